"""Append-only event files: one writer per process, any number of readers.

A line is written with a single ``write`` call, so a reader sees complete lines and at most one unfinished last line,
which it reads later. A damaged line in the middle of a file is an error, never skipped.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, get_args

import orjson

from etude.closing import Closing
from etude.errors import DamagedError
from etude.storage import FULL
from etude.telemetry.events import Event, Logged

EVENT_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
"""Event name in the log → its class."""


class EventFollower(Protocol):
    """Reader of an event file while it is written."""

    def catch_up(self) -> None:
        """Read all events written so far; a temporary failure raises nothing."""

    def close(self) -> None:
        """Read the remaining events and stop."""


class EventLog(Closing):
    """Writer of this process's events."""

    def __init__(
        self, folder: Path, process: str, *, lossy: bool = False, now: Callable[[], float] = time.time
    ) -> None:
        """``lossy``: on a full disk, lose the event instead of raising. ``now`` gives the time of events."""
        folder.mkdir(parents=True, exist_ok=True)
        self._process, self._lossy, self._now = process, lossy, now
        self._followers: list[EventFollower] = []
        file = folder / f"{process}.jsonl"
        _drop_unfinished_line(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: Event) -> None:
        """Append one event, completely or not at all."""
        line = {"at_s": self._now(), "writer": self._process, "event": type(event).__name__, **asdict(event)}
        data = orjson.dumps(line) + b"\n"
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            written = 0
        if written < len(data):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            if not self._lossy:
                raise OSError(errno.ENOSPC, f"event log of {self._process!r}: the disk is full")

    def follow(self, follower: EventFollower) -> None:
        """Register a follower of the file; :meth:`flush` makes it catch up, :meth:`close` closes it."""
        self._followers.append(follower)

    def flush(self) -> None:
        """Return when all followers have the written events, or failed to get them."""
        for follower in self._followers:
            follower.catch_up()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        for follower in self._followers:
            follower.close()


@dataclass(frozen=True, slots=True)
class Placed:
    """An event and its position in the log."""

    logged: Logged
    file: str
    """Name of its file."""
    end: int
    """Offset of the byte after its line."""


class EventReader:
    """Reader of a run's events, for all processes or one; each event is read once."""

    def __init__(self, folder: Path, process: str = "*", offsets: Mapping[str, int] | None = None) -> None:
        """``offsets``: file name → offset at which to start; default: the start of each file."""
        self._folder = folder
        self._files = f"{process}.jsonl"
        self._offsets = dict(offsets or {})
        self._last_lines: dict[str, bytes] = {}
        """File name → the last line read, which shows whether the file is still the same one."""

    def new(self) -> list[Logged]:
        """Events written since the previous call, in order of time."""
        return [placed.logged for placed in self.placed()]

    def placed(self) -> list[Placed]:
        """The events of :meth:`new`, with their positions."""
        events = [event for file in sorted(self._folder.glob(self._files)) for event in self._tail(file)]
        return sorted(events, key=lambda placed: placed.logged.at_s)

    def _tail(self, file: Path) -> Iterator[Placed]:
        if file.stat().st_size == self._offsets.get(file.name, 0):
            return
        with file.open("rb") as stream:
            end = self._offsets[file.name] = self._next_line(stream, file)
            stream.seek(end)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield Placed(_parse(line, file), file.name, end)
                self._offsets[file.name] = end
                self._last_lines[file.name] = line

    def _next_line(self, stream: BinaryIO, file: Path) -> int:
        """The offset of the first line that was not read yet. A file may be replaced by that of another machine, on
        which its process went on from an earlier event: then it is the first line that is newer than those read.
        """
        end, last = self._offsets.get(file.name, 0), self._last_lines.get(file.name)
        if not end:
            return 0
        if last is None:  # the position comes from an earlier process
            stream.seek(end - 1)
            if stream.read(1) != b"\n":
                stream.readline()
            return min(stream.tell(), file.stat().st_size)
        stream.seek(end - len(last))
        if stream.read(len(last)) == last:
            return end
        read_s, end = _parse(last, file).at_s, 0
        stream.seek(0)
        for line in stream:
            if not line.endswith(b"\n") or _parse(line, file).at_s > read_s:
                break
            end += len(line)
        return end


def _drop_unfinished_line(file: Path) -> None:
    """Remove the unfinished line of a killed predecessor, so that the next event starts a new line."""
    if not file.exists():
        return
    whole = file.read_bytes().rfind(b"\n") + 1
    if whole < file.stat().st_size:
        os.truncate(file, whole)


def _parse(line: bytes, file: Path) -> Logged:
    try:
        fields = orjson.loads(line)
        at_s, process, kind = fields.pop("at_s"), fields.pop("writer"), EVENT_TYPES[fields.pop("event")]
        return Logged(at_s=float(at_s), process=process, event=kind(**fields))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: unreadable event {line[:120]!r}: {error}") from error
