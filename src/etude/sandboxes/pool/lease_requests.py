"""Who asks a warm pool for sandboxes: claims, the line they wait in, and when each of them runs out of time.

    WAITING ──▶ GRANTED ──▶ LEFT          its holder is done, or LOST: it was silent or too long, or the sandbox died
       ├──▶ EXPIRED                       its deadline came first
       ├──▶ FAILED                        no sandbox of its kind can be made
       └──▶ LEFT                          it gave up

Owns order and deadlines. Which claim gets what is decided in :mod:`etude.sandboxes.pool.leases`. No clock, no I/O.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from math import inf
from types import MappingProxyType

from etude.sandboxes.pool.slots import Key, Slot, Slots, SlotState


class ClaimState(StrEnum):
    """Where a claim is."""

    NEW = "new"
    WAITING = "waiting"
    """In line."""
    GRANTED = "granted"
    """Its slot is leased to it."""
    REFUSED = "refused"
    """The line was full."""
    EXPIRED = "expired"
    FAILED = "failed"
    LOST = "lost"
    LEFT = "left"


CLAIM_MOVES: Mapping[ClaimState, frozenset[ClaimState]] = MappingProxyType(
    {
        ClaimState.NEW: frozenset({ClaimState.WAITING, ClaimState.REFUSED, ClaimState.GRANTED}),  # GRANTED: a fork
        ClaimState.WAITING: frozenset(
            {ClaimState.GRANTED, ClaimState.EXPIRED, ClaimState.FAILED, ClaimState.LEFT},
        ),
        ClaimState.GRANTED: frozenset({ClaimState.LEFT, ClaimState.LOST}),
        ClaimState.REFUSED: frozenset(),
        ClaimState.EXPIRED: frozenset(),
        ClaimState.FAILED: frozenset(),
        ClaimState.LOST: frozenset(),
        ClaimState.LEFT: frozenset(),
    }
)
"""State of a claim → where it may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What is asked for."""

    key: Key
    """Also how long it may be held in all, from its grant: ``ttl_s`` of its spec."""
    holder: str = ""
    """Who asks, for people."""
    priority: int = 0
    """Lower is served first; below 0 is urgent, and may use reserved places."""
    wait_s: float = 600.0
    """How long to wait."""

    def __post_init__(self) -> None:
        if not 0 < self.wait_s < inf:
            raise ValueError(f"wait_s={self.wait_s!r}: expected a finite number of seconds above 0")

    @property
    def urgent(self) -> bool:
        """Whether it may use reserved places."""
        return self.priority < 0


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """One holder's claim to one sandbox. Only :class:`~etude.sandboxes.pool.leases.Leases` writes it."""

    number: int
    """Unique in its pool, in order of arrival."""
    want: Want
    asked_at: float
    state: ClaimState = ClaimState.NEW
    reason: str = ""
    """Why it has no sandbox, or has none any more."""
    slot: Slot | None = None
    """What it was granted."""
    ends_at: float = 0.0
    """When its lease is over, whatever the holder does; once granted."""
    retry_after_s: float = 0.0
    """When to ask again, if it was refused or has expired."""
    permanent: bool = False
    """Whether to ask again is of no use."""

    @property
    def order(self) -> tuple[int, int]:
        """Its place in line."""
        return self.want.priority, self.number

    def move(self, state: ClaimState, reason: str = "") -> None:
        """Go to another state; only moves in ``CLAIM_MOVES`` exist."""
        assert state in CLAIM_MOVES[self.state], f"claim {self.number} went from {self.state} to {state}"
        self.state, self.reason = state, reason


class Line:
    """Claims that wait, by priority and arrival, for each key and in all."""

    def __init__(self, limit: int) -> None:
        """``limit`` is how many of each urgency may wait."""
        self._limit = limit
        self._lengths = {False: 0, True: 0}
        self._claims: dict[Key, list[Claim]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return sum(self._lengths.values())

    def length(self, *, urgent: bool) -> int:
        """How many of an urgency wait."""
        return self._lengths[urgent]

    def is_full(self, *, urgent: bool) -> bool:
        """Whether as many of an urgency wait as may: a grader is not kept out by rollouts that wait."""
        return self._lengths[urgent] >= self._limit

    def wanted(self) -> Sequence[Key]:
        """What is waited for."""
        return tuple(self._claims)

    def of(self, key: Key) -> Sequence[Claim]:
        """Who waits for a key, the first in line first."""
        return tuple(self._claims.get(key, ()))

    def first(self, key: Key) -> Claim | None:
        """Whose turn it is."""
        return next(iter(self._claims.get(key, ())), None)

    def waiting_for(self, key: Key) -> int:
        """How many wait for a key."""
        return len(self._claims.get(key, ()))

    def uncovered(self, slots: Slots) -> Iterator[Claim]:
        """Claims for which nothing starts yet, in order; the line must not change meanwhile."""
        left = [islice(claims, slots.number_of(key, SlotState.STARTING), None) for key, claims in self._claims.items()]
        return heapq.merge(*left, key=_order)

    def add(self, claim: Claim) -> None:
        """Put a claim where it belongs."""
        insort(self._claims.setdefault(claim.want.key, []), claim, key=_order)
        self._lengths[claim.want.urgent] += 1

    def remove(self, claim: Claim) -> None:
        """Take a claim out."""
        claims = self._claims[claim.want.key]
        del claims[bisect_left(claims, claim.order, key=_order)]
        if not claims:
            del self._claims[claim.want.key]
        self._lengths[claim.want.urgent] -= 1


class Agenda:
    """When each claim runs out of time: in line, or with its sandbox."""

    def __init__(self) -> None:
        self._times: dict[Claim, float] = {}
        self._heap: list[tuple[float, int, Claim]] = []  # an entry counts if its time is the claim's

    def set(self, claim: Claim, time: float) -> None:
        """Settle the time of a claim anew."""
        self._times[claim] = time
        heapq.heappush(self._heap, (time, claim.number, claim))
        if len(self._heap) > 4 * len(self._times) + 64:  # heartbeats leave many entries that do not count
            self._heap = [(time, claim.number, claim) for claim, time in self._times.items()]
            heapq.heapify(self._heap)

    def clear(self, claim: Claim) -> None:
        """Forget a claim."""
        self._times.pop(claim, None)

    def next_time(self) -> float | None:
        """The earliest of all times; ``None`` without any."""
        while self._heap and self._times.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[Claim]:
        """Claims whose time has come, and forget them."""
        while (time := self.next_time()) is not None and time <= now:
            claim = heapq.heappop(self._heap)[2]
            del self._times[claim]
            yield claim


def _order(claim: Claim) -> tuple[int, int]:
    return claim.order
