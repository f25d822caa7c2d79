"""Which model calls may go to the engines now: the pure core of back-pressure.

    enter ──▶ GRANTED ──leave──▶ LEFT          a place was free
          ├─▶ WAITING ──due───▶ GRANTED        one became free, or EXPIRED: the call's deadline came first
          └─▶ REFUSED                          as many wait as may, or it gave way to a call of a shorter line

Owns how many calls are at the engines and who waits for a place. People come before rollouts: a production call that
finds all places taken by rollouts gets one beyond the limit, as the engines put rollouts back for it, and it never
waits behind one. A small share of places is kept for rollouts, in addition, so that nothing starves for ever.

How many places there are is found out, as TCP finds out what a path carries (Jacobson 1988, "Congestion avoidance and
control"): while all are in use and nothing queues at the engines, each answer adds one place at first, and one per
round of answers after the first congestion; when an engine says that it is busy, or a call runs into its deadline, the
number falls by a factor, at most once in the time of one call. No clock: ``now`` is an argument, in seconds.

Within a class accounts have equal shares of places and of the room to wait, as soon as several want them
(:mod:`etude.gateway.routing.fairness`).
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from math import ceil
from types import MappingProxyType

from etude.gateway.routing.fairness import FairQueue


class TrafficClass(StrEnum):
    """Who is served."""

    PRODUCTION = "production"
    """People who wait for an answer."""
    ROLLOUT = "rollout"
    """Training, which can wait."""


PRIORITIES: Mapping[TrafficClass, int] = MappingProxyType({TrafficClass.PRODUCTION: -1, TrafficClass.ROLLOUT: 0})
"""What engines are told, best first and in order of service: the lower is served first there, too. Rollouts have the
default, so that an engine without priorities serves a run as well.
"""
DECREASE = 0.7
"""What is left of the limit after congestion: that of CUBIC (RFC 9438, section 4.6); half is for paths whose queues
nobody can see.
"""
QUEUE_SHARE = 0.1
"""Calls that may queue at the engines, of those in flight, while the limit still grows."""
SMOOTHING = 0.125
"""Weight of a new sample in the mean time of a call and in the mean gap between two that leave (Jacobson's gain)."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""Bounds of the advice when to try again."""


class TicketState(StrEnum):
    """Where a call is on its way to an engine."""

    NEW = "new"
    GRANTED = "granted"
    """It has a place."""
    WAITING = "waiting"
    """In line."""
    REFUSED = "refused"
    """The line was full, or is, and it had more than its share of it."""
    EXPIRED = "expired"
    """Its deadline came before a place."""
    LEFT = "left"
    """It is over, or it gave up waiting."""


TICKET_MOVES: Mapping[TicketState, frozenset[TicketState]] = MappingProxyType(
    {
        TicketState.NEW: frozenset({TicketState.GRANTED, TicketState.WAITING, TicketState.REFUSED}),
        TicketState.GRANTED: frozenset({TicketState.LEFT}),
        TicketState.WAITING: frozenset(
            {TicketState.GRANTED, TicketState.REFUSED, TicketState.EXPIRED, TicketState.LEFT}
        ),
        TicketState.REFUSED: frozenset(),
        TicketState.EXPIRED: frozenset(),
        TicketState.LEFT: frozenset(),
    }
)
"""State of a ticket → where it may go."""


class Outcome(StrEnum):
    """How a call that had a place ended."""

    ANSWERED = "answered"
    OVERLOADED = "overloaded"
    """Engines were busy, or the deadline passed: there are too many calls."""
    FAILED = "failed"
    """For a reason that says nothing of the load."""
    ABANDONED = "abandoned"
    """Its caller went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Bounds of what is admitted."""

    production: int = 512
    """Places that production calls may hold."""
    rollouts: int = 512
    """Places that rollouts may hold."""
    waiting: int = 1024
    """Calls of each class that may wait for a place."""
    start: int = 64
    """Places before anything is known of the engines."""
    floor: int = 4
    """Places there are at least, however congested."""
    rollout_share: float = 0.05
    """Places kept for rollouts, of the limit and beyond it; at least one."""

    def __post_init__(self) -> None:
        if min(self.production, self.rollouts, self.floor) < 1 or self.waiting < 0:
            raise ValueError(f"{self}: production, rollouts and floor are at least 1, waiting at least 0")
        if not self.floor <= self.start:
            raise ValueError(f"start={self.start}: expected at least the floor, {self.floor}")
        if not 0 < self.rollout_share < 1:
            raise ValueError(f"rollout_share={self.rollout_share}: expected a number between 0 and 1")

    @property
    def ceiling(self) -> int:
        """Places there are at most: as many as may ever be in use."""
        return self.production + self.rollouts

    def of(self, traffic: TrafficClass) -> int:
        """Places that a class may hold."""
        return self.production if traffic is TrafficClass.PRODUCTION else self.rollouts


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One call's claim to a place. Only :class:`Admission` writes it."""

    traffic: TrafficClass
    deadline: float
    """When a place is of no more use."""
    account: str = ""
    """The account whose share of the places it takes."""
    state: TicketState = TicketState.NEW
    granted_at: float = 0.0
    retry_after_s: float | None = None
    """When to try again, if it was refused or has expired."""

    def move(self, state: TicketState) -> None:
        """Go to another state; only moves in ``TICKET_MOVES`` exist."""
        assert state in TICKET_MOVES[self.state], f"a ticket went from {self.state} to {state}"
        self.state = state


DEFAULT_ADMISSION = AdmissionLimits()


class Admission:
    """Gives places to calls.

    After every :meth:`leave`, and when the deadline of a ticket that waits has come, ask :meth:`due` who may go or has
    waited too long.
    """

    def __init__(self, limits: AdmissionLimits = DEFAULT_ADMISSION) -> None:
        self._limits = limits
        self._places = Places(limits)
        self._inflight = dict.fromkeys(TrafficClass, 0)
        self._held: dict[TrafficClass, Counter[str]] = {one: Counter() for one in TrafficClass}  # by account
        self._lines: dict[TrafficClass, FairQueue[Ticket]] = {one: FairQueue() for one in TrafficClass}
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap; it may hold tickets that wait no more
        self._arrivals = count()
        self._ended: list[Ticket] = []
        """Tickets that expired or gave way since :meth:`due` was asked."""
        self._drain = Drain()

    @property
    def limit(self) -> int:
        """Places that there are now, beyond which only reserved ones are given."""
        return self._places.number

    def inflight(self, traffic: TrafficClass) -> int:
        """Places in use by a class."""
        return self._inflight[traffic]

    def waiting(self, traffic: TrafficClass) -> int:
        """Calls of a class in line."""
        return len(self._lines[traffic])

    def enter(self, traffic: TrafficClass, now: float, deadline: float, account: str = "") -> Ticket:
        """Ask for a place: the ticket is granted, waits until ``deadline``, or is refused with ``retry_after_s``.

        One that waits may have had another one refused: ask :meth:`due`.
        """
        self._expire(now)
        ticket, line = Ticket(traffic=traffic, deadline=deadline, account=account), self._lines[traffic]
        if not line and self._has_place(traffic):
            self._grant(ticket, now)
        elif deadline <= now or (len(line) >= self._limits.waiting and not self._displace(line, account)):
            self._refuse(ticket)
        else:
            ticket.move(TicketState.WAITING)
            line.add(account, ticket)
            heapq.heappush(self._deadlines, (deadline, next(self._arrivals), ticket))
        return ticket

    def leave(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        """A call is over, or gives up waiting; a ticket that was refused or has expired needs no leaving."""
        if ticket.state is TicketState.WAITING:
            self._lines[ticket.traffic].remove(ticket.account, ticket)
        elif ticket.state is TicketState.GRANTED:
            busy = sum(self._inflight.values())
            self._inflight[ticket.traffic] -= 1
            held = self._held[ticket.traffic]
            held[ticket.account] -= 1
            if not held[ticket.account]:
                del held[ticket.account]  # or accounts would become ever more
            self._drain.left(now, busy)
            if outcome is Outcome.ANSWERED:
                self._places.answered(now - ticket.granted_at, busy)
            elif outcome is Outcome.OVERLOADED:
                self._places.congested(now)
        else:
            return
        ticket.move(TicketState.LEFT)

    def due(self, now: float) -> list[Ticket]:
        """Tickets that do not wait any more: granted in order of class, share and arrival, expired or refused."""
        self._expire(now)
        changed, self._ended = self._ended, []
        for traffic in PRIORITIES:
            line = self._lines[traffic]
            while line and self._has_place(traffic):
                ticket = line.pop(self._held[traffic])
                self._grant(ticket, now)
                changed.append(ticket)
        return changed

    def congested(self, now: float) -> None:
        """An engine turned a call away because it has enough to do."""
        self._places.congested(now)

    def queueing(self, calls: int) -> None:
        """So many calls wait inside the engines."""
        self._places.queueing = calls

    def _has_place(self, traffic: TrafficClass) -> bool:
        held, limit = self._inflight[traffic], self.limit
        if held >= self._limits.of(traffic):
            return False
        if traffic is TrafficClass.PRODUCTION:
            return held < limit  # what rollouts hold does not count: the engines put them back
        reserved = ceil(limit * self._limits.rollout_share)
        return sum(self._inflight.values()) < limit or held < reserved

    def _grant(self, ticket: Ticket, now: float) -> None:
        ticket.move(TicketState.GRANTED)
        ticket.granted_at = now
        self._inflight[ticket.traffic] += 1
        self._held[ticket.traffic][ticket.account] += 1

    def _refuse(self, ticket: Ticket) -> None:
        ticket.move(TicketState.REFUSED)
        ticket.retry_after_s = self._drain.wait_s(len(self._lines[ticket.traffic]) + 1)

    def _displace(self, line: FairQueue[Ticket], account: str) -> bool:
        """Make room in a full line for a call of ``account``, if that has less than its share."""
        found = line.displaced_by(account)
        if found is None:
            return False
        line.remove(*found)
        self._refuse(found[1])
        self._ended.append(found[1])
        return True

    def _expire(self, now: float) -> None:
        self._forget_settled()
        while self._deadlines and self._deadlines[0][0] <= now:
            *_, ticket = heapq.heappop(self._deadlines)
            line = self._lines[ticket.traffic]
            ticket.retry_after_s = self._drain.wait_s(len(line))
            line.remove(ticket.account, ticket)
            ticket.move(TicketState.EXPIRED)
            self._ended.append(ticket)
            self._forget_settled()

    def _forget_settled(self) -> None:
        """Let the earliest deadline be that of a call that still waits, and the heap no larger than twice the lines."""
        while self._deadlines and self._deadlines[0][2].state is not TicketState.WAITING:
            heapq.heappop(self._deadlines)
        if len(self._deadlines) > 2 * sum(map(len, self._lines.values())) + 64:
            self._deadlines = list(self._still_waiting())
            heapq.heapify(self._deadlines)

    def _still_waiting(self) -> Iterator[tuple[float, int, Ticket]]:
        return (entry for entry in self._deadlines if entry[2].state is TicketState.WAITING)


class Places:
    """How many calls the engines take at once: additive increase, multiplicative decrease."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.queueing = 0
        """Calls that wait inside the engines, as they last said."""
        self._limits = limits
        self._number = float(min(limits.start, limits.ceiling))
        self._threshold = float(limits.ceiling)  # below it one answer adds one place; congestion sets it
        self._call_s: float | None = None
        self._fell_at: float | None = None

    @property
    def number(self) -> int:
        """Places that there are."""
        return int(self._number)

    def answered(self, call_s: float, busy: int) -> None:
        """A call was answered after ``call_s``; ``busy`` places were in use, its own among them."""
        self._call_s = call_s if self._call_s is None else self._call_s + SMOOTHING * (call_s - self._call_s)
        if busy < self.number or self.queueing > QUEUE_SHARE * busy:
            return  # more places would be of no use
        step = 1.0 if self._number < self._threshold else 1.0 / self._number
        self._number = min(self._number + step, float(self._limits.ceiling))

    def congested(self, now: float) -> None:
        """There were too many; what follows within the time of a call is of the same congestion."""
        if self._fell_at is not None and now - self._fell_at < (self._call_s or 0.0):
            return
        self._fell_at = now
        floor = min(self._limits.floor, self._limits.ceiling)
        self._number = self._threshold = max(self._number * DECREASE, float(floor))


class Drain:
    """How fast calls leave, and so how long a line takes."""

    def __init__(self) -> None:
        self._gap_s = 0.0
        self._left_at: float | None = None

    def left(self, now: float, busy: int) -> None:
        """One of ``busy`` calls left; the time after the last one says nothing of the speed."""
        if self._left_at is not None:
            self._gap_s += SMOOTHING * (now - self._left_at - self._gap_s)
        self._left_at = now if busy > 1 else None

    def wait_s(self, calls: int) -> float:
        """Seconds until ``calls`` have left, within bounds."""
        return min(max(calls * self._gap_s, RETRY_MIN_S), RETRY_MAX_S)
