"""An interrupted bench prints its measurements, and none of its goals is met."""

import json
import os
import signal

import pytest

from bench import report
from bench.__main__ import main
from bench.report import INTERRUPTED, UNMEASURED, Goal, envelope, heading, so_far
from bench.templates import bench as templates
from etude.types import Json


def test_what_was_measured_is_gone_on_with_and_meets_no_goal() -> None:
    rows: list[Json] = []
    with so_far() as measured:
        for number in range(3):
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            rows.append({"contestant": str(number)})
    assert measured.interrupted and len(rows) == 2
    goals: Json = {
        "fast": Goal("fast", "at least", 1.0, "Speed.").judge(2.0),
        "none": Goal("none", "at most", 1.0, "Seconds.").judge(None, "x"),
    }
    result = envelope("toy", 1.0, {"results": rows, "goals": goals}, interrupted=measured.interrupted)
    assert result["interrupted"] is True and "INTERRUPTED" in heading(result)
    judged = result["goals"]
    fast = judged["fast"]  # type: ignore[index,call-overload]
    assert isinstance(fast, dict)
    assert (fast["value"], fast["met"], fast["reason"]) == (2.0, False, INTERRUPTED)
    assert judged["none"]["reason"] == UNMEASURED  # type: ignore[index,call-overload]


def test_sigterm_is_an_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(options: object) -> dict[str, Json]:
        with so_far() as measured:
            os.kill(os.getpid(), signal.SIGTERM)
        return report.envelope("templates", 0.0, {"results": [], "goals": {}}, interrupted=measured.interrupted)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(templates, "run", measure)
    assert main(["templates", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["interrupted"] is True
    assert signal.getsignal(signal.SIGTERM) is before
