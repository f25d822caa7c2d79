"""Which claim gets which sandbox, and for how long: the pure core of a warm pool.

    ask ──▶ line ──due──▶ lease ──▶ leave          beat: the holder lives
              │            └──▶ lost               it did not, or held on too long, or the sandbox died
              └──▶ refused · expired · failed

Owns who holds what. A slot has one holder in its life; a lease ends at its deadline whatever its holder does; whoever
waits is told by its own deadline. Places and states are :mod:`etude.sandboxes.pool.slots`', order and deadlines
:mod:`etude.sandboxes.pool.lease_requests`', and how many to start :mod:`etude.sandboxes.pool.inventory`'s. No clock, no
I/O, no logging: facts and ``now`` (seconds) in, decisions out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from etude.sandboxes.pool.inventory import Memory, Stock
from etude.sandboxes.pool.lease_requests import Agenda, Claim, ClaimState, Line, Want
from etude.sandboxes.pool.slots import Key, PoolLimits, Slot, Slots, SlotState

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""Bounds of the advice when to ask again."""
SMOOTHING = 0.125
"""Weight of a new sample in the mean gap between two leases that end."""


@dataclass(slots=True, kw_only=True)
class LeaseCounters:
    """What happened since the start."""

    asked: int = 0
    granted: int = 0
    granted_warm: int = 0
    """At once, of a slot that was warm."""
    refused: int = 0
    expired: int = 0
    failed: int = 0
    """Claims that were told that no sandbox can be made."""
    silent: int = 0
    """Leases that ended as their holder gave no sign of life."""
    overdue: int = 0
    """Leases that ended as their time to live was over."""
    died: int = 0
    """Sandboxes that were found dead."""
    forked: int = 0
    started: int = 0
    start_failures: int = 0
    shed: int = 0
    """Warm slots that were given up."""
    unclosed: int = 0
    """Sandboxes whose removal failed as often as it may."""
    wait_s: float = 0.0
    """Of all granted claims together."""
    start_s: float = 0.0
    """Of all starts together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What is to be done now."""

    start: tuple[Slot, ...]
    """Make a sandbox; say :meth:`Leases.started` or :meth:`Leases.failed`."""
    remove: tuple[Slot, ...]
    """Remove the sandbox; say :meth:`Leases.gone`."""
    settled: tuple[Claim, ...]
    """Waits no more, or has lost its sandbox."""


class Leases:
    """Gives sandboxes to holders.

    After every call that changes something, and at :meth:`next_time`, ask :meth:`due` what is to be done.
    """

    def __init__(self, limits: PoolLimits) -> None:
        self.counters = LeaseCounters()
        self.stock = Stock(limits)
        """What is known of each kind; tell it what was measured."""
        self.slots = Slots(limits)
        self.line = Line(limits.waiting)
        self._limits = limits
        self._agenda = Agenda()
        self._holdings = Holdings(self.counters, limits, self.slots, self.stock, self._agenda)
        self._numbers = count(1)
        self._settled: list[Claim] = []
        self._shut = ""

    def ask(self, want: Want, now: float) -> Claim:
        """Ask for a sandbox: the claim waits, or is refused with ``retry_after_s``."""
        claim = Claim(number=next(self._numbers), want=want, asked_at=now)
        self.counters.asked += 1
        self.stock.kind(want.key).ask(now)
        if self._shut or self.line.is_full(urgent=want.urgent):
            claim.move(ClaimState.REFUSED, self._shut or f"{len(self.line)} claims wait already, as many as may")
            claim.retry_after_s, claim.permanent = self.retry_after_s(), bool(self._shut)
            self.counters.refused += 1
        else:
            claim.move(ClaimState.WAITING)
            self.line.add(claim)
            self._agenda.set(claim, now + want.wait_s)
        return claim

    def fork(self, claim: Claim, copies: int, now: float) -> tuple[Claim, ...]:
        """Claims for ``copies`` of what ``claim`` holds, all granted, or none where there are not that many
        places. The holder never waits for them: it holds a sandbox meanwhile.
        """
        assert claim.state is ClaimState.GRANTED, f"a {claim.state} claim has nothing to copy"
        if self._shut or self.slots.room(urgent=claim.want.urgent) < copies:
            return ()
        made = []
        for _ in range(copies):
            copy = Claim(number=next(self._numbers), want=claim.want, asked_at=now)
            slot = self.slots.add(claim.want.key, now, urgent=claim.want.urgent)
            self._holdings.grant(copy, slot, now)
            self.slots.promise(slot, self.stock.kind(slot.key).growth_bytes(0.0))
            made.append(copy)
        self.counters.forked += copies
        return tuple(made)

    def beat(self, claim: Claim, now: float, quiet_s: float = 0.0) -> bool:
        """Its holder lives and may be quiet for ``quiet_s`` more than usual; false if it holds nothing any more."""
        if claim.state is not ClaimState.GRANTED or now >= claim.ends_at:
            return False
        self._holdings.hear(claim, now, quiet_s)
        return True

    def leave(self, claim: Claim, now: float) -> None:
        """The holder is done, or gives up waiting; harmless for a claim that is settled otherwise."""
        if claim.state is ClaimState.WAITING:
            self.line.remove(claim)
            self._agenda.clear(claim)
            claim.move(ClaimState.LEFT)
        elif claim.state is ClaimState.GRANTED:
            self._holdings.end(claim, ClaimState.LEFT, "", now)

    def started(self, slot: Slot, now: float) -> None:
        """A sandbox was made."""
        seconds = now - slot.since
        self.counters.started += 1
        self.counters.start_s += seconds
        kind = self.stock.kind(slot.key)
        kind.start_worked(seconds)
        self.slots.move(slot, SlotState.WARM, now)
        self.slots.promise(slot, kind.growth_bytes(0.0))
        if self._shut:
            self._holdings.drain(slot, self._shut, now)

    def failed(self, slot: Slot, reason: str, now: float, *, permanent: bool = False) -> None:
        """A sandbox could not be made; if that goes on, or is ``permanent``, those who wait for one are told why."""
        self.counters.start_failures += 1
        self.slots.promise(slot, 0)
        self.slots.move(slot, SlotState.DEAD, now, reason)
        kind = self.stock.kind(slot.key)
        kind.start_failed(now)
        if permanent or kind.failures % self._limits.tries == 0:
            self._tell(self.line.of(slot.key), reason, permanent=permanent)

    def died(self, slot: Slot, reason: str, now: float) -> None:
        """A sandbox was found dead; harmless when it is already being removed."""
        if slot.state not in (SlotState.WARM, SlotState.LEASED):
            return
        self.counters.died += 1
        claim = self._holdings.claim_of(slot)
        if claim is None:
            self._holdings.drain(slot, reason, now)
        else:
            self._holdings.end(claim, ClaimState.LOST, reason, now)

    def gone(self, slot: Slot, now: float, *, closed: bool = True) -> None:
        """A sandbox was removed, or that failed as often as it may."""
        self.counters.unclosed += not closed
        self.slots.move(slot, SlotState.DEAD, now, slot.reason)

    def shut(self, reason: str, now: float) -> None:
        """Refuse whoever asks, fail whoever waits, and remove everything."""
        self._shut = reason
        for key in self.line.wanted():
            self._tell(self.line.of(key), reason, permanent=True)
        for claim in self._holdings.claims():
            self._holdings.end(claim, ClaimState.LOST, reason, now)
        for slot in self.slots.all(SlotState.WARM):
            self._holdings.drain(slot, reason, now)

    def due(self, now: float, memory: Memory) -> Decisions:
        """What is to be done now."""
        for claim in self._agenda.pop_due(now):
            self._expire(claim, now)
        for key in self.line.wanted():
            self._hand_out(key, now)
        started: tuple[Slot, ...] = ()
        if not self._shut:
            plan = self.stock.plan(self.line, self.slots, now, memory)
            started = tuple(plan.started)
            self.counters.shed += len(plan.shed)
            for slot, reason in plan.shed.items():
                self._holdings.drain(slot, reason, now)
            self.stock.forget(self.line, self.slots, now)
        lost, removed = self._holdings.take()
        settled, self._settled = self._settled, []
        return Decisions(start=started, remove=removed, settled=(*settled, *lost))

    def next_time(self) -> float | None:
        """When a claim or a lease runs out, if nothing happens before; pauses and idle stock are not in it."""
        return self._agenda.next_time()

    def retry_after_s(self) -> float:
        """Seconds until those who wait now, and one more, have probably been served."""
        return self._holdings.retry_after_s(len(self.line) + 1)

    def _expire(self, claim: Claim, now: float) -> None:
        """The time of a claim has come, in line or with its sandbox."""
        if claim.state is ClaimState.WAITING:
            self.line.remove(claim)
            claim.move(ClaimState.EXPIRED, f"no sandbox became free within {claim.want.wait_s:g} s")
            claim.retry_after_s = self.retry_after_s()
            self.counters.expired += 1
            self._settled.append(claim)
        elif now >= claim.ends_at:
            self.counters.overdue += 1
            self._holdings.end(
                claim, ClaimState.LOST, f"its time to live of {claim.want.key.spec.ttl_s:g} s is over", now
            )
        else:
            self.counters.silent += 1
            self._holdings.end(claim, ClaimState.LOST, "its holder gave no sign of life", now)

    def _hand_out(self, key: Key, now: float) -> None:
        """Give warm slots of a key to those who wait for one, in order."""
        while (claim := self.line.first(key)) is not None:
            slot = self.slots.pick(key, urgent=claim.want.urgent)
            if slot is None:
                return
            self.line.remove(claim)
            self.counters.granted_warm += slot.since < claim.asked_at
            self._holdings.grant(claim, slot, now)
            self._settled.append(claim)

    def _tell(self, claims: Iterable[Claim], reason: str, *, permanent: bool) -> None:
        """Those who wait for what cannot be made wait no more."""
        for claim in claims:
            self.line.remove(claim)
            self._agenda.clear(claim)
            claim.move(ClaimState.FAILED, reason)
            claim.permanent = permanent
            self.counters.failed += 1
            self._settled.append(claim)


class Holdings:
    """Who holds which slot, from the grant to the removal, and how fast leases end."""

    def __init__(self, counters: LeaseCounters, limits: PoolLimits, slots: Slots, stock: Stock, agenda: Agenda) -> None:
        self._counters = counters
        self._limits = limits
        self._slots = slots
        self._stock = stock
        self._agenda = agenda
        self._leases: dict[Slot, Claim] = {}
        self._lost: list[Claim] = []
        self._removals: list[Slot] = []
        self._gap_s = 0.0
        self._ended_at: float | None = None

    def claims(self) -> Sequence[Claim]:
        """Everyone who holds one."""
        return tuple(self._leases.values())

    def claim_of(self, slot: Slot) -> Claim | None:
        """Who holds a slot."""
        return self._leases.get(slot)

    def grant(self, claim: Claim, slot: Slot, now: float) -> None:
        """Give a slot to a claim."""
        claim.move(ClaimState.GRANTED)
        claim.slot, claim.ends_at = slot, now + claim.want.key.spec.ttl_s
        self._leases[slot] = claim
        self._slots.lend(slot, now, urgent=claim.want.urgent)
        self._counters.granted += 1
        self._counters.wait_s += now - claim.asked_at
        self.hear(claim, now, 0.0)

    def hear(self, claim: Claim, now: float, quiet_s: float) -> None:
        """The holder lives, and may be quiet for so much longer than usual."""
        self._agenda.set(claim, min(now + self._limits.silence_s + quiet_s, claim.ends_at))

    def end(self, claim: Claim, state: ClaimState, reason: str, now: float) -> None:
        """End a lease, and with it the life of its sandbox."""
        slot = claim.slot
        assert slot is not None, "a granted claim has a slot"
        self._agenda.clear(claim)
        claim.move(state, reason)
        del self._leases[slot]
        if state is ClaimState.LOST:
            self._lost.append(claim)
        if self._ended_at is not None:
            self._gap_s += SMOOTHING * (now - self._ended_at - self._gap_s)
        self._ended_at = now if self._leases else None  # the time after the last one says nothing of the speed
        self._stock.learn(slot)
        self.drain(slot, reason or "its holder is done", now)

    def drain(self, slot: Slot, reason: str, now: float) -> None:
        """Have a slot's sandbox removed."""
        self._slots.promise(slot, 0)
        self._slots.move(slot, SlotState.DRAINING, now, reason)
        self._removals.append(slot)

    def take(self) -> tuple[tuple[Claim, ...], tuple[Slot, ...]]:
        """Leases lost and slots to remove since the last call."""
        taken = tuple(self._lost), tuple(self._removals)
        self._lost, self._removals = [], []
        return taken

    def retry_after_s(self, claims: int) -> float:
        """Seconds until so many have probably been served."""
        return min(max(claims * self._gap_s, RETRY_MIN_S), RETRY_MAX_S)
