"""Schedule of slots: running, waiting and given up. The pure core of the rollouts.

                    a place is free            graded
        WAITING ─────────────────────▶ RUNNING ──────▶ GRADED
           ▲                            │ │ │
           │ the pause is over   failed │ │ └─ failed, no attempt left ─▶ LOST
        BACKING_OFF ◀───────────────────┘ └─── its group was dropped ──▶ ABANDONED ◀── (from WAITING, BACKING_OFF)

Owns the order in which slots start, their attempts and pauses. The oldest group goes first, retries included: batches
are formed in admission order, so later ones can wait, and none waits for ever. Does not own what an
attempt is (:mod:`etude.rollouts.worker`), how many groups there are (:mod:`etude.rollouts.admission`) or when machines
are down (:mod:`etude.rollouts.breaker`). No clock, no I/O: facts and ``now`` (seconds) in, decisions out. No decision
walks all slots: each costs the logarithm of their number, and what it returns.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from etude.backoff import Backoff
from etude.ledger.ledger import OpenSlot
from etude.rollouts.breaker import Breaker, Circuit

PAUSES = Backoff(first_s=1.0, longest_s=8.0)
"""Before attempts 1, 2, …: long enough in sum for a dead process to be restarted."""

Place: TypeAlias = tuple[int, int]
"""A slot's group and its number there: unique within a purpose, and in order of age."""


class SlotPhase(StrEnum):
    """State of a slot between its opening and its reward."""

    WAITING = "waiting"
    """For a place to run in."""
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    """Its last attempt failed; the next one is not due."""
    GRADED = "graded"
    LOST = "lost"
    """Its attempts are used up."""
    ABANDONED = "abandoned"
    """Its group was dropped."""


SLOT_MOVES: Mapping[SlotPhase, frozenset[SlotPhase]] = MappingProxyType(
    {
        SlotPhase.WAITING: frozenset({SlotPhase.RUNNING, SlotPhase.LOST, SlotPhase.ABANDONED}),
        SlotPhase.RUNNING: frozenset({SlotPhase.GRADED, SlotPhase.BACKING_OFF, SlotPhase.LOST, SlotPhase.ABANDONED}),
        SlotPhase.BACKING_OFF: frozenset({SlotPhase.WAITING, SlotPhase.ABANDONED}),
        SlotPhase.GRADED: frozenset(),
        SlotPhase.LOST: frozenset(),
        SlotPhase.ABANDONED: frozenset(),
    }
)
"""State of a slot → where it may go. One that waits is lost at once if a predecessor used up its attempts."""


@dataclass(slots=True, kw_only=True, eq=False)
class _ScheduledSlot:
    """One slot. Only :class:`Schedule` writes it."""

    slot: OpenSlot
    state: SlotPhase = SlotPhase.WAITING

    def move(self, state: SlotPhase) -> None:
        """Go to another state; only moves in ``SLOT_MOVES`` exist."""
        assert state in SLOT_MOVES[self.state], f"a slot went from {self.state} to {state}"
        self.state = state


class Schedule:
    """The slots of one purpose that this process holds.

    After every call that changes something, and at :meth:`next_time`, ask :meth:`due` what to start.
    """

    def __init__(self, *, concurrency: int, max_attempts: int, outage_s: float, worked: bool = False) -> None:
        self.breaker = Breaker(outage_s, worked=worked)
        self._concurrency = concurrency
        self._max_attempts = max_attempts
        self._entries: dict[Place, _ScheduledSlot] = {}  # those that have not ended
        self._groups: dict[int, dict[Place, None]] = {}  # the same, by group, in the order in which they came
        self._running = 0
        self._probe: Place | None = None  # the slot that runs to see whether anything can
        self._waiting: list[list[Place]] = [[] for _ in range(max_attempts)]
        """A heap for each number of failed attempts; it may hold places that wait no more."""
        self._pauses: list[tuple[float, Place]] = []  # a heap, likewise

    def __len__(self) -> int:
        """Slots that have not ended."""
        return len(self._entries)

    def __contains__(self, slot: OpenSlot) -> bool:
        """True for a slot that was added and has not ended."""
        return place_of(slot) in self._entries

    @property
    def running(self) -> int:
        """Slots that run."""
        return self._running

    def add(self, slot: OpenSlot) -> SlotPhase:
        """Take a slot in hand: WAITING, or LOST if its attempts were used up before."""
        place = place_of(slot)
        assert place not in self._entries, f"slot {place} was launched twice"
        entry = self._entries[place] = _ScheduledSlot(slot=slot)
        self._groups.setdefault(slot.group_index, {})[place] = None
        if slot.attempt >= self._max_attempts:
            return self._end(place, SlotPhase.LOST)
        heapq.heappush(self._waiting[slot.attempt], place)
        return entry.state

    def due(self, now: float) -> list[OpenSlot]:
        """Slots to start now, oldest first; they run from here on."""
        while self._pauses and self._pauses[0][0] <= now:
            _, place = heapq.heappop(self._pauses)
            if self._state(place) is SlotPhase.BACKING_OFF:
                entry = self._entries[place]
                entry.move(SlotPhase.WAITING)
                heapq.heappush(self._waiting[entry.slot.attempt], place)
        match self.breaker.ask(now):
            case Circuit.OPEN:
                return []
            case Circuit.PROBING:
                return [self._start(place) for place in self._next_probe()]
            case Circuit.CLOSED:
                return [self._start(place) for place in self._oldest(self._concurrency - self._running)]

    def graded(self, slot: OpenSlot) -> None:
        """A running slot has its reward."""
        self._end(place_of(slot), SlotPhase.GRADED)
        self.breaker.succeeded()

    def failed(self, slot: OpenSlot, *, due: int, now: float) -> SlotPhase:
        """An attempt of a running slot failed, and attempt ``due`` is next: BACKING_OFF, or LOST if it may not be."""
        place = place_of(slot)
        self.breaker.failed(now, probe=place == self._probe)
        if due >= self._max_attempts:
            return self._end(place, SlotPhase.LOST)
        entry = self._entries[place]
        entry.move(SlotPhase.BACKING_OFF)
        entry.slot = replace(entry.slot, attempt=due)
        self._stop(place)
        heapq.heappush(self._pauses, (now + PAUSES.delay_s(due), place))
        return entry.state

    def abandon(self, group_index: int) -> list[Place]:
        """A group was dropped: none of its slots runs any more. Returns those that did, to be cancelled."""
        places = list(self._groups.get(group_index, ()))
        running = [place for place in places if self._entries[place].state is SlotPhase.RUNNING]
        for place in places:
            self._end(place, SlotPhase.ABANDONED)
        return running

    def next_time(self) -> float | None:
        """When :meth:`due` has something to say even if nothing ends meanwhile."""
        while self._pauses and self._state(self._pauses[0][1]) is not SlotPhase.BACKING_OFF:
            heapq.heappop(self._pauses)
        times = [self._pauses[0][0]] if self._pauses else []
        if self.breaker.circuit is Circuit.OPEN and len(self._entries) > self._running:
            times.append(self.breaker.until_s)
        return min(times, default=None)

    def _start(self, place: Place) -> OpenSlot:
        entry = self._entries[place]
        entry.move(SlotPhase.RUNNING)
        self._running += 1
        return entry.slot

    def _end(self, place: Place, state: SlotPhase) -> SlotPhase:
        entry = self._entries.pop(place)
        group = self._groups[place[0]]
        del group[place]
        if not group:
            del self._groups[place[0]]
        if entry.state is SlotPhase.RUNNING:
            self._stop(place)
        entry.move(state)
        return state

    def _stop(self, place: Place) -> None:
        self._running -= 1
        if place == self._probe:
            self._probe = None

    def _oldest(self, number: int) -> Iterator[Place]:
        """Up to ``number`` waiting slots, oldest first, off their heaps."""
        for _ in range(number):
            heaps = [heap for heap in self._waiting if self._has_waiting(heap)]
            if not heaps:
                return
            yield heapq.heappop(min(heaps, key=lambda heap: heap[0]))

    def _next_probe(self) -> list[Place]:
        """The slot that probes, unless one does: that with the fewest attempts, so that a task that fails by itself
        cannot pass for an outage.
        """
        if self._probe is not None:
            return []
        heap = next(filter(self._has_waiting, self._waiting), None)
        if heap is None:
            return []
        self._probe = heapq.heappop(heap)
        return [self._probe]

    def _has_waiting(self, heap: list[Place]) -> bool:
        """Say whether a slot of a heap waits: then it is the first one, as those before it are taken off."""
        while heap and self._state(heap[0]) is not SlotPhase.WAITING:
            heapq.heappop(heap)
        return bool(heap)

    def _state(self, place: Place) -> SlotPhase | None:
        entry = self._entries.get(place)
        return None if entry is None else entry.state


def place_of(slot: OpenSlot) -> Place:
    """Group and number of a slot."""
    return slot.group_index, slot.slot
