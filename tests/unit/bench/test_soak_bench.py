"""``bench soak``: nothing grows, and planted growth is detected."""

import os
from pathlib import Path
from typing import Any

import pytest

from bench.simulation.soak import FEWEST_HOURS, SAMPLES, bench_soak, rise_of, table
from etude.errors import UserError
from etude.simulation.trainer import ModelledStore

SHORT_S = 120.0
"""Virtual seconds of an "hour"."""


def test_a_run_ends_with_what_it_began_with() -> None:
    result: dict[str, Any] = bench_soak(FEWEST_HOURS, hour_s=SHORT_S)
    goals = result["goals"]
    assert {name: goals[name]["met"] for name in ("violations", "handles_grown", "tasks_grown")} == {
        "violations": True, "handles_grown": True, "tasks_grown": True,
    }  # fmt: skip
    assert result["restarts"] > 0
    assert [hour["hour"] for hour in result["results"]][:FEWEST_HOURS] == [1, 2, 3, 4]
    assert "virtual hours" in table(result)


def test_a_handle_and_memory_that_each_step_keeps_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish, hoard = ModelledStore.publish, list[tuple[int, bytearray]]()

    def hoarding(self: ModelledStore, version: int) -> None:
        hoard.append((os.open(tmp_path, os.O_RDONLY), bytearray(100_000)))
        publish(self, version)

    monkeypatch.setattr(ModelledStore, "publish", hoarding)
    try:
        result: dict[str, Any] = bench_soak(FEWEST_HOURS, hour_s=SHORT_S)
    finally:
        for handle, _ in hoard:
            os.close(handle)
    goals = result["goals"]
    assert [goals[name]["met"] for name in ("handles_grown", "memory_kib_per_hour")] == [False, False]
    assert "test_soak_bench.py" in result["grown"][0]


def test_counts_rise_by_what_is_lost_and_not_by_what_is_at_work() -> None:
    busy = [5 + minute % 7 for minute in range(8 * SAMPLES)]
    assert rise_of(busy) == 0
    assert rise_of([each + minute // SAMPLES for minute, each in enumerate(busy)]) > 3
    seldom_idle = [max(each, 7) if minute > 5 * SAMPLES else each for minute, each in enumerate(busy)]
    assert rise_of(seldom_idle) == 0, "the lowest count of a busy time is higher, the highest is not"


def test_too_few_hours_are_refused() -> None:
    with pytest.raises(UserError, match="--hours 3: growth can only be measured from 4 hours on"):
        bench_soak(3)
