"""Every sink gets every event once, at its own pace, and no process waits for it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from etude.config.log import JsonlOptions
from etude.telemetry import tail
from etude.telemetry.events import Event, Logged
from etude.telemetry.log import EventReader
from etude.telemetry.sinks.jsonl import JsonlSink
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.tail import EventTail, SinkThread
from run_events import step, write
from waiting import wait_until

STEPS: list[tuple[str, Event]] = [("train", step(number)) for number in range(1, 6)]


@dataclass
class Listed:
    act: Callable[[Event], object] = lambda event: None
    taken: list[Event] = field(default_factory=list)
    closed: bool = False

    def emit(self, event: Logged) -> None:
        self.act(event.event)
        self.taken.append(event.event)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(tail, name, 0.01)


def fed(folder: Path, sink: Listed, messages: list[tuple[str, int]] | None = None) -> SinkThread:
    heard = [] if messages is None else messages
    thread = SinkThread(
        "one",
        EventTail(folder, folder / "one.json"),
        lambda: sink,
        lambda _, reason, lost: heard.append((reason, lost)),
    )
    thread.start()
    return thread


def finished(thread: SinkThread) -> None:
    thread.end()
    assert thread.join(time.monotonic() + 30.0)


def test_a_sink_gets_what_there_is_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    write(tmp_path, STEPS[:2])
    first, second = Listed(), Listed()
    finished(fed(tmp_path, first))
    assert first.closed
    write(tmp_path, STEPS[2:])
    finished(fed(tmp_path, second))
    assert first.taken + second.taken == [event for _, event in STEPS]
    assert [logged.event for logged in EventTail(tmp_path, tmp_path / "one.json").past()] == [e for _, e in STEPS]


def test_a_process_that_is_killed_in_an_event_never_sends_it_twice(tmp_path: Path) -> None:
    write(tmp_path, STEPS)
    reached, gate = threading.Event(), threading.Event()

    def hang(event: Event) -> None:
        if event == STEPS[2][1]:
            reached.set()
            gate.wait()

    first, second = Listed(hang), Listed()
    fed(tmp_path, first)
    assert reached.wait(10.0)  # it has sent two and is at the third when its process is gone
    finished(fed(tmp_path, second))
    assert first.taken + second.taken == [event for number, (_, event) in enumerate(STEPS) if number != 2]
    gate.set()


def test_a_sink_that_is_away_gets_its_events_later(tmp_path: Path) -> None:
    write(tmp_path, STEPS)
    is_away, messages = threading.Event(), list[tuple[str, int]]()
    is_away.set()

    def reach(_: Event) -> None:
        if is_away.is_set():
            raise ConnectionError("no route")

    sink = Listed(reach)
    thread = fed(tmp_path, sink, messages)
    wait_until(lambda: bool(messages), timeout_s=10.0)
    is_away.clear()
    finished(thread)
    assert sink.taken == [event for _, event in STEPS]
    assert messages == [("unavailable, gets these events later: ConnectionError: no route", 0)]


def test_what_a_sink_has_not_got_at_the_end_is_there_for_the_next_start(tmp_path: Path) -> None:
    write(tmp_path, STEPS)

    def unreachable(_: Event) -> None:
        raise TimeoutError

    sink, later = Listed(unreachable), Listed()
    finished(fed(tmp_path, sink))
    assert not sink.closed
    finished(fed(tmp_path, later))
    assert later.taken == [event for _, event in STEPS]


def test_a_sink_that_raises_loses_that_event_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, STEPS)
    tries, messages = list[Event](), list[tuple[str, int]]()

    def refuse_third(event: Event) -> None:
        tries.append(event)
        if event == STEPS[2][1]:
            raise ZeroDivisionError("division by zero")

    sink = Listed(refuse_third)
    finished(fed(tmp_path, sink, messages))
    assert len(sink.taken) == 4
    assert tries.count(STEPS[2][1]) == tail.TRIES
    assert messages == [("does not accept an event: ZeroDivisionError: division by zero", 1)]


def test_lines_of_json_have_every_event(tmp_path: Path) -> None:
    write(tmp_path / "events", STEPS[:1])
    context = SinkContext(run="r", id="1", folder=tmp_path, config={})
    sink = JsonlSink(JsonlOptions(folder=str(tmp_path / "far")), context)
    (logged,) = EventReader(tmp_path / "events").new()
    sink.emit(logged)
    sink.close()
    line = orjson.loads((tmp_path / "far" / "r-1.jsonl").read_bytes())
    assert (line["at_s"], line["process"], line["event"], line["step"]) == (logged.at_s, "train", "StepDone", 1)
