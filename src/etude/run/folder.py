"""The folder of a run, which every process of the run opens.

    run.toml          the resolved recipe          ledger.db     durable state, or ledger.url: where it is
    model/            checkpoint that RL starts    store/        weight versions (etude.weights)
                      from                         phases/       earlier phases (etude.run.phase_folders)
    checkpoints/      training state               events/       telemetry, one file per process
    endpoints.json    URLs of the processes        logs/         output of the processes
    payloads/         turns, their routes and masks     report.json, report.html
    evaluations/      ledgers of `etude eval`      run.key       secret of the run (etude.run.keys)
    weights.id        id of its weight log         judge-N.db    votes of judges, by worker
    harness/          files of an external harness .NAME.lock    held by the process of that name
    .NAME.beat        time of its last heartbeat   plugins/      copies of files that the recipe names
    judge-spend-N.json  cost of the votes          judge-held.txt  why judging is paused, while it is
    feedback.db       live sessions and signals, unless the ledger is elsewhere
    sinks/            position of each sink (etude.run.sinks)
    data/             copies of the recipe's data       run.url       where the run is, if elsewhere: then weights and
                      (etude.run.data_copies)                         payloads are there, and copies of the rest

This module owns the names and the first checks; the content of each file belongs to its own module.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.config.loading import dump_run, load_recipe
from etude.config.recipe import RunConfig
from etude.errors import DamagedError, RunFolderError
from etude.fsync import write_whole
from etude.ledger.open import is_url, place_of_run
from etude.objects import ObjectStore
from etude.run.endpoints import Endpoints
from etude.run.keys import KeyRole, derive_key, has_run_key, read_run_key, write_run_key
from etude.run.process_name import ProcessName
from etude.run.resolve import resolve, with_absolute_paths

LEDGER_URL = "ledger.url"
"""The file with the URL of a ledger outside the folder."""
FLEET_FILE = "fleet.toml"
"""The file with the fleet that a run was last placed on; absent for a run on one machine."""
RUN_URL = "run.url"
"""The file of a working folder with the run's URL (:mod:`etude.run.working_folder`)."""
LOG_ID = "weights.id"
"""The file with the id of the run's log of weight versions; not in the store, as others may be able to write there."""
CREATE_S = 60.0
"""Longest wait for another process that creates a run in the same folder."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, ledger: str = "", at: str = "") -> "RunFolder":
        """Create a new run with its durable state at ``ledger``, by default as in ``config``; with ``at`` it is the
        working folder of a run at that URL. ``auto`` settings are resolved now, on this machine, and paths are made
        absolute.

        Raises :class:`~etude.errors.RunFolderError` if a run exists or the folder is not writable, and the errors of
        :func:`~etude.run.resolve.resolve`.
        """
        folder = cls.check_new(path)
        resolved = with_absolute_paths(resolve(config))
        if not ledger and config.ledger.url:
            ledger = place_of_run(config.ledger.url, f"{config.name}_s{config.seed}")
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)  # hidden tests are in there
            with exclusive(folder, "create", wait_s=CREATE_S):
                cls.check_new(path)  # of two processes that create it at the same time, the second one finds a run
                _fill(folder, resolved, ledger, at)
        except OSError as error:
            raise RunFolderError(
                f"cannot write the run folder {path}: {error.strerror}; choose another --out"
            ) from error
        return folder

    @classmethod
    def check_new(cls, path: Path) -> "RunFolder":
        """The place of a new run. Raises :class:`~etude.errors.RunFolderError` if there is one already."""
        folder = cls(path)
        if folder.config_file.exists():
            raise RunFolderError(
                f"{path} already holds a run: continue it with --resume {path}, or choose another --out"
            )
        return folder

    def record_url(self, url: str) -> None:
        """Record the run's URL in a working folder, and create the folders of every run. Each process of the run does
        so when it opens the folder, while others read it.
        """
        write_whole(self.path / RUN_URL, f"{url}\n".encode())
        for part in (self.events, self.logs):
            part.mkdir(exist_ok=True)

    @property
    def has_begun(self) -> bool:
        """True once there are results that a user may want to keep: a step of a phase, or a weight version."""
        if self.url and (ObjectStore(self.store).list("commits") or ObjectStore(f"{self.url}/phases").list("")):
            return True
        places = ("phases/*/checkpoints/*", "phases/*/model/lineage.json", "store/*", "evaluations/*")
        return any(next(self.path.glob(pattern), None) is not None for pattern in places)

    @classmethod
    def open(cls, path: Path, *, writes: bool = True) -> "RunFolder":
        """Open an existing run; a reader needs no write permission.

        Raises :class:`~etude.errors.RunFolderError`.
        """
        folder = cls(path)
        if not folder.config_file.is_file():
            raise RunFolderError(f"{path} is not a run folder: it has no run.toml")
        if writes and not os.access(path, os.W_OK):
            raise RunFolderError(f"the run folder {path} is not writable")
        return folder

    def config(self) -> RunConfig:
        """The resolved recipe, without ``auto`` settings, so that every process uses the same values."""
        return resolve(load_recipe(self.config_file))

    @property
    def config_file(self) -> Path:
        """The resolved recipe, as TOML."""
        return self.path / "run.toml"

    @property
    def ledger(self) -> str:
        """Path or URL of the durable state of the run."""
        return _recorded(self.path / LEDGER_URL) or str(self.path / "ledger.db")

    @property
    def name(self) -> str:
        """The name with which a user opens the run: its URL or its folder."""
        return self.url or str(self.path)

    @property
    def url(self) -> str:
        """The run's URL; empty if it is only in this folder. Raises :class:`~etude.errors.DamagedError`."""
        return _recorded(self.path / RUN_URL)

    @property
    def payloads(self) -> str:
        """Place of the turns of rollouts, and of their routes and sampling masks."""
        return f"{self.url or self.path.absolute()}/payloads"

    @property
    def store(self) -> str:
        """URL of the weight store."""
        return f"{url}/weights" if (url := self.url) else str((self.path / "store").absolute())

    @property
    def model(self) -> Path:
        """The model that RL starts from, of the last phase: configuration, tokenizer, weights."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Training state, per step."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """Telemetry."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """Output of the processes."""
        return self.path / "logs"

    @property
    def report_json(self) -> Path:
        """The measured result."""
        return self.path / "report.json"

    @property
    def report_html(self) -> Path:
        """The measured result as a web page."""
        return self.path / "report.html"

    def key(self, role: KeyRole) -> str:
        """The key of one role. Raises as :func:`~etude.run.keys.read_run_key`."""
        return derive_key(read_run_key(self.path), role)

    @property
    def endpoints(self) -> Endpoints:
        """URLs of the listening processes."""
        return Endpoints(self.path / "endpoints.json")


def feedback_place(folder: RunFolder) -> str:
    """Path or URL of the live sessions and signals of a run: beside its ledger, in a schema of its own."""
    ledger = folder.ledger
    return f"{ledger}_live" if is_url(ledger) else str(folder.path / "feedback.db")


def make_key(folder: RunFolder) -> None:
    """Create the run's key if it is missing: a new working folder has none, since the key is never
    stored at the URL.
    """
    if not has_run_key(folder.path):
        write_run_key(folder.path)


def _fill(folder: RunFolder, config: RunConfig, ledger: str, at: str) -> None:
    """Write the files of a new run; run.toml is the last one, whole or not at all."""
    if at:
        folder.record_url(at)
    for place in (folder.store, folder.payloads):
        ObjectStore(place)  # creates the folder if the store is one
    for part in (folder.events, folder.logs):
        part.mkdir(exist_ok=True)
    make_key(folder)
    (folder.path / LOG_ID).write_text(secrets.token_hex(16) + "\n", encoding="utf-8")
    if ledger:
        (folder.path / LEDGER_URL).write_text(ledger + "\n", encoding="utf-8")
    write_whole(folder.config_file, dump_run(config, folder.path).encode())


def start_from(start: RunFolder, folder: RunFolder) -> None:
    """Copy model and weight versions of another run into a new one, with the id of their log."""
    shutil.copytree(start.model, folder.model)
    shutil.copytree(start.store, folder.store, dirs_exist_ok=True)
    shutil.copy(start.path / LOG_ID, folder.path)


def require_empty(out: Path) -> None:
    """Raise :class:`~etude.errors.RunFolderError` if something would be overwritten."""
    if out.exists() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty: choose another folder, nothing is overwritten")


POLL_S = 0.1
"""Interval at which a lock in use is tried again."""


@contextlib.contextmanager
def exclusive(folder: RunFolder, process: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a process name; the kernel releases it when this process dies, however it dies.

    Waits up to ``wait_s`` for a predecessor that is still cleaning up. Raises
    :class:`~etude.errors.RunFolderError` when another process holds it.
    """
    deadline_s = time.monotonic() + wait_s
    descriptor = os.open(folder.path / f".{process}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not try_lock(descriptor):
            if time.monotonic() >= deadline_s:
                raise RunFolderError(f"{folder.path} is in use: its {process!r} process is running already")
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _recorded(file: Path) -> str:
    """The place that a file of a run folder names; empty without that file."""
    if not file.is_file():
        return ""
    if not (place := file.read_text(encoding="utf-8").strip()):
        raise DamagedError(f"{file} is empty: write the place into it that it named, or open the run by its URL")
    return place


def remove_unbegun(folder: RunFolder) -> None:
    """Remove a run that has not begun, unless another process uses it, so that a corrected recipe can use its place."""
    with contextlib.suppress(RunFolderError), exclusive(folder, "supervisor"):
        if not folder.has_begun:
            shutil.rmtree(folder.path)


def holder(folder: RunFolder, process: ProcessName) -> str:
    """The name under which a process that is :func:`exclusive` in its folder takes leases (:mod:`etude.ledger.leases`):
    any previous process with that name is dead.
    """
    return f"{socket.gethostname()}:{folder.path.resolve()}:{process}"


def try_lock(descriptor: int) -> bool:
    """Take an open file's exclusive lock without waiting; false if it is in use."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
