"""Admission control: which model calls go to the engines now, and the queue of the others.

    async with queue.permit(traffic, deadline, account): …call an engine…

    acquire ──▶ GRANTED ──release──▶ RELEASED    a permit was free
            ├─▶ WAITING ──due────▶ GRANTED       one became free, or EXPIRED: the call's deadline came first
            └─▶ REFUSED                          the queue is full, or the call was dropped for an account with a
            shorter queue

Owns the number of calls at the engines and the queue for permits. :class:`AdmissionController` is the pure core: no
clock, ``now`` is an argument, in seconds. :class:`AdmissionQueue` is its async shell: consumes calls; produces permits;
waits for a call to end, at most until the deadline; woken by the call that ends; on shutdown each waiter is cancelled
with its call.

Users come before rollouts. If rollouts hold all permits, a production call gets one beyond the limit and never waits
behind a rollout; the engines preempt rollouts for it. A small extra share of permits is reserved for rollouts, so that
they never starve.

The number of permits is found as TCP finds the capacity of a path (Jacobson 1988, "Congestion avoidance and control").
While all are in use and no call queues at the engines, each answer adds one permit at first, and each round of answers
adds one after the first congestion. When an engine reports that it is busy, or a call reaches its deadline, the number
falls by a factor, at most once in the duration of one call.

Within a class, accounts that compete have equal shares of permits and of the queue: products by their keys, rollouts by
their sessions, so that no agent holds back its neighbours. This is max-min fairness (Bertsekas and Gallager, *Data
Networks*, 1992, section 6.5.2): an account may use idle capacity, but no more than its share while others need theirs.
In a full queue the call to drop is chosen by longest queue drop (B. Suter, T. Lakshman, D. Stiliadis and A. Choudhury,
INFOCOM 1998): a full queue never keeps out an account whose own queue is shorter.
"""

import asyncio
import heapq
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from math import ceil
from types import MappingProxyType
from typing import final

from etude.errors import EngineBusy
from etude.gateway.api.calls import ApiError
from etude.protocols import Clock


class TrafficClass(StrEnum):
    """The priority class of a call."""

    PRODUCTION = "production"
    """Users, who wait for an answer."""
    ROLLOUT = "rollout"
    """Training, which can wait."""


PRIORITIES: Mapping[TrafficClass, int] = MappingProxyType({TrafficClass.PRODUCTION: -1, TrafficClass.ROLLOUT: 0})
"""Traffic class → priority at the engines, in order of service: a lower number is served first, also by the engines.
Rollouts have the engines' default, so an engine without priorities works as well.
"""
SHADOW_PRIORITY = 1
"""Priority of shadow calls, whose answers no caller waits for."""
DECREASE = 0.7
"""Factor of the limit after congestion, as in CUBIC (RFC 9438, section 4.6); a factor of one half is for paths whose
queues are invisible.
"""
QUEUE_SHARE = 0.1
"""Share of calls in flight that may queue at the engines while the limit still grows."""
SMOOTHING = 0.125
"""Weight of a new sample in the mean call time and in the mean gap between two completions (Jacobson's gain)."""
SPARE_DEADLINES = 64
"""Deadlines of calls that no longer wait, beyond as many as do, that are kept before all are looked through."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""Bounds of the suggested time before a retry."""


class TicketState(StrEnum):
    """The state of a call that needs a permit."""

    NEW = "new"
    GRANTED = "granted"
    """It has a permit."""
    WAITING = "waiting"
    """It is in the queue."""
    REFUSED = "refused"
    """The queue was full, or the call was dropped from a full queue because its account had more than its share."""
    EXPIRED = "expired"
    """Its deadline passed before it got a permit."""
    RELEASED = "released"
    """It has ended, or it stopped waiting."""


TICKET_MOVES: Mapping[TicketState, frozenset[TicketState]] = MappingProxyType(
    {
        TicketState.NEW: frozenset({TicketState.GRANTED, TicketState.WAITING, TicketState.REFUSED}),
        TicketState.GRANTED: frozenset({TicketState.RELEASED}),
        TicketState.WAITING: frozenset(
            {TicketState.GRANTED, TicketState.REFUSED, TicketState.EXPIRED, TicketState.RELEASED}
        ),
        TicketState.REFUSED: frozenset(),
        TicketState.EXPIRED: frozenset(),
        TicketState.RELEASED: frozenset(),
    }
)
"""State of a ticket → possible next states."""


class AdmissionOutcome(StrEnum):
    """The outcome of an admitted call."""

    ANSWERED = "answered"
    OVERLOADED = "overloaded"
    """Engines were busy, or the deadline passed: too many calls."""
    FAILED = "failed"
    """Failed for a reason unrelated to load."""
    ABANDONED = "abandoned"
    """Its caller disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits on admitted calls."""

    production: int = 512
    """Permits that production calls may hold."""
    rollouts: int = 512
    """Permits that rollouts may hold."""
    waiting: int = 1024
    """Calls of each class that may queue for a permit."""
    start: int = 64
    """Initial permits, before the engines' capacity is known."""
    floor: int = 4
    """Smallest number of permits, under any congestion."""
    rollout_share: float = 0.05
    """Permits reserved for rollouts, as a share of the limit and in addition to it; at least one."""

    def __post_init__(self) -> None:
        if min(self.production, self.rollouts, self.floor) < 1 or self.waiting < 0:
            raise ValueError(f"{self}: production, rollouts and floor are at least 1, waiting at least 0")
        if not self.floor <= self.start:
            raise ValueError(f"start={self.start}: expected at least the floor, {self.floor}")
        if not 0 < self.rollout_share < 1:
            raise ValueError(f"rollout_share={self.rollout_share}: expected a number between 0 and 1")

    @property
    def ceiling(self) -> int:
        """Largest number of permits that may ever be in use."""
        return self.production + self.rollouts

    def of(self, traffic: TrafficClass) -> int:
        """Permits that a class may hold."""
        return self.production if traffic is TrafficClass.PRODUCTION else self.rollouts


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One call's request for a permit. Only :class:`AdmissionController` writes it."""

    traffic: TrafficClass
    deadline: float
    """Time after which a permit is useless."""
    account: str = ""
    """The account whose share of the permits it takes."""
    state: TicketState = TicketState.NEW
    granted_at: float = 0.0
    retry_after_s: float | None = None
    """Time before a retry, if the call was refused or has expired."""

    def move(self, state: TicketState) -> None:
        """Move to another state; only moves in ``TICKET_MOVES`` are allowed."""
        assert state in TICKET_MOVES[self.state], f"a ticket went from {self.state} to {state}"
        self.state = state


DEFAULT_ADMISSION = AdmissionLimits()


class AdmissionController:
    """Admits calls to the engines: grants permits by traffic class, account and concurrency.

    After every :meth:`release`, and when the deadline of a waiting ticket has passed, call :meth:`due` for the tickets
    that are granted or expired.
    """

    def __init__(self, limits: AdmissionLimits = DEFAULT_ADMISSION) -> None:
        self._limits = limits
        self._limit = ConcurrencyLimit(limits)
        self._permits: dict[TrafficClass, Permits] = {one: Permits() for one in TrafficClass}
        self._queues: dict[TrafficClass, FairQueue] = {one: FairQueue() for one in TrafficClass}
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap; may contain tickets that no longer wait
        self._arrivals = count()
        self._ended: list[Ticket] = []
        """Tickets that expired or were dropped since the last :meth:`due`."""
        self._releases = ReleaseRate()

    @property
    def limit(self) -> int:
        """Current number of permits; beyond it, only reserved ones are granted."""
        return self._limit.permits

    def inflight(self, traffic: TrafficClass) -> int:
        """Permits in use by a class."""
        return self._permits[traffic].total

    def waiting(self, traffic: TrafficClass) -> int:
        """Calls of a class in the queue."""
        return len(self._queues[traffic])

    def acquire(self, traffic: TrafficClass, now: float, deadline: float, account: str = "") -> Ticket:
        """Request a permit: the ticket is granted, waits until ``deadline``, or is refused with ``retry_after_s``.

        A waiting ticket may cause another to be refused: call :meth:`due`.
        """
        self._expire(now)
        ticket, queue = Ticket(traffic=traffic, deadline=deadline, account=account), self._queues[traffic]
        if not queue and self._has_permit(traffic):
            self._grant(ticket, now)
        elif deadline <= now or (len(queue) >= self._limits.waiting and not self._displace(queue, account)):
            self._refuse(ticket)
        else:
            ticket.move(TicketState.WAITING)
            queue.add(ticket)
            heapq.heappush(self._deadlines, (deadline, next(self._arrivals), ticket))
        return ticket

    def release(self, ticket: Ticket, outcome: AdmissionOutcome, now: float) -> None:
        """Record that a call has ended or stopped waiting; refused or expired tickets need no release."""
        if ticket.state is TicketState.WAITING:
            self._queues[ticket.traffic].remove(ticket)
        elif ticket.state is TicketState.GRANTED:
            busy = self._busy()
            self._permits[ticket.traffic].give_back(ticket.account)
            self._releases.released(now, busy)
            if outcome is AdmissionOutcome.ANSWERED:
                self._limit.answered(now - ticket.granted_at, busy)
            elif outcome is AdmissionOutcome.OVERLOADED:
                self._limit.congested(now)
        else:
            return
        ticket.move(TicketState.RELEASED)

    def due(self, now: float) -> list[Ticket]:
        """Tickets that no longer wait: granted in order of class, share and arrival, expired or refused."""
        self._expire(now)
        changed, self._ended = self._ended, []
        for traffic in PRIORITIES:
            queue = self._queues[traffic]
            while queue and self._has_permit(traffic):
                ticket = queue.pop(self._permits[traffic].by_account)
                self._grant(ticket, now)
                changed.append(ticket)
        return changed

    def congested(self, now: float) -> None:
        """Record that an engine rejected a call because it is busy."""
        self._limit.congested(now)

    def queueing(self, calls: int) -> None:
        """Record the number of calls that wait inside the engines."""
        self._limit.queueing = calls

    def _busy(self) -> int:
        return sum(permits.total for permits in self._permits.values())

    def _has_permit(self, traffic: TrafficClass) -> bool:
        used, limit = self.inflight(traffic), self.limit
        if used >= self._limits.of(traffic):
            return False
        if traffic is TrafficClass.PRODUCTION:
            return used < limit  # permits of rollouts do not count: the engines preempt them
        return self._busy() < limit or used < ceil(limit * self._limits.rollout_share)

    def _grant(self, ticket: Ticket, now: float) -> None:
        ticket.move(TicketState.GRANTED)
        ticket.granted_at = now
        self._permits[ticket.traffic].take(ticket.account)

    def _refuse(self, ticket: Ticket) -> None:
        ticket.move(TicketState.REFUSED)
        ticket.retry_after_s = self._releases.wait_s(len(self._queues[ticket.traffic]) + 1)

    def _displace(self, queue: "FairQueue", account: str) -> bool:
        """Make room in a full queue for a call of ``account``, if that account has less than its share."""
        ticket = queue.displaced_by(account)
        if ticket is None:
            return False
        queue.remove(ticket)
        self._refuse(ticket)
        self._ended.append(ticket)
        return True

    def _expire(self, now: float) -> None:
        self._forget_settled()
        while self._deadlines and self._deadlines[0][0] <= now:
            *_, ticket = heapq.heappop(self._deadlines)
            queue = self._queues[ticket.traffic]
            ticket.retry_after_s = self._releases.wait_s(len(queue))
            queue.remove(ticket)
            ticket.move(TicketState.EXPIRED)
            self._ended.append(ticket)
            self._forget_settled()

    def _forget_settled(self) -> None:
        """Drop settled tickets, so that the earliest deadline is of a waiting call and there are at most twice as many
        as calls wait, and ``SPARE_DEADLINES``.
        """
        while self._deadlines and self._deadlines[0][2].state is not TicketState.WAITING:
            heapq.heappop(self._deadlines)
        if len(self._deadlines) > 2 * sum(map(len, self._queues.values())) + SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._deadlines)


class Permits:
    """The permits in use by one class."""

    def __init__(self) -> None:
        self.total = 0
        """Permits of all accounts."""
        self.by_account: Counter[str] = Counter()
        """Permits of each account that has any."""

    def take(self, account: str) -> None:
        """Count a permit that a call got."""
        self.total += 1
        self.by_account[account] += 1

    def give_back(self, account: str) -> None:
        """Count a permit that a call no longer needs."""
        self.total -= 1
        self.by_account[account] -= 1
        if not self.by_account[account]:
            del self.by_account[account]  # or the number of accounts would grow without limit


class ConcurrencyLimit:
    """The number of calls that engines run at once: additive increase, multiplicative decrease (AIMD)."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.queueing = 0
        """Calls that wait inside the engines, according to their last report."""
        self._limits = limits
        self._number = float(min(limits.start, limits.ceiling))
        self._threshold = float(limits.ceiling)  # below it each answer adds one permit; set by congestion
        self._call_s: float | None = None
        self._fell_at: float | None = None

    @property
    def permits(self) -> int:
        """Current number of permits."""
        return int(self._number)

    def answered(self, call_s: float, busy: int) -> None:
        """Record an answer after ``call_s``, with ``busy`` permits in use, its own included."""
        self._call_s = call_s if self._call_s is None else self._call_s + SMOOTHING * (call_s - self._call_s)
        if busy < self.permits or self.queueing > QUEUE_SHARE * busy:
            return  # more permits would be useless
        step = 1.0 if self._number < self._threshold else 1.0 / self._number
        self._number = min(self._number + step, float(self._limits.ceiling))

    def congested(self, now: float) -> None:
        """Lower the limit; later signals within the duration of a call belong to the same congestion."""
        if self._fell_at is not None and now - self._fell_at < (self._call_s or 0.0):
            return
        self._fell_at = now
        floor = min(self._limits.floor, self._limits.ceiling)
        self._number = self._threshold = max(self._number * DECREASE, float(floor))


class ReleaseRate:
    """The rate at which calls end, which gives the expected waiting time of a queue."""

    def __init__(self) -> None:
        self._gap_s = 0.0
        self._released_at: float | None = None

    def released(self, now: float, busy: int) -> None:
        """Record that one of ``busy`` calls ended; the gap after the last call says nothing about the rate."""
        if self._released_at is not None:
            self._gap_s += SMOOTHING * (now - self._released_at - self._gap_s)
        self._released_at = now if busy > 1 else None

    def wait_s(self, calls: int) -> float:
        """Seconds until ``calls`` calls have ended, within bounds."""
        return min(max(calls * self._gap_s, RETRY_MIN_S), RETRY_MAX_S)


@final
class FairQueue:
    """Waiting tickets, fair between accounts; first come, first served within each account."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[Ticket, None]] = {}  # none is empty; least recently served account first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, ticket: Ticket) -> None:
        """Queue a ticket behind the others of its account."""
        self._queues.setdefault(ticket.account, OrderedDict())[ticket] = None
        self._size += 1

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting ticket."""
        queue = self._queues[ticket.account]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.account]
        self._size -= 1

    def pop(self, in_progress: Mapping[str, int]) -> Ticket:
        """The next ticket, from the account with the fewest calls ``in_progress``; ties are served in turn."""
        account = next((one for one in self._queues if not in_progress.get(one, 0)), None)  # most often the first
        if account is None:
            account = min(self._queues, key=lambda one: in_progress[one])
        queue = self._queues.pop(account)
        ticket, _ = queue.popitem(last=False)
        if queue:
            self._queues[account] = queue  # at the end of the order
        self._size -= 1
        return ticket

    def displaced_by(self, account: str) -> Ticket | None:
        """The ticket to drop for one of ``account``; ``None`` if no queue is longer by two."""
        longest = max(self._queues, key=lambda one: len(self._queues[one]), default=account)
        if len(self._queues.get(longest, ())) < len(self._queues.get(account, ())) + 2:
            return None
        return next(reversed(self._queues[longest]))


@final
class AdmissionQueue:
    """Lets callers await permits from ``controller``."""

    def __init__(self, controller: AdmissionController, clock: Clock) -> None:
        self.controller = controller
        """Knows the calls in progress and in the queue."""
        self._clock = clock
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def permit(self, traffic: TrafficClass, deadline: float, account: str) -> AsyncIterator[None]:
        """Hold a permit for one call. Raises :class:`~etude.gateway.api.calls.ApiError` with 429."""
        ticket = await self._acquire(traffic, deadline, account)
        try:
            yield
        except BaseException as error:
            self._release(ticket, self._outcome(ticket, error))
            raise
        self._release(ticket, AdmissionOutcome.ANSWERED)

    async def _acquire(self, traffic: TrafficClass, deadline: float, account: str) -> Ticket:
        """Wait for a permit; return the granted ticket."""
        now = self._clock.now()
        ticket = self.controller.acquire(traffic, now, deadline, account)
        if ticket.state is TicketState.WAITING:
            self._wake(now)  # the ticket that was dropped for it
            await self._wait(ticket)
        if ticket.state is not TicketState.GRANTED:
            message = f"too many {traffic} calls are in progress and in the queue: try again later"
            raise ApiError(429, "rate_limit_exceeded", message, retry_after_s=ticket.retry_after_s)
        return ticket

    def _release(self, ticket: Ticket, outcome: AdmissionOutcome) -> None:
        """Return a permit and pass it to a waiting call."""
        now = self._clock.now()
        self.controller.release(ticket, outcome, now)
        self._wake(now)

    def _outcome(self, ticket: Ticket, error: BaseException) -> AdmissionOutcome:
        """The meaning of an error for the load; a call that its deadline ended is cancelled, as if abandoned."""
        if isinstance(error, EngineBusy | TimeoutError) or self._clock.now() >= ticket.deadline:
            return AdmissionOutcome.OVERLOADED
        return AdmissionOutcome.FAILED if isinstance(error, Exception) else AdmissionOutcome.ABANDONED

    async def _wait(self, ticket: Ticket) -> None:
        woken = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({woken}, timeout=ticket.deadline - self._clock.now())
            if not woken.done():
                self._wake(self._clock.now())
            if ticket.state is TicketState.WAITING:  # the timer fired slightly early
                self._release(ticket, AdmissionOutcome.ABANDONED)
        except asyncio.CancelledError:
            self._release(ticket, AdmissionOutcome.ABANDONED)
            raise
        finally:
            self._waiting.pop(ticket, None)

    def _wake(self, now: float) -> None:
        for ticket in self.controller.due(now):
            woken = self._waiting.pop(ticket, None)
            if woken is not None and not woken.done():
                woken.set_result(None)


@final
class InflightCalls:
    """The model calls of one gateway that are in progress, and the gateway's drain."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        """True once new calls are rejected."""
        self._idle = asyncio.Event()

    def check_open(self) -> None:
        """Raise :class:`~etude.gateway.api.calls.ApiError` with 503 while the gateway drains."""
        if self.draining:
            raise ApiError(503, "draining", "this gateway is stopping: use another one, or retry later")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Track one call, from its first check to its last byte."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if self.draining and not self.count:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Reject new calls and wait until none is in progress, at most ``seconds``."""
        self.draining = True
        if not self.count:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
