"""Schedule of slots: running, waiting and given up. The pure core of the rollouts.

                    a place is free            graded
        WAITING ─────────────────────▶ RUNNING ──────▶ GRADED
           ▲                            │ │ │
           │ the pause is over   failed │ │ └─ failed, no attempt left ─▶ LOST
        BACKING_OFF ◀───────────────────┘ └─── its group was dropped ──▶ ABANDONED ◀── (from WAITING, BACKING_OFF)

This module owns the start order of slots, their attempts and pauses. The oldest group goes first, including retries:
batches are formed in admission order, so later groups can wait, and none waits forever. Attempts are in
:mod:`etude.rollouts.worker`, the number of groups in :mod:`etude.rollouts.admission`, outages in
:mod:`etude.rollouts.breaker`. No clock and no I/O: facts and ``now`` (seconds) are arguments. No decision visits all
slots: each costs the logarithm of their number plus the size of its result.
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
"""Pauses before attempts 1, 2, …: together long enough for the restart of a dead process."""

Place: TypeAlias = tuple[int, int]
"""A slot's group and its number there: unique within a purpose, and ordered by age."""


class SlotPhase(StrEnum):
    """State of a slot between its opening and its reward."""

    WAITING = "waiting"
    """Waits for a free place to run."""
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
"""State of a slot → its possible next states. A waiting slot is lost at once if a previous process used up its
attempts.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class _ScheduledSlot:
    """One slot. Only :class:`Schedule` writes it."""

    slot: OpenSlot
    state: SlotPhase = SlotPhase.WAITING

    def move(self, state: SlotPhase) -> None:
        """Change to another state, as ``SLOT_MOVES`` allows."""
        assert state in SLOT_MOVES[self.state], f"a slot went from {self.state} to {state}"
        self.state = state


class Schedule:
    """The slots of one purpose that this process holds.

    After every change, and at :meth:`next_time`, call :meth:`due` for the slots to start.
    """

    def __init__(self, *, concurrency: int, max_attempts: int, outage_s: float, worked: bool) -> None:
        self.breaker = Breaker(outage_s, worked=worked)
        self._concurrency = concurrency
        self._max_attempts = max_attempts
        self._entries: dict[Place, _ScheduledSlot] = {}  # slots that have not ended
        self._groups: dict[int, dict[Place, None]] = {}  # the same, by group, in the order in which they came
        self._running = 0
        self._probe: Place | None = None  # the slot that runs as a probe
        self._waiting: list[list[Place]] = [[] for _ in range(max_attempts)]
        """A heap for each number of failed attempts; it may contain places that no longer wait."""
        self._pauses: list[tuple[float, Place]] = []  # a heap, likewise

    def __len__(self) -> int:
        """Number of slots that have not ended."""
        return len(self._entries)

    def __contains__(self, slot: OpenSlot) -> bool:
        """True for a slot that was added and has not ended."""
        return place_of(slot) in self._entries

    @property
    def running(self) -> int:
        """Number of running slots."""
        return self._running

    def add(self, slot: OpenSlot) -> SlotPhase:
        """Add a slot; returns WAITING, or LOST if its attempts were used up before."""
        place = place_of(slot)
        assert place not in self._entries, f"slot {place} was launched twice"
        entry = self._entries[place] = _ScheduledSlot(slot=slot)
        self._groups.setdefault(slot.group_index, {})[place] = None
        if slot.attempt >= self._max_attempts:
            return self._end(place, SlotPhase.LOST)
        heapq.heappush(self._waiting[slot.attempt], place)
        return entry.state

    def due(self, now: float) -> list[OpenSlot]:
        """Slots to start now, oldest first; they count as running from now on."""
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
        """Record the reward of a running slot."""
        self._end(place_of(slot), SlotPhase.GRADED)
        self.breaker.succeeded()

    def failed(self, slot: OpenSlot, *, due: int, now: float) -> SlotPhase:
        """Record a failed attempt of a running slot, with ``due`` as its next attempt; returns BACKING_OFF, or LOST if
        no attempts are left.
        """
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
        """Abandon the slots of a dropped group; returns the running ones, to be cancelled."""
        places = list(self._groups.get(group_index, ()))
        running = [place for place in places if self._entries[place].state is SlotPhase.RUNNING]
        for place in places:
            self._end(place, SlotPhase.ABANDONED)
        return running

    def next_time(self) -> float | None:
        """Next time at which :meth:`due` may return slots even if no rollout ends before."""
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
        """Pop up to ``number`` waiting slots from their heaps, oldest first."""
        for _ in range(number):
            heaps = [heap for heap in self._waiting if self._has_waiting(heap)]
            if not heaps:
                return
            yield heapq.heappop(min(heaps))  # the one whose first slot is the oldest

    def _next_probe(self) -> list[Place]:
        """The next slot to probe, unless one is probing: the one with the fewest attempts, so that a faulty task does
        not look like an outage.
        """
        if self._probe is not None:
            return []
        heap = next(filter(self._has_waiting, self._waiting), None)
        if heap is None:
            return []
        self._probe = heapq.heappop(heap)
        return [self._probe]

    def _has_waiting(self, heap: list[Place]) -> bool:
        """Report whether a heap has a waiting slot; removes outdated entries, so that it is the first one."""
        while heap and self._state(heap[0]) is not SlotPhase.WAITING:
            heapq.heappop(heap)
        return bool(heap)

    def _state(self, place: Place) -> SlotPhase | None:
        entry = self._entries.get(place)
        return None if entry is None else entry.state


def place_of(slot: OpenSlot) -> Place:
    """Group and number of a slot."""
    return slot.group_index, slot.slot
