"""The engines behind a gateway as one engine: a call whose engine dies is retried on another one.

    call ──▶ Router.choose ──▶ engine ──▶ answer            polls ──▶ Router.report
               ▲                 │ lost: another one, or the same once it answers again
               └─────────────────┘ busy: another one, or a pause

Owns the calls in progress, their deadlines and the recovery of a turn whose engine fails.
:class:`~etude.gateway.routing.router.Router` chooses the engine of a call.
:class:`~etude.gateway.routing.admission.AdmissionController` limits the calls that arrive here; it is notified when
engines are busy and how many calls they queue.

A turn of which no token was sent is sampled again; one that was sent in part is continued (:class:`StreamedTurn`):

    chunks of the first engine ──▶ prompt + their tokens ──▶ chunks of the second one ──▶ one completion of both

Every token keeps the log-probability and the version it was sampled with. Routes come from the last engine, which read
all tokens but the last, including those that another engine sampled. With a seed and the same weights the native engine
continues with exactly the tokens that the first engine would have sampled. Two things are lost with an engine: the
sampling mask of the tokens so far, if the engine sends it only at the end, and the end of a turn whose last token was
sent.

A lent engine (``EngineEntry.is_lent``) may be taken back at any moment, with or without notice. Its whole answers are
also fetched token by token, and are continued like streams, even when it is removed.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar, final

import numpy as np

from etude.backoff import Backoff
from etude.errors import EngineBusy, EngineUnavailable, VersionPending
from etude.gateway.routing.admission import AdmissionController
from etude.gateway.routing.arms import CallArm, ShadowArm
from etude.gateway.routing.router import EngineEntry, EngineState, EngineView, Reason, Router
from etude.protocols import Clock, Completion, Engine, SamplingParams, TokenChunk
from etude.types import Ids, SamplingMask, TokenIds, as_list

Answer = TypeVar("Answer")

BACKOFF = Backoff(first_s=0.05, longest_s=1.0, jitter=0.5)
"""Pauses of a call while no engine is available."""
TICK_S = 0.05
"""Pause between two checks for due polls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Timeouts and retry limits of calls and polls."""

    outage_s: float = 30.0
    """Longest total time that a call waits while no engine is available to it."""
    losses: int = 4
    """Engines that may fail under one call: a request that crashes every engine must not take down all of them."""
    poll_s: float = 5.0
    """Timeout of a poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The routing options of one call."""

    min_version: int | None = None
    """Oldest weight version that may sample it; ``None`` for any version."""
    wait_for_version: bool = False
    """Wait while no engine serves that version, as while there is no engine, instead of failing at once."""
    region: str | None = None
    """Preferred region of the engine."""
    arm: CallArm | ShadowArm | None = None
    """The released weights that may sample it; ``None``: any weights."""
    deadline_s: float = 600.0
    """Longest total duration of the call, in seconds from now."""
    dispatched: Callable[[float | None, str], None] = lambda at, engine: None
    """Called with the engine's name and the time at which the call was sent to it, or ``None`` when the engine failed
    under the call.
    """


DEFAULT_OPTIONS = CallOptions()
DEFAULT_POOL_LIMITS = PoolLimits()


@dataclass(slots=True, kw_only=True)
class PoolCounters:
    """Counts of events since the start."""

    losses: int = 0
    """Engines that failed during a call."""
    continued: int = 0
    """Turns that continued on another engine after some of their tokens."""
    anew: int = 0
    """Whole answers of lent engines that could not be continued and were sampled again from the start."""
    recalled: int = 0
    """Lent engines that were taken back with notice."""
    busy: int = 0
    """Calls that an engine rejected because it was busy."""
    pauses: int = 0
    """Times that a call found no engine and paused."""
    unreleased: int = 0
    """Answers, or parts of them, that were discarded because unreleased weights had sampled them."""


@final
class EnginePool:
    """Calls engines; ``engines`` makes the client for a URL, which should not retry by itself.

    :meth:`watch` must run, or an engine that failed during a call is never polled again.
    """

    def __init__(
        self,
        engines: Callable[[str], Engine],
        router: Router,
        clock: Clock,
        limits: PoolLimits = DEFAULT_POOL_LIMITS,
        *,
        admission: AdmissionController | None = None,
        seed: int | None = None,
    ) -> None:
        """``admission`` is notified of congestion; ``seed`` fixes the jitter."""
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
        client = _Client(engine=self._make(entry.url), is_lent=entry.is_lent)
        self._router.add(entry, self._clock.now())
        self._clients[entry.name] = client

    def remove(self, name: str) -> None:
        """Send no more calls to an engine. Its calls run to their end; those of a lent engine move to another one at
        once.

        Raises ``ValueError`` for an unknown name.
        """
        self._router.remove(name)
        client = self._clients.pop(name)
        if client.is_lent:
            _interrupt(client)
            self.counters.recalled += 1

    def list(self) -> tuple[EngineView, ...]:
        """The state of each engine."""
        return self._router.engines()

    def versions(self) -> tuple[int, ...]:
        """The weight versions that can answer calls now, ascending, without duplicates."""
        serving = (view for view in self.list() if view.state in (EngineState.HEALTHY, EngineState.SUSPECT))
        return tuple(sorted({view.health.version for view in serving if view.health is not None}))

    def announce(self, version: int, digest: str) -> None:
        """Record the digest that the weight log announces. Raises ``ValueError`` if it contradicts an earlier
        announcement.
        """
        self._router.announce(version, digest, self._clock.now())

    def forget(self, session: str) -> None:
        """Forget the engine of a session that has ended."""
        self._router.forget(session)

    async def generate(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str, options: CallOptions = DEFAULT_OPTIONS
    ) -> Completion:
        """Sample one completion; if its engine fails, sample it again on another one, or continue it if the engine was
        lent.

        Raises ``ValueError`` when an engine rejects the request, :class:`~etude.errors.VersionPending` when none has
        that weight version, :class:`~etude.errors.EngineBusy` when all were busy until the deadline, and
        :class:`~etude.errors.EngineUnavailable` when none answered.
        """
        call = _RoutedCall(session=session, options=options, began=self._clock.now())
        turn = StreamedTurn(prompt_ids, params)
        while True:
            name = await self._choose(call)
            with self._calling(name, call):
                return await self._whole(name, call, turn)
            if turn.can_resume:
                self.counters.continued += turn.resume(call.trouble)
            else:  # no token was sent
                self.counters.anew += 1
                turn = StreamedTurn(prompt_ids, params)

    async def _whole(self, name: str, call: "_RoutedCall", turn: "StreamedTurn") -> Completion:
        """The complete turn, the rest of which one engine samples."""
        client = self._clients[name]
        if client.is_lent:
            async with aclosing(self._chunks(name, call, turn)) as chunks:
                async for chunk in chunks:
                    if chunk.completion is not None:
                        return chunk.completion
            raise AssertionError("a stream ends with its completion")
        answer = client.engine.generate(turn.prompt, turn.params, session=call.session)
        rest = await self._bounded(client, call, answer)
        self._check_released(name, rest.versions, call)
        self._router.answered(name, self._clock.now(), _last(rest.versions))
        return turn.joined(rest)

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str, options: CallOptions = DEFAULT_OPTIONS
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and yield its tokens as they arrive; if its engine fails, continue on another one.

        Raises like :meth:`generate`. With top-p or top-k, a turn cannot be continued once some tokens were yielded: it
        raises :class:`~etude.errors.EngineUnavailable`.
        """
        call = _RoutedCall(session=session, options=options, began=self._clock.now())
        turn = StreamedTurn(prompt_ids, params)
        while not turn.complete:
            name = await self._choose(call)
            with self._calling(name, call):
                async with aclosing(self._chunks(name, call, turn)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            if not turn.complete:
                self.counters.continued += turn.resume(call.trouble)

    async def _chunks(self, name: str, call: "_RoutedCall", turn: "StreamedTurn") -> AsyncGenerator[TokenChunk, None]:
        """The chunks that one engine adds to a turn. Each is a sign of life: a busy engine may miss its polls."""
        client = self._clients[name]
        async with aclosing(client.engine.stream(turn.prompt, turn.params, session=call.session)) as chunks:
            while not turn.complete:
                sampled = await self._bounded(client, call, _next(chunks))
                self._check_released(name, sampled.versions, call)
                chunk = turn.add(sampled)
                self._router.answered(name, self._clock.now(), _last(chunk.versions) if turn.complete else None)
                yield chunk

    async def watch(self) -> None:
        """Poll the engines for ever.

        consumes: nothing; produces: facts for router and admission; waits for: engines, ``poll_s`` each at most; woken
        by: time; on shutdown: cancelled, with its polls.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                for name in self._router.due(self._clock.now()):
                    group.create_task(self._poll(name, self._clients[name]))
                await self._clock.sleep(TICK_S)

    async def _choose(self, call: "_RoutedCall") -> str:
        """Choose an engine for a call, waiting if necessary."""
        options = call.options
        while True:
            silent = [name for name, contacts in call.lost.items() if self._router.contacts(name) == contacts]
            choice = self._router.choose(
                call.session,
                min_version=options.min_version,
                region=options.region,
                avoid={*silent, *call.busy},
                digests=None if options.arm is None else options.arm.digests(),
            )
            if choice.name is not None:
                return choice.name
            if choice.reason is Reason.VERSION and not options.wait_for_version:
                assert options.min_version is not None and choice.newest is not None, "no version was requested"
                raise VersionPending(options.min_version, choice.newest)
            pause_s = call.pause(self._clock.now(), self._limits.outage_s, self._random.random())
            self.counters.pauses += 1
            await self._clock.sleep(pause_s)

    def _check_released(self, name: str, versions: Ids, call: "_RoutedCall") -> None:
        """Raise :class:`~etude.errors.EngineUnavailable` for tokens from weights that the call must not get: its engine
        swapped weights after its last report. The tokens are discarded, and the call goes to another engine.
        """
        arm = call.options.arm
        if arm is None:
            return
        for version in np.unique(versions).tolist():
            digest = self._router.digest(version)
            if digest is None or not arm.allows(digest):
                self.counters.unreleased += 1
                raise EngineUnavailable(f"{name} sampled with version {version}, which is not released")

    @contextmanager
    def _calling(self, name: str, call: "_RoutedCall") -> Iterator[None]:
        """Count a call, and update the engine's state from its result. Errors that another engine may not have are
        recorded, not raised.
        """
        self._router.began(name)
        call.options.dispatched(self._clock.now(), name)
        try:
            yield
        except EngineUnavailable as error:
            call.options.dispatched(None, name)
            if call.over:
                raise
            self._learn(name, call, error)
        except ValueError:
            self._router.answered(name, self._clock.now())
            raise
        finally:
            self._router.ended(name)

    def _learn(self, name: str, call: "_RoutedCall", error: EngineUnavailable) -> None:
        """Record that an engine rejected a call, or failed during it."""
        call.trouble, now = error, self._clock.now()
        if name not in self._clients:  # it was taken back, which is no fault of the engine or the call
            return
        if isinstance(error, EngineBusy):
            call.busy.add(name)
            self.counters.busy += 1
            self._router.answered(name, now)
            if self._admission is not None:
                self._admission.congested(now)
            return
        # Without the message: an engine's answer to a call may quote the prompt, and operators see reasons.
        self._failed(name, f"a call failed: {type(error.__cause__ or error).__name__}", in_call=True)
        call.lost[name] = self._router.contacts(name)
        call.losses += 1
        self.counters.losses += 1
        if call.losses > self._limits.losses:
            raise call.give_up(f"{call.losses} engines failed under this call") from error

    async def _bounded(self, client: "_Client", call: "_RoutedCall", answer: Awaitable[Answer]) -> Answer:
        """An engine's answer, unless the call's deadline passes first or the engine is declared dead."""
        left_s = call.deadline - self._clock.now()
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
                call.over = True
                raise call.give_up(f"no completion within {call.options.deadline_s:g} s") from error
            raise EngineUnavailable("the engine was found dead, or taken back, while it worked on the call") from error

    async def _poll(self, name: str, client: "_Client") -> None:
        try:
            async with asyncio.timeout(self._limits.poll_s):
                health = await client.engine.health()
        except BaseException as error:  # of any kind, or the engine would never be polled again
            if self._clients.get(name) is client:  # else another engine has this name now
                self._failed(name, f"a poll failed: {error or 'no answer in time'}", in_call=False)
            if isinstance(error, EngineUnavailable | TimeoutError):
                return
            raise
        if self._clients.get(name) is client:
            self._router.report(name, health, self._clock.now())
            if self._admission is not None:
                self._admission.queueing(self._router.waiting())

    def _failed(self, name: str, reason: str, *, in_call: bool) -> None:
        """Report a failure to the router; calls that wait for a dead engine move to another one."""
        if self._router.failed(name, reason, self._clock.now(), in_call=in_call) is EngineState.DEAD:
            _interrupt(self._clients[name])


def _interrupt(client: "_Client") -> None:
    """Move calls that wait for an engine to another one."""
    for wait in client.waits:
        if not wait.expired():
            wait.reschedule(0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Client:
    """An engine's client and the waits of its calls in progress."""

    engine: Engine
    is_lent: bool = False
    waits: set[asyncio.Timeout] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _RoutedCall:
    """One call in progress: the engines that failed under it, and its remaining time."""

    session: str
    options: CallOptions
    began: float
    lost: dict[str, int] = field(default_factory=dict)
    """Engines that failed under it → their count of signs of life at that time: an engine is not used again before a
    new one.
    """
    losses: int = 0
    busy: set[str] = field(default_factory=set)
    """Engines that rejected it since its last pause."""
    outage_s: float = 0.0
    """Seconds that it paused because no engine was available."""
    pauses: int = 0
    trouble: EngineUnavailable | None = None
    """The last error."""
    over: bool = False
    """True if its deadline passed while an engine worked on it."""

    @property
    def deadline(self) -> float:
        """Time at which it must have ended."""
        return self.began + self.options.deadline_s

    def pause(self, now: float, outage_s: float, chance: float) -> float:
        """Seconds to wait for an engine to return or to finish a call; ``chance`` in 0 … 1 is the jitter.

        Raises :class:`~etude.errors.EngineUnavailable` when the deadline has passed, or when there was no engine for
        ``outage_s``.
        """
        left_s = self.deadline - now
        if left_s <= 0:
            raise self.give_up(f"no engine accepted the call within {self.options.deadline_s:g} s")
        if not self.busy and self.outage_s >= outage_s:
            raise self.give_up(f"no engine was available for {self.outage_s:.1f} s")
        self.pauses += 1
        pause_s = min(BACKOFF.delay_s(self.pauses, chance), left_s)
        self.outage_s += 0.0 if self.busy else pause_s
        self.busy.clear()
        return pause_s

    def give_up(self, why: str) -> EngineUnavailable:
        """The error that ends it, of the same kind as its last error."""
        kind = EngineBusy if isinstance(self.trouble, EngineBusy) else EngineUnavailable
        return kind(why if self.trouble is None else f"{why}; at last: {self.trouble}")


async def _next(chunks: AsyncIterator[TokenChunk]) -> TokenChunk:
    try:
        return await anext(chunks)
    except StopAsyncIteration:
        raise EngineUnavailable("a stream ended without its completion") from None


def _last(versions: Ids) -> int | None:
    return int(versions[-1]) if len(versions) else None


class StreamedTurn:
    """The chunks of a turn that have arrived, and the request for the rest. Pure."""

    def __init__(self, prompt: TokenIds, params: SamplingParams) -> None:
        self.prompt = prompt
        """The prompt for the current engine."""
        self.params = params
        """The sampling parameters for the rest."""
        self.complete = False
        """True once the last chunk was added."""
        self._original = prompt, params
        self._chunks: list[TokenChunk] = []
        self._earlier = 0  # number of ``_chunks`` that earlier engines sampled

    def add(self, chunk: TokenChunk) -> TokenChunk:
        """The chunk to yield: the last one has the completion of the whole turn."""
        if chunk.completion is None:
            self._chunks.append(chunk)
            return chunk
        self.complete = True
        return replace(chunk, completion=self.joined(chunk.completion))

    def joined(self, rest: Completion) -> Completion:
        """The completion of the whole turn; the current engine sampled ``rest``."""
        earlier = self._chunks[: self._earlier]
        return _concatenated(earlier, rest) if earlier else rest

    @property
    def can_resume(self) -> bool:
        """True if another engine can continue after the chunks so far, or start if there are none."""
        return not self._loss()

    def resume(self, error: EngineUnavailable | None) -> bool:
        """Prepare for another engine after ``error``; return whether it continues chunks that were yielded.

        Raises :class:`~etude.errors.EngineUnavailable` for a turn that cannot be continued.
        """
        sent = self._sent()
        if lost := self._loss():
            raise EngineUnavailable(f"a turn broke off after {len(sent)} tokens; {lost} is lost: call again") from error
        prompt, params = self._original
        self.prompt = [*as_list(prompt), *sent]
        self.params = replace(
            params, max_tokens=params.max_tokens - len(sent), sampled_before=params.sampled_before + len(sent)
        )
        self._earlier = len(self._chunks)
        return bool(sent)

    def _loss(self) -> str:
        """The part of the record that was lost with the engine; empty for none."""
        sent, (_, params) = self._sent(), self._original
        if params.truncates and any(chunk.sampling_mask is None for chunk in self._chunks):
            return "its sampling mask"
        ended = bool(sent) and (len(sent) == params.max_tokens or sent[-1] in params.stop_ids)
        return "the record of its end" if ended else ""

    def _sent(self) -> list[int]:
        return [token for chunk in self._chunks for token in chunk.token_ids.tolist()]


def _concatenated(earlier: Sequence[TokenChunk], rest: Completion) -> Completion:
    """One completion from the samples of several engines; routes cover all of it, as the last engine read it."""
    return Completion(
        token_ids=np.concatenate([*(chunk.token_ids for chunk in earlier), rest.token_ids]),
        logprobs=np.concatenate([*(chunk.logprobs for chunk in earlier), rest.logprobs]),
        versions=np.concatenate([*(chunk.versions for chunk in earlier), rest.versions]),
        finish=rest.finish,
        routes=rest.routes,
        sampling_mask=_joined_masks([*(chunk.sampling_mask for chunk in earlier), rest.sampling_mask]),
    )


def _joined_masks(masks: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """One mask of consecutive tokens; ``None`` if nothing was truncated."""
    present = [mask for mask in masks if mask is not None]
    return SamplingMask.of_rows([row for mask in present for row in mask]) if present else None
