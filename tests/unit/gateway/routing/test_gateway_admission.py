"""Admission: production before rollouts, no starvation, and no place lost, for events in any order."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.gateway.routing.admission import (
    DECREASE,
    PRIORITIES,
    RETRY_MAX_S,
    RETRY_MIN_S,
    AdmissionController,
    AdmissionLimits,
    AdmissionOutcome,
    ConcurrencyLimit,
    ReleaseRate,
    Ticket,
    TicketState,
    TrafficClass,
)

PEOPLE, ROLLOUTS = TrafficClass.PRODUCTION, TrafficClass.ROLLOUT
GRANTED, WAITING = TicketState.GRANTED, TicketState.WAITING
LATE = 1e9


def acquire(admission: AdmissionController, traffic: TrafficClass, calls: int, now: float = 0.0) -> list[Ticket]:
    return [admission.acquire(traffic, now, LATE) for _ in range(calls)]


def states(tickets: Sequence[Ticket]) -> list[TicketState]:
    return [ticket.state for ticket in tickets]


def limits(places: int, **others: int) -> AdmissionLimits:
    """Limits with a fixed number of places until the controller learns."""
    return AdmissionLimits(start=places, floor=1, **others)


def test_people_are_served_before_rollouts_by_the_engines_too() -> None:
    assert PRIORITIES[PEOPLE] < PRIORITIES[ROLLOUTS]
    assert list(PRIORITIES) == [PEOPLE, ROLLOUTS]


def test_calls_beyond_the_limit_wait_in_order_of_arrival() -> None:
    admission = AdmissionController(limits(2))
    tickets = acquire(admission, ROLLOUTS, 4)
    assert states(tickets) == [GRANTED, GRANTED, WAITING, WAITING]
    assert admission.due(0.0) == []
    admission.release(tickets[0], AdmissionOutcome.FAILED, 1.0)
    assert admission.due(1.0) == [tickets[2]]
    admission.release(tickets[3], AdmissionOutcome.ABANDONED, 1.0)
    admission.release(tickets[1], AdmissionOutcome.FAILED, 1.0)
    assert admission.due(1.0) == []
    assert (admission.inflight(ROLLOUTS), admission.waiting(ROLLOUTS)) == (1, 0)


def test_calls_expire_in_the_order_of_their_deadlines_after_many_others_stopped_waiting() -> None:
    admission = AdmissionController(limits(1))
    acquire(admission, ROLLOUTS, 1)
    tickets = [admission.acquire(ROLLOUTS, 0.0, float(s)) for s in Random(0).sample(range(1, 301), 300)]
    for ticket in tickets[100:]:
        admission.release(ticket, AdmissionOutcome.ABANDONED, 0.0)
    for ticket in sorted(tickets[:100], key=lambda ticket: ticket.deadline):
        assert admission.due(ticket.deadline) == [ticket]
        assert ticket.state is TicketState.EXPIRED


def test_a_production_call_does_not_wait_for_rollouts() -> None:
    admission = AdmissionController(limits(4))
    assert states(acquire(admission, ROLLOUTS, 5)) == [GRANTED] * 4 + [WAITING]
    assert states(acquire(admission, PEOPLE, 5)) == [GRANTED] * 4 + [WAITING]


def test_a_production_call_waits_at_its_own_limit() -> None:
    admission = AdmissionController(limits(8, production=2))
    assert states(acquire(admission, PEOPLE, 3)) == [GRANTED, GRANTED, WAITING]
    assert states(acquire(admission, ROLLOUTS, 7)) == [GRANTED] * 6 + [WAITING]


def test_rollouts_keep_a_share_while_people_take_everything() -> None:
    admission = AdmissionController(limits(20))
    acquire(admission, PEOPLE, 30)
    assert states(acquire(admission, ROLLOUTS, 3)) == [GRANTED, WAITING, WAITING]
    small = AdmissionController(limits(1))
    acquire(small, PEOPLE, 1)
    assert states(acquire(small, ROLLOUTS, 1)) == [GRANTED]


def test_people_go_first_when_a_place_is_free() -> None:
    admission = AdmissionController(limits(2))
    people = acquire(admission, PEOPLE, 3)
    rollouts = acquire(admission, ROLLOUTS, 2)
    assert states(rollouts) == [GRANTED, WAITING]
    admission.release(people[0], AdmissionOutcome.FAILED, 1.0)
    assert admission.due(1.0) == [people[2]]


def test_a_full_line_refuses_with_advice() -> None:
    admission = AdmissionController(limits(1, waiting=1))
    first, _, third = acquire(admission, ROLLOUTS, 3)
    assert third.state is TicketState.REFUSED
    assert third.retry_after_s == RETRY_MIN_S
    admission.release(third, AdmissionOutcome.ABANDONED, 0.0)
    assert admission.inflight(ROLLOUTS) == 1
    admission.release(first, AdmissionOutcome.ANSWERED, 0.0)
    assert admission.inflight(ROLLOUTS) == 0


def test_without_places_to_wait_a_call_is_granted_or_refused() -> None:
    admission = AdmissionController(limits(1, waiting=0))
    assert states(acquire(admission, ROLLOUTS, 2)) == [GRANTED, TicketState.REFUSED]


def test_the_advice_is_how_long_the_line_takes() -> None:
    admission = AdmissionController(limits(4, waiting=5))
    tickets = acquire(admission, ROLLOUTS, 9)
    for index in range(200):
        now = 2.0 * index
        admission.release(next(ticket for ticket in tickets if ticket.state is GRANTED), AdmissionOutcome.FAILED, now)
        admission.due(now)
        tickets.append(admission.acquire(ROLLOUTS, now, LATE))
    refused = admission.acquire(ROLLOUTS, 400.0, LATE)
    assert refused.state is TicketState.REFUSED
    assert refused.retry_after_s == pytest.approx(12.0, abs=0.1)  # six of them, one each two seconds


def test_the_advice_to_an_expired_call_counts_all_that_waited() -> None:
    admission = AdmissionController(limits(2))
    for ticket, now in zip(acquire(admission, ROLLOUTS, 2), (0.0, 8.0), strict=True):
        admission.release(ticket, AdmissionOutcome.FAILED, now)
        acquire(admission, ROLLOUTS, 1, now)
    early = admission.acquire(ROLLOUTS, 8.0, 20.0)
    acquire(admission, ROLLOUTS, 4, 8.0)
    assert admission.due(20.0) == [early]
    assert early.retry_after_s == 5.0  # an eighth of the one gap of eight seconds, five times


def test_the_rate_of_releases_is_a_mean_of_the_gaps_while_calls_were_in_progress() -> None:
    rate = ReleaseRate()
    rate.released(0.0, busy=2)
    rate.released(8.0, busy=2)
    assert [rate.wait_s(calls) for calls in (0, 1, 5, 1000)] == [RETRY_MIN_S, 1.0, 5.0, RETRY_MAX_S]
    rate.released(16.0, busy=1)  # no call is left
    rate.released(1000.0, busy=2)
    assert rate.wait_s(8) == 8 * (1.0 + 7.0 / 8)


def test_calls_and_accounts_that_are_gone_take_no_memory() -> None:
    admission = AdmissionController(limits(1))
    acquire(admission, ROLLOUTS, 1)
    admission.acquire(ROLLOUTS, 0.0, 1.0)  # waits, with the first deadline
    tracemalloc.start()
    for number in range(3_000):
        for traffic in TrafficClass:
            ticket = admission.acquire(traffic, 0.0, LATE, f"account {number}")
            admission.release(ticket, AdmissionOutcome.ABANDONED, 0.0)
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size_bytes < 100_000


def test_an_account_whose_calls_stopped_waiting_has_no_turn() -> None:
    admission = AdmissionController(limits(1))
    (first,) = acquire(admission, ROLLOUTS, 1)
    left, stays = (admission.acquire(ROLLOUTS, 0.0, LATE, account) for account in "ab")
    admission.release(left, AdmissionOutcome.ABANDONED, 0.0)
    admission.release(first, AdmissionOutcome.FAILED, 1.0)
    assert admission.due(1.0) == [stays]


def test_a_call_that_waits_beyond_its_deadline_expires() -> None:
    admission = AdmissionController(limits(1))
    acquire(admission, ROLLOUTS, 1)
    late, early = admission.acquire(ROLLOUTS, 0.0, 9.0), admission.acquire(ROLLOUTS, 0.0, 5.0)
    assert admission.due(4.9) == []
    assert admission.due(5.0) == [early]
    assert early.state is TicketState.EXPIRED
    assert early.retry_after_s is not None and RETRY_MIN_S <= early.retry_after_s <= RETRY_MAX_S
    admission.release(late, AdmissionOutcome.ABANDONED, 6.0)
    assert admission.due(9.0) == []
    assert admission.acquire(ROLLOUTS, 6.0, 6.0).state is TicketState.REFUSED


def test_an_expired_call_makes_room_in_the_line() -> None:
    admission = AdmissionController(limits(1, waiting=1))
    acquire(admission, ROLLOUTS, 1)
    early = admission.acquire(ROLLOUTS, 0.0, 5.0)
    assert admission.acquire(ROLLOUTS, 6.0, LATE).state is WAITING
    assert admission.due(6.0) == [early]


def test_one_account_may_use_what_is_idle_and_gives_it_up_to_those_who_come() -> None:
    admission = AdmissionController(limits(8, production=4, waiting=6))
    mine = [admission.acquire(PEOPLE, 0.0, LATE, "a") for _ in range(20)]
    assert states(mine) == [GRANTED] * 4 + [WAITING] * 6 + [TicketState.REFUSED] * 10
    yours = [admission.acquire(PEOPLE, 0.0, LATE, "b") for _ in range(5)]
    assert states(yours) == [WAITING] * 3 + [TicketState.REFUSED] * 2  # half of the line is its share
    assert states(mine[4:10]) == [WAITING] * 3 + [TicketState.REFUSED] * 3  # the newest gave way
    assert mine[9].retry_after_s is not None
    assert admission.due(0.0) == [mine[9], mine[8], mine[7]]
    for ticket in mine[:4]:
        admission.release(ticket, AdmissionOutcome.ANSWERED, 1.0)
    assert admission.due(1.0) == [mine[4], yours[0], mine[5], yours[1]]  # in turn, while they hold as much
    admission.release(mine[4], AdmissionOutcome.ANSWERED, 2.0)
    assert admission.due(2.0) == [mine[6]]
    third = admission.acquire(PEOPLE, 2.0, LATE, "c")
    admission.release(yours[0], AdmissionOutcome.ANSWERED, 3.0)
    assert admission.due(3.0) == [third]  # it holds nothing yet


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=80))
def test_no_account_is_kept_from_its_share(events: list[tuple[str, bool]]) -> None:
    """An account with less than a third of the queue is never refused; the one with the fewest places is next."""
    admission = AdmissionController(limits(6, production=6, waiting=6))
    opened: list[Ticket] = []
    for account, leaves in events:
        used = Counter(ticket.account for ticket in opened if ticket.state is GRANTED)
        line = Counter(ticket.account for ticket in opened if ticket.state is WAITING)
        if leaves and used[account]:
            leaving = next(ticket for ticket in opened if (ticket.account, ticket.state) == (account, GRANTED))
            admission.release(leaving, AdmissionOutcome.FAILED, 1.0)
            used[account] -= 1
            for ticket in admission.due(1.0):
                assert used[ticket.account] == min(used[other] for other in line)
        else:
            opened.append(admission.acquire(PEOPLE, 1.0, LATE, account))
            assert opened[-1].state is not TicketState.REFUSED or line[account] >= 2
            for ticket in admission.due(1.0):
                assert line[ticket.account] > 2, "only what is beyond a share gives way"
        assert admission.waiting(PEOPLE) == sum(ticket.state is WAITING for ticket in opened) <= 6


class SyntheticLoad:
    """Callers who keep every place in use, and one more in line."""

    def __init__(self, admission: AdmissionController) -> None:
        self.admission = admission
        self.tickets = list[Ticket]()
        self.now = 100.0

    def round(self) -> None:
        """Answer all calls in progress, one after the other, after a second."""
        self.refill()
        self.now += 1.0
        for ticket in [ticket for ticket in self.tickets if ticket.state is GRANTED]:
            self.admission.release(ticket, AdmissionOutcome.ANSWERED, self.now)
            self.admission.due(self.now)
            self.refill()

    def refill(self) -> None:
        self.tickets = [ticket for ticket in self.tickets if ticket.state in (GRANTED, WAITING)]
        while not self.admission.waiting(ROLLOUTS):
            self.tickets.append(self.admission.acquire(ROLLOUTS, self.now, LATE))


def test_places_double_each_round_until_the_first_congestion_then_grow_by_one() -> None:
    load = SyntheticLoad(AdmissionController(AdmissionLimits(start=8)))
    seen = list[int]()
    for _ in range(3):
        load.round()
        seen.append(load.admission.limit)
    assert seen == [16, 32, 64]
    load.admission.congested(load.now)
    assert load.admission.limit == int(64 * DECREASE)
    load.round()  # those in flight are still as many as before
    before = load.admission.limit
    for more in range(1, 20):
        load.round()
        assert before + more - 1 <= load.admission.limit <= before + more


def test_places_do_not_grow_while_they_are_not_used_or_calls_queue_at_the_engines() -> None:
    idle = AdmissionController(AdmissionLimits(start=8))
    for _ in range(100):
        (ticket,) = acquire(idle, ROLLOUTS, 1)
        idle.release(ticket, AdmissionOutcome.ANSWERED, 1.0)
    assert idle.limit == 8
    load = SyntheticLoad(AdmissionController(AdmissionLimits(start=20)))
    load.admission.queueing(3)
    load.round()
    assert load.admission.limit == 20
    load.admission.queueing(2)
    load.round()
    assert load.admission.limit > 20


def test_one_congestion_counts_once() -> None:
    load = SyntheticLoad(AdmissionController(AdmissionLimits(start=100)))
    load.round()
    limit = load.admission.limit
    for _ in range(50):
        load.admission.congested(load.now)
        load.admission.congested(load.now + 0.9)
    assert load.admission.limit == int(limit * DECREASE)
    load.admission.congested(load.now + 1.0)
    assert load.admission.limit == int(limit * DECREASE * DECREASE)


def test_congestions_within_the_mean_duration_of_a_call_are_one() -> None:
    limit = ConcurrencyLimit(AdmissionLimits(start=1000))
    for call_s in (1.0, 9.0):
        limit.answered(call_s, busy=1)  # a mean of 1 + 8 / 8 seconds
    for now, falls in ((0.0, True), (1.9, False), (2.0, True), (3.9, False)):
        before = limit.permits
        limit.congested(now)
        assert (limit.permits < before) == falls


def test_before_the_first_answer_each_congestion_counts() -> None:
    limit = ConcurrencyLimit(AdmissionLimits(start=1000))
    limit.congested(0.0)
    limit.congested(0.1)
    assert limit.permits == int(1000 * DECREASE * DECREASE)


def test_after_a_congestion_it_takes_a_round_of_answers_to_add_one() -> None:
    limit = ConcurrencyLimit(AdmissionLimits(start=100))
    limit.congested(0.0)
    seen = []
    for _ in range(75):
        limit.answered(1.0, busy=limit.permits)
        seen.append(limit.permits)
    assert seen == [70] * seen.count(70) + [71] * seen.count(71)
    assert 69 <= seen.count(70) <= 72


def test_a_call_that_ran_into_its_deadline_is_congestion_and_one_that_failed_is_not() -> None:
    admission = AdmissionController(AdmissionLimits(start=100))
    first, second = acquire(admission, ROLLOUTS, 2)
    admission.release(first, AdmissionOutcome.FAILED, 1.0)
    assert admission.limit == 100
    admission.release(second, AdmissionOutcome.OVERLOADED, 1.0)
    assert admission.limit == 70


@given(st.lists(st.floats(0, 1e6), max_size=60))
def test_the_limit_has_a_floor_and_a_ceiling(times: list[float]) -> None:
    admission = AdmissionController(AdmissionLimits(production=3, rollouts=3, start=4, floor=2))
    for now in sorted(times):
        admission.congested(now)
        assert 2 <= admission.limit <= 6
    load = SyntheticLoad(admission)
    for _ in range(20):
        load.round()
        assert admission.limit <= 6
    tight = AdmissionController(AdmissionLimits(production=1, rollouts=1))
    assert tight.limit == 2
    tight.congested(0.0)
    assert tight.limit >= 1


@pytest.mark.parametrize(
    "wrong", [{"production": 0}, {"rollouts": 0}, {"waiting": -1}, {"floor": 0}, {"start": 3}, {"rollout_share": 1.0}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdmissionLimits(**wrong)  # type: ignore[arg-type]  # a float stands for either kind of number


class AdmissionMachine(RuleBasedStateMachine):
    """Calls of both classes in random order, with checks of the invariants after each."""

    LIMITS = AdmissionLimits(production=5, rollouts=5, waiting=4, start=4, floor=2)

    def __init__(self) -> None:
        super().__init__()
        self.admission = AdmissionController(self.LIMITS)
        self.now = 0.0
        self.open: list[Ticket] = []
        """In order of arrival; granted or waiting."""

    @rule(traffic=st.sampled_from(TrafficClass), timeout_s=st.sampled_from([0.5, 2.0, 100.0]))
    def acquire(self, traffic: TrafficClass, timeout_s: float) -> None:
        waiting = self.admission.waiting(traffic)
        before = {one: self.admission.inflight(one) for one in TrafficClass}
        ticket = self.admission.acquire(traffic, self.now, self.now + timeout_s)
        if ticket.state is TicketState.REFUSED:
            assert waiting == self.LIMITS.waiting
            assert ticket.retry_after_s is not None and RETRY_MIN_S <= ticket.retry_after_s <= RETRY_MAX_S
            return
        if traffic is PEOPLE and before[PEOPLE] < min(self.admission.limit, 5) and not waiting:
            assert ticket.state is GRANTED, "a rollout is in the way"
        self.open.append(ticket)
        self.settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), outcome=st.sampled_from(AdmissionOutcome))
    def release(self, data: st.DataObject, outcome: AdmissionOutcome) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        self.admission.release(ticket, outcome, self.now)
        self.admission.release(ticket, outcome, self.now)
        assert ticket.state is TicketState.RELEASED
        self.settle()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(calls=st.integers(0, 5))
    def hear(self, calls: int) -> None:
        self.admission.queueing(calls)

    @rule()
    def congest(self) -> None:
        self.admission.congested(self.now)

    def settle(self) -> None:
        waited = [ticket for ticket in self.open if ticket.state is WAITING]
        changed = self.admission.due(self.now)
        assert len(set(map(id, changed))) == len(changed)
        assert all(ticket.state is not WAITING for ticket in changed)
        for ticket in changed:
            assert (ticket.state is TicketState.EXPIRED) == (ticket.deadline <= self.now)
        for ticket in waited:
            assert (ticket in changed) == (ticket.state is not WAITING)
        for traffic in TrafficClass:  # first come, first served
            alive = [ticket for ticket in waited if ticket.traffic is traffic and ticket.state in (GRANTED, WAITING)]
            assert alive == sorted(alive, key=lambda ticket: ticket.state is WAITING)
        self.open = [ticket for ticket in self.open if ticket.state in (GRANTED, WAITING)]

    @invariant()
    def every_call_is_where_it_is_counted(self) -> None:
        for traffic in TrafficClass:
            mine = [ticket for ticket in self.open if ticket.traffic is traffic]
            granted = sum(ticket.state is GRANTED for ticket in mine)
            assert self.admission.inflight(traffic) == granted <= 5
            assert self.admission.waiting(traffic) == len(mine) - granted <= self.LIMITS.waiting

    @invariant()
    def every_waiter_is_served(self) -> None:
        people, rollouts = self.admission.inflight(PEOPLE), self.admission.inflight(ROLLOUTS)
        limit = self.admission.limit
        if self.admission.waiting(PEOPLE):
            assert people >= min(limit, 5)
        if self.admission.waiting(ROLLOUTS):
            assert rollouts >= 1
            assert rollouts == 5 or people + rollouts >= limit

    def teardown(self) -> None:
        self.now += 1000.0
        self.settle()
        while self.open:
            self.admission.release(self.open[0], AdmissionOutcome.FAILED, self.now)
            self.settle()
        assert not any(map(self.admission.waiting, TrafficClass))


AdmissionMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase
