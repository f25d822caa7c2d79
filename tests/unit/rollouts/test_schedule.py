"""The schedule, for slots that end at any time and in any way: oldest first, bounded attempts, and every slot ends."""

import pickle
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.ledger.ledger import OpenSlot
from etude.rollouts.breaker import FIRST_OUTAGE_S, MAX_PAUSE_S, STREAK, Circuit
from etude.rollouts.schedule import PAUSES, SLOT_MOVES, Place, Schedule, SlotPhase, place_of
from records import TASK

CONCURRENCY, MAX_ATTEMPTS = 3, 3


def slot(group: int, number: int = 0, attempt: int = 0) -> OpenSlot:
    return OpenSlot(task=TASK, group_index=group, slot=number, attempt=attempt)


def schedule(*slots: OpenSlot, concurrency: int = CONCURRENCY) -> Schedule:
    made = Schedule(concurrency=concurrency, max_attempts=MAX_ATTEMPTS, outage_s=300.0, worked=False)
    for one in slots:
        made.add(one)
    return made


def places(slots: list[OpenSlot]) -> list[Place]:
    return [place_of(one) for one in slots]


def test_the_oldest_run_first_and_no_more_than_there_are_places() -> None:
    here = schedule(slot(2), slot(0, 1), slot(1), slot(0, 0))
    assert places(here.due(0.0)) == [(0, 0), (0, 1), (1, 0)]
    assert (here.running, len(here)) == (3, 4)
    assert here.due(0.0) == []
    here.graded(slot(0, 1))
    assert places(here.due(0.0)) == [(2, 0)]


def test_a_failed_slot_comes_back_before_younger_ones() -> None:
    here = schedule(slot(0), slot(1), slot(2), concurrency=1)
    (first,) = here.due(0.0)
    assert here.failed(first, due=1, now=0.0) is SlotPhase.BACKING_OFF
    assert here.next_time() == PAUSES.delay_s(1)
    assert places(here.due(0.0)) == [(1, 0)]
    here.graded(slot(1))
    (again,) = here.due(PAUSES.delay_s(1))
    assert (place_of(again), again.attempt) == ((0, 0), 1)


def test_a_slot_without_an_attempt_left_is_lost() -> None:
    here = schedule(slot(0, attempt=MAX_ATTEMPTS - 1))
    (last,) = here.due(0.0)
    assert here.failed(last, due=MAX_ATTEMPTS, now=0.0) is SlotPhase.LOST
    assert len(here) == here.running == 0
    assert here.add(slot(1, attempt=MAX_ATTEMPTS)) is SlotPhase.LOST
    assert slot(1) not in here


def test_a_schedule_has_a_slot_until_it_ends() -> None:
    here = schedule(slot(0))
    (started,) = here.due(0.0)
    assert slot(0) in here
    here.graded(started)
    assert slot(0) not in here


def test_a_slot_that_does_not_run_has_no_reward() -> None:
    with pytest.raises(AssertionError, match="a slot went from waiting to graded"):
        schedule(slot(0)).graded(slot(0))


def test_a_schedule_keeps_nothing_of_groups_that_ended() -> None:
    here, sizes = schedule(), list[int]()
    for group in range(100):
        here.add(slot(group, 0))
        here.add(slot(group, 1))
        graded, _ = here.due(0.0)
        here.graded(graded)
        here.abandon(group)
        sizes.append(len(pickle.dumps(here)))
    assert sizes[-1] == sizes[50]


def test_a_dropped_group_is_abandoned_wherever_its_slots_are() -> None:
    here = schedule(*(slot(0, number) for number in range(5)), slot(1))
    started = here.due(0.0)
    here.failed(started[0], due=1, now=0.0)
    here.due(0.0)
    assert sorted(here.abandon(0)) == [(0, 1), (0, 2), (0, 3)]
    assert (len(here), here.running) == (1, 0)
    assert places(here.due(PAUSES.longest_s)) == [(1, 0)]
    assert here.next_time() is None


def test_a_pause_of_a_dropped_group_is_not_waited_for() -> None:
    here = schedule(slot(0), slot(1))
    for attempt, one in enumerate(here.due(0.0), start=1):
        here.failed(one, due=attempt, now=0.0)
    assert here.next_time() == PAUSES.delay_s(1)
    here.abandon(0)
    assert here.next_time() == PAUSES.delay_s(2)


def outage(here: Schedule, now: float) -> float:
    """Let running slots fail until the circuit is open; returns the time of the next probe."""
    while here.breaker.circuit is Circuit.CLOSED:
        for one in here.due(now):
            here.failed(one, due=one.attempt + 1, now=now)
        now += PAUSES.longest_s
    return max(now, here.breaker.until_s)


def test_while_machines_are_down_one_slot_probes_and_the_others_keep_their_attempts() -> None:
    here = schedule(*(slot(0, number) for number in range(20)), concurrency=STREAK)
    now, probed = outage(here, 0.0), Counter[Place]()
    for _ in range(12):
        (probe,) = here.due(now)
        assert here.due(now) == []
        probed[place_of(probe)] += 1
        here.failed(probe, due=probe.attempt + 1, now=now)
        assert here.due(now) == []
        now = here.breaker.until_s
    assert max(probed.values()) == 1
    assert len(here) == 20


def test_a_probe_whose_group_is_dropped_is_replaced() -> None:
    here = schedule(*(slot(group) for group in range(STREAK + 3)), concurrency=STREAK)
    now = outage(here, 0.0)
    (probe,) = here.due(now)
    assert here.due(now) == []
    here.abandon(probe.group_index)
    assert len(here.due(now)) == 1


def test_once_a_probe_succeeded_everything_flows() -> None:
    here = schedule(*(slot(0, number) for number in range(10)), concurrency=STREAK)
    now = outage(here, 0.0)
    (probe,) = here.due(now)
    here.graded(probe)
    assert len(here.due(now + MAX_PAUSE_S)) == STREAK


def test_a_slot_that_waits_out_an_outage_is_woken_by_its_end() -> None:
    here = schedule(*(slot(0, number) for number in range(10)), concurrency=STREAK)
    for one in here.due(0.0):
        here.failed(one, due=2, now=0.0)
    assert here.next_time() == here.breaker.until_s < PAUSES.delay_s(2)


def test_the_end_of_an_outage_starts_nothing_while_every_slot_runs() -> None:
    here = schedule(*(slot(group) for group in range(STREAK + 1)), concurrency=STREAK + 1)
    for one in here.due(0.0)[:STREAK]:
        here.failed(one, due=MAX_ATTEMPTS, now=0.0)
    assert (here.breaker.circuit, here.running, here.next_time()) == (Circuit.OPEN, 1, None)


def test_a_probe_waits_until_there_is_a_slot() -> None:
    here = schedule(*(slot(group) for group in range(STREAK)), concurrency=STREAK)
    now = outage(here, 0.0)
    for group in range(STREAK):
        here.abandon(group)
    assert here.due(now) == []
    here.add(slot(STREAK))
    assert places(here.due(now)) == [(STREAK, 0)]


@pytest.mark.parametrize("worked", [False, True])
def test_a_run_that_worked_before_gives_up_after_its_own_limit_and_another_one_sooner(worked: bool) -> None:
    limit_s = 3 * FIRST_OUTAGE_S
    here = Schedule(concurrency=STREAK, max_attempts=99, outage_s=limit_s, worked=worked)
    for number in range(20):
        here.add(slot(0, number))
    now, gave_up_s = outage(here, 0.0), []
    while now < 2 * limit_s:
        (probe,) = here.due(now)
        here.failed(probe, due=probe.attempt + 1, now=now)
        gave_up_s += [now] if here.breaker.gave_up else []
        now = here.breaker.until_s
    assert (gave_up_s[0] > limit_s) == worked


def test_ends_are_ends() -> None:
    ends = {state for state, moves in SLOT_MOVES.items() if not moves}
    assert ends == {SlotPhase.GRADED, SlotPhase.LOST, SlotPhase.ABANDONED}


def test_pauses_grow_up_to_a_limit() -> None:
    assert [PAUSES.delay_s(attempt) for attempt in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


class ScheduleMachine(RuleBasedStateMachine):
    """Adds slots and ends them at random.

    A plain rule that walks over all slots must choose the same ones, and the remaining slots must always be able to
    end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.here = schedule()
        self.now = 0.0
        self.groups = 0
        self.attempts = Counter[Place]()
        self.open: set[Place] = set()
        self.running: dict[Place, OpenSlot] = {}
        self.due_s: dict[Place, float] = {}
        self.probe: Place | None = None

    def plain_rule(self) -> list[Place]:
        """The slots to start now, by looking at all waiting ones."""
        waiting = sorted(
            place for place in self.open - self.running.keys() if self.due_s.get(place, self.now) <= self.now
        )
        match self.here.breaker.ask(self.now):
            case Circuit.OPEN:
                return []
            case Circuit.PROBING if self.probe in self.running:
                return []
            case Circuit.PROBING:
                return sorted(waiting, key=lambda place: (self.attempts[place], place))[:1]
            case Circuit.CLOSED:
                return waiting[: CONCURRENCY - len(self.running)]

    @rule(size=st.integers(1, 4))
    def admit(self, size: int) -> None:
        for number in range(size):
            assert self.here.add(slot(self.groups, number)) is SlotPhase.WAITING
            self.open.add((self.groups, number))
        self.groups += 1

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 20.0]))
    def start(self, seconds: float) -> None:
        self.now += seconds
        expected = self.plain_rule()
        started = self.here.due(self.now)
        assert places(started) == expected
        if self.here.breaker.circuit is Circuit.PROBING and expected:
            (self.probe,) = expected
        for one in started:
            place = place_of(one)
            assert place in self.open - self.running.keys()
            assert one.attempt == self.attempts[place] < MAX_ATTEMPTS
            self.running[place] = one

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, *, fails: bool) -> None:
        one = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        place = place_of(one)
        self.probe = None if place == self.probe else self.probe
        if not fails:
            self.here.graded(one)
            self.open.remove(place)
            return
        self.attempts[place] += 1
        self.due_s[place] = self.now + PAUSES.delay_s(self.attempts[place])
        state = self.here.failed(one, due=self.attempts[place], now=self.now)
        assert (state is SlotPhase.LOST) == (self.attempts[place] == MAX_ATTEMPTS)
        if state is SlotPhase.LOST:
            self.open.remove(place)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group, _ = data.draw(st.sampled_from(sorted(self.open)))
        gone = {place for place in self.open if place[0] == group}
        assert set(self.here.abandon(group)) == gone & self.running.keys()
        self.open -= gone
        self.probe = None if self.probe in gone else self.probe
        self.running = {place: one for place, one in self.running.items() if place not in gone}

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert len(self.here) == len(self.open)
        assert self.here.running == len(self.running) <= CONCURRENCY

    @invariant()
    def something_can_always_happen(self) -> None:
        """No starvation: with nothing running there is a time at which the schedule starts something."""
        if self.open and not self.running:
            self.now = max(self.now, self.here.next_time() or self.now)
            self.start(0.0)
            while not self.running:
                self.start(1.0)

    def teardown(self) -> None:
        """Without further failures every slot ends, and the oldest group's slots never after younger ones."""
        while self.open:
            self.something_can_always_happen()
            for place in list(self.running):
                self.here.graded(self.running.pop(place))
                self.open.remove(place)
        assert len(self.here) == self.here.running == 0


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("concurrency", [1, 2, 7])
def test_while_nothing_fails_slots_start_strictly_in_order_of_age(concurrency: int) -> None:
    here = schedule(*(slot(group, number) for group in (3, 1, 0, 2) for number in (1, 0)), concurrency=concurrency)
    started: list[Place] = []
    while len(here):
        now_due = here.due(0.0)
        started += places(now_due)
        for one in now_due:
            here.graded(one)
    assert started == sorted(started)
