"""Lending of production engines: production always comes first, and idle engines are lent soon."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.fleet.lending import (
    HOUR_S,
    MARGIN_HALF_LIFE_HOURS,
    MOST_MARGIN,
    WEEK_HOURS,
    Forecast,
    LendingLimits,
    LendingState,
    LendingTable,
    ProductionLoad,
)

NAMES = ("p0", "p1", "p2", "p3")
LIMITS = LendingLimits(slo_first_token_s=1.0, places=10, keep=1, margin=0.25, lead_s=120.0, calm_s=60.0)
IDLE = ProductionLoad(running=0, waiting=0, first_token_p95_s=None)


def load(running: int, waiting: int = 0, p95_s: float | None = 0.1) -> ProductionLoad:
    return ProductionLoad(running=running, waiting=waiting, first_token_p95_s=p95_s)


def lent(table: LendingTable) -> list[str]:
    return [name for name, state in table.states().items() if state is LendingState.LENT]


def settled(table: LendingTable, facts: ProductionLoad, now: float = 0.0) -> float:
    """Look until nothing has been needed for long; the time afterwards."""
    for _ in range(20):
        table.step(facts, lent(table), now)
        now += 10.0
    return now


def test_all_but_what_is_kept_is_lent_without_calls_and_from_the_back() -> None:
    table = LendingTable(NAMES, LIMITS)
    table.step(load(35), (), 0.0)
    assert lent(table) == []
    assert table.step(IDLE, (), 30.0).lend == ()
    assert table.step(IDLE, (), 60.0).lend == ("p1", "p2", "p3")
    table = LendingTable(NAMES, LIMITS)
    settled(table, load(5))
    assert lent(table) == ["p2", "p3"], "room for 5 calls, the fill of one engine and a quarter of both"


def test_without_a_time_of_calm_what_is_needed_now_is_not_lent() -> None:
    table = LendingTable(NAMES, replace(LIMITS, calm_s=0.0))
    for now in range(3):
        assert table.step(None, (), float(now)).lend == ()
    assert table.step(IDLE, (), 3.0).lend == ("p1", "p2", "p3")


def test_what_production_needs_goes_back_and_is_free_once_rollouts_have_left_it() -> None:
    table = LendingTable(NAMES, LIMITS)
    now = settled(table, IDLE)
    decision = table.step(load(12), lent(table), now)
    assert decision.recall == ("p1", "p2")
    assert decision.lend == ()
    assert table.states()["p1"] is LendingState.RECALLED
    table.step(load(12), ("p2", "p3"), now + 1.0)
    assert table.states() == {
        "p0": LendingState.FREE,
        "p1": LendingState.FREE,
        "p2": LendingState.RECALLED,
        "p3": LendingState.LENT,
    }


@pytest.mark.parametrize("facts", [load(3, waiting=1), load(3, p95_s=0.81), None])
def test_all_engines_return_when_production_queues_nears_its_limit_or_stops_reporting(
    facts: ProductionLoad | None,
) -> None:
    table = LendingTable(NAMES, LIMITS)
    now = settled(table, IDLE)
    assert table.step(facts, lent(table), now).recall == ("p1", "p2", "p3")


def test_trouble_widens_the_margin_once_for_a_burst_and_calm_narrows_it() -> None:
    table = LendingTable(NAMES, LIMITS)
    now = settled(table, IDLE)
    for second in range(30):
        table.step(load(3, waiting=1), lent(table), now + second)
    assert table.margin == pytest.approx(0.25 * 1.5)
    table.step(load(3), lent(table), now + 29 + MARGIN_HALF_LIFE_HOURS * HOUR_S)
    assert table.margin == pytest.approx(0.25 * 1.25), "half of the growth is forgotten"
    table.step(load(3), lent(table), now + 240 * HOUR_S)
    assert table.margin == pytest.approx(LIMITS.margin, abs=1e-3)


def test_what_earlier_weeks_brought_at_this_hour_is_kept_free_before_it_comes() -> None:
    forecast, nine = Forecast(), 9 * HOUR_S
    for second in range(0, int(WEEK_HOURS * HOUR_S), 600):
        forecast.observe(30 if nine <= second < nine + HOUR_S else 0, float(second))
    week = WEEK_HOURS * HOUR_S
    forecast.observe(0, week)
    table = LendingTable(NAMES, LIMITS, Forecast.learnt(forecast.to_json()))
    settled(table, IDLE, week + nine - 2 * HOUR_S)
    assert lent(table) == ["p1", "p2", "p3"]
    soon = week + nine - LIMITS.lead_s
    assert table.step(IDLE, lent(table), soon).recall == ("p1", "p2"), "for 30 calls"
    settled(table, IDLE, week + nine + HOUR_S)
    assert lent(table) == ["p1", "p2", "p3"]


def test_an_hour_that_rises_is_forecast_by_its_quarters() -> None:
    forecast, nine = Forecast(), 9 * HOUR_S
    for quarter in range(5):
        forecast.observe(10 * quarter, nine + quarter * HOUR_S / 4)
    again = Forecast.learnt(forecast.to_json())
    week = WEEK_HOURS * HOUR_S
    assert [again.expected(at, at + 60) for at in (week + nine, week + nine + HOUR_S / 2)] == [0, 20]
    assert not again.knows(week + nine + HOUR_S), "it is not over"


def test_a_forecast_of_whole_hours_counts_for_their_first_quarters() -> None:
    forecast = Forecast.learnt('{"9": 30.0}')
    assert forecast.expected(9 * HOUR_S, 9 * HOUR_S + 1) == 30
    assert not forecast.knows(9.25 * HOUR_S)


def test_a_habit_that_changed_is_followed() -> None:
    forecast = Forecast()
    for week in range(6):
        for quarter in range(4 * WEEK_HOURS):
            forecast.observe(40 if week == 0 else 10, week * WEEK_HOURS * HOUR_S + quarter * HOUR_S / 4)
    assert 10 < forecast.expected(7 * WEEK_HOURS * HOUR_S, 7 * WEEK_HOURS * HOUR_S + 1) < 20


@pytest.mark.parametrize("text", ["", "[]", '{"200": 1}', '{"a": 1}', '{"1": null}', '{"inf": 1}', '{"-0.1": 1}'])
def test_what_is_no_forecast_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Forecast.learnt(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"places": 0},
        {"keep": -1},
        {"slo_first_token_s": 0.0},
        {"slo_first_token_s": float("inf")},
        {"margin": 5.0},
        {"lead_s": -1},
    ],
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LendingLimits(**{"slo_first_token_s": 1.0, "places": 10} | wrong)  # type: ignore[arg-type]


LOADS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.builds(load, st.integers(0, 60), st.integers(0, 3), st.floats(0.0, 2.0))),
        st.floats(0.1, 4000.0),
        st.sets(st.sampled_from(NAMES)),
    ),
    max_size=60,
)


@given(LOADS, st.integers(0, 5))
def test_production_never_has_less_than_it_needs_now(
    looks: Sequence[tuple[ProductionLoad | None, float, set[str]]], keep: int
) -> None:
    limits = LendingLimits(slo_first_token_s=1.0, places=10, keep=keep, lead_s=120.0, calm_s=60.0)
    table, now = LendingTable(NAMES, limits), 0.0
    needed_at = [float("-inf")] * (len(NAMES) + 1)
    for facts, passed, running in looks:
        now += passed
        before = table.states()
        decision = table.step(facts, running, now)
        after = table.states()
        calls = 10**6 if facts is None or facts.waiting or (facts.first_token_p95_s or 0) > 0.8 else facts.running
        needed = min(len(NAMES), max(keep, -(-calls // limits.places)))
        for count in range(needed + 1):
            needed_at[count] = now
        assert len(lent(table)) <= len(NAMES) - needed, "recalled at once"
        assert not set(NAMES[:keep]) & set(lent(table))
        assert limits.margin <= table.margin <= MOST_MARGIN
        if decision.lend:
            remaining = sum(state is LendingState.FREE for state in after.values())
            assert all(now - at >= limits.calm_s for at in needed_at[remaining + 1 :]), "needed a moment ago"
            assert not decision.recall
        for name in NAMES:
            if before[name] is LendingState.RECALLED and name in running:
                assert after[name] is LendingState.RECALLED, "rollouts are still there"
