"""Lending of production engines: production always comes first, and idle engines are lent soon."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.fleet.lending import (
    HOUR_S,
    LEARNING_RATE,
    LEAST_GROWN,
    MARGIN_GROWTH,
    MARGIN_HALF_LIFE_HOURS,
    MOST_MARGIN,
    NEAR_SLO,
    SLOT_S,
    WEEK_HOURS,
    Forecast,
    LendingLimits,
    LendingState,
    LendingTable,
    ProductionLoad,
)

NAMES = ("p0", "p1", "p2", "p3")
LIMITS = LendingLimits(slo_first_token_s=1.0, places=10, keep=1, margin=0.25, lead_s=120.0, calm_s=60.0)
WEEK_S = WEEK_HOURS * HOUR_S
IDLE = ProductionLoad(running=0, waiting=0, first_token_p95_s=None)


def load(running: int, waiting: int = 0, p95_s: float | None = 0.1) -> ProductionLoad:
    return ProductionLoad(running=running, waiting=waiting, first_token_p95_s=p95_s)


def lent(table: LendingTable) -> list[str]:
    return [name for name, state in table.states().items() if state is LendingState.LENT]


def borrowed(table: LendingTable) -> list[str]:
    return [name for name, state in table.states().items() if state is not LendingState.FREE]


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


@pytest.mark.parametrize(
    ("forecast", "calls", "needed"),
    [
        ("{}", 1, 2),  # an unobserved time may bring one engine's worth more
        ("{}", 10, 2),
        ('{"0": 0}', 8, 1),  # a quarter more than the calls in progress
        ('{"0": 0}', 9, 2),
        ('{"0": 10}', 0, 1),  # the peak of earlier weeks, without a margin
        ('{"0": 11}', 0, 2),
        ('{"0": 100}', 0, 4),  # all that there are
    ],
)
def test_engines_are_kept_for_the_calls_in_progress_and_for_the_peak_of_earlier_weeks(
    forecast: str, calls: int, needed: int
) -> None:
    table = LendingTable(NAMES, LIMITS, Forecast.learnt(forecast))
    settled(table, load(calls), WEEK_S)
    assert lent(table) == [*NAMES[needed:]]


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
    assert lent(table) == []


def test_a_time_to_first_token_that_is_not_near_its_limit_is_no_trouble() -> None:
    table = LendingTable(NAMES, LIMITS)
    now = settled(table, IDLE)
    assert table.step(load(0, p95_s=NEAR_SLO * LIMITS.slo_first_token_s), lent(table), now).recall == ()


def test_trouble_widens_the_margin_once_for_a_burst() -> None:
    table = LendingTable(NAMES, LIMITS)
    now = settled(table, IDLE)
    for second in range(int(LIMITS.lead_s)):
        table.step(load(3, waiting=1), borrowed(table), now + second)
    assert table.margin == LIMITS.margin * MARGIN_GROWTH
    table.step(load(3, waiting=1), borrowed(table), now + LIMITS.lead_s)
    assert table.margin == LIMITS.margin * MARGIN_GROWTH**2, "engines that were recalled at once would serve by now"


def test_trouble_without_lent_engines_says_nothing_about_the_margin() -> None:
    table = LendingTable(NAMES, LIMITS)
    table.step(load(3, waiting=1), (), 0.0)
    assert table.margin == LIMITS.margin


def test_a_margin_of_zero_grows_too() -> None:
    table = LendingTable(NAMES, replace(LIMITS, margin=0.0))
    now = settled(table, IDLE)
    table.step(load(3, waiting=1), lent(table), now)
    assert table.margin == LEAST_GROWN * MARGIN_GROWTH


def test_after_trouble_the_forecast_has_a_margin_too() -> None:
    table = LendingTable(NAMES, LIMITS, Forecast.learnt('{"0": 10}'))
    now = settled(table, IDLE, WEEK_S)
    assert lent(table) == ["p1", "p2", "p3"]
    table.step(load(3, waiting=1), lent(table), now)
    settled(table, IDLE, now + 10.0)
    assert lent(table) == ["p2", "p3"], "for an eighth more than 10 calls"


@given(st.lists(st.floats(0.0, 100 * HOUR_S), max_size=20))
def test_calm_halves_the_growth_of_the_margin_in_its_half_life_however_often_it_looks(
    pauses_s: Sequence[float],
) -> None:
    table = LendingTable(NAMES, LIMITS)
    start = now = settled(table, IDLE)
    table.step(load(3, waiting=1), lent(table), now)
    grown = table.margin - LIMITS.margin
    for pause_s in pauses_s:
        now += pause_s
        table.step(IDLE, (), now)
    left = 0.5 ** ((now - start) / (MARGIN_HALF_LIFE_HOURS * HOUR_S))
    assert table.margin == pytest.approx(LIMITS.margin + grown * left)


def test_what_earlier_weeks_brought_at_this_hour_is_kept_free_before_it_comes() -> None:
    forecast, nine = Forecast(), 9 * HOUR_S
    for second in range(0, int(WEEK_S), 600):
        forecast.observe(30 if nine <= second < nine + HOUR_S else 0, float(second))
    forecast.observe(0, WEEK_S)
    table = LendingTable(NAMES, LIMITS, Forecast.learnt(forecast.to_json()))
    settled(table, IDLE, WEEK_S + nine - 2 * HOUR_S)
    assert lent(table) == ["p1", "p2", "p3"]
    soon = WEEK_S + nine - LIMITS.lead_s
    assert table.step(IDLE, lent(table), soon).recall == ("p1", "p2"), "for 30 calls"
    settled(table, IDLE, WEEK_S + nine + HOUR_S)
    assert lent(table) == ["p1", "p2", "p3"]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=50), st.integers(-(10**9), 10**9)
)
@example([(0, 0), (0, 0)], 0)
def test_what_a_quarter_of_an_hour_brought_is_expected_there_a_week_later(
    calls: Sequence[tuple[int, int]], start_s: int
) -> None:
    forecast = Forecast()
    for quarter, looks in enumerate([*calls, (0, 0)]):
        for number in looks:
            forecast.observe(number, start_s + quarter * SLOT_S)
    again, later_s = Forecast.learnt(forecast.to_json()), start_s + WEEK_S
    for quarter, looks in enumerate(calls):
        at_s = later_s + quarter * SLOT_S
        assert again.knows(at_s)
        assert again.expected(at_s, at_s) == max(looks)
    end_s = later_s + len(calls) * SLOT_S
    assert again.expected(later_s, end_s) == max(map(max, calls))
    assert not again.knows(end_s), "it is not over"
    assert again.expected(end_s, end_s) == 0


def test_a_table_learns_from_all_calls_those_that_wait_too() -> None:
    table = LendingTable(NAMES, LIMITS)
    for quarter in range(2):
        table.step(load(5, waiting=2), (), quarter * SLOT_S)
    assert table.forecast.expected(WEEK_S, WEEK_S) == 7


def test_an_hour_that_rises_is_forecast_by_its_quarters() -> None:
    forecast, nine = Forecast(), 9 * HOUR_S
    for quarter in range(5):
        forecast.observe(10 * quarter, nine + quarter * HOUR_S / 4)
    again = Forecast.learnt(forecast.to_json())
    assert [again.expected(at, at + 60) for at in (WEEK_S + nine, WEEK_S + nine + HOUR_S / 2)] == [0, 20]


def test_a_forecast_of_whole_hours_counts_for_their_first_quarters() -> None:
    forecast = Forecast.learnt('{"9": 30.0}')
    assert forecast.expected(9 * HOUR_S, 9 * HOUR_S + 1) == 30
    assert not forecast.knows(9.25 * HOUR_S)


def test_a_habit_that_changed_is_followed() -> None:
    forecast = Forecast()
    for week in range(6):
        for quarter in range(4 * WEEK_HOURS):
            forecast.observe(40 if week == 0 else 10, week * WEEK_S + quarter * SLOT_S)
    assert forecast.expected(7 * WEEK_S, 7 * WEEK_S) == pytest.approx(10 + 30 * (1 - LEARNING_RATE) ** 5)
    again = Forecast.learnt(forecast.to_json())
    assert again.expected(7 * WEEK_S, 7 * WEEK_S) == 15.042, "a thousandth of a call is enough"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"168": 1}',
        '{"1": 1, "200": 1}',
        '{"a": 1}',
        '{"inf": 1}',
        '{"-0.1": 1}',
        '{"1": null}',
        '{"1": NaN}',
        '{"1": Infinity}',
        '{"1": 1, "2": -1}',
    ],
)
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
        {"margin": -0.1},
        {"lead_s": -1},
        {"calm_s": -1},
    ],
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LendingLimits(**{"slo_first_token_s": 1.0, "places": 10} | wrong)  # type: ignore[arg-type]


def test_limits_may_be_as_narrow_as_can_be() -> None:
    limits = LendingLimits(slo_first_token_s=1e-3, places=1, keep=0, margin=0.0, lead_s=0.0, calm_s=0.0)
    assert LendingTable(NAMES, limits).step(IDLE, (), 0.0).lend == NAMES
    assert LendingTable(NAMES, replace(limits, margin=MOST_MARGIN)).step(IDLE, (), 0.0).lend == NAMES


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
