"""Working folders: a machine's local copy of a run at a URL, and the upload of files to that URL.

    etude run RECIPE --at URL ──▶ working folder ──keep──▶ URL ──fetch──▶ working folder of another machine

A working folder is a run folder like any other (:mod:`etude.run.folder`), with a file that says where the run is. It is
a cache: it may be removed, and is created again from the URL. The newest set of files at the URL is valid, whatever the
folder contains; only a report or a fleet that this machine wrote since it had that set stays until it is uploaded.
Files are fetched whole and verified by digest. The folder is below ``ETUDE_WORK``, by default in the user's cache.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
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
from etude.run.run_url import EVENTS, FILES, POSITIONS, is_run_url, normal_url, open_place, open_stored
from etude.run.store_outages import StoreOutages
from etude.run.stored_files import StoredFiles, stored_file

WORK_VARIABLE = "ETUDE_WORK"
"""Environment variable with the parent folder of working folders."""
RECIPE_FILES = ("run.toml", LOG_ID, LEDGER_URL, FLEET_FILE, "plugins")
"""Files and folders that define a run."""
MODEL, REPORTS = ("model",), ("report.json", "report.html")
"""The run's model, which its phases produce, and its report."""
WRITTEN_FIRST = (FLEET_FILE, *REPORTS)
"""Files that a machine changes some time before it uploads them; of the others, a local change is damage."""
WEIGHTS = (".safetensors", ".bin")
"""Suffixes of files that only the phases before the loop need: the loop reads weights from their log."""
LOOP = frozenset({"serve", "gateway", "rollouts", "train"})
"""Commands of the loop. Others wait while their processes restart, so these only fetch what they need."""
DIGITS = 12
"""Hexadecimal digits of a URL's SHA-256 in the name of its working folder."""
FETCH_S = 3600.0
"""Longest wait for another process of this machine that fetches the same run."""


def open_run_folder(run: Path | str, *, writes: bool = True, process: ProcessName | None = None) -> RunFolder:
    """Open a run by its folder or its URL; for a URL, this creates or updates the working folder.

    A reader (not ``writes``) gets no weights; a ``process`` of the run gets only its own events. While the URL is
    unavailable, a process in a region uses an existing working folder, so that processes can start in a region that is
    cut off. Raises :class:`~etude.errors.RunFolderError` if there is no run, and :class:`~etude.errors.DamagedError`
    for incomplete files.
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
        with fetching(folder):
            _fetch(folder, url, stored, with_weights=writes and (process is None or process.command not in LOOP))
            fetch_events(open_place(url, EVENTS, far=far), folder.events, "" if process is None else str(process))
    except InfrastructureError:
        if not far or not folder.config_file.is_file():
            raise
    return RunFolder.open(folder.path, writes=writes)


def create_run(
    url: str, config: RunConfig, data: DataPlan | None = None, tell: Callable[[str], None] = lambda line: None
) -> RunFolder:
    """Create a new run at a URL, with copies of its recipe's data, and its working folder; ``tell`` receives progress
    messages.

    Raises as :func:`check_place`, :func:`~etude.run.data_copies.plan_data` and :meth:`RunFolder.create` do.
    """
    url = normal_url(url)
    check_place(url, config)
    config = send_data(url, config, data or plan_data(config), working_path(url), tell)
    folder = RunFolder.create(working_path(url), config, at=url)
    try:
        KeptFiles(folder, FILES).keep(*RECIPE_FILES, is_first=True)
    except RunFolderError:  # it is another machine's run
        shutil.rmtree(folder.path)
        raise
    return folder


def check_place(url: str, config: RunConfig) -> None:
    """Check that a new run of a recipe can be created at a URL; a folder is created.

    Raises :class:`~etude.errors.ConfigError`, :class:`~etude.errors.RunFolderError` if there is a run already,
    :class:`~etude.errors.UserError` if objects can be overwritten and :class:`~etude.errors.InfrastructureError` if
    nothing can be written.
    """
    url = normal_url(url)
    if not config.ledger.url:
        raise ConfigError(
            f"ledger.url is empty, so the state of a run at {url} would be lost with this machine: give it a "
            f"PostgreSQL database, --ledger postgresql://USER@HOST/DATABASE; only a run in a folder can do without"
        )
    check_put_if_absent(open_place(url, FILES))
    if open_stored(url, FILES).numbers():
        raise RunFolderError(
            f"there is a run at {url} already: continue it with --resume {url}, or choose another place"
        )
    if (left := RunFolder(working_path(url))).config_file.exists():
        raise RunFolderError(f"{left.path} is left of a run that was at {url} and is no more: remove that folder")


def forget(folder: RunFolder) -> None:
    """Remove a run that has not begun from its URL; does nothing for a run without one."""
    for name in (FILES, EVENTS, DATA, POSITIONS) if folder.url else ():
        place = open_place(folder.url, name)
        place.delete(*place.list(""))


def keep(folder: RunFolder, *names: str, outages: StoreOutages | None = None) -> None:
    """Upload the current files and folders ``names`` of a run to its URL; does nothing for a run without one.

    The other files of the newest set stay in it, even with concurrent uploads.
    """
    KeptFiles(folder, FILES, outages).keep(*names)


def fetching(folder: RunFolder) -> AbstractContextManager[None]:
    """Hold the lock without which no process of this machine fetches files of a run."""
    return exclusive(folder, "fetch", wait_s=FETCH_S)


def working_path(url: str, below: Path | None = None) -> Path:
    """The working folder of a run at a normal URL, on this machine; or below the folder ``below``."""
    chosen = str(below or os.environ.get(WORK_VARIABLE, ""))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:DIGITS]}"
    return (Path(chosen) if chosen else cache / "etude" / "runs") / name


def _fetch(folder: RunFolder, url: str, stored: StoredFiles, *, with_weights: bool) -> None:
    folder.record_url(url)
    numbers, copies = stored.numbers(), KeptFiles(folder, FILES)
    newest, last = max(numbers), copies.last()
    files = stored.read(newest)
    before = stored.read(last) if last in numbers else {}
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
        if path in WRITTEN_FIRST and target.is_file() and before.get(path) == file:
            continue  # no other machine changed it since this disk had it
        if not target.is_file() or target.is_symlink() or stored_file(target) != file:
            stored.fetch(path, file, folder.path)
    copies.note(newest)
