"""A call succeeds as long as any engine can answer, and a broken turn is continued token for token."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.clock import SystemClock, VirtualClock
from etude.engines.fake import FakeEngine
from etude.engines.http import engine_app, http_engines
from etude.errors import EngineBusy, EngineUnavailable, VersionPending
from etude.gateway.routing.admission import AdmissionController, AdmissionLimits
from etude.gateway.routing.pool import CallOptions, EnginePool, PoolLimits
from etude.gateway.routing.router import EngineEntry, EngineState, HealthLimits, Router
from etude.protocols import Clock, Completion, Engine, EngineHealth, SamplingParams, TokenChunk
from etude.types import Finish, SamplingMask, TokenIds
from waiting import until

PROMPT = [1, 2, 3]
STOP = 0
QUICK = HealthLimits(
    dead_s=0.1, grace_s=0.1, healthy_poll_s=0.02, suspect_poll_s=0.02, stale_poll_s=0.02, dead_poll_s=0.02
)


@dataclass(eq=False)
class Chain:
    """An engine whose next token depends on all tokens before it, with logprobs of its own weights."""

    mark: int = 0
    """Which weights it has: version, digest and log-probabilities."""
    digest: str = ""
    breaks: list[int] = field(default_factory=list)
    """After how many tokens each of the next calls fails."""
    busy: int = 0
    """How many of the next calls it turns away."""
    down: bool = False
    hangs: bool = False
    refuses: bool = False
    loses_end: bool = False
    """Whether it hands out the last token and breaks before the completion."""
    requests: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    """What each call was about."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        async with aclosing(self.stream(prompt_ids, params, session=session)) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    return chunk.completion
        raise AssertionError("a stream ends with its completion")

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append((tuple(prompt_ids), params))
        await self._trouble()
        left, text, context = (self.breaks.pop(0) if self.breaks else 1 << 30), list[int](), list(prompt_ids)
        while not text or (text[-1] not in params.stop_ids and len(text) < params.max_tokens):
            if len(text) == left:
                raise EngineUnavailable("it broke")
            digest = hashlib.sha256(repr((context, params.seed if params.temperature else None)).encode()).digest()
            text.append(digest[0] % 16)
            context.append(text[-1])
            ended = text[-1] in params.stop_ids or len(text) == params.max_tokens
            whole = self._completion(text, prompt_ids, params) if ended and not self.loses_end else None
            yield self._chunk(text, whole)
        if self.loses_end:
            raise EngineUnavailable("it broke")

    async def health(self) -> EngineHealth:
        if self.down:
            raise EngineUnavailable("it is down")
        return EngineHealth(version=self.mark, digest=self.digest or f"digest {self.mark}", running=0, waiting=0)

    async def _trouble(self) -> None:
        if self.down:
            raise EngineUnavailable("it is down")
        if self.refuses:
            raise ValueError("it refuses")
        if self.busy:
            self.busy -= 1
            raise EngineBusy("it is busy")
        if self.hangs:
            await asyncio.Event().wait()

    def _chunk(self, text: Sequence[int], completion: Completion | None) -> TokenChunk:
        return TokenChunk(
            token_ids=np.array(text[-1:], np.int32),
            logprobs=np.array([-1.0 - self.mark], np.float32),
            versions=np.array([self.mark], np.int32),
            completion=completion,
        )

    def _completion(self, text: Sequence[int], prompt_ids: TokenIds, params: SamplingParams) -> Completion:
        size, read = len(text), np.array([*prompt_ids, *text[:-1]], np.uint16)
        sampling_mask = SamplingMask(offsets=np.arange(size + 1, dtype=np.int64), token_ids=np.array(text, np.int32))
        return Completion(
            token_ids=np.array(text, np.int32),
            logprobs=np.full(size, -1.0 - self.mark, np.float32),
            versions=np.full(size, self.mark, np.int32),
            finish=Finish.STOP if text[-1] in params.stop_ids else Finish.LENGTH,
            routes=read.reshape(-1, 1, 1) if params.want_routes else None,
            sampling_mask=sampling_mask if params.truncates else None,
        )


Scene = Callable[[], Awaitable[None]]


def pool_of(
    *engines: Engine, clock: Clock | None = None, limits: PoolLimits | None = None, health: HealthLimits = QUICK
) -> EnginePool:
    """A pool of engines named ``0``, ``1``, …, without any health report yet."""
    by_url = {str(index): engine for index, engine in enumerate(engines)}
    pool = EnginePool(by_url.__getitem__, Router(health), clock or SystemClock(), limits or PoolLimits(), seed=1)
    for url in by_url:
        pool.add(EngineEntry(name=url, url=url))
    return pool


@asynccontextmanager
async def watched(pool: EnginePool) -> AsyncIterator[None]:
    """Polls go on while the context is open; it opens when all engines were seen."""
    polling = asyncio.create_task(pool.watch())
    try:
        await until(lambda: all(view.reason != "not yet seen" for view in pool.list()))
        yield
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


async def listen(
    pool: EnginePool, params: SamplingParams, options: CallOptions | None = None
) -> tuple[list[TokenChunk], Completion]:
    chunks = [chunk async for chunk in pool.stream(PROMPT, params, session="s", options=options or CallOptions())]
    assert chunks[-1].completion is not None
    return chunks, chunks[-1].completion


def states(pool: EnginePool) -> list[EngineState]:
    return [view.state for view in pool.list()]


def play(scene: Scene) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90.0):
            await scene()

    asyncio.run(bounded())


PARAMS = SamplingParams(max_tokens=12, temperature=0.0, want_routes=True)


# Failures


def test_a_call_goes_to_another_engine_when_its_own_fails() -> None:
    async def scene() -> None:
        engines = [Chain(), Chain(), Chain()]
        whole = await Chain().generate(PROMPT, PARAMS, session="s")
        for broken in engines:
            pool = pool_of(*engines)
            broken.breaks = [3]
            for session in range(8):
                completion = await pool.generate(PROMPT, PARAMS, session=str(session))
                assert completion.token_ids.tolist() == whole.token_ids.tolist()
            assert pool.counters.losses == 1
            assert all(view.inflight == 0 for view in pool.list())

    play(scene)


@settings(max_examples=60, deadline=None)
@given(
    breaks=st.lists(st.integers(0, 6), max_size=4),
    stop=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.none() | st.integers(0, 9),
)
def test_a_broken_stream_is_continued_token_for_token(
    breaks: list[int], stop: bool, temperature: float, seed: int | None
) -> None:
    params = replace(PARAMS, max_tokens=30, stop_ids=(STOP,) if stop else (), temperature=temperature, seed=seed)

    async def scene() -> None:
        shared = list(breaks)  # whichever engine is asked, the n-th call breaks after breaks[n] tokens
        pool = pool_of(*(Chain(mark=mark, breaks=shared) for mark in range(len(breaks) + 1)))
        chunks, completion = await listen(pool, params)
        sent = np.concatenate([chunk.token_ids for chunk in chunks])
        np.testing.assert_array_equal(sent, completion.token_ids)
        np.testing.assert_array_equal(np.concatenate([chunk.logprobs for chunk in chunks]), completion.logprobs)
        np.testing.assert_array_equal(np.concatenate([chunk.versions for chunk in chunks]), completion.versions)
        np.testing.assert_array_equal(completion.logprobs, -1.0 - completion.versions)  # those of the one who sampled
        assert completion.routes is not None
        assert completion.routes.ravel().tolist() == [*PROMPT, *sent[:-1].tolist()]
        assert (completion.finish is Finish.STOP) == (sent[-1] in params.stop_ids)
        assert len(sent) == params.max_tokens or completion.finish is Finish.STOP
        if temperature == 0:
            whole = await Chain().generate(PROMPT, params, session="s")
            assert sent.tolist() == whole.token_ids.tolist()
            assert completion.finish is whole.finish

    play(scene)


def test_a_seeded_turn_goes_on_with_other_random_numbers_and_always_the_same() -> None:
    params = replace(PARAMS, temperature=1.0, seed=7)

    async def scene() -> None:
        turns = list[list[int]]()
        for _ in range(2):
            breaks = [4]
            engines = [Chain(breaks=breaks), Chain(breaks=breaks)]
            pool = pool_of(*engines)
            turns.append((await listen(pool, params))[1].token_ids.tolist())
            (first,) = [engine for engine in engines if len(engine.requests[0][0]) == len(PROMPT)]
            (second,) = [engine for engine in engines if engine is not first]
            prompt, requests = second.requests[0]
            assert prompt == (*PROMPT, *turns[-1][:4])
            assert requests.max_tokens == 8
            assert (requests.seed, requests.sampled_before) == (params.seed, 4)
            assert requests.fresh_seed not in (None, params.seed)
        assert turns[0] == turns[1]

    play(scene)


CUT = replace(PARAMS, temperature=1.0, top_p=0.9)


def test_a_cut_turn_that_was_handed_out_in_part_fails_and_one_that_was_not_is_sampled_anew() -> None:
    async def scene() -> None:
        breaks = [0]
        _, completion = await listen(pool_of(Chain(breaks=breaks), Chain(breaks=breaks)), CUT)
        assert not breaks
        assert completion.sampling_mask is not None and len(completion.sampling_mask) == 12
        pool = pool_of(Chain(breaks=[1]), Chain(breaks=[1]))
        heard = list[TokenChunk]()
        with pytest.raises(EngineUnavailable, match=r"after 1 tokens; its sampling mask is lost"):
            async for chunk in pool.stream(PROMPT, CUT, session="s"):
                heard.append(chunk)
        assert len(heard) == 1

    play(scene)


def test_a_turn_whose_record_went_down_with_its_engine_fails() -> None:
    async def scene() -> None:
        with pytest.raises(EngineUnavailable, match=r"after 12 tokens; the record of its end is lost"):
            await listen(pool_of(Chain(loses_end=True), Chain(loses_end=True)), PARAMS)

    play(scene)


def test_a_request_that_every_engine_dies_of_does_not_kill_all_of_them() -> None:
    async def scene() -> None:
        engines = [Chain(breaks=[0]) for _ in range(9)]
        with pytest.raises(EngineUnavailable, match="3 engines failed under this call; at last: it broke"):
            await pool_of(*engines, limits=PoolLimits(losses=2)).generate(PROMPT, PARAMS, session="s")
        assert sum(len(engine.requests) for engine in engines) == 3

    play(scene)


def test_an_engine_that_is_down_is_not_asked_again_before_it_gave_a_sign_of_life() -> None:
    async def scene() -> None:
        clock, engine = VirtualClock(), Chain(down=True)
        pool = pool_of(engine, clock=clock)
        with pytest.raises(EngineUnavailable, match=r"no engine was available for 30\.\d s; at last: it is down"):
            await pool.generate(PROMPT, PARAMS, session="s")
        assert len(engine.requests) == 1
        assert 30.0 <= clock.now() <= 31.0

    play(scene)


def test_a_call_waits_for_an_engine_that_restarts() -> None:
    async def scene() -> None:
        engine = Chain(down=True)
        pool = pool_of(engine)
        async with watched(pool):
            call = asyncio.create_task(pool.generate(PROMPT, PARAMS, session="s"))
            await until(lambda: pool.counters.pauses > 0 and states(pool) == [EngineState.DEAD])
            engine.down = False
            assert len((await call).token_ids) == 12
            await until(lambda: states(pool) == [EngineState.HEALTHY])

    play(scene)


def test_calls_on_an_engine_that_hangs_go_elsewhere_once_it_is_found_dead() -> None:
    async def scene() -> None:
        engines = [Chain(hangs=True), Chain(hangs=True)]
        pool = pool_of(*engines)
        async with watched(pool):
            calls = [
                asyncio.create_task(pool.generate(PROMPT, PARAMS, session="s")),
                asyncio.create_task(listen(pool, PARAMS)),
            ]
            await until(lambda: sum(len(engine.requests) for engine in engines) == 2)
            (stuck,) = [engine for engine in engines if engine.requests]
            (other,) = [engine for engine in engines if not engine.requests]
            stuck.down, other.hangs = True, False
            await asyncio.gather(*calls)
            assert len(other.requests) == 2
            assert pool.counters.losses == 2

    play(scene)


# Busy engines


def test_a_busy_engine_is_passed_over_and_not_blamed() -> None:
    async def scene() -> None:
        engines = [Chain(), Chain()]
        pool = pool_of(*engines)
        async with watched(pool):
            await pool.generate(PROMPT, PARAMS, session="s")
            (first,) = [engine for engine in engines if engine.requests]
            first.busy = 1
            await pool.generate(PROMPT, PARAMS, session="s")
            assert [len(engine.requests) for engine in engines if engine is not first] == [1]
            assert states(pool) == [EngineState.HEALTHY] * 2
            assert (pool.counters.busy, pool.counters.pauses) == (1, 0)

    play(scene)


def test_a_call_waits_while_all_engines_are_busy_until_its_deadline() -> None:
    async def scene() -> None:
        clock, engines = VirtualClock(), [Chain(busy=3), Chain(busy=3)]
        admission = AdmissionController(AdmissionLimits(start=10))
        by_url: dict[str, Engine] = {"a": engines[0], "b": engines[1]}
        pool = EnginePool(by_url.__getitem__, Router(), clock, admission=admission, seed=1)
        for url in by_url:
            pool.add(EngineEntry(name=url, url=url))
        assert len((await pool.generate(PROMPT, PARAMS, session="s")).token_ids) == 12
        assert pool.counters.pauses == 3
        assert admission.limit < 10
        for engine in engines:
            engine.busy = 1 << 30
        began = clock.now()
        with pytest.raises(EngineBusy, match="no engine accepted the call within 60 s; at last: it is busy"):
            await pool.generate(PROMPT, PARAMS, session="s", options=CallOptions(deadline_s=60.0))
        assert clock.now() - began == pytest.approx(60.0)

    play(scene)


class Sleeper(VirtualClock):
    """A clock that records the durations of its sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = list[float]()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


def test_callers_that_were_turned_away_at_once_do_not_come_back_at_once() -> None:
    async def scene() -> None:
        clock = Sleeper()
        pool = pool_of(Chain(busy=16), clock=clock)
        await asyncio.gather(*(pool.generate(PROMPT, PARAMS, session=str(index)) for index in range(16)))
        assert len(set(clock.slept)) == 16
        assert max(clock.slept) > 1.3 * min(clock.slept)

    play(scene)


# What a call wants


def test_a_version_that_no_engine_serves_is_pending() -> None:
    async def scene() -> None:
        engines = [Chain(mark=1), Chain(mark=3)]
        pool = pool_of(*engines)
        async with watched(pool):
            assert pool.versions() == (1, 3)
            completion = await pool.generate(PROMPT, PARAMS, session="s", options=CallOptions(min_version=2))
            assert completion.versions.tolist() == [3] * 12
            with pytest.raises(VersionPending, match="version 4 is not served yet, the newest is 3") as caught:
                await pool.generate(PROMPT, PARAMS, session="s", options=CallOptions(min_version=4))
            assert (caught.value.required, caught.value.newest) == (4, 3)

    play(scene)


def test_a_deadline_ends_a_call_and_does_not_blame_its_engine() -> None:
    async def scene() -> None:
        pool = pool_of(Chain(hangs=True))
        async with watched(pool):
            for call in (
                pool.generate(PROMPT, PARAMS, session="s", options=CallOptions(deadline_s=0.05)),
                listen(pool, PARAMS, CallOptions(deadline_s=0.05)),
            ):
                with pytest.raises(EngineUnavailable, match=r"no completion within 0\.05 s"):
                    await call
            assert states(pool) == [EngineState.HEALTHY]
            assert pool.counters.losses == 0

    play(scene)


def test_a_refused_request_reaches_the_caller_and_blames_no_engine() -> None:
    async def scene() -> None:
        pool = pool_of(Chain(refuses=True), Chain(refuses=True))
        async with watched(pool):
            for call in (pool.generate(PROMPT, PARAMS, session="s"), listen(pool, PARAMS)):
                with pytest.raises(ValueError, match="it refuses"):
                    await call
            assert states(pool) == [EngineState.HEALTHY] * 2

    play(scene)


def test_a_caller_that_leaves_frees_its_place() -> None:
    async def scene() -> None:
        pool = pool_of(Chain(hangs=True))
        call = asyncio.create_task(pool.generate(PROMPT, PARAMS, session="s"))
        await until(lambda: pool.list()[0].inflight == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert pool.list()[0].inflight == 0
        other = pool_of(Chain())
        async with aclosing(other.stream(np.array(PROMPT, np.int32), PARAMS, session="s")) as chunks:
            await anext(chunks)
            assert other.list()[0].inflight == 1
        assert other.list()[0].inflight == 0

    play(scene)


# Engines that come, go and change


def test_an_engine_with_a_wrong_digest_gets_no_more_calls() -> None:
    async def scene() -> None:
        engines = [Chain(), Chain()]
        pool = pool_of(*engines)
        pool.announce(0, "digest 0")
        async with watched(pool):
            engines[0].digest = "wrong"
            await until(lambda: states(pool)[0] is EngineState.STALE)
            for session in range(20):
                await pool.generate(PROMPT, PARAMS, session=str(session))
            assert (len(engines[0].requests), len(engines[1].requests)) == (0, 20)
            engines[0].digest = ""
            await until(lambda: states(pool)[0] is EngineState.HEALTHY)

    play(scene)


def test_engines_come_and_go_while_calls_are_in_progress() -> None:
    async def scene() -> None:
        made = {"old": Chain(mark=1), "new": Chain(mark=2)}
        pool = EnginePool(made.__getitem__, Router(QUICK), SystemClock(), seed=1)
        with pytest.raises(EngineUnavailable, match="no engine was available"):
            await pool_of(clock=VirtualClock()).generate(PROMPT, PARAMS, session="s")
        pool.add(EngineEntry(name="a", url="old"))
        async with watched(pool), aclosing(pool.stream(PROMPT, PARAMS, session="s")) as chunks:
            await anext(chunks)
            pool.remove("a")
            pool.add(EngineEntry(name="a", url="new"))
            rest = [chunk async for chunk in chunks]
            assert rest[-1].versions.tolist() == [1], "its calls end as they may"
            assert (await pool.generate(PROMPT, PARAMS, session="s")).versions[-1] == 2
            await until(lambda: pool.versions() == (2,))
            assert [view.inflight for view in pool.list()] == [0]
            with pytest.raises(ValueError, match="registered already"):
                pool.add(EngineEntry(name="a", url="old"))
            pool.remove("a")
            with pytest.raises(ValueError, match="no engine 'a'"):
                pool.remove("a")

    play(scene)


# Over HTTP


def test_real_servers_that_fail_and_come_back() -> None:
    async def scene() -> None:
        params = SamplingParams(max_tokens=6)
        fakes = [FakeEngine(SystemClock(), vocab_size=32, max_length=64, seed=index) for index in range(3)]
        async with (
            TestServer(engine_app(fakes[0])) as one,
            TestServer(engine_app(fakes[1])) as two,
            http_engines(0.0) as connect,
        ):
            pool = EnginePool(connect, Router(QUICK), SystemClock(), seed=1)
            pool.add(EngineEntry(name="one", url=str(one.make_url(""))))
            pool.add(EngineEntry(name="two", url=str(two.make_url(""))))
            pool.add(EngineEntry(name="nobody", url="http://127.0.0.1:9"))
            async with watched(pool):
                for round_ in range(10):
                    fakes[round_ % 2].fail_next(1)
                    calls = (pool.generate(PROMPT, params, session=f"{round_} {index}") for index in range(8))
                    assert [len(completion.token_ids) for completion in await asyncio.gather(*calls)] == [6] * 8
                await until(lambda: states(pool) == [EngineState.HEALTHY] * 2 + [EngineState.DEAD])
                assert pool.list()[2].reason.startswith("no contact for")

    play(scene)
