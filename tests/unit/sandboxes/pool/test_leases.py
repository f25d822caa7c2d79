"""Who is served first, what is started and kept warm, and what happens when starts fail or memory is short."""

import math

import pytest

from etude.sandbox_spec import SandboxLimits, SandboxSpec
from etude.sandboxes.pool.inventory import DEMAND_S, KINDS, Kind, Memory
from etude.sandboxes.pool.lease_requests import Claim, ClaimState, Want
from etude.sandboxes.pool.leases import Decisions, Leases
from etude.sandboxes.pool.slots import Key, PoolLimits, SlotState

GIB = 1 << 30
PLENTY = Memory(available_bytes=1e15, stalled=0.0)
LIMITS = PoolLimits(live=6, reserved=1, starting=3, waiting=4, warm=0)


def key(name: str = "k") -> Key:
    return Key(digest=name, spec=SandboxSpec(ttl_s=50.0))


K = key()


class Story:
    """A pool whose starts and removals take no time unless told otherwise."""

    def __init__(self, limits: PoolLimits = LIMITS) -> None:
        self.leases = Leases(limits)
        self.memory = PLENTY
        self.now = 0.0

    def ask(self, wanted: Key = K, priority: int = 0, wait_s: float = 100.0) -> Claim:
        return self.leases.ask(Want(key=wanted, priority=priority, wait_s=wait_s), self.now)

    def due(self) -> Decisions:
        return self.leases.due(self.now, self.memory)

    def settle(self) -> None:
        """Do what is decided until nothing is."""
        while (decisions := self.due()).start or decisions.remove:
            for slot in decisions.start:
                self.leases.started(slot, self.now)
            for slot in decisions.remove:
                self.leases.gone(slot, self.now)

    def count(self, state: SlotState) -> int:
        return self.leases.slots.count(state)


# --- Order ----------------------------------------------------------------------------------------------------------


def test_the_lower_priority_is_served_first_then_the_earlier() -> None:
    story = Story(PoolLimits(live=1, reserved=0, warm=0))
    late, early, urgent = story.ask(priority=1), story.ask(), story.ask(priority=-1)
    for expected in (urgent, early, late):
        story.settle()
        assert [c for c in (late, early, urgent) if c.state is ClaimState.GRANTED] == [expected]
        story.leases.leave(expected, story.now)


def test_a_grader_finds_a_place_when_rollouts_hold_all_of_theirs() -> None:
    story = Story()
    rollouts = [story.ask() for _ in range(4)]
    story.settle()
    rollouts += [story.ask() for _ in range(4)]
    story.settle()
    assert [rollout.state for rollout in rollouts].count(ClaimState.GRANTED) == 5
    grader = story.ask(priority=-1)
    story.settle()
    assert grader.state is ClaimState.GRANTED
    story.leases.leave(grader, story.now)
    story.settle()
    assert [rollout.state for rollout in rollouts].count(ClaimState.GRANTED) == 5


def test_a_full_line_refuses_with_advice_but_not_the_urgent() -> None:
    story = Story()
    waiting = [story.ask() for _ in range(5)]
    assert [claim.state for claim in waiting] == [ClaimState.WAITING] * 4 + [ClaimState.REFUSED]
    assert "4 claims wait already" in waiting[-1].reason
    assert waiting[-1].retry_after_s >= 1
    assert story.ask(priority=-1).state is ClaimState.WAITING


def test_advice_follows_how_fast_leases_end() -> None:
    story = Story()
    held = [story.ask() for _ in range(4)]
    story.settle()
    for claim in held:
        story.now += 10.0
        story.leases.leave(claim, story.now)
    assert 1 < story.leases.retry_after_s() < 10


def test_a_claim_that_is_not_served_in_time_is_told() -> None:
    story = Story()
    claim = story.ask(wait_s=3.0)
    assert story.leases.next_time() == 3.0
    story.now = 3.0
    assert story.due().settled == (claim,)
    assert (claim.state, claim.reason) == (ClaimState.EXPIRED, "no sandbox became free within 3 s")


def test_a_start_that_finds_no_claim_any_more_serves_the_next() -> None:
    story = Story()
    first = story.ask()
    (slot,) = story.due().start
    story.leases.leave(first, story.now)
    second = story.ask()
    story.leases.started(slot, story.now)
    assert not story.due().start
    assert second.slot is slot


def test_one_that_starts_for_a_claim_is_enough() -> None:
    story = Story()
    story.ask()
    assert [len(story.due().start) for _ in range(3)] == [1, 0, 0]
    story.ask(), story.ask(key("other"))
    assert [len(story.due().start) for _ in range(3)] == [2, 0, 0]


def test_a_reserved_place_is_kept_even_by_a_sandbox_that_no_grader_wants_any_more() -> None:
    story = Story(PoolLimits(live=3, reserved=1, starting=3, warm=0))
    rollouts = [story.ask(), story.ask()]
    story.settle()
    grader = story.ask(priority=-1)
    (slot,) = story.due().start
    story.leases.leave(grader, story.now)
    story.leases.started(slot, story.now)
    late = story.ask()
    assert not story.due().remove  # to give it up would free no place for a rollout
    assert (slot.state, late.state) == (SlotState.WARM, ClaimState.WAITING)
    story.leases.leave(rollouts[0], story.now)
    story.settle()
    assert late.slot is slot
    assert story.leases.slots.room(urgent=True) == 1


# --- Leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_ends_with_its_time_to_live_however_alive_the_holder_is() -> None:
    story = Story()
    claim = story.ask()
    story.settle()
    for story.now in (20.0, 40.0, 49.9):
        assert story.leases.beat(claim, story.now)
    story.now = 50.0
    assert not story.leases.beat(claim, story.now)
    decisions = story.due()
    assert (decisions.remove, decisions.settled) == ((claim.slot,), (claim,))
    assert claim.reason == "its time to live of 50 s is over"


def test_a_silent_holder_loses_its_sandbox_one_that_runs_a_command_does_not() -> None:
    story = Story(PoolLimits(silence_s=5.0, warm=0))
    silent, busy = story.ask(), story.ask()
    story.settle()
    assert story.leases.beat(busy, 1.0, quiet_s=20.0)
    story.now = 6.0
    story.settle()
    assert (silent.state, busy.state) == (ClaimState.LOST, ClaimState.GRANTED)
    assert "no sign of life" in silent.reason
    story.now = 26.0
    story.settle()
    assert busy.state is ClaimState.LOST


def test_forks_are_all_granted_or_none() -> None:
    story = Story()
    claim = story.ask()
    story.settle()
    copies = story.leases.fork(claim, 4, story.now)
    assert len({copy.slot for copy in copies}) == 4
    assert story.count(SlotState.LEASED) == 5
    assert story.leases.fork(claim, 1, story.now) == ()


# --- Starts ---------------------------------------------------------------------------------------------------------


def test_no_more_start_at_a_time_than_may() -> None:
    story = Story()
    for _ in range(4):
        story.ask()
    assert [len(story.due().start) for _ in range(2)] == [3, 0]


def test_a_failed_start_is_tried_again_after_a_pause_then_whoever_waits_is_told() -> None:
    story = Story(PoolLimits(tries=3, warm=0))
    claim = story.ask()
    pauses = []
    for _ in range(3):
        (slot,) = story.due().start
        story.leases.failed(slot, "no disk", story.now)
        assert not story.due().start
        pauses.append(story.leases.stock.kind(K).retry_at - story.now)
        story.now += pauses[-1]
    assert pauses == pytest.approx([0.1, 0.2, 0.4])
    assert (claim.state, claim.reason, claim.permanent) == (ClaimState.FAILED, "no disk", False)


def test_a_start_that_can_never_work_is_told_at_once_and_hurts_no_other_kind() -> None:
    story = Story()
    claim, other = story.ask(), story.ask(key("other"))
    one, two = story.due().start
    story.leases.failed(one, "not claimed", story.now, permanent=True)
    story.leases.started(two, story.now)
    story.settle()
    assert (claim.state, claim.permanent) == (ClaimState.FAILED, True)
    assert other.state is ClaimState.GRANTED


def test_a_warm_sandbox_gives_way_to_another_kind_that_is_waited_for() -> None:
    story = Story(PoolLimits(live=2, reserved=0, warm=2))
    story.leases.stock.announce(K, 2, story.now, 60.0)
    story.settle()
    assert story.count(SlotState.WARM) == 2
    claim = story.ask(key("other"))
    story.settle()
    assert claim.state is ClaimState.GRANTED


# --- Memory ---------------------------------------------------------------------------------------------------------


def tight(available_bytes: float, stalled: float = math.nan) -> Story:
    story = Story(
        PoolLimits(live=99, starting=99, reserve_bytes=GIB, start_bytes=GIB // 4, usual_bytes=GIB // 16, warm=0)
    )
    story.memory = Memory(available_bytes=available_bytes, stalled=stalled)
    return story


def test_a_burst_does_not_find_free_what_the_starts_before_it_will_use() -> None:
    story = tight(2 * GIB)
    for _ in range(9):
        story.ask()
    assert len(story.due().start) == 4  # of a quarter each beside the reserve
    assert not story.due().start


def test_once_started_only_what_is_usual_stays_promised_less_what_is_seen() -> None:
    story = tight(2 * GIB)
    story.ask()
    (slot,) = story.due().start
    assert story.leases.slots.promised_bytes == GIB // 4
    story.leases.started(slot, 1.0)
    assert story.leases.slots.promised_bytes == GIB // 16
    story.leases.stock.measure(slot, story.leases.slots, GIB / 32)
    assert story.leases.slots.promised_bytes == GIB // 32
    story.leases.stock.measure(slot, story.leases.slots, math.nan)
    assert story.leases.slots.promised_bytes == GIB // 32


def test_what_sandboxes_came_to_use_is_expected_of_the_next() -> None:
    story = tight(100 * GIB)
    kind = story.leases.stock.kind(K)
    for _ in range(40):
        claim = story.ask()
        story.settle()
        assert claim.slot is not None
        story.leases.stock.measure(claim.slot, story.leases.slots, GIB / 2)
        story.leases.leave(claim, story.now)
        story.settle()
    assert GIB / 2.1 < kind.usual_bytes <= GIB / 2
    assert kind.peak_bytes(LIMITS) == GIB / 2


def test_no_sandbox_is_expected_to_use_more_than_it_can() -> None:
    small = Key(digest="small", spec=SandboxSpec(limits=SandboxLimits(memory_bytes=1000)))
    kind = Kind(key=small, usual_bytes=5000.0)
    assert (kind.peak_bytes(LIMITS), kind.growth_bytes(400.0), kind.growth_bytes(2000.0)) == (1000, 600, 0)


def test_the_first_is_not_overtaken_by_one_that_needs_less() -> None:
    story = tight(2 * GIB)
    story.ask()
    story.settle()
    story.memory = Memory(available_bytes=GIB + GIB / 8)
    small = Key(digest="small", spec=SandboxSpec(limits=SandboxLimits(memory_bytes=1000)))
    story.ask()
    story.ask(small)
    assert not story.due().start


def test_where_memory_stalls_nothing_is_started_but_in_an_empty_pool() -> None:
    story = tight(100 * GIB, stalled=0.5)
    story.ask(), story.ask()
    assert [len(story.due().start) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("memory", [Memory(available_bytes=GIB / 2), Memory(available_bytes=1e15, stalled=0.5)])
def test_warm_sandboxes_are_given_up_when_memory_is_short(memory: Memory) -> None:
    story = Story(PoolLimits(warm=4))
    story.leases.stock.announce(K, 4, story.now, 60.0)
    story.settle()
    assert story.count(SlotState.WARM) == 4
    story.memory = memory
    story.settle()
    assert story.count(SlotState.WARM) == 0


# --- Stock ----------------------------------------------------------------------------------------------------------


def test_what_was_asked_lately_is_kept_warm_and_fades() -> None:
    story = Story(PoolLimits(warm=8, rest_s=1e6))
    claim = story.ask()
    story.settle()
    story.leases.leave(claim, story.now)
    story.settle()
    assert story.count(SlotState.WARM) == 1
    story.now = 4.0
    again = story.ask()
    story.settle()
    assert again.state is ClaimState.GRANTED
    assert story.leases.counters.granted_warm == 1
    story.now = 10 * DEMAND_S
    story.settle()
    assert story.leases.slots.live == 0


def test_the_more_is_asked_the_more_is_kept_up_to_the_limit() -> None:
    targets = []
    for asks in (1, 10, 100, 1000):
        kind = Kind(key=K, usual_bytes=0.0)
        for _ in range(asks):
            kind.ask(0.0)
        targets.append(kind.target(0.0))
    assert targets == sorted(set(targets))
    assert targets[0] == 1
    kind.start_worked(100.0)
    assert kind.target(0.0) > targets[-1]


def test_a_burst_that_was_announced_is_warm_before_it_comes() -> None:
    story = Story(PoolLimits(warm=8))
    story.leases.stock.announce(K, 5, story.now, 60.0)
    story.settle()
    claims = [story.ask() for _ in range(5)]
    assert not any(slot for slot in story.due().start if slot.key != K)
    assert all(claim.state is ClaimState.GRANTED for claim in claims)


def test_a_warm_sandbox_that_rested_too_long_is_replaced() -> None:
    story = Story(PoolLimits(warm=1, rest_s=100.0))
    story.leases.stock.announce(K, 1, story.now, 1000.0)
    story.settle()
    story.now = 100.0
    decisions = story.due()
    assert [slot.reason for slot in decisions.remove] == ["nobody wanted it for 100 s"]
    for slot in decisions.remove:
        story.leases.gone(slot, story.now)
    story.settle()
    assert story.count(SlotState.WARM) == 1


def test_kinds_that_nobody_uses_are_forgotten() -> None:
    story = Story(PoolLimits(warm=0, wait_s=1.0))
    kept = story.ask(wait_s=1e6)
    story.settle()
    for number in range(2 * KINDS):
        story.leases.stock.announce(key(str(number)), 1, story.now, 1.0)
    story.due()
    assert len(story.leases.stock.kinds) == KINDS
    assert kept.want.key in story.leases.stock.kinds
