"""Working folders: what a machine makes of a run that is at a URL, and what a run keeps there.

    etude run RECIPE --at URL ──▶ working folder ──keep──▶ URL ──fetch──▶ working folder of another machine

A working folder is a run folder like any other (:mod:`etude.run.folder`), with a file that says where the run is. It is
a cache: it may be removed, and is made again from the URL. Of the set of files there the newest counts, whatever the
folder has; files are fetched whole and by their digest. It lies below ``ETUDE_WORK``, or else in the user's cache.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from etude.config.data_paths import DATA
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, DamagedError, InfrastructureError, RunFolderError
from etude.objects import check_put_if_absent
from etude.run.data_copies import DataPlan, plan_data, send_data
from etude.run.event_copies import fetch_events
from etude.run.folder import FLEET_FILE, LEDGER_URL, LOG_ID, RunFolder, exclusive
from etude.run.kept_files import KeptFiles
from etude.run.process_name import ProcessName
from etude.run.run_url import EVENTS, FILES, is_run_url, normal_url, open_place, open_stored
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import StoredFiles, stored_file

WORK_VARIABLE = "ETUDE_WORK"
"""The environment variable with the folder for working folders."""
RECIPE_FILES = ("run.toml", LOG_ID, LEDGER_URL, FLEET_FILE, "plugins")
"""Files, and folders of files, that make a run what it is."""
MODEL, REPORTS = ("model",), ("report.json", "report.html")
"""Its model, which its phases leave, and its report."""
WEIGHTS = (".safetensors", ".bin")
"""Suffixes of files that are of use to phases before the loop alone: the loop has weights from their log."""
LOOP = frozenset({"serve", "gateway", "rollouts", "train"})
"""Commands of the loop. Their processes are started again while others wait for them, and fetch what they need."""
DIGITS = 12
"""Hexadecimal digits of a URL's SHA-256 in the name of its working folder."""
FETCH_S = 3600.0
"""Longest wait for another process of this machine that fetches the same run."""


def open_run_folder(run: Path | str, *, writes: bool = True, process: ProcessName | None = None) -> RunFolder:
    """Open a run by its folder or its URL; of a URL this makes the working folder, or brings it up to date.

    Who only reads (not ``writes``) gets no weights; a ``process`` of the run gets its own events alone. While the URL
    is away, a working folder that is there will do for a process in a region: where that is cut off, processes are
    started, too. Raises :class:`~etude.errors.RunFolderError` where there is no run, and
    :class:`~etude.errors.DamagedError` for what is not whole.
    """
    if isinstance(run, Path) or not is_run_url(run):
        return RunFolder.open(Path(run), writes=writes)
    url = normal_url(run)
    far, folder = process is not None and bool(process.region), RunFolder(working_path(url))
    try:
        stored = open_stored(url, FILES, far=far)
        if not stored.numbers():
            raise RunFolderError(f"there is no run at {url}: start one with `etude run RECIPE --at {url}`")
        folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)  # hidden tests are in there
        with exclusive(folder, "fetch", wait_s=FETCH_S):
            _fetch(folder, url, stored, with_weights=writes and (process is None or process.command not in LOOP))
            fetch_events(open_place(url, EVENTS, far=far), folder.events, "" if process is None else str(process))
    except InfrastructureError:
        if not far or not folder.config_file.is_file():
            raise
    return RunFolder.open(folder.path, writes=writes)


def create_run(
    url: str, config: RunConfig, data: DataPlan | None = None, tell: Callable[[str], None] = lambda line: None
) -> RunFolder:
    """Make a new run at a URL, with copies of the data that its recipe names, and its working folder; ``tell`` is told
    what is copied.

    Raises as :func:`check_place`, :func:`~etude.run.data_copies.plan_data` and :meth:`RunFolder.create` do.
    """
    url = normal_url(url)
    check_place(url, config)
    config = send_data(url, config, data or plan_data(config), working_path(url), tell)
    folder = RunFolder.create(working_path(url), config, at=url)
    keep(folder, *RECIPE_FILES)
    return folder


def check_place(url: str, config: RunConfig) -> None:
    """Look whether a new run of a recipe can be at a URL, which is made where it is a folder.

    Raises :class:`~etude.errors.ConfigError`, :class:`~etude.errors.RunFolderError` where there is one,
    :class:`~etude.errors.UserError` where objects can be overwritten and
    :class:`~etude.errors.InfrastructureError` where nothing can be written.
    """
    url = normal_url(url)
    if not config.ledger.url:
        raise ConfigError(
            f"ledger.url is empty, so the state of a run at {url} would be lost with this machine: give it a "
            f"PostgreSQL database, --ledger postgresql://USER@HOST/DATABASE, or leave out --at"
        )
    check_put_if_absent(open_place(url, FILES))
    if open_stored(url, FILES).numbers():
        raise RunFolderError(
            f"there is a run at {url} already: continue it with --resume {url}, or choose another place"
        )
    if (left := RunFolder(working_path(url))).config_file.exists():
        raise RunFolderError(f"{left.path} is left of a run that was at {url} and is no more: remove that folder")


def forget(folder: RunFolder) -> None:
    """Remove a run that has not begun from its URL; does nothing for one without."""
    for name in (FILES, EVENTS, DATA) if folder.url else ():
        place = open_place(folder.url, name)
        place.delete(*place.list(""))


def keep(folder: RunFolder, *names: str, outages: StoreOutages | None = None) -> None:
    """Keep files of a run, and those below folders, at its URL as they are now; does nothing for a run without one.

    The other files of the newest set stay in it, whoever else keeps some at the same time.
    """
    KeptFiles(folder, FILES, outages).keep(*names)


def working_path(url: str, below: Path | None = None) -> Path:
    """The working folder of a run at a normal URL, on this machine; or ``below`` another folder for such."""
    chosen = str(below or os.environ.get(WORK_VARIABLE, ""))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:DIGITS]}"
    return (Path(chosen) if chosen else cache / "etude" / "runs") / name


def _fetch(folder: RunFolder, url: str, stored: StoredFiles, *, with_weights: bool) -> None:
    folder.record_url(url)
    files = stored.read(max(stored.numbers()))
    own_id = folder.path / LOG_ID
    if own_id.is_file() and LOG_ID in files and stored_file(own_id) != files[LOG_ID]:
        raise DamagedError(
            f"{url} has another run than the one that {folder.path} was made of: remove that folder if you made a new "
            f"run there, and else look who did"
        )
    for path, file in files.items():
        target = folder.path / path
        if not with_weights and target.suffix in WEIGHTS:
            continue
        if not target.is_file() or target.is_symlink() or stored_file(target) != file:
            stored.fetch(path, file, folder.path)
