"""A pool of real engines over HTTP: nothing that dies, changes or fills up costs a turn or a token."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from etude.clock import SystemClock
from etude.config.inference import EngineConfig, NativeOptions
from etude.engines.http import engine_app, http_engines
from etude.engines.native.engine import NativeEngine, Weights
from etude.gateway.routing.admission import (
    PRIORITIES,
    AdmissionController,
    AdmissionLimits,
    AdmissionQueue,
    TrafficClass,
)
from etude.gateway.routing.pool import EnginePool
from etude.gateway.routing.router import EngineEntry, EngineState, HealthLimits, Router
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.protocols import Completion, SamplingParams, TokenChunk
from waiting import until

# An engine that is killed here dies as a process does: it closes no connection that came in at that very moment.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROMPT = [5, 6, 7, 8, 9]
SPEC = replace(TINY, vocab_size=64, max_positions=256)
CONFIG = EngineConfig(max_running=4, max_length=256, options=NativeOptions(max_waiting=64))
DIGESTS = ("first", "second")
QUICK = HealthLimits(healthy_poll_s=0.02, suspect_poll_s=0.02, stale_poll_s=0.02, dead_poll_s=0.02, dead_s=0.3)


def weights(seed: int, version: int, digest: str) -> Weights:
    model = Decoder(SPEC, InvariantArithmetic())
    model.initialise(seed, std=0.2)
    return Weights(model, version, digest)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage after each test, so that leftovers of a killed engine are reported in the test that killed it."""
    yield
    gc.collect()


class Host:
    """One native engine on its own port, which a test can kill at any time."""

    def __init__(self) -> None:
        self.engine = NativeEngine(weights(0, 0, DIGESTS[0]), CONFIG, seed=0, record_routes=True)
        self._runner = web.AppRunner(engine_app(self.engine), handler_cancellation=True, shutdown_timeout=0.01)

    async def start(self) -> str:
        """Serve; returns the base URL."""
        self._stepping = asyncio.create_task(self.engine.run())
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def kill(self) -> None:
        """Drop the port, every connection and every call; twice is harmless."""
        self._stepping.cancel()
        await asyncio.gather(self._stepping, self._runner.cleanup(), return_exceptions=True)


@asynccontextmanager
async def pool_of(engines: int, *, is_lent: bool = False) -> AsyncIterator[tuple[EnginePool, Sequence[Host]]]:
    """A pool that watches its engines, which are all healthy."""
    hosts = [Host() for _ in range(engines)]
    async with AsyncExitStack() as stack:
        connect = await stack.enter_async_context(http_engines(0.0))
        pool = EnginePool(connect, Router(QUICK), SystemClock(), seed=0)
        pool.announce(0, DIGESTS[0])
        for name, host in enumerate(hosts):
            stack.push_async_callback(host.kill)
            pool.add(EngineEntry(name=str(name), url=await host.start(), is_lent=is_lent))
        monitor = asyncio.create_task(pool.watch())
        stack.push_async_callback(asyncio.wait, [monitor])
        stack.callback(monitor.cancel)
        await until(lambda: all(view.state is EngineState.HEALTHY for view in pool.list()))
        yield pool, hosts


def assert_same(one: Completion, other: Completion) -> None:
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    np.testing.assert_array_equal(one.versions, other.versions)
    assert one.finish is other.finish
    assert one.routes is not None and other.routes is not None
    np.testing.assert_array_equal(one.routes, other.routes)


def test_a_turn_whose_engine_is_killed_in_the_middle_is_the_turn_it_would_have_been() -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, want_routes=True)

    async def run() -> None:
        async with pool_of(2) as (pool, hosts):
            whole = await hosts[0].engine.generate(PROMPT, params, session="s")
            heard = list[TokenChunk]()
            async for chunk in pool.stream(PROMPT, params, session="s"):
                heard.append(chunk)
                if len(heard) == 20:
                    (serving,) = [view for view in pool.list() if view.inflight]
                    await hosts[int(serving.entry.name)].kill()
            assert pool.counters.continued == 1
            completion = heard[-1].completion
            assert completion is not None
            assert_same(completion, whole)
            np.testing.assert_array_equal(np.concatenate([chunk.token_ids for chunk in heard]), whole.token_ids)
            await until(lambda: sorted(view.state for view in pool.list()) == [EngineState.DEAD, EngineState.HEALTHY])
            assert_same(await pool.generate(PROMPT, params, session="s"), whole)

    asyncio.run(run())


@pytest.mark.parametrize("is_noticed", [True, False], ids=["recalled", "killed without a notice"])
@pytest.mark.parametrize("top_p", [1.0, 0.8], ids=["", "truncated"])
def test_turns_of_a_lent_engine_go_on_elsewhere_to_the_bit(is_noticed: bool, top_p: float) -> None:
    params = [SamplingParams(max_tokens=60, seed=seed, top_p=top_p, want_routes=True) for seed in range(8)]

    async def listen(pool: EnginePool, params: SamplingParams, session: str) -> Completion:
        async for chunk in pool.stream(PROMPT, params, session=session):
            if chunk.completion is not None:
                return chunk.completion
        raise AssertionError("a stream ends with its completion")

    async def run() -> None:
        async with pool_of(3, is_lent=True) as (pool, hosts):
            undisturbed = [await hosts[0].engine.generate(PROMPT, each, session="s") for each in params]
            whole = [pool.generate(PROMPT, each, session=str(index)) for index, each in enumerate(params)]
            streams = [listen(pool, each, f"stream {index}") for index, each in enumerate(params)]
            calls = asyncio.gather(*whole, *streams)
            sampled = Counter[int]()
            await until(lambda: _is_sampling(hosts[1], sampled, tokens=20))
            taken = pool.list()[1].inflight
            assert taken > 0
            if is_noticed:
                pool.remove("1")
            else:
                await hosts[1].kill()
            for completion, expected in zip(await calls, [*undisturbed, *undisturbed], strict=True):
                assert_same(completion, expected)
                assert (completion.sampling_mask is None) == (top_p == 1)
                if completion.sampling_mask is not None and expected.sampling_mask is not None:
                    np.testing.assert_array_equal(completion.sampling_mask.offsets, expected.sampling_mask.offsets)
                    np.testing.assert_array_equal(completion.sampling_mask.token_ids, expected.sampling_mask.token_ids)
            assert 0 < pool.counters.continued <= taken
            assert (pool.counters.anew, pool.counters.recalled) == (0, int(is_noticed))
            assert (pool.counters.losses > 0) != is_noticed

    asyncio.run(run())


def test_tokens_of_a_continued_turn_keep_the_logprobs_and_versions_that_they_were_sampled_with() -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, want_routes=True)

    async def run() -> None:
        async with pool_of(2) as (pool, hosts):
            pool.announce(1, DIGESTS[1])
            heard = list[TokenChunk]()
            async for chunk in pool.stream(PROMPT, params, session="s"):
                heard.append(chunk)
                if len(heard) == 20:
                    (serving,) = [int(view.entry.name) for view in pool.list() if view.inflight]
                    await hosts[1 - serving].engine.swap(weights(1, 1, DIGESTS[1]))
                    await hosts[serving].kill()
            completion = heard[-1].completion
            assert completion is not None and completion.routes is not None
            versions = completion.versions.tolist()
            assert versions == sorted(versions) and set(versions) == {0, 1}
            assert len(completion.routes) == len(PROMPT) + len(versions) - 1
            np.testing.assert_array_equal(np.concatenate([chunk.logprobs for chunk in heard]), completion.logprobs)
            # The first token of each part, scored by its own weights, behind exactly what came before it.
            second = versions.index(1)
            for at, seed in ((0, 0), (second, 1)):
                context = [*PROMPT, *completion.token_ids[:at].tolist()]
                logprob = await chance(weights(seed, seed, ""), context, int(completion.token_ids[at]))
                assert logprob == completion.logprobs[at]

    asyncio.run(run())


def _is_sampling(host: Host, sampled: Counter[int], *, tokens: int) -> bool:
    """True once an engine has sampled more than ``tokens`` since it was first looked at."""
    sampled[0] += host.engine.take_counters().generated_tokens
    return sampled[0] > tokens


async def chance(lease: Weights, context: Sequence[int], token: int) -> float:
    """The log-probability with which an engine samples ``token`` behind ``context``, found by drawing until it does."""
    engine = NativeEngine(lease, CONFIG, seed=0)
    stepping = asyncio.create_task(engine.run())
    try:
        for seed in range(5000):
            drawn = await engine.generate(context, SamplingParams(max_tokens=1, seed=seed), session="s")
            if drawn.token_ids[0] == token:
                return float(drawn.logprobs[0])
        raise AssertionError(f"token {token} was not drawn in 5000 tries")
    finally:
        stepping.cancel()


def test_an_engine_that_swaps_to_wrong_weights_gets_no_more_calls() -> None:
    params = SamplingParams(max_tokens=4)

    async def run() -> None:
        async with pool_of(2) as (pool, hosts):
            pool.announce(1, DIGESTS[1])
            await hosts[0].engine.swap(weights(2, 1, "damaged"))
            await hosts[1].engine.swap(weights(1, 1, DIGESTS[1]))
            await until(lambda: pool.list()[0].state is EngineState.STALE)
            hosts[0].engine.take_counters()
            calls = (pool.generate(PROMPT, params, session=str(session)) for session in range(30))
            for completion in await asyncio.gather(*calls):
                assert completion.versions.tolist() == [1] * 4
            assert hosts[0].engine.take_counters().generated_tokens == 0
            await hosts[0].engine.swap(weights(1, 1, DIGESTS[1]))
            await until(lambda: pool.list()[0].state is EngineState.HEALTHY)

    asyncio.run(run())


def test_people_are_served_first_while_rollouts_saturate_the_engine_and_no_rollout_is_lost() -> None:
    async def run() -> None:
        async with pool_of(1) as (pool, (host,)):
            clock = SystemClock()
            admission_queue = AdmissionQueue(AdmissionController(AdmissionLimits(start=8)), clock)
            expected = await asyncio.gather(
                *(host.engine.generate(PROMPT, rollout(seed), session="s") for seed in range(16))
            )
            host.engine.take_counters()

            async def call(traffic: TrafficClass, params: SamplingParams, session: str) -> Completion:
                async with admission_queue.permit(traffic, clock.now() + 60.0, ""):
                    request = replace(params, priority=PRIORITIES[traffic])
                    return await pool.generate(PROMPT, request, session=session)

            rollouts = [asyncio.create_task(call(TrafficClass.ROLLOUT, rollout(seed), str(seed))) for seed in range(16)]
            while (await host.engine.health()).running < CONFIG.max_running:
                await asyncio.sleep(0.001)
            assert admission_queue.controller.waiting(TrafficClass.ROLLOUT) == 8
            before = sum(task.done() for task in rollouts)
            answer = await call(TrafficClass.PRODUCTION, SamplingParams(max_tokens=8, seed=99), "person")
            assert len(answer.token_ids) == 8
            assert sum(task.done() for task in rollouts) == before == 0
            assert host.engine.take_counters().preempted >= 1
            for completion, undisturbed in zip(await asyncio.gather(*rollouts), expected, strict=True):
                assert_same(completion, undisturbed)

    asyncio.run(run())


def rollout(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=60, seed=seed, want_routes=True)
