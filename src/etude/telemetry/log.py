"""Append-only event files: one writer per process, any number of readers.

A line is written whole with one ``write`` call, so a reader sees complete lines or, at worst, one unfinished last line,
which it leaves for later. A damaged line in the middle of a file is an error, never skipped.
"""

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, get_args

import orjson

from etude.closing import Closing
from etude.errors import DamagedError
from etude.storage import FULL
from etude.telemetry.events import Event, Logged
from etude.telemetry.sinks import Sinks

EVENT_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
"""Event name in the log → its class."""


class EventFollower(Protocol):
    """Something that reads an event file while it is written."""

    def catch_up(self) -> None:
        """Read what was written so far; raises nothing for what it cannot do now."""

    def close(self) -> None:
        """Read the last of it, and end."""


class EventLog(Closing):
    """Writes this process's events."""

    def __init__(self, folder: Path, process: str, *, lossy: bool = False, sinks: Sinks | None = None) -> None:
        """``lossy``: rather go on without an event than end on a full disk. ``sinks`` are closed with this."""
        folder.mkdir(parents=True, exist_ok=True)
        self._process, self._lossy, self._sinks = process, lossy, sinks
        self._followers: list[EventFollower] = []
        file = folder / f"{process}.jsonl"
        _drop_unfinished_line(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: Event) -> None:
        """Append one event, whole or not at all."""
        at_s = time.time()
        if self._sinks is not None:
            self._sinks.put(Logged(at_s=at_s, process=self._process, event=event))
        line = {"at_s": at_s, "writer": self._process, "event": type(event).__name__, **asdict(event)}
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
        """Tell a follower of the file when to catch up, and close it with this."""
        self._followers.append(follower)

    def flush(self) -> None:
        """Return when all followers have what was written, or could not get it."""
        for follower in self._followers:
            follower.catch_up()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        if self._sinks is not None:
            self._sinks.close()
        for follower in self._followers:
            follower.close()


class EventReader:
    """Reads every event of a run once, of all its processes or of one, and later the new ones."""

    def __init__(self, folder: Path, process: str = "*") -> None:
        self._folder = folder
        self._files = f"{process}.jsonl"
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[Logged]:
        """Events written since the previous call, in order of time."""
        events = [event for file in sorted(self._folder.glob(self._files)) for event in self._tail(file)]
        return sorted(events, key=lambda logged: logged.at_s)

    def _tail(self, file: Path) -> Iterator[Logged]:
        with file.open("rb") as stream:
            stream.seek(self._offsets.get(file, 0))
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                yield _parse(line, file)
                self._offsets[file] = self._offsets.get(file, 0) + len(line)


def _drop_unfinished_line(file: Path) -> None:
    """Cut off what a predecessor was writing when it died, so that the next line starts on its own."""
    if not file.exists():
        return
    whole = file.read_bytes().rfind(b"\n") + 1
    if whole < file.stat().st_size:
        os.truncate(file, whole)


def _parse(line: bytes, file: Path) -> Logged:
    try:
        fields = orjson.loads(line)
        at_s, process, kind = fields.pop("at_s"), fields.pop("writer"), EVENT_TYPES[fields.pop("event")]
        return Logged(at_s=at_s, process=process, event=kind(**fields))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: unreadable event {line[:120]!r}: {error}") from error
