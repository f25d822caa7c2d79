"""Events of a run at its URL: each process's appended events are uploaded as small immutable objects.

    events/trainer/000000000000.jsonl      named by the offset of its first byte in the file, whole lines
    events/trainer/000000004711.jsonl      …

So the file of a process is one stream on every machine: on a new machine its file starts as a copy of the uploaded
part. Events are for people: events not yet uploaded when a machine was lost are missing, and no process waits for
uploads except a trainer about to commit a step. This module owns uploads and downloads; :mod:`etude.telemetry` owns the
content of events.
"""

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import BinaryIO, final

from etude.closing import Closing
from etude.errors import DamagedError, EtudeError, RunFolderError
from etude.fsync import write_whole
from etude.objects import Objects
from etude.run.folder import RunFolder, exclusive
from etude.run.rounds import Rounds

MOST_BYTES = 4 << 20
"""Maximum bytes of one object, unless a single line is longer."""
AT_A_TIME = 16
"""Number of concurrent downloads."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventObject:
    """One object of a process's stream."""

    key: str
    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.start + self.size_bytes


@final
class EventCopies(Closing):
    """Uploads what is appended to one process's event file, on a separate thread, until it is closed."""

    def __init__(self, objects: Objects, folder: Path, process: str) -> None:
        self._objects = objects
        self._file = folder / f"{process}.jsonl"
        self._process = process
        self._sent: int | None = None
        """Bytes already in the storage; ``None`` before the first listing."""
        self._is_sound = True
        """False once another writer of this stream was detected."""
        self._lock = Lock()
        self._rounds = Rounds(f"copies of {self._file.name}", self.catch_up)

    def close(self) -> None:
        """Upload the last events, if that is quickly possible."""
        self._rounds.close()

    def catch_up(self) -> None:
        """Upload new events; if the storage is unavailable, report it and retry later."""
        with self._lock:
            try:
                self._is_sound = self._is_sound and self._send()
            except (EtudeError, OSError) as error:
                logger.warning("events of %s are not copied yet: %s", self._process, error)

    def _send(self) -> bool:
        """Upload the new complete lines; false if another process writes this stream."""
        if self._sent is None:
            segments = _streams(self._objects, self._process).get(self._process, ())
            self._sent = segments[-1].end if segments else 0
            if self._file.stat().st_size < self._sent:
                logger.warning("%s lacks events that were sent from elsewhere: its own are not copied", self._file)
                return False
        with self._file.open("rb") as stream:
            while data := self._whole_lines(stream):
                key = f"{self._process}/{self._sent:012d}.jsonl"
                if not self._objects.put_if_absent(key, data):
                    there = self._objects.get(key) or b""
                    if not there or not data.startswith(there):
                        logger.warning("%s/%s is another process's: its events are not copied", self._objects.url, key)
                        return False
                    data = there  # uploaded before, but the answer was lost; the file has grown since
                self._sent += len(data)
        return True

    def _whole_lines(self, stream: BinaryIO) -> bytes:
        """The complete lines after the uploaded part."""
        stream.seek(self._sent or 0)
        return b"".join(line for line in stream.readlines(MOST_BYTES) if line.endswith(b"\n"))


@final
class EventDownloads(Closing):
    """Updates the event files in a folder with the uploads of processes on other machines, until it is closed."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._rounds = Rounds("downloads of events", self._fetch)

    def close(self) -> None:
        """Download the last events, if that is quickly possible."""
        self._rounds.close()

    def _fetch(self) -> None:
        try:
            fetch_events(self._objects, self._folder)
        except (EtudeError, OSError) as error:
            logger.warning("events from elsewhere are not here yet: %s", error)


def fetch_events(objects: Objects, folder: Path, process: str = "") -> None:
    """Update the event files in a run's folder of events, or only that of ``process``, from the uploads; files with
    more events, or of a process that runs on this machine, are unchanged.

    Raises :class:`~etude.errors.DamagedError` naming a missing object.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, segments in _streams(objects, process).items():
        file = folder / f"{name}.jsonl"
        local = file.read_bytes() if file.exists() else b""
        shipped = [segment for segment in segments if segment.end <= len(local)]
        if shipped and objects.get(shipped[-1].key) != local[shipped[-1].start : shipped[-1].end]:
            shipped = []  # written by a machine that the run no longer uses
        missing = segments[len(shipped) :]
        if missing:
            whole = local[: shipped[-1].end if shipped else 0] + b"".join(_read(objects, missing))
            _replace(file, len(local), whole)


def _replace(file: Path, size_bytes: int, data: bytes) -> None:
    """Replace the event file of a process, unless it has not that size any more or the process runs on this machine: it
    would write on into the former file.
    """
    with contextlib.suppress(RunFolderError), exclusive(RunFolder(file.parent.parent), file.stem):
        if (file.stat().st_size if file.exists() else 0) == size_bytes:
            write_whole(file, data)


def _read(objects: Objects, segments: Sequence[_EventObject]) -> list[bytes]:
    def read(segment: _EventObject) -> bytes:
        data = objects.get(segment.key)
        if data is None or len(data) != segment.size_bytes:
            raise DamagedError(f"events {objects.url}/{segment.key} are missing or changed: restore them from a copy")
        return data

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(read, segments))


def _streams(objects: Objects, process: str = "") -> dict[str, list[_EventObject]]:
    """The objects of each process, or of ``process`` only, in order."""
    streams: dict[str, list[_EventObject]] = {}
    for entry in objects.entries(process):
        path = PurePosixPath(entry.key)
        if len(path.parts) == 2 and path.suffix == ".jsonl" and path.stem.isdecimal():
            segment = _EventObject(key=entry.key, start=int(path.stem), size_bytes=entry.size_bytes)
            streams.setdefault(path.parts[0], []).append(segment)
    for segments in streams.values():
        end = 0
        for segment in segments:
            if segment.start != end:
                raise DamagedError(
                    f"events {objects.url}/{segment.key} do not follow those before, which end at {end}: an object is "
                    f"missing, restore it from a copy"
                )
            end = segment.end
    return streams
