"""How many sandboxes to start now, and which warm ones to give up: the pool's memory of what each kind is like.

Three things decide about a start: somebody wants it, there is a place, and its memory fits. Memory is counted twice
over: what the machine says is free, less what living sandboxes are known to take but do not have yet; a start counts
with its peak. So a burst of starts does not find free what the starts before it are about to use.

How many are kept warm follows the base-stock rule of inventories: what is expected to be asked while one more starts,
and twice the square root of that, which is how far a Poisson number strays. Demand fades exponentially, so what was
asked lately is kept and the rest is given up. No clock, no I/O: facts and ``now`` in, starts and removals out.
"""

import math
from dataclasses import dataclass, field

from etude.sandboxes.pool.lease_requests import Claim, Line
from etude.sandboxes.pool.slots import Key, PoolLimits, Slot, Slots, SlotState

DEMAND_S = 300.0
"""Time in which demand that is not repeated falls to 1/e."""
FADED = 0.25
"""Of one ask: demand that has fallen below keeps nothing warm."""
LEAD_S = 10.0
"""Time that the stock must last at least, as starts queue behind each other."""
SAFETY = 2.0
"""Standard deviations of demand that the stock covers beyond its mean."""
SMOOTHING = 0.125
"""Weight of a new sample in a running mean (Jacobson's gain)."""
KINDS = 256
"""Keys that are remembered; of those not in use the least wanted is forgotten."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 30.0
"""After a failed start; in between the pause doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the machine says of its memory."""

    available_bytes: float
    """What can be taken before something is swapped out or killed."""
    stalled: float = math.nan
    """Share of the last ten seconds in which something waited for memory; ``nan`` where the kernel does not tell."""


@dataclass(slots=True, kw_only=True, eq=False)
class Kind:
    """What is known of the sandboxes of one key."""

    key: Key
    usual_bytes: float
    """The most that one in use comes to have, in the mean."""
    most_bytes: float = 0.0
    """The most that any was seen with."""
    start_s: float = 0.0
    """A start takes so long, in the mean."""
    asks: float = 0.0
    """Times that it was asked for, faded, as of ``asked_at``."""
    asked_at: float = 0.0
    announced: int = 0
    """Asks that somebody said will come until ``announced_until``."""
    announced_until: float = 0.0
    failures: int = 0
    """Starts that failed in a row."""
    retry_at: float = -math.inf
    """Nothing is started before."""

    @property
    def cap_bytes(self) -> int:
        """What none can exceed."""
        return self.key.spec.limits.memory_bytes

    def ask(self, now: float) -> None:
        """Somebody asks."""
        self.asks = self.demand(now) + 1
        self.asked_at = now
        self.announced = max(0, self.announced - 1)

    def demand(self, now: float) -> float:
        """Times that it was asked for, those longer ago counting less."""
        return self.asks * math.exp((self.asked_at - now) / DEMAND_S)

    def target(self, now: float) -> int:
        """How many shall be warm."""
        demand = self.demand(now)
        expected = demand / DEMAND_S * max(self.start_s, LEAD_S)
        usual = math.ceil(expected + SAFETY * math.sqrt(expected)) if demand >= FADED else 0
        return max(usual, self.announced if now < self.announced_until else 0)

    def peak_bytes(self, limits: PoolLimits) -> int:
        """What a start is to find free."""
        return int(min(max(limits.start_bytes, self.most_bytes), self.cap_bytes))

    def growth_bytes(self, seen_bytes: float) -> int:
        """What one that is seen with so much will probably take beyond it."""
        return int(max(0.0, min(self.usual_bytes, self.cap_bytes) - seen_bytes))

    def start_failed(self, now: float) -> None:
        """Wait longer, the more often it fails."""
        pause_s = min(PAUSE_MIN_S * 2.0 ** min(self.failures, 20), PAUSE_MAX_S)
        self.failures += 1
        self.retry_at = now + pause_s

    def start_worked(self, seconds: float) -> None:
        """Note how long it took."""
        self.failures, self.retry_at = 0, -math.inf
        self.start_s += (SMOOTHING if self.start_s else 1.0) * (seconds - self.start_s)


@dataclass(slots=True)
class Plan:
    """What is to be done now."""

    started: list[Slot] = field(default_factory=list)
    """Already among the slots."""
    shed: dict[Slot, str] = field(default_factory=dict)
    """Warm slots to give up, and why."""


class Stock:
    """Knows the kinds of sandboxes and plans starts."""

    def __init__(self, limits: PoolLimits) -> None:
        self.kinds: dict[Key, Kind] = {}
        """What is remembered."""
        self._limits = limits

    def kind(self, key: Key) -> Kind:
        """What is known of a key."""
        return self.kinds.setdefault(key, Kind(key=key, usual_bytes=self._limits.usual_bytes))

    def announce(self, key: Key, count: int, now: float, within_s: float) -> None:
        """So many will be asked for within some time: keep as many warm, if limits allow."""
        kind = self.kind(key)
        kind.announced, kind.announced_until = count, now + within_s

    def measure(self, slot: Slot, slots: Slots, size_bytes: float) -> None:
        """A slot was seen to use so much memory; ``nan`` says nothing."""
        if math.isnan(size_bytes) or slot.state not in (SlotState.WARM, SlotState.LEASED):
            return
        kind = self.kind(slot.key)
        slot.most_bytes = max(slot.most_bytes, size_bytes)
        kind.most_bytes = max(kind.most_bytes, size_bytes)
        slots.promise(slot, kind.growth_bytes(size_bytes))

    def learn(self, slot: Slot) -> None:
        """A slot was in use and is not any more: what it came to have is usual."""
        kind = self.kind(slot.key)
        if slot.most_bytes:
            kind.usual_bytes += SMOOTHING * (slot.most_bytes - kind.usual_bytes)

    def forget(self, line: Line, slots: Slots, now: float) -> None:
        """Keep no more than ``KINDS``, and all that are in use."""
        if len(self.kinds) <= KINDS:
            return
        idle = [kind for key, kind in self.kinds.items() if not line.waiting_for(key) and not slots.in_use(key)]
        idle.sort(key=lambda kind: kind.demand(now))
        for kind in idle[: len(self.kinds) - KINDS]:
            del self.kinds[kind.key]

    def plan(self, line: Line, slots: Slots, now: float, memory: Memory) -> Plan:
        """Start what is waited for, then what will be; give up what is warm for nobody.

        Whoever is first in line is not overtaken by one that needs less.
        """
        plan = Plan()
        if self._start_for_claims(plan, line, slots, now, memory):
            self._start_ahead(plan, line, slots, now, memory)
        self._shrink(plan, slots, now, memory)
        return plan

    def _start_for_claims(self, plan: Plan, line: Line, slots: Slots, now: float, memory: Memory) -> bool:
        """Whether no claim is left that finds no place or no memory."""
        for claim in line.uncovered(slots):
            kind = self.kind(claim.want.key)
            if now < kind.retry_at:
                continue
            if slots.count(SlotState.STARTING) >= self._limits.starting:
                return False
            # A pool with nothing in it starts one whatever is estimated, or it might never learn better.
            fits = not slots.live or self._has_memory(kind, slots, memory)
            if not fits or slots.room(urgent=claim.want.urgent) <= 0:
                self._shed_for(claim, plan, slots, fits=fits)
                return False
            plan.started.append(self._start(kind, slots, now, urgent=claim.want.urgent))
        return True

    def _start_ahead(self, plan: Plan, line: Line, slots: Slots, now: float, memory: Memory) -> None:
        """Start what nobody waits for yet, the most wanted first."""
        starting = {key: slots.number_of(key, SlotState.STARTING) - line.waiting_for(key) for key in self.kinds}
        idle = slots.count(SlotState.WARM) + sum(max(0, spare) for spare in starting.values())
        for kind in sorted(self.kinds.values(), key=lambda kind: -kind.demand(now)):
            if now < kind.retry_at:
                continue
            warm = slots.number_of(kind.key, SlotState.WARM) + max(0, starting[kind.key])
            for _ in range(kind.target(now) - warm):
                busy = slots.count(SlotState.STARTING) >= self._limits.starting
                if busy or idle >= self._limits.warm or slots.room(urgent=False) <= 0:
                    return
                if not self._has_memory(kind, slots, memory):
                    return
                plan.started.append(self._start(kind, slots, now, urgent=False))
                idle += 1

    def _shrink(self, plan: Plan, slots: Slots, now: float, memory: Memory) -> None:
        """Give up what is old, what is beyond demand, and one at a time what memory is short for."""
        warm = slots.all(SlotState.WARM)
        beyond = {key: slots.number_of(key, SlotState.WARM) - self.kind(key).target(now) for key in self.kinds}
        for slot in warm:  # of each key the oldest first
            age_s = now - slot.since
            if age_s >= self._limits.rest_s:
                plan.shed[slot] = f"nobody wanted it for {age_s:.0f} s"
            elif age_s >= self._limits.linger_s and beyond[slot.key] > 0:
                plan.shed[slot] = "more were warm than are asked for"
            else:
                continue
            beyond[slot.key] -= 1
        short = self._headroom_bytes(slots, memory) < 0 or memory.stalled >= self._limits.stalled
        if short and warm and self._may_shed(plan, slots):
            plan.shed[min(warm, key=lambda slot: slot.since)] = "memory is short"

    def _shed_for(self, claim: Claim, plan: Plan, slots: Slots, *, fits: bool) -> None:
        """Give up the oldest warm slot that is in the way of a claim, one at a time."""
        of_use = [slot for slot in slots.all(SlotState.WARM) if claim.want.urgent or not fits or not slot.urgent]
        if of_use and self._may_shed(plan, slots):
            plan.shed[min(of_use, key=lambda slot: slot.since)] = "another kind was wanted more"

    def _may_shed(self, plan: Plan, slots: Slots) -> bool:
        """Whether so few are being removed that one more is called for."""
        return slots.count(SlotState.DRAINING) + len(plan.shed) < self._limits.starting

    def _start(self, kind: Kind, slots: Slots, now: float, *, urgent: bool) -> Slot:
        slot = slots.add(kind.key, now, urgent=urgent)
        slots.promise(slot, kind.peak_bytes(self._limits))
        return slot

    def _headroom_bytes(self, slots: Slots, memory: Memory) -> float:
        """What is free and not promised."""
        return memory.available_bytes - self._limits.reserve_bytes - slots.promised_bytes

    def _has_memory(self, kind: Kind, slots: Slots, memory: Memory) -> bool:
        """Whether one more would fit at its peak."""
        if memory.stalled >= self._limits.stalled:
            return False
        return self._headroom_bytes(slots, memory) >= kind.peak_bytes(self._limits)
