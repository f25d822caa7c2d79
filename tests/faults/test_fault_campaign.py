"""Fifty things that go wrong in two runs of real processes: nothing is lost, doubled, wrongly scored or waited for."""

from pathlib import Path

import pytest

from bench.faults.bench import FaultOptions, bench_faults, table
from bench.faults.machine import missing

FAULTS = 50
LATE = 2
"""Faults that may come to nothing: while the chaos run stands still, a run may get past its last ones and be over."""

pytestmark = pytest.mark.heavy("minutes, and a C compiler", missing=missing() is not None)


@pytest.mark.timeout(3600)
def test_fifty_faults_cost_time_and_nothing_else(tmp_path: Path) -> None:
    options = FaultOptions(faults=FAULTS, seed=1, out=tmp_path)
    result = bench_faults(options)
    shown = table(result)
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert {name for name, goal in goals.items() if isinstance(goal, dict) and goal["met"]} == {
        "lost",
        "double_trained",
        "infra_scored_zero",
        "unbounded_waits",
    }, shown
    rows, injected = result["results"], result["injected"]
    assert isinstance(rows, list) and isinstance(injected, int)
    assert FAULTS - LATE <= injected <= FAULTS, shown
    unseen = options.extent.kinds - {row["case"] for row in rows if isinstance(row, dict)}
    assert len(unseen) <= FAULTS - injected, shown
    assert all(row["recovered"] == row["injected"] for row in rows if isinstance(row, dict)), shown
    assert bench_faults(options)["results"] == rows  # read from the store
