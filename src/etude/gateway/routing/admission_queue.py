"""Waiting for a place at the engines: the async shell of :class:`~etude.gateway.routing.admission.Admission`.

    async with line.place(traffic, deadline, account): …call an engine…

Consumes calls; produces places; waits for a call to leave, at most until the deadline; woken by the one that leaves.
Owns the futures of those who wait and what the end of a call says about the load. On shutdown each waiter is cancelled
with its call.
"""

import asyncio
from types import TracebackType
from typing import final

from etude.errors import EngineBusy
from etude.gateway.api.calls import Refusal
from etude.gateway.routing.admission import Admission, Outcome, Ticket, TicketState, TrafficClass
from etude.protocols import Clock


@final
class Line:
    """Hands out the places of ``admission``."""

    def __init__(self, admission: Admission, clock: Clock) -> None:
        self.admission = admission
        """How many are in progress and in line."""
        self._clock = clock
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    def place(self, traffic: TrafficClass, deadline: float, account: str) -> "Place":
        """A place for one call, as a context; entering it raises :class:`~etude.gateway.api.calls.Refusal` with 429."""
        return Place(self, traffic, deadline, account)

    async def enter(self, traffic: TrafficClass, deadline: float, account: str) -> Ticket:
        """Wait for a place; the ticket is granted."""
        now = self._clock.now()
        ticket = self.admission.enter(traffic, now, deadline, account)
        if ticket.state is TicketState.WAITING:
            self._wake(now)  # the one that gave way to it
            await self._wait(ticket)
        if ticket.state is not TicketState.GRANTED:
            raise Refusal(
                429,
                "rate_limit_exceeded",
                f"the {traffic} calls in progress are as many as may be, and so are those in line: try again later",
                retry_after_s=ticket.retry_after_s,
            )
        return ticket

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        """Give a place back, to who waits for it."""
        now = self._clock.now()
        self.admission.leave(ticket, outcome, now)
        self._wake(now)

    def outcome(self, ticket: Ticket, error: BaseException | None) -> Outcome:
        """What the end of a call says about the load; one that its deadline ended was cancelled, as if abandoned."""
        if error is None:
            return Outcome.ANSWERED
        if isinstance(error, EngineBusy | TimeoutError) or self._clock.now() >= ticket.deadline:
            return Outcome.OVERLOADED
        return Outcome.FAILED if isinstance(error, Exception) else Outcome.ABANDONED

    async def _wait(self, ticket: Ticket) -> None:
        woken = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({woken}, timeout=ticket.deadline - self._clock.now())
            if not woken.done():
                self._wake(self._clock.now())
            if ticket.state is TicketState.WAITING:  # the timer was early by a tick
                self.leave(ticket, Outcome.ABANDONED)
        except asyncio.CancelledError:
            self.leave(ticket, Outcome.ABANDONED)
            raise
        finally:
            self._waiting.pop(ticket, None)

    def _wake(self, now: float) -> None:
        for ticket in self.admission.due(now):
            woken = self._waiting.pop(ticket, None)
            if woken is not None and not woken.done():
                woken.set_result(None)


@final
class Place:
    """The context of :meth:`Line.place`."""

    __slots__ = ("_account", "_deadline", "_line", "_ticket", "_traffic")

    def __init__(self, line: Line, traffic: TrafficClass, deadline: float, account: str) -> None:
        self._line, self._traffic, self._deadline, self._account = line, traffic, deadline, account
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> None:
        self._ticket = await self._line.enter(self._traffic, self._deadline, self._account)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ticket is not None, "only a place that was entered is left"
        self._line.leave(self._ticket, self._line.outcome(self._ticket, error))
