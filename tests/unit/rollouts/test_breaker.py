"""The circuit breaker: few probes during an outage, probes decide its end, and the user is told in the end."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rollouts.breaker import (
    CIRCUIT_MOVES,
    FEWEST_PROBES,
    FIRST_OUTAGE_S,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    OUTAGE_SHARE,
    STREAK,
    WINDOW_FULL,
    Breaker,
    Circuit,
)


def tripped(outage_s: float = 300.0, *, now: float = 0.0, worked: bool = True) -> Breaker:
    breaker = Breaker(outage_s)
    if worked:
        breaker.succeeded()
    for _ in range(STREAK):
        breaker.failed(now)
    return breaker


def give_up_time(breaker: Breaker) -> tuple[float, int]:
    """The time at which a breaker gives up if every probe fails at once, and the number of probes."""
    for probes in count():
        if breaker.gave_up:
            return breaker.until_s, probes
        assert breaker.ask(breaker.until_s) is Circuit.PROBING
        breaker.failed(breaker.until_s, probe=True)
    raise AssertionError


def test_a_streak_of_failures_opens_it() -> None:
    breaker = Breaker(300.0)
    for _ in range(STREAK - 1):
        breaker.failed(1.0)
    assert breaker.ask(1.0) is Circuit.CLOSED
    breaker.failed(1.0)
    assert breaker.ask(1.0) is Circuit.OPEN
    assert breaker.ask(1.0 + FIRST_PAUSE_S) is Circuit.PROBING


def test_so_does_half_of_the_last_attempts() -> None:
    breaker = Breaker(300.0)
    for _ in range(WINDOW_FULL // 2):
        breaker.succeeded()
        assert breaker.ask(0.0) is Circuit.CLOSED
        breaker.failed(0.0)
    assert breaker.ask(0.0) is Circuit.OPEN


def test_failures_now_and_then_do_not() -> None:
    breaker = Breaker(300.0)
    for _ in range(200):
        breaker.succeeded()
        breaker.succeeded()
        breaker.failed(0.0)
        assert breaker.ask(0.0) is Circuit.CLOSED


@pytest.mark.parametrize("probing", [False, True])
def test_one_success_closes_it_and_the_past_is_forgotten(*, probing: bool) -> None:
    breaker = tripped()
    if probing:
        assert breaker.ask(FIRST_PAUSE_S) is Circuit.PROBING
    breaker.succeeded()
    assert breaker.ask(0.0) is Circuit.CLOSED
    breaker.failed(0.0)
    assert breaker.ask(0.0) is Circuit.CLOSED


def test_pauses_between_probes_grow_up_to_a_limit() -> None:
    breaker, pauses = tripped(10_000.0), []
    for _ in range(7):
        now = breaker.until_s
        assert breaker.ask(now) is Circuit.PROBING
        breaker.failed(now, probe=True)
        pauses.append(breaker.until_s - now)
    assert pauses == [2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 15.0]


def test_rollouts_that_were_under_way_when_it_opened_say_nothing_new() -> None:
    breaker = tripped()
    breaker.failed(0.5)
    assert breaker.until_s == FIRST_PAUSE_S
    assert breaker.ask(FIRST_PAUSE_S) is Circuit.PROBING
    breaker.failed(FIRST_PAUSE_S)
    assert breaker.circuit is Circuit.PROBING


def test_it_gives_up_after_the_outage_that_a_recipe_allows() -> None:
    gave_up_s, _ = give_up_time(tripped(300.0))
    assert 300.0 <= gave_up_s <= 300.0 * (1.0 + OUTAGE_SHARE) ** 2 + MAX_PAUSE_S


def test_a_runner_that_went_on_after_it_gave_up_may_hope_again() -> None:
    breaker = tripped(300.0)
    give_up_time(breaker)
    breaker.ask(breaker.until_s)
    breaker.succeeded()
    assert not breaker.gave_up


def test_it_gives_up_sooner_where_nothing_ever_worked() -> None:
    gave_up_s, _ = give_up_time(tripped(300.0, worked=False))
    assert FIRST_OUTAGE_S <= gave_up_s <= FIRST_OUTAGE_S + 2 * MAX_PAUSE_S


def test_a_process_that_was_suspended_tries_before_it_gives_up() -> None:
    breaker = tripped(300.0)
    breaker.until_s += 1e6
    _, probes = give_up_time(breaker)
    assert probes == FEWEST_PROBES


@given(st.lists(st.tuples(st.sampled_from(["ask", "ok", "fail", "probe"]), st.floats(0, 40)), max_size=80))
def test_it_only_moves_as_its_table_says_and_always_comes_back(moves: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(300.0), 0.0
    for kind, seconds in moves:
        now += seconds
        before = breaker.circuit
        match kind:
            case "ask":
                breaker.ask(now)
            case "ok":
                breaker.succeeded()
            case _:
                breaker.failed(now, probe=kind == "probe" and before is Circuit.PROBING)
        assert breaker.circuit is before or breaker.circuit in CIRCUIT_MOVES[before]
        assert breaker.ask(now + MAX_PAUSE_S) is not Circuit.OPEN or breaker.until_s > now + MAX_PAUSE_S
    breaker.succeeded()
    assert breaker.ask(now) is Circuit.CLOSED


def test_an_outage_without_a_bound_is_waited_out_with_few_probes() -> None:
    """Regression: a run ended after ``outage_s``, although its machines would have come back."""
    breaker, now, probes = tripped(0.0), 0.0, 0
    while now < 86_400.0:
        now = max(now, breaker.until_s)
        assert breaker.ask(now) is Circuit.PROBING
        breaker.failed(now, probe=True)
        probes += 1
    assert not breaker.gave_up
    assert breaker.since_s == 0.0
    assert probes < 100
    breaker.succeeded()
    assert breaker.ask(now) is Circuit.CLOSED
    assert give_up_time(tripped(60.0))[0] >= 60.0


def test_a_process_that_starts_in_an_outage_knows_that_it_worked_before() -> None:
    breaker = Breaker(0.0, worked=True)
    for _ in range(STREAK):
        breaker.failed(0.0)
    for _ in range(50):
        breaker.ask(breaker.until_s)
        breaker.failed(breaker.until_s, probe=True)
    assert not breaker.gave_up
