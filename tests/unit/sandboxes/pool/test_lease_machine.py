"""Whatever is asked, made, lost and removed in whatever order: places, holders and deadlines are kept."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.sandbox_spec import SandboxSpec
from etude.sandboxes.pool.inventory import Memory
from etude.sandboxes.pool.lease_requests import Claim, ClaimState, Want
from etude.sandboxes.pool.leases import Decisions, Leases
from etude.sandboxes.pool.slots import Key, PoolLimits, Slot, SlotState

MIB = 1 << 20
LIMITS = PoolLimits(
    live=5,
    reserved=1,
    starting=2,
    waiting=8,
    warm=2,
    linger_s=20.0,
    rest_s=90.0,
    silence_s=15.0,
    tries=2,
    reserve_bytes=100 * MIB,
    start_bytes=50 * MIB,
    usual_bytes=10 * MIB,
)
PLENTY = 10_000.0
RED, GREEN, BLUE = (
    Key(digest=name, spec=SandboxSpec(ttl_s=ttl_s)) for name, ttl_s in (("red", 5.0), ("green", 60.0), ("blue", 60.0))
)
KEYS = st.sampled_from([GREEN, BLUE, RED])


class LeaseMachine(RuleBasedStateMachine):
    """Facts in random order. After each the decisions are asked for, so that what must always hold can be checked."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(LIMITS)
        self.now = 0.0
        self.available_mib = PLENTY
        self.claims: list[Claim] = []
        self.beaten: dict[Claim, float] = {}  # granted claim → until when its holder may be silent
        self.starting: list[Slot] = []
        self.removing: list[Slot] = []
        self.held: dict[Slot, Claim] = {}  # every slot that ever had a holder → who

    def decide(self) -> Decisions:
        memory = Memory(available_bytes=self.available_mib * MIB)
        decisions = self.leases.due(self.now, memory)
        self.starting += decisions.start
        self.removing += decisions.remove
        assert len(set(self.removing)) == len(self.removing), "removed twice"
        for claim in decisions.settled:
            assert claim in self.claims
            assert claim.state not in (ClaimState.NEW, ClaimState.WAITING)
            if claim.state is ClaimState.GRANTED:
                note_grant(self, claim)
        return decisions

    @rule(
        key=KEYS,
        priority=st.sampled_from([-1, 0, 0, 1]),
        wait_s=st.sampled_from([1.0, 10.0, 100.0]),
        times=st.integers(1, 4),
    )
    def ask(self, key: Key, priority: int, wait_s: float, times: int) -> None:
        want = Want(key=key, priority=priority, wait_s=wait_s)
        for _ in range(times):
            full = self.leases.line.length(urgent=want.urgent) >= LIMITS.waiting
            claim = self.leases.ask(want, self.now)
            assert (claim.state is ClaimState.REFUSED) == full
            if claim.state is ClaimState.REFUSED:
                assert claim.reason and claim.retry_after_s > 0
            else:
                self.claims.append(claim)
        self.decide()

    @rule()
    def finish_everything(self) -> None:
        while self.starting or self.removing:
            while self.starting:
                self.leases.started(self.starting.pop(), self.now)
            while self.removing:
                self.leases.gone(self.removing.pop(), self.now)
            self.decide()

    @precondition(lambda self: any(claim.state is ClaimState.WAITING for claim in self.claims) or bool(granted(self)))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        able = [claim for claim in self.claims if claim.state in (ClaimState.WAITING, ClaimState.GRANTED)]
        self.leases.leave(data.draw(st.sampled_from(able)), self.now)
        self.decide()

    @precondition(lambda self: bool(granted(self)))
    @rule(data=st.data(), quiet_s=st.sampled_from([0.0, 30.0]))
    def beat(self, data: st.DataObject, quiet_s: float) -> None:
        claim = data.draw(st.sampled_from(granted(self)))
        assert self.leases.beat(claim, self.now, quiet_s)
        self.beaten[claim] = self.now + LIMITS.silence_s + quiet_s

    @precondition(lambda self: bool(granted(self)))
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        claim = data.draw(st.sampled_from(granted(self)))
        room = self.leases.slots.room(urgent=claim.want.urgent)
        copies = self.leases.fork(claim, count, self.now)
        assert len(copies) == (0 if room < count else count)
        for copy in copies:
            self.claims.append(copy)
            note_grant(self, copy)
        self.decide()

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]), permanent=st.booleans())
    def finish_start(self, data: st.DataObject, works: bool, permanent: bool) -> None:
        slot = data.draw(st.sampled_from(self.starting))
        self.starting.remove(slot)
        if works:
            self.leases.started(slot, self.now)
        else:
            self.leases.failed(slot, "no luck", self.now, permanent=permanent)
        if permanent and not works:
            assert not self.leases.line.of(slot.key)
        self.decide()

    @precondition(lambda self: self.removing)
    @rule(data=st.data(), closed=st.booleans())
    def finish_removal(self, data: st.DataObject, closed: bool) -> None:
        slot = data.draw(st.sampled_from(self.removing))
        self.removing.remove(slot)
        self.leases.gone(slot, self.now, closed=closed)
        self.decide()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.leases.died(data.draw(st.sampled_from(list(self.held))), "killed", self.now)
        self.decide()

    @rule(mib=st.sampled_from([0.0, 5.0, 80.0, math.nan]))
    def measure(self, mib: float) -> None:
        for state in SlotState:
            for slot in self.leases.slots.all(state):
                self.leases.stock.measure(slot, self.leases.slots, mib * MIB)

    @rule(mib=st.sampled_from([0.0, 120.0, 200.0, PLENTY, PLENTY, PLENTY]))
    def change_memory(self, mib: float) -> None:
        self.available_mib = mib
        decisions = self.decide()
        if mib == 0.0:
            assert len(decisions.start) <= 1  # none but the first of an empty pool

    @rule(key=KEYS, count=st.integers(0, 4))
    def announce(self, key: Key, count: int) -> None:
        self.leases.stock.announce(key, count, self.now, 30.0)
        self.decide()

    @rule(seconds=st.sampled_from([0.1, 0.1, 3.0, 3.0, 12.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.decide()

    @precondition(lambda self: len(self.claims) > 20)
    @rule()
    def close_and_begin_anew(self) -> None:
        self.leases.shut("closed", self.now)
        self.decide()
        assert not self.leases.line.wanted()
        assert self.leases.ask(Want(key=RED), self.now).state is ClaimState.REFUSED
        self.finish_everything()
        assert self.leases.slots.live == 0
        assert not granted(self)
        self.leases, self.claims = Leases(LIMITS), []
        self.beaten.clear()
        self.held.clear()

    @invariant()
    def all_is_kept(self) -> None:
        check_places(self)
        check_leases(self)
        check_line(self)


def note_grant(machine: LeaseMachine, claim: Claim) -> None:
    """A claim is granted."""
    assert claim.slot is not None
    assert claim.slot not in machine.held, "a second holder"
    machine.held[claim.slot] = claim
    machine.beaten[claim] = machine.now + LIMITS.silence_s


def granted(machine: LeaseMachine) -> list[Claim]:
    """Who holds something."""
    return [claim for claim in machine.claims if claim.state is ClaimState.GRANTED]


def check_places(machine: LeaseMachine) -> None:
    """No more slots than may be, in the states that they should be in."""
    slots = machine.leases.slots
    everyone = [slot for state in SlotState for slot in slots.all(state)]
    assert slots.live == len(everyone) <= LIMITS.live
    ordinary = sum(not slot.urgent for slot in everyone)
    assert ordinary <= LIMITS.live - LIMITS.reserved
    assert slots.room(urgent=True) == LIMITS.live - len(everyone)
    assert slots.room(urgent=False) == min(LIMITS.live - len(everyone), LIMITS.live - LIMITS.reserved - ordinary)
    assert slots.count(SlotState.STARTING) == len(machine.starting) <= LIMITS.starting
    assert set(slots.all(SlotState.DRAINING)) == set(machine.removing)
    assert slots.promised_bytes == sum(slot.promised_bytes for slot in everyone)
    assert all(slot.promised_bytes >= 0 for slot in everyone)


def check_leases(machine: LeaseMachine) -> None:
    """A lease has one holder, a holder one lease, and none outlives its deadline."""
    leased = machine.leases.slots.all(SlotState.LEASED)
    holders = granted(machine)
    assert {claim.slot for claim in holders} == set(leased)
    assert len(holders) == len(leased)
    for claim in holders:
        assert claim.slot is not None
        assert claim.slot.key == claim.want.key
        assert claim.slot.urgent == claim.want.urgent
        assert claim.ends_at > machine.now
        assert machine.beaten[claim] > machine.now


def check_line(machine: LeaseMachine) -> None:
    """Nobody who waits is forgotten, and an empty pool serves whoever is first."""
    slots, line = machine.leases.slots, machine.leases.line
    waiting = [claim for claim in machine.claims if claim.state is ClaimState.WAITING]
    assert len(waiting) == len(line) == sum(line.waiting_for(key) for key in line.wanted())
    for claim in waiting:
        assert claim in line.of(claim.want.key)
        assert claim.asked_at + claim.want.wait_s > machine.now
        assert slots.pick(claim.want.key, urgent=claim.want.urgent) is None
    times = [claim.asked_at + claim.want.wait_s for claim in waiting]
    times += [min(claim.ends_at, machine.beaten[claim]) for claim in granted(machine)]
    assert machine.leases.next_time() == min(times, default=None)
    kinds = [machine.leases.stock.kind(key) for key in machine.leases.line.wanted()]
    if any(kind.retry_at <= machine.now for kind in kinds):
        assert machine.leases.slots.live > 0


LeaseMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLeases = LeaseMachine.TestCase
