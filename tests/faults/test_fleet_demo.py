"""The short fleet demo: a machine and a link are lost while a run trains in two regions, and nothing else is."""

import json

import pytest

from bench.fleet import ray_nodes
from bench.fleet.bench import bench_fleet, table
from bench.fleet.demo import MACHINES, RAY
from bench.fleet.machines import missing
from bench.fleet.plan import short_plan

NEVER = ("k3", "staleness_over_bound", "lost", "double_trained", "infra_scored_zero")
"""Goals that hold on any machine, however busy; the others are about time."""

pytestmark = pytest.mark.heavy("root, PostgreSQL and /dev/net/tun", missing=missing() is not None)


@pytest.mark.timeout(1800)
def test_a_machine_and_a_region_are_lost_and_nothing_else() -> None:
    result = bench_fleet(short_plan(), launcher=RAY if ray_nodes.missing() is None else MACHINES)
    shown = table(result | {"page": ""})
    assert result["finished"] and not result["skipped"], shown
    assert result["findings"] == [], shown
    rows, goals = result["results"], result["goals"]
    assert isinstance(rows, list) and isinstance(goals, dict)
    assert all(isinstance(row, dict) and row["over_s"] is not None for row in rows), shown
    assert {name: goals[name] for name in NEVER if not goals[name]["met"]} == {}, shown  # type: ignore[index,call-overload]
    assert goals["wan_copies_per_region"]["value"] is not None, json.dumps(goals)  # type: ignore[index,call-overload]
