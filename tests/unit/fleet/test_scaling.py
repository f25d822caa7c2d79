"""The number of engines: enough, no more than needed, within bounds, and without oscillation."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.fleet.scaling import WAITS, ReplicaRange, ScalingLimits, ScalingTable, StepLoad

NEAR = ReplicaRange(region="near", fewest=1, most=64, cost_per_hour=2.0)
FAR = ReplicaRange(region="far", fewest=1, most=8, cost_per_hour=1.0)
SETTLE = ScalingLimits().settle


def full(wait_share: float) -> StepLoad:
    return StepLoad(work_s=1 - wait_share, wait_s=wait_share, busy=1.0)


def after(
    table: ScalingTable, load: StepLoad, steps: int = SETTLE, *, budget_per_hour: float = math.inf
) -> dict[str, int]:
    for _ in range(steps):
        table.step(load, budget_per_hour=budget_per_hour)
    return table.counts


def test_a_trainer_that_waits_half_its_time_gets_twice_the_engines() -> None:
    assert after(ScalingTable([NEAR], {"near": 9}), full(0.5), SETTLE - 1) == {"near": 9}
    assert after(ScalingTable([NEAR], {"near": 9}), full(0.5)) == {"near": 18}
    assert after(ScalingTable([NEAR], {"near": 9}), full(0.2)) == {"near": math.ceil(9 / 0.8 / 0.9)}


def test_it_may_wait_a_little() -> None:
    assert after(ScalingTable([NEAR], {"near": 9}), full(WAITS), 40) == {"near": 9}


def test_engines_count_as_full_from_a_busy_share_on() -> None:
    limits = ScalingLimits(full=0.5, target=0.5)
    for busy, count in ((0.499, 9), (0.5, 18)):
        table = ScalingTable([NEAR], {"near": 9}, limits)
        assert after(table, StepLoad(work_s=1.0, wait_s=1.0, busy=busy)) == {"near": count}


def test_a_step_without_work_says_nothing_about_the_number() -> None:
    assert after(ScalingTable([NEAR], {"near": 9}), StepLoad(work_s=0.0, wait_s=5.0, busy=1.0), 40) == {"near": 9}


def test_what_was_measured_before_a_change_does_not_count_after_it() -> None:
    table = ScalingTable([NEAR], {"near": 9})
    assert not table.is_full, "nothing is known yet"
    after(table, full(0.5))
    assert table.is_full
    table.step(full(0.0))
    assert not table.is_full


def test_where_something_else_is_slow_more_engines_are_no_help() -> None:
    slow = StepLoad(work_s=1.0, wait_s=3.0, busy=0.3)
    assert after(ScalingTable([NEAR], {"near": 9}), slow, 40) == {"near": 9}


def test_it_does_not_grow_while_others_that_it_uses_are_full() -> None:
    table = ScalingTable([NEAR], {"near": 9})
    for _ in range(3 * SETTLE):
        assert not table.step(full(0.5), may_grow=False)
    assert table.is_full
    idle = StepLoad(work_s=1.0, wait_s=0.0, busy=0.45)
    for _ in range(ScalingLimits().calm):
        table.step(idle, may_grow=False)
    assert table.counts == {"near": 5}, "it may shrink"
    assert not table.is_full


def test_of_a_trainer_that_did_not_work_nothing_follows() -> None:
    hung = StepLoad(work_s=0.0, wait_s=60.0, busy=1.0)
    assert after(ScalingTable([NEAR], {"near": 9}), hung, 40) == {"near": 9}


def test_places_that_were_asked_for_and_not_there_count() -> None:
    short = StepLoad(work_s=1.0, wait_s=0.0, busy=1.5)
    assert after(ScalingTable([NEAR], {"near": 9}), short, 40) == {"near": 9}, "the trainer does not wait"
    waiting = StepLoad(work_s=0.9, wait_s=0.1, busy=1.5)
    assert after(ScalingTable([NEAR], {"near": 9}), waiting) == {"near": math.ceil(9 * 1.5 / 0.9 / 0.9)}


def test_idle_engines_go_once_they_have_been_so_for_long() -> None:
    table = ScalingTable([NEAR], {"near": 10})
    idle = StepLoad(work_s=1.0, wait_s=0.0, busy=0.45)
    assert after(table, idle, ScalingLimits().calm - 1) == {"near": 10}
    table.step(full(0.0))
    assert after(table, idle, ScalingLimits().calm - 1) == {"near": 10}, "busy meanwhile"
    assert after(table, idle, 1) == {"near": 5}


def test_the_cheapest_region_grows_first_the_dearest_shrinks_first_and_money_bounds_both() -> None:
    table = ScalingTable([NEAR, FAR], {"near": 4, "far": 4})
    assert after(table, full(0.5)) == {"near": 8, "far": 8}, "8 is all that far has"
    idle = StepLoad(work_s=1.0, wait_s=0.0, busy=0.5)
    assert after(table, idle, 10) == {"near": 1, "far": 8}
    poor = ScalingTable([NEAR], {"near": 2})
    assert after(poor, full(0.5), budget_per_hour=7.0) == {"near": 3}
    assert poor.cost_per_hour == 6.0


def test_the_cheapest_region_with_room_grows_while_the_budget_lasts() -> None:
    table = ScalingTable([NEAR, FAR], {"near": 2, "far": 2})
    assert after(table, full(0.5), budget_per_hour=8.0) == {"near": 2, "far": 4}, "all of it may be spent"


def test_replicas_do_not_move_to_a_cheaper_region() -> None:
    for steady in (full(0.0), StepLoad(work_s=1.0, wait_s=0.0, busy=0.89)):
        assert after(ScalingTable([NEAR, FAR], {"near": 4, "far": 4}), steady, 40) == {"near": 4, "far": 4}


def test_bounds_may_be_as_narrow_as_can_be() -> None:
    nothing = ReplicaRange(region="r", fewest=0, most=0, cost_per_hour=0.0)
    quick = ScalingLimits(settle=1, window=1, calm=1, full=1.0, target=1.0)
    assert after(ScalingTable([nothing], {"r": 0}, quick), full(0.5), 1) == {"r": 0}
    idle = StepLoad(work_s=1.0, wait_s=0.0, busy=0.5)
    assert after(ScalingTable([NEAR], {"near": 4}, quick), idle, 1) == {"near": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"fewest": -1},
        {"fewest": 2, "most": 1},
        {"cost_per_hour": -1.0},
        {"cost_per_hour": math.inf},
    ],
)
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="fewest is at least 0"):
        ReplicaRange(**{"region": "r", "fewest": 0, "most": 1} | wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 0},
        {"window": 5, "settle": 4},
        {"calm": 0},
        {"full": 0.0},
        {"full": 0.9, "target": 0.8},
        {"target": 1.1},
    ],
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="window is 1"):
        ScalingLimits(**wrong)  # type: ignore[arg-type]


def played(demand: Sequence[float], *, work_s: float = 10.0, lag: int = 2) -> list[int]:
    """Engines at each step: step n needs ``demand[n]`` engine-seconds, and new engines serve ``lag`` steps later."""
    table, history, serving = ScalingTable([NEAR], {"near": 4}), [4] * lag, list[int]()
    for seconds in demand:
        engines = history[-lag]
        step_s = max(work_s, seconds / engines)
        busy = min(1.0, seconds / engines / step_s)
        table.step(StepLoad(work_s=work_s, wait_s=step_s - work_s, busy=busy))
        history.append(table.counts["near"])
        serving.append(table.counts["near"])
    return serving


def changes(counts: Sequence[int]) -> list[int]:
    """Signs of the changes, in order."""
    return [(after > before) - (after < before) for before, after in pairwise(counts) if after != before]


def test_a_load_that_doubles_and_halves_is_followed_without_swinging() -> None:
    counts = played([80.0] * 40 + [160.0] * 40 + [80.0] * 40)
    assert (counts[39], counts[79], counts[119]) == (8, 18, 9)
    signs = changes(counts)
    assert signs == sorted(signs, reverse=True), "up while there is more to do, then down, never to and fro"


@given(st.floats(5.0, 500.0), st.integers(1, 4))
def test_under_any_steady_load_it_comes_to_rest_where_the_trainer_hardly_waits(seconds: float, lag: int) -> None:
    counts = played([seconds] * 80, lag=lag)
    assert len(set(counts[-20:])) == 1, "at rest"
    engines = counts[-1]
    if engines < NEAR.most:
        step_s = max(10.0, seconds / engines)
        assert step_s - 10.0 <= WAITS * step_s
    if engines > NEAR.fewest:
        fewer = seconds / (engines - 1) / 10.0
        assert fewer > ScalingLimits().full, "one fewer would be full, or nearly"


LOADS = st.builds(StepLoad, work_s=st.floats(0, 9), wait_s=st.floats(0, 9), busy=st.floats(0, 1))


@given(st.lists(LOADS, max_size=60), st.integers(1, 8), st.integers(1, 8))
def test_bounds_hold_whatever_is_heard(loads: Sequence[StepLoad], near: int, far: int) -> None:
    table = ScalingTable([NEAR, FAR], {"near": near, "far": far})
    start = table.cost_per_hour
    last = 0
    for number, load in enumerate(loads, 1):
        if table.step(load, budget_per_hour=40.0):
            assert number - last >= SETTLE
            last = number
        for each in (NEAR, FAR):
            assert each.fewest <= table.counts[each.region] <= each.most
        assert table.cost_per_hour <= max(40.0, start)
