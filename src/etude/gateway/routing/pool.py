"""The engines behind a gateway as one engine: every call ends with an answer, whichever of them dies meanwhile.

    call ──▶ Router.choose ──▶ engine ──▶ answer            polls ──▶ Router.report
               ▲                 │ lost: another one, or the same once it was heard of again
               └─────────────────┘ busy: another one, or a pause

Owns the calls in progress, their deadlines and what becomes of a turn whose engine fails. Which engine is asked is the
:class:`~etude.gateway.routing.router.Router`'s to decide, and how many calls come here at all the
:class:`~etude.gateway.routing.admission.Admission`'s; it is told when engines are busy and how many calls queue in
them.

A turn that nobody has seen is sampled anew; one that was handed out in part is continued
(:mod:`etude.gateway.capture.continuations`).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar, final

from etude.errors import EngineBusy, EngineUnavailable, VersionPending
from etude.gateway.capture.continuations import StreamedTurn
from etude.gateway.routing.admission import Admission
from etude.gateway.routing.engine_health import EngineEntry, EngineState, EngineView
from etude.gateway.routing.router import Reason, Router
from etude.protocols import Clock, Completion, Engine, SamplingParams, TokenChunk
from etude.types import Ids, TokenIds, as_list

Answer = TypeVar("Answer")

PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 1.0
"""A call that finds no engine pauses this long at first and at most; in between the pause doubles."""
JITTER = 0.5
"""Share of each pause that is random: callers that were turned away together do not come back together."""
TICK_S = 0.05
"""How often the watch looks whether a poll is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What bounds a call and a poll."""

    outage_s: float = 30.0
    """How long a call waits, in all, while there is no engine that it could go to."""
    losses: int = 4
    """Engines that a call may lose under way: a request that every engine dies of must not kill all of them."""
    poll_s: float = 5.0
    """An engine that cannot say its version in this time has failed the poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What a call needs of its engine."""

    min_version: int | None = None
    """Oldest weight version that may sample it; ``None`` for any."""
    region: str | None = None
    """Where it should be, if anything there can take it."""
    deadline_s: float = 600.0
    """How long the call may take in all, from now."""
    taken: Callable[[float | None], None] = lambda at: None
    """Told when an engine is given the call, and with ``None`` when it failed under it."""


ANYTHING = Want()
DEFAULT_LIMITS = PoolLimits()


@dataclass(slots=True, kw_only=True)
class PoolCounters:
    """What happened since the start."""

    losses: int = 0
    """Engines that failed under a call."""
    continued: int = 0
    """Turns that went on elsewhere after some of their tokens."""
    busy: int = 0
    """Calls that an engine turned away because it had enough to do."""
    pauses: int = 0
    """Times that a call found no engine and paused."""


@final
class EnginePool:
    """Calls engines; ``engines`` makes the client of a URL, which should give up at the first trouble.

    :meth:`watch` has to run, or an engine that failed under a call is never asked again.
    """

    def __init__(
        self,
        engines: Callable[[str], Engine],
        router: Router,
        clock: Clock,
        limits: PoolLimits = DEFAULT_LIMITS,
        *,
        admission: Admission | None = None,
        seed: int | None = None,
    ) -> None:
        """``admission`` is told of congestion; ``seed`` fixes the jitter."""
        self.counters = PoolCounters()
        self._make = engines
        self._router = router
        self._clock = clock
        self._limits = limits
        self._admission = admission
        self._random = Random(seed)
        self._clients: dict[str, _Client] = {}

    def add(self, entry: EngineEntry) -> None:
        """Register an engine; it is polled at once. Raises ``ValueError`` if the name is taken, or for its URL."""
        client = _Client(engine=self._make(entry.url))
        self._router.add(entry, self._clock.now())
        self._clients[entry.name] = client

    def remove(self, name: str) -> None:
        """Send nothing more to an engine; its calls end as they may. Raises ``ValueError`` for an unknown name."""
        self._router.remove(name)
        del self._clients[name]

    def list(self) -> tuple[EngineView, ...]:
        """What is known of each engine."""
        return self._router.engines()

    def versions(self) -> tuple[int, ...]:
        """The weight versions that calls may be answered with now, ascending, each once."""
        serving = (view for view in self.list() if view.state in (EngineState.HEALTHY, EngineState.SUSPECT))
        return tuple(sorted({view.health.version for view in serving if view.health is not None}))

    def announce(self, version: int, digest: str) -> None:
        """The weight log says which digest a version has. Raises ``ValueError`` if it said otherwise before."""
        self._router.announce(version, digest, self._clock.now())

    async def generate(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str, want: Want = ANYTHING
    ) -> Completion:
        """Sample one completion; when its engine fails, it is sampled anew elsewhere.

        Raises ``ValueError`` when an engine refuses the request, :class:`~etude.errors.VersionPending` when none has
        the wanted version, :class:`~etude.errors.EngineBusy` when all had enough to do until the deadline, and
        :class:`~etude.errors.EngineUnavailable` when none answered.
        """
        trip = _Trip(session=session, want=want, began=self._clock.now())
        while True:
            name = await self._choose(trip)
            with self._calling(name, trip):
                client = self._clients[name]
                answer = client.engine.generate(prompt_ids, params, session=session)
                completion = await self._bounded(client, trip, answer)
                self._router.answered(name, self._clock.now(), _last(completion.versions))
                return completion

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str, want: Want = ANYTHING
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and hand out its tokens as they come; when its engine fails, it is continued elsewhere.

        Raises like :meth:`generate`. With top-p or top-k, a turn of which some tokens were handed out already cannot be
        continued: it raises :class:`~etude.errors.EngineUnavailable`.
        """
        trip = _Trip(session=session, want=want, began=self._clock.now())
        turn = StreamedTurn(as_list(prompt_ids), params)
        while not turn.complete:
            name = await self._choose(trip)
            with self._calling(name, trip):
                async with aclosing(self._pieces(name, trip, turn)) as pieces:
                    async for piece in pieces:
                        yield piece
            if not turn.complete:
                self.counters.continued += turn.resume(trip.trouble)

    async def _pieces(self, name: str, trip: "_Trip", turn: StreamedTurn) -> AsyncGenerator[TokenChunk, None]:
        """What one engine adds to a turn. Each piece is a sign of life: an engine may be too busy for its polls."""
        client = self._clients[name]
        async with aclosing(client.engine.stream(turn.prompt, turn.params, session=trip.session)) as pieces:
            while not turn.complete:
                piece = turn.add(await self._bounded(client, trip, _next(pieces)))
                self._router.answered(name, self._clock.now(), _last(piece.versions) if turn.complete else None)
                yield piece

    async def watch(self) -> None:
        """Ask engines how they are, for ever.

        consumes: nothing; produces: facts for router and admission; waits for: engines, ``poll_s`` each at most; woken
        by: time; on shutdown: cancelled, with its polls.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                for name in self._router.due(self._clock.now()):
                    group.create_task(self._poll(name, self._clients[name]))
                await self._clock.sleep(TICK_S)

    async def _choose(self, trip: "_Trip") -> str:
        """An engine for a call, perhaps after a while."""
        want = trip.want
        while True:
            silent = [name for name, heard in trip.lost.items() if self._router.heard(name) == heard]
            choice = self._router.choose(
                trip.session, min_version=want.min_version, region=want.region, avoid={*silent, *trip.busy}
            )
            if choice.name is not None:
                return choice.name
            if choice.reason is Reason.VERSION:
                assert want.min_version is not None and choice.newest is not None, "nothing was wanted"
                raise VersionPending(want.min_version, choice.newest)
            pause_s = trip.pause(self._clock.now(), self._limits.outage_s, self._random.random())
            self.counters.pauses += 1
            await self._clock.sleep(pause_s)

    @contextmanager
    def _calling(self, name: str, trip: "_Trip") -> Iterator[None]:
        """Count a call, and learn from how it ends. Trouble that another engine may not have is noted, not raised."""
        self._router.began(name)
        trip.want.taken(self._clock.now())
        try:
            yield
        except EngineUnavailable as error:
            trip.want.taken(None)
            if trip.over:
                raise
            self._learn(name, trip, error)
        except ValueError:
            self._router.answered(name, self._clock.now())
            raise
        finally:
            self._router.ended(name)

    def _learn(self, name: str, trip: "_Trip", error: EngineUnavailable) -> None:
        """Note that an engine turned a call away, or failed under it."""
        trip.trouble, now = error, self._clock.now()
        if isinstance(error, EngineBusy):
            trip.busy.add(name)
            self.counters.busy += 1
            self._router.answered(name, now)
            if self._admission is not None:
                self._admission.congested(now)
            return
        # Without its words: an engine's answer to a call may quote the prompt, and reasons are shown to operators.
        self._failed(name, f"a call failed: {type(error.__cause__ or error).__name__}", in_call=True)
        trip.lost[name] = self._router.heard(name)
        trip.losses += 1
        self.counters.losses += 1
        if trip.losses > self._limits.losses:
            raise trip.give_up(f"{trip.losses} engines failed under this call") from error

    async def _bounded(self, client: "_Client", trip: "_Trip", answer: Awaitable[Answer]) -> Answer:
        """What an engine answers, unless the call's deadline comes first or the engine is found dead."""
        left_s = trip.deadline - self._clock.now()
        try:
            async with asyncio.timeout(left_s) as wait:
                deadline = wait.when()
                client.waits.add(wait)
                try:
                    return await answer
                finally:
                    client.waits.discard(wait)
        except TimeoutError as error:
            if wait.when() == deadline:
                trip.over = True
                raise trip.give_up(f"no completion within {trip.want.deadline_s:g} s") from error
            raise EngineUnavailable("the engine was found dead while it worked on the call") from error

    async def _poll(self, name: str, client: "_Client") -> None:
        try:
            async with asyncio.timeout(self._limits.poll_s):
                health = await client.engine.health()
        except BaseException as error:  # of any kind, or the engine would never be asked again
            if self._clients.get(name) is client:  # else another one has its name now
                self._failed(name, f"a poll failed: {error or 'no answer in time'}", in_call=False)
            if isinstance(error, EngineUnavailable | TimeoutError):
                return
            raise
        if self._clients.get(name) is client:
            self._router.report(name, health, self._clock.now())
            if self._admission is not None:
                self._admission.queueing(self._router.waiting())

    def _failed(self, name: str, reason: str, *, in_call: bool) -> None:
        """Tell the router; calls that wait for a dead engine go elsewhere."""
        if self._router.failed(name, reason, self._clock.now(), in_call=in_call) is EngineState.DEAD:
            for wait in self._clients[name].waits:
                if not wait.expired():
                    wait.reschedule(0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Client:
    """An engine's client and the waits of calls that it works on."""

    engine: Engine
    waits: set[asyncio.Timeout] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _Trip:
    """One call on its way: where it was, and how long it may go on."""

    session: str
    want: Want
    began: float
    lost: dict[str, int] = field(default_factory=dict)
    """Engines that failed under it → signs of life that each had given by then: it is not asked before another one."""
    losses: int = 0
    busy: set[str] = field(default_factory=set)
    """Engines that turned it away since its last pause."""
    outage_s: float = 0.0
    """How long it paused for want of any engine."""
    pause_s: float = PAUSE_MIN_S
    """The next pause."""
    trouble: EngineUnavailable | None = None
    """The last one."""
    over: bool = False
    """Whether its deadline came while an engine worked on it."""

    @property
    def deadline(self) -> float:
        """When it must be over."""
        return self.began + self.want.deadline_s

    def pause(self, now: float, outage_s: float, chance: float) -> float:
        """How long to wait for an engine to come back or to finish something; ``chance`` in 0 … 1 is the jitter.

        Raises :class:`~etude.errors.EngineUnavailable` when the deadline has come, or when there was no engine for
        ``outage_s``.
        """
        left_s = self.deadline - now
        if left_s <= 0:
            raise self.give_up(f"no engine took the call within {self.want.deadline_s:g} s")
        if not self.busy and self.outage_s >= outage_s:
            raise self.give_up(f"no engine could be had for {self.outage_s:.1f} s")
        pause_s = min(self.pause_s * (1 - JITTER * chance), left_s)
        self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)
        self.outage_s += 0.0 if self.busy else pause_s
        self.busy.clear()
        return pause_s

    def give_up(self, why: str) -> EngineUnavailable:
        """The error that ends it, of the kind of its last trouble."""
        kind = EngineBusy if isinstance(self.trouble, EngineBusy) else EngineUnavailable
        return kind(why if self.trouble is None else f"{why}; at last: {self.trouble}")


async def _next(pieces: AsyncIterator[TokenChunk]) -> TokenChunk:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        raise EngineUnavailable("a stream ended without its completion") from None


def _last(versions: Ids) -> int | None:
    return int(versions[-1]) if len(versions) else None
