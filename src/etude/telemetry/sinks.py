"""Sinks: others than the run folder that are told of events.

    EventLog.write ──▶ file in the run folder
                 └───▶ bounded queue ──thread──▶ Sink.emit      one of each for every sink

A sink that raises or is slow loses events, which are counted; the run neither waits for it nor ends with it. Does not
own the events or their files (:mod:`etude.telemetry.events`, :mod:`etude.telemetry.log`).
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, final

import orjson

from etude.config.telemetry import JsonlOptions
from etude.telemetry.events import Logged

logger = logging.getLogger(__name__)

WAITING = 1024
"""Events that may wait for a sink: minutes of a run, and some hundred kilobytes."""
CLOSING_S = 2.0
"""Time that sinks have to take what still waits when a process ends."""


class Sink(Protocol):
    """Takes events; called from one thread of its own.

    One is made by calling what ``telemetry.sinks`` names with its options and a :class:`SinkContext`, in every process
    that writes events.
    """

    def emit(self, event: Logged) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """The run that a sink is made for, beside its own options."""

    run: str
    """Name of the run."""
    process: str


@final
class JsonlSink:
    """Appends JSON lines to a file; implements :class:`Sink`."""

    def __init__(self, options: JsonlOptions, context: SinkContext) -> None:
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{context.run}-{context.process}.jsonl").open("ab")

    def emit(self, event: Logged) -> None:
        """Append one line and hand it to the system."""
        line = {"at_s": event.at_s, "process": event.process, "event": type(event.event).__name__}
        self._file.write(orjson.dumps(line | asdict(event.event)) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Sinks:
    """The sinks of one process."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._threads = [_SinkThread(name, sink) for name, sink in sinks.items()]

    def put(self, event: Logged) -> None:
        """Leave an event to all; never waits."""
        for thread in self._threads:
            thread.put(event)

    @property
    def lost(self) -> Mapping[str, int]:
        """Sink → the events that it did not take."""
        return {thread.name: thread.lost for thread in self._threads}

    def close(self) -> None:
        """Give all some time for what waits, together; what is left is lost."""
        deadline_s = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


class _SinkThread:
    """A sink, its queue and its thread, which ends with the process."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self.lost = 0
        self._sink = sink
        self._queue: queue.Queue[Logged] = queue.Queue(WAITING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, event: Logged) -> None:
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._lose("it is slow: its queue is full")

    def end(self) -> None:
        self._ended.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if left := self._queue.qsize():
            self._lose("it was not through when the process ended", left)
        if self.lost > 1:
            logger.warning("sink %s lost %d events", self.name, self.lost)

    def _run(self) -> None:
        while not (self._ended.is_set() and self._queue.empty()):
            try:
                event = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            try:
                self._sink.emit(event)
            except Exception as error:  # noqa: BLE001  # somebody else's code may raise anything
                self._lose(f"{type(error).__name__}: {error}")
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001  # likewise
            logger.warning("sink %s: %s: %s", self.name, type(error).__name__, error)

    def _lose(self, reason: str, count: int = 1) -> None:
        """Count what was lost, and say so the first time."""
        if not self.lost:
            logger.warning("sink %s loses events, and the run goes on: %s", self.name, reason)
        self.lost += count


POLL_S = 0.2
"""Longest time after which a thread notices that the process ends."""
