"""Sinks take events, and never hold a run up."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from etude.config.telemetry import JsonlOptions
from etude.telemetry.events import Logged, PhaseStarted
from etude.telemetry.log import EventLog, EventReader
from etude.telemetry.sinks import WAITING, JsonlSink, SinkContext, Sinks

EVENT = PhaseStarted(phase="rl")


@dataclass
class Listed:
    act: Callable[[], object]
    taken: list[Logged] = field(default_factory=list)
    closed: bool = False

    def emit(self, event: Logged) -> None:
        self.act()
        self.taken.append(event)

    def close(self) -> None:
        self.closed = True


def test_events_go_to_the_run_folder_and_to_every_sink(tmp_path: Path) -> None:
    one, jsonl = (
        Listed(lambda: None),
        JsonlSink(JsonlOptions(folder=str(tmp_path / "far")), SinkContext(run="r", process="p")),
    )
    with EventLog(tmp_path, "p", sinks=Sinks({"one": one, "jsonl": jsonl})) as log:
        log.write(EVENT)
    assert one.closed
    assert one.taken == EventReader(tmp_path).new()
    (line,) = (tmp_path / "far" / "r-p.jsonl").read_bytes().splitlines()
    assert orjson.loads(line) == {"at_s": one.taken[0].at_s, "process": "p", "event": "PhaseStarted", "phase": "rl"}


def test_a_sink_that_raises_loses_its_own_events_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Listed(lambda: 1 / 0), Listed(lambda: None)
    sinks = Sinks({"broken": broken, "sound": sound})
    for _ in range(5):
        sinks.put(Logged(at_s=0.0, process="p", event=EVENT))
    sinks.close()
    assert (sinks.lost, len(sound.taken)) == ({"broken": 5, "sound": 0}, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "sink broken loses events, and the run goes on: ZeroDivisionError: division by zero",
        "sink broken lost 5 events",
    ]


def test_a_sink_that_hangs_is_not_waited_for() -> None:
    gate = threading.Event()
    sinks = Sinks({"slow": Listed(gate.wait)})
    for _ in range(WAITING + 10):
        sinks.put(Logged(at_s=0.0, process="p", event=EVENT))
    assert 9 <= sinks.lost["slow"] <= 10  # one may be in its hands
    sinks.close()
    assert sinks.lost["slow"] >= WAITING
    gate.set()
