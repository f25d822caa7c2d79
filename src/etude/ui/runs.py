"""Runs that the page shows: where they are, and what is known of each, read as it grows.

    folders, folders of folders ──▶ RunList ──▶ RunReader ──▶ folds of events, the ledger, the weight log

Owns discovery and the folding of events; writes nothing. A reader is called in threads, several at a time; each fold
reads what was written since it was last asked for.
"""

import mmap
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import orjson

from etude.config.recipe import RunConfig
from etude.dashboard.run_metrics import RunMetrics
from etude.errors import EtudeError, RunFolderError
from etude.run.folder import RunFolder
from etude.telemetry.events import Logged
from etude.telemetry.log import EventReader
from etude.types import Json

ALIVE_S = 15.0
"""A run whose supervisor wrote nothing for so long is not going on: it notes the memory in use every two seconds."""
MOST_RUNS = 500
"""Runs of a folder that are listed: the newest."""


class Fold(Protocol):
    """Something that is made of a run's events, one after another."""

    def add(self, logged: Logged) -> None:
        """Fold in one event."""


F = TypeVar("F", bound=Fold)


class RunReader:
    """Reads one run: its recipe, what its events come to, and when there are new ones."""

    def __init__(self, folder: RunFolder, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        """Its name in URLs."""
        self._lock = threading.Lock()
        self._folds: dict[Callable[[], Fold], tuple[EventReader, Fold]] = {}
        self._config: tuple[int, RunConfig] | None = None

    @property
    def config(self) -> RunConfig:
        """The recipe of now: a run that goes on may have other limits."""
        changed_ns = self.folder.config_file.stat().st_mtime_ns
        if self._config is None or self._config[0] != changed_ns:
            self._config = changed_ns, self.folder.config()
        return self._config[1]

    def fold(self, make: Callable[[], F]) -> F:
        """Fold all events so far with ``make``, a class; its fold is kept, and brought up to date by the next call."""
        with self._lock:
            reader, fold = self._folds.setdefault(make, (EventReader(self.folder.events), make()))
            for logged in reader.new():
                fold.add(logged)
            return fold  # type: ignore[return-value]  # the fold of this very class

    @property
    def metrics(self) -> RunMetrics:
        """The facts of the run, up to now."""
        return self.fold(RunMetrics)

    def stamp(self) -> tuple[int, ...]:
        """Sizes of the files that grow with the run: as long as they are the same there is nothing new."""
        return tuple(file.stat().st_size for file in self._files())

    def overview(self) -> dict[str, Json]:
        """Line of a list of runs; cheap, whatever the size of its events."""
        changed_s = max((file.stat().st_mtime for file in self._files()), default=0.0)
        phase = _newest(self.folder.events, "PhaseStarted")
        step = _newest(self.folder.events, "StepDone", "train*.jsonl")
        config, done = self.config, phase.get("phase") == "done"
        return {
            "id": self.run_id,
            "name": config.name,
            "seed": config.seed,
            "path": self.folder.name,
            "phase": phase.get("phase"),
            "step": step.get("step"),
            "steps": config.trainer.steps,
            "started_s": _first_s(self.folder.events / "supervisor.jsonl"),
            "updated_s": changed_s or None,
            "alive": not done and time.time() - changed_s < ALIVE_S,
            "live": config.live.groups_per_step > 0 or config.release.enabled,
        }

    def _files(self) -> list[Path]:
        return sorted(self.folder.events.glob("*.jsonl"))


class RunList:
    """The runs below some places: run folders, or folders of such."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._readers: dict[Path, RunReader] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunReader]:
        """Every run that is there now, the newest first."""
        with self._lock:
            newest = sorted(dict.fromkeys(self._folders()), key=_changed_s, reverse=True)[:MOST_RUNS]
            for path in reversed(newest):
                if path not in self._readers:
                    self._readers[path] = RunReader(RunFolder(path), self._new_id(path.name))
            return [self._readers[path] for path in newest]

    def get(self, run_id: str) -> RunReader | None:
        """The run of an id; ``None`` where there is none."""
        return next((reader for reader in self.all() if reader.run_id == run_id), None)

    def overviews(self) -> list[Json]:
        """A line for each run; one whose recipe cannot be read says why."""
        return [_overview(reader) for reader in self.all()]

    def _folders(self) -> Iterator[Path]:
        for place in self._places:
            if (place / "run.toml").is_file():
                yield place.resolve()
            else:
                yield from (file.parent.resolve() for file in place.glob("*/run.toml"))

    def _new_id(self, name: str) -> str:
        plain, taken = re.sub(r"[^A-Za-z0-9._-]+", "-", name), {reader.run_id for reader in self._readers.values()}
        return next(each for each in (plain, *(f"{plain}~{n}" for n in range(2, MOST_RUNS))) if each not in taken)


def check_places(places: Sequence[Path]) -> None:
    """Raise :class:`~etude.errors.RunFolderError` for a place that can hold no run."""
    for place in places:
        if not place.is_dir():
            raise RunFolderError(f"{place} is no folder: name a run folder, or a folder with run folders in it")


def _overview(reader: RunReader) -> Json:
    try:
        return reader.overview()
    except (EtudeError, OSError) as error:
        return {"id": reader.run_id, "name": reader.run_id, "path": str(reader.folder.path), "error": str(error)}


def _changed_s(path: Path) -> float:
    files = (path / "run.toml", path / "events" / "supervisor.jsonl")
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _newest(events: Path, kind: str, files: str = "*.jsonl") -> dict[str, Json]:
    """The fields of the newest event of a kind; empty where there is none."""
    lines = (_last_line(file, f'"event":"{kind}"'.encode()) for file in events.glob(files))
    events_of_kind: list[dict[str, Json]] = [orjson.loads(line) for line in lines if line]
    return max(events_of_kind, key=lambda fields: float(str(fields["at_s"])), default={})


def _last_line(file: Path, text: bytes) -> bytes:
    """The last whole line with ``text`` in it, found from the end."""
    with file.open("rb") as stream:
        if not stream.seek(0, 2):
            return b""
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
            place = data.rfind(text, 0, end)
            return b"" if place < 0 else data[data.rfind(b"\n", 0, place) + 1 : data.find(b"\n", place)]


def _first_s(file: Path) -> float | None:
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        line = stream.readline()
    return float(orjson.loads(line)["at_s"]) if line.endswith(b"\n") else None
