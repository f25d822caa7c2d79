"""Runs that the page shows: their folders and their data, read incrementally.

    folders, folders of folders ──▶ RunList ──▶ RunReader ──▶ folds of events, the ledger, the weight log

Owns discovery and the folding of events; writes nothing. A reader is called in several threads concurrently; each fold
reads the events since its last use.
"""

import contextlib
import math
import mmap
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import orjson

from etude.config.recipe import RunConfig
from etude.dashboard.run_metrics import RunMetrics
from etude.errors import EtudeError, InfrastructureError, RunFolderError
from etude.run.event_copies import fetch_events
from etude.run.folder import RunFolder
from etude.run.run_url import EVENTS, open_place
from etude.telemetry.events import Logged
from etude.telemetry.log import EventReader
from etude.types import Json
from etude.ui.event_lines import EventLines, Fields

ALIVE_S = 15.0
"""Silence of a supervisor after which its run counts as ended: it logs the memory in use every two seconds."""
FIGURES_SHARE = 0.003
"""Share of a core for recomputing figures while a page is open: those of 10,000 steps every two minutes."""
FETCH_S = 5.0
"""Interval at which events are fetched from the URL of a run whose page is open."""
LONGEST_LINE = 1 << 16
"""Maximum length of a line, in bytes: a search restarts that far back, for a line that was incomplete before."""
MOST_RUNS = 500
"""Maximum number of listed runs of a folder: the newest."""


class Fold(Protocol):
    """State that is computed from a run's events, one after another."""

    def add(self, logged: Logged) -> None:
        """Add one event."""


class LineFold(Protocol):
    """State that is computed from the fields of some kinds of events: fast enough for a hundred thousand."""

    KINDS: ClassVar[frozenset[str]]
    """Kinds of events that it needs; others are not even parsed."""

    def add(self, kind: str, fields: Fields) -> None:
        """Add one event; those of one process are in order."""


F = TypeVar("F", bound=Fold)
L = TypeVar("L", bound=LineFold)


class RunReader:
    """Reads one run: its recipe, state computed from its events, and whether there are new ones."""

    def __init__(self, folder: RunFolder, run_id: str) -> None:
        self.folder = folder
        self.run_id = run_id
        """Its name in URLs."""
        self._lock = threading.Lock()
        self._folds: dict[Callable[[], Fold], tuple[EventReader, Fold]] = {}
        self._line_folds: dict[type[LineFold], tuple[EventLines, LineFold]] = {}
        self._line_lock = threading.Lock()
        self._newest: dict[tuple[Path, str], tuple[int, dict[str, Json]]] = {}
        """File and kind of event → the searched size of the file, and the newest event."""
        self._figures: dict[str, tuple[float, Json]] = {}
        """Name → the time from which it may be recomputed, and the current value."""
        self._figures_lock = threading.Lock()
        self._fetched_s = -math.inf
        self._config: tuple[int, RunConfig] | None = None

    @property
    def config(self) -> RunConfig:
        """The current recipe: a resumed run may have other limits."""
        changed_ns = self.folder.config_file.stat().st_mtime_ns
        if self._config is None or self._config[0] != changed_ns:
            self._config = changed_ns, self.folder.config()
        return self._config[1]

    def fold(self, make: Callable[[], F]) -> F:
        """Fold all events so far with ``make``, a class; the fold is cached, and updated by the next call."""
        with self._lock:
            reader, fold = self._folds.setdefault(make, (EventReader(self.folder.events), make()))
            for logged in reader.new():
                fold.add(logged)
            return fold  # type: ignore[return-value]  # the fold of this very class

    @contextmanager
    def folded(self, make: type[L]) -> Iterator[L]:
        """An updated fold of some kinds of events; it does not change while the context is open."""
        with self._line_lock:
            if make not in self._line_folds:
                self._line_folds[make] = EventLines(self.folder.events, make.KINDS), make()
            lines, fold = self._line_folds[make]
            for kind, fields in lines.new():
                fold.add(kind, fields)
            yield fold  # type: ignore[misc]  # the fold of this very class

    def figures(self, name: str, make: Callable[[], Json]) -> Json:
        """Expensive figures, recomputed so rarely that they take at most :data:`FIGURES_SHARE` of a core."""
        with self._figures_lock:
            due_s, figures = self._figures.get(name, (-math.inf, None))
            now_s = time.monotonic()
            if now_s >= due_s:
                started_s = time.thread_time()
                figures = make()
                due_s = time.monotonic() + (time.thread_time() - started_s) / FIGURES_SHARE
                self._figures[name] = due_s, figures
            return figures

    @property
    def metrics(self) -> RunMetrics:
        """The facts of the run, up to now."""
        return self.fold(RunMetrics)

    def stamp(self) -> tuple[int, ...]:
        """Sizes of the files that grow with the run: if they are unchanged, there is nothing new. For a run at a URL,
        new events are fetched at intervals.
        """
        if (url := self.folder.url) and time.monotonic() - self._fetched_s > FETCH_S:
            self._fetched_s = time.monotonic()
            with contextlib.suppress(InfrastructureError):  # the next time, then
                fetch_events(open_place(url, EVENTS), self.folder.events)
        return tuple(file.stat().st_size for file in self._files())

    def overview(self) -> dict[str, Json]:
        """Row in the list of runs; cheap for any number of events."""
        changed_s = max((file.stat().st_mtime for file in self._files()), default=0.0)
        phase = self._last("PhaseStarted", "supervisor*.jsonl", "rollouts*.jsonl")
        step = self._last("StepDone", "train*.jsonl")
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

    def _last(self, kind: str, *patterns: str) -> dict[str, Json]:
        """The fields of the newest event of a kind, for kinds that are not written at every step; empty if none."""
        newest = [self._last_in(file, kind) for pattern in patterns for file in self.folder.events.glob(pattern)]
        return max(newest, key=lambda fields: float(str(fields.get("at_s", 0))), default={})

    def _last_in(self, file: Path, kind: str) -> dict[str, Json]:
        """The newest event of a kind in one file, of which only the part since the last call is searched."""
        searched, fields = self._newest.get((file, kind), (0, {}))
        size = file.stat().st_size
        if size > searched:
            line = _last_line(file, f'"event":"{kind}"'.encode(), max(0, searched - LONGEST_LINE))
            fields = orjson.loads(line) if line else fields
            self._newest[file, kind] = size, fields
        return fields

    def _files(self) -> list[Path]:
        return sorted(self.folder.events.glob("*.jsonl"))


class RunList:
    """The runs below some paths: run folders, or folders of them."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._readers: dict[Path, RunReader] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunReader]:
        """All existing runs, the newest first."""
        with self._lock:
            newest = sorted(dict.fromkeys(self._folders()), key=_changed_s, reverse=True)[:MOST_RUNS]
            for path in reversed(newest):
                if path not in self._readers:
                    self._readers[path] = RunReader(RunFolder(path), self._new_id(path.name))
            return [self._readers[path] for path in newest]

    def get(self, run_id: str) -> RunReader | None:
        """The run with an id; ``None`` if there is none."""
        return next((reader for reader in self.all() if reader.run_id == run_id), None)

    def overviews(self) -> list[Json]:
        """A row for each run; if its recipe cannot be read, the row has the reason."""
        return [overview_or_error(reader) for reader in self.all()]

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
    """Raise :class:`~etude.errors.RunFolderError` for a path that is not a folder."""
    for place in places:
        if not place.is_dir():
            raise RunFolderError(f"{place} is not a folder: name a run folder, or a folder with run folders in it")


def overview_or_error(reader: RunReader) -> dict[str, Json]:
    """The row of a run in a list, or the reason if its recipe cannot be read."""
    try:
        return reader.overview()
    except (EtudeError, OSError) as error:
        return {"id": reader.run_id, "name": reader.run_id, "path": str(reader.folder.path), "error": str(error)}


def _changed_s(path: Path) -> float:
    files = (path / "run.toml", path / "events" / "supervisor.jsonl")
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _last_line(file: Path, text: bytes, start: int) -> bytes:
    """The last complete line after ``start`` that contains ``text``, searched from the end."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        place = data.rfind(text, start, end)
        return b"" if place < 0 else data[data.rfind(b"\n", 0, place) + 1 : data.find(b"\n", place)]


def _first_s(file: Path) -> float | None:
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        line = stream.readline()
    return float(orjson.loads(line)["at_s"]) if line.endswith(b"\n") else None
