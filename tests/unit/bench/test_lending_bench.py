"""The model of ``bench lending``, and its goals."""

from dataclasses import replace
from itertools import islice

import pytest

from bench.lending.bench import ETUDE, WITHOUT, goals
from bench.lending.recalls import RecallResult
from bench.lending.week import WEEK_S, ByTable, Nothing, ProductionModel, Traffic, calls_of
from etude.types import Json

SMALL = Traffic(machines=4, places=2, own=1, call_s=600.0, bursts=2)
"""A few thousand calls a week."""


def test_calls_come_in_order_are_of_the_seed_and_follow_the_hour() -> None:
    calls = list(calls_of(SMALL, 1, seed=3))
    assert calls == list(calls_of(SMALL, 1, seed=3))
    assert list(islice(calls_of(SMALL, 1, seed=4), 9)) != calls[:9]
    times = [call.at_s for call in calls]
    assert times == sorted(times) and times[0] >= WEEK_S and times[-1] < 2 * WEEK_S
    sunday, thursday = (sum(day <= (at - WEEK_S) / 86400 < day + 1 for at in times) for day in (6, 3))
    assert sunday < thursday


def test_with_room_for_all_no_call_waits_and_nothing_is_lent() -> None:
    roomy = replace(SMALL, places=50, peak=0.02)
    week = ProductionModel(roomy, Nothing(), 120.0, look_s=60.0).play(0, seed=0)
    assert week.waited == week.lent_s == week.returns == 0
    assert week.calls == len(week.first_token_s) > 500
    assert week.percentile(0.0) >= roomy.step_s


def test_a_call_that_finds_no_place_waits_for_one() -> None:
    crowded = replace(SMALL, peak=1.5)
    week = ProductionModel(crowded, Nothing(), 120.0, look_s=60.0).play(0, seed=0)
    assert week.waited > 0.2 * week.calls
    assert week.percentile(0.95) > 60


def test_the_table_lends_what_is_idle_and_production_does_not_feel_it() -> None:
    lent = ProductionModel(SMALL, ByTable(SMALL, 120.0, 2.0), 120.0, look_s=60.0)
    first, second = lent.play(0, seed=0), lent.play(1, seed=0)
    alone = ProductionModel(SMALL, Nothing(), 120.0, first_week=1, look_s=60.0).play(1, seed=0)
    assert second.calls == alone.calls
    assert first.returns and second.returns
    assert 0 < second.lent_s <= second.idle_s + 180.0 * (second.returns + 4)
    assert alone.lent_s == 0
    assert second.percentile(0.5) <= 1.05 * alone.percentile(0.5)


def row(contestant: str, seed: int, p95_s: float, idle_used: float) -> dict[str, Json]:
    return {"contestant": contestant, "seed": seed, "p95_s": p95_s, "idle_used": idle_used}


def test_goals_are_of_pairs_of_weeks_and_the_slowest_recall() -> None:
    rows = [
        row(who, seed, p95_s + seed / 1000, idle)
        for seed in range(3)
        for who, p95_s, idle in ((ETUDE, 0.404, 0.85), (WITHOUT, 0.4, 0.0))
    ]
    judged = goals(rows, RecallResult(recall_s=[0.5, 1.5], lost=0, rollouts=8))
    values = {name: goal["value"] for name, goal in judged.items() if isinstance(goal, dict)}
    assert values == {"p95_vs_without": 1.01, "idle_used": 0.85, "recall_s": 1.5, "lost": 0.0}
    assert all(goal["met"] for goal in judged.values() if isinstance(goal, dict))
    unmeasured = goals(rows, RecallResult())
    for name in ("recall_s", "lost"):
        goal = unmeasured[name]
        assert isinstance(goal, dict)
        assert (goal["met"], goal["reason"]) == (False, "no recall was measured")


@pytest.mark.heavy("two minutes of a run")
def test_a_run_loses_nothing_while_its_engine_is_taken_back() -> None:
    from bench.lending.recalls import measure_recalls

    result = measure_recalls(2)
    assert len(result.recall_s) == 2
    assert result.lost == 0
    assert result.tokens > 0
