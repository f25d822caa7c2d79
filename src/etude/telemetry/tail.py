"""The tail of a run's events: each sink gets every event once, at its own pace, and blocks no other component.

    events/*.jsonl ──▶ SinkThread ──▶ Sink.emit
                         │ sinks/NAME.json: its position, written before an event is passed

An unavailable sink gets its events later; if a sink raises any other error, the event is lost after a few attempts,
which is counted and reported. Since the position is written first, a killed process loses at most one event and sends
none twice. Owns pace and position, not the sink's use of an event.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson

from etude.closing import Closing
from etude.telemetry.events import Logged
from etude.telemetry.log import EventReader, Placed
from etude.telemetry.sinks.sink import Sink

POLL_S = 1.0
"""Interval between checks for new events."""
TRIES = 3
"""Attempts to pass an event to a sink that raises."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""First and maximum pause while a sink is unavailable; the pause doubles."""
REPORT_EVERY = 100
"""Lost events between two reports."""


class EventTail(Closing):
    """The events of a run after a position that is stored in a file."""

    def __init__(self, events: Path, place: Path) -> None:
        self._events = events
        self._descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        self._offsets: dict[str, int] = orjson.loads(text or b"{}")
        self._size = len(text)
        self._reader = EventReader(events, offsets=self._offsets)

    def past(self) -> Iterator[Logged]:
        """The events before the position, in order of time."""
        before = dict(self._offsets)
        for placed in EventReader(self._events).placed():
            if placed.end <= before.get(placed.file, 0):
                yield placed.logged

    def new(self) -> list[Placed]:
        """The events after the position that were not returned yet, in order of time."""
        return self._reader.placed()

    def go_to(self, placed: Placed) -> int:
        """Set the position to the end of an event; return the previous offset in its file."""
        before = self._offsets.get(placed.file, 0)
        self.put(placed.file, placed.end)
        return before

    def put(self, file: str, end: int) -> None:
        """Set the position in one file."""
        self._offsets[file] = end
        text = orjson.dumps(self._offsets).ljust(self._size)  # overwrites the old text in one call: atomic if killed
        self._size = len(text)
        os.pwrite(self._descriptor, text, 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class SinkThread:
    """One sink, its position and its thread.

    consumes: events; produces: the sink's output; waits for: the sink only; woken by: its own polling; on shutdown:
    passes the events written until then, and closes the sink.
    """

    def __init__(
        self, name: str, tail: EventTail, open_sink: Callable[[], Sink], report: Callable[[str, str, int], None]
    ) -> None:
        """``report`` is called with name, reason and number of lost events: when the sink becomes unavailable,
        and for the first and every ``REPORT_EVERY``-th lost event.
        """
        self.name = name
        self.lost = 0
        self._tail = tail
        self._open_sink = open_sink
        self._report = report
        self._is_unavailable = False
        """True while the sink is unavailable, which was reported."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Request the end of the thread after the remaining events."""
        self._ending.set()

    def join(self, deadline_s: float | None = None) -> bool:
        """Wait for the thread's end, at most until ``deadline_s`` (monotonic); return true if it ended."""
        self._thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._tail:
                sink = self._opened()
                if sink is not None and self._give_all(sink):
                    sink.close()
        except Exception as error:  # noqa: BLE001  # code of a plugin may raise anything
            self._report(self.name, f"{type(error).__name__}: {error}", self.lost)

    def _opened(self) -> Sink | None:
        """The sink; ``None`` if it could not be opened before the end."""
        for pause_s in _pauses():
            is_last = self._ending.is_set()
            try:
                return self._open_sink()
            except Exception as error:  # noqa: BLE001  # likewise
                self._report_unavailable(error)
            if is_last:
                break
            self._ending.wait(pause_s)
        return None

    def _give_all(self, sink: Sink) -> bool:
        """Pass events until the end; return false if the sink was then unavailable."""
        while True:
            is_last = self._ending.is_set()  # read before the events, so that none is missed
            for placed in self._tail.new():
                if not self._give(sink, placed):
                    return False
            if is_last:
                return True
            self._ending.wait(POLL_S)

    def _give(self, sink: Sink, placed: Placed) -> bool:
        """Pass one event; return false if the sink is unavailable at the end: the position is then before the event."""
        failures = 0
        for pause_s in _pauses():
            is_last = self._ending.is_set()
            before = self._tail.go_to(placed)
            try:
                sink.emit(placed.logged)
            except OSError as error:
                self._tail.put(placed.file, before)
                self._report_unavailable(error)
                if is_last:
                    return False
                self._ending.wait(pause_s)
            except Exception as error:  # noqa: BLE001  # likewise
                failures += 1
                if failures == TRIES:
                    self._lose(error)
                    break
            else:
                self._is_unavailable = False
                break
        return True

    def _report_unavailable(self, error: Exception) -> None:
        if not self._is_unavailable:
            self._is_unavailable = True
            self._report(self.name, f"unavailable, gets these events later: {type(error).__name__}: {error}", self.lost)

    def _lose(self, error: Exception) -> None:
        self.lost += 1
        if self.lost == 1 or self.lost % REPORT_EVERY == 0:
            self._report(self.name, f"does not accept an event: {type(error).__name__}: {error}", self.lost)


def _pauses() -> Iterator[float]:
    """Growing pauses between attempts."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
