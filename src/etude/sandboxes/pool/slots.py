"""The places of a warm pool: which sandbox is in which state, how many there may be, and what memory they will take.

    STARTING ──▶ WARM ──▶ LEASED ──▶ DRAINING ──▶ DEAD          no way leads back: nobody gets a used sandbox

Owns states and counts. Who gets a slot is decided in :mod:`etude.sandboxes.pool.leases`, how many are started in
:mod:`etude.sandboxes.pool.inventory`. No clock, no I/O.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from hashlib import sha256
from math import inf
from types import MappingProxyType
from typing import Self

from etude.sandbox_spec import SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What sandboxes that can stand in for each other have in common."""

    digest: str
    """Of the spec, the time to live included; two keys are the same if this is."""
    spec: SandboxSpec = field(compare=False, repr=False)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        """The key of a spec. Mappings may come in any order."""
        image = spec.image
        told = [
            [image.digest, image.base, list(map(str, image.layers)), dict(image.environment), image.workdir],
            [astuple(spec.limits), spec.allow, spec.user, spec.ttl_s],
            [{inside: str(path) for inside, path in spec.mounts.items()}, dict(spec.environment)],
        ]
        return cls(digest=sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(), spec=spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """The bounds of a pool; the defaults suit a machine of a few cores that it has to itself."""

    live: int = 256
    """Sandboxes of any state, those being removed included: they still have memory and processes."""
    reserved: int = 4
    """Of these, kept for urgent claims. A grader's claim is urgent: rollouts that wait for their grades hold sandboxes,
    and would hold all of them for ever.
    """
    starting: int = 2
    """Starts at a time. A start takes a core and far more memory than a sandbox that rests."""
    waiting: int = 4096
    """Claims of each urgency that may wait; more are refused."""
    warm: int = 16
    """Sandboxes that nobody has asked for yet."""
    linger_s: float = 60.0
    """How long a warm one beyond what demand calls for stays."""
    rest_s: float = 600.0
    """How long any warm one stays before it is replaced: its own time to live goes on meanwhile."""
    wait_s: float = 600.0
    """How long a claim waits, unless it says otherwise."""
    silence_s: float = 900.0
    """A holder that gives no sign of life for so long has lost its sandbox: longer than any model call."""
    start_s: float = 120.0
    """A start that takes longer has failed."""
    close_s: float = 30.0
    """So has a removal, which is then tried again."""
    tries: int = 3
    """Starts that fail in a row before those who wait for one are told, and removals before one is given up."""
    reserve_bytes: int = 1 << 30
    """Memory of the machine that sandboxes never get."""
    start_bytes: int = 256 << 20
    """What a start is taken to need at its peak; more, once more was seen."""
    usual_bytes: int = 64 << 20
    """What a sandbox in use is taken to need until some were seen."""
    stalled: float = 0.1
    """Share of time in which something waits for memory (PSI, "some") from which nothing is started any more."""

    def __post_init__(self) -> None:
        for name in ("live", "starting", "waiting", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a pool needs at least 1")
        if not 0 <= self.reserved < self.live:
            raise ValueError(f"reserved={self.reserved}: expected 0 … {self.live - 1}, less than live={self.live}")
        for name in ("warm", "reserve_bytes", "start_bytes", "usual_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0")
        for name in ("linger_s", "rest_s", "wait_s", "silence_s", "start_s", "close_s", "stalled"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a finite number above 0")


class SlotState(StrEnum):
    """What a sandbox of a pool is doing."""

    STARTING = "starting"
    """Its provider is making it."""
    WARM = "warm"
    """It waits for somebody."""
    LEASED = "leased"
    """Somebody has it."""
    DRAINING = "draining"
    """It is being removed."""
    DEAD = "dead"
    """It is gone, or never came to be."""


SLOT_MOVES: Mapping[SlotState, frozenset[SlotState]] = MappingProxyType(
    {
        SlotState.STARTING: frozenset({SlotState.WARM, SlotState.LEASED, SlotState.DEAD}),  # LEASED: a fork
        SlotState.WARM: frozenset({SlotState.LEASED, SlotState.DRAINING}),
        SlotState.LEASED: frozenset({SlotState.DRAINING}),
        SlotState.DRAINING: frozenset({SlotState.DEAD}),
        SlotState.DEAD: frozenset(),
    }
)
"""State of a slot → where it may go."""


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One place and the sandbox in it. Only :class:`Slots` writes it."""

    number: int
    """Unique in its pool, ascending."""
    key: Key
    urgent: bool
    """Whether it may use a reserved place: it is held by, or was started for, an urgent claim."""
    state: SlotState
    since: float
    """When it came into its state."""
    reason: str = ""
    """Why it is being removed, or never came to be."""
    most_bytes: float = 0.0
    """The most memory that it was seen with."""
    promised_bytes: int = 0
    """Memory that it does not use yet and is expected to."""


class Slots:
    """All slots of a pool that are not dead, by key and state."""

    def __init__(self, limits: PoolLimits) -> None:
        self.promised_bytes = 0
        """Memory that is not used yet but expected to be, of all together."""
        self._limits = limits
        self._created = 0
        self._ordinary = 0
        self._counts = dict.fromkeys(SlotState, 0)
        self._places: dict[tuple[Key, SlotState], dict[Slot, None]] = {}

    @property
    def live(self) -> int:
        """Places in use."""
        return sum(self._counts.values())

    def count(self, state: SlotState) -> int:
        """Slots in a state."""
        return self._counts[state]

    def of(self, key: Key, state: SlotState) -> Sequence[Slot]:
        """Slots of a key in a state, by how long they are in it, the longest first."""
        return tuple(self._places.get((key, state), ()))

    def number_of(self, key: Key, state: SlotState) -> int:
        """How many those are."""
        return len(self._places.get((key, state), ()))

    def all(self, state: SlotState) -> Sequence[Slot]:
        """Slots in a state, those of a key together."""
        return [slot for (_, place), held in self._places.items() if place is state for slot in held]

    def in_use(self, key: Key) -> bool:
        """Whether a key has any slot."""
        return any((key, state) in self._places for state in SlotState)

    def room(self, *, urgent: bool) -> int:
        """Places that are free for a claim of such urgency."""
        free = self._limits.live - self.live
        return free if urgent else min(free, self._limits.live - self._limits.reserved - self._ordinary)

    def pick(self, key: Key, *, urgent: bool) -> Slot | None:
        """The warm slot that such a claim is given: the newest, so that those beyond demand grow old and go.

        One that holds a reserved place is given to an ordinary claim only if it can leave that place.
        """
        held = self._places.get((key, SlotState.WARM), {})
        if urgent:
            return next(reversed(held), None)
        usual = next((slot for slot in reversed(held) if not slot.urgent), None)
        if usual is None and self._limits.live - self._limits.reserved > self._ordinary:
            return next(reversed(held), None)
        return usual

    def add(self, key: Key, now: float, *, urgent: bool) -> Slot:
        """A new slot, which starts."""
        assert self.room(urgent=urgent) > 0, "started without a free place"
        self._created += 1
        slot = Slot(number=self._created, key=key, urgent=urgent, state=SlotState.STARTING, since=now)
        self._ordinary += not urgent
        self._counts[SlotState.STARTING] += 1
        self._places.setdefault((key, SlotState.STARTING), {})[slot] = None
        return slot

    def move(self, slot: Slot, state: SlotState, now: float, reason: str = "") -> None:
        """Take a slot to another state; only moves in ``SLOT_MOVES`` exist."""
        assert state in SLOT_MOVES[slot.state], f"slot {slot.number} went from {slot.state} to {state}"
        held = self._places[slot.key, slot.state]
        del held[slot]
        if not held:
            del self._places[slot.key, slot.state]
        self._counts[slot.state] -= 1
        slot.state, slot.since, slot.reason = state, now, reason
        if state is SlotState.DEAD:
            self._ordinary -= not slot.urgent
        else:
            self._counts[state] += 1
            self._places.setdefault((slot.key, state), {})[slot] = None

    def lend(self, slot: Slot, now: float, *, urgent: bool) -> None:
        """Give a slot to a claim of such urgency."""
        self._ordinary += slot.urgent - urgent
        slot.urgent = urgent
        self.move(slot, SlotState.LEASED, now)

    def promise(self, slot: Slot, size_bytes: int) -> None:
        """Expect a slot to take so much memory beyond what it has."""
        self.promised_bytes += size_bytes - slot.promised_bytes
        slot.promised_bytes = size_bytes
