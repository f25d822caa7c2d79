"""Contract of every engine."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from etude.aio import background_task
from etude.clock import SystemClock
from etude.config.inference import EngineConfig
from etude.config.loading import default_recipe
from etude.config.plugins import load
from etude.engines.fake import FakeEngine
from etude.engines.http import BUSY, HttpEngine, encode_chunk, encode_completion, engine_app
from etude.engines.kinds import Opener as Kind
from etude.engines.native.engine import NativeEngine, Weights
from etude.errors import EngineBusy, EngineUnavailable
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.protocols import Completion, Engine, SamplingParams, TokenChunk
from etude.run.resolve import resolve
from etude.types import Finish
from native_configs import altered
from served_engines import PulledStates, context_of
from waiting import WAIT_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
VOCAB_SIZE = 64
MAX_LENGTH = 64
PROMPT = [5, 6, 7]

SPEC = replace(TINY, vocab_size=VOCAB_SIZE)
CONFIG = EngineConfig(max_running=4, max_length=MAX_LENGTH)

STOPS = tuple(range(0, VOCAB_SIZE, 4))

Opener = Callable[[], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def fake() -> AsyncIterator[Engine]:
    yield FakeEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)


@asynccontextmanager
async def over_http(app: web.Application, timeout_s: float = 1.0) -> AsyncIterator[HttpEngine]:
    async with TestServer(app) as server, ClientSession() as http:
        with closing(HttpEngine(str(server.make_url("")), http, timeout_s)) as engine:
            yield engine


@asynccontextmanager
async def fake_over_http() -> AsyncIterator[Engine]:
    async with fake() as engine, over_http(engine_app(engine)) as client:
        yield client


@asynccontextmanager
async def native(config: EngineConfig = CONFIG) -> AsyncIterator[NativeEngine]:
    model = Decoder(SPEC, InvariantArithmetic())
    model.initialise(0, std=0.2)
    engine = NativeEngine(Weights(model, 0, "digest"), config, seed=0, record_routes=True)
    stepping = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)


@asynccontextmanager
async def native_over_http() -> AsyncIterator[Engine]:
    async with native() as engine, over_http(engine_app(engine)) as client:
        yield client


@asynccontextmanager
async def example() -> AsyncIterator[Engine]:
    """The engine of ``docs/extending.md``."""
    kind = cast("Kind", load(f"@{EXAMPLES / 'engine.py'}:Logged", "a test"))
    sizes = [f"engine.max_running={CONFIG.max_running}", f"engine.max_length={MAX_LENGTH}", "engine.device=cpu"]
    config = resolve(default_recipe([*sizes, "trainer.device=cpu", "engine.options.step_tokens=64"]))
    with TemporaryDirectory() as folder:
        context = context_of(Path(folder), config, SPEC)
        async with kind(context, PulledStates(SPEC).version(0)) as served, AsyncExitStack() as stack:
            stack.callback(context.events.close)
            for task in served.tasks:
                await stack.enter_async_context(background_task(task()))
            yield served.engine


@pytest.fixture(params=[fake, fake_over_http, native, native_over_http, example])
def opener(request: pytest.FixtureRequest) -> Opener:
    chosen: Opener = request.param
    return chosen


def play(opener: Opener, scene: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opener() as engine:
            await scene(engine)

    asyncio.run(run())


def test_a_completion_has_a_logprob_and_the_served_version_for_each_token(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        health = await engine.health()
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=20), session="s")
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 20
        dtypes = [array.dtype for array in (completion.token_ids, completion.logprobs, completion.versions)]
        assert dtypes == [np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.int32)]
        assert ((completion.token_ids >= 0) & (completion.token_ids < VOCAB_SIZE)).all()
        assert (np.isfinite(completion.logprobs) & (completion.logprobs <= 0)).all()
        assert (completion.versions == health.version).all()
        assert completion.finish is Finish.LENGTH

    play(opener, scene)


def test_a_stop_token_ends_the_completion_and_is_kept(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        stop_ids = tuple(range(0, VOCAB_SIZE, 2))
        params = [SamplingParams(max_tokens=40, stop_ids=stop_ids, seed=seed) for seed in range(20)]
        for completion in [await engine.generate(PROMPT, one, session="s") for one in params]:
            *before, last = completion.token_ids.tolist()
            assert not set(before) & set(stop_ids)
            assert (last in stop_ids) == (completion.finish is Finish.STOP)
            assert completion.finish is Finish.STOP or len(completion.token_ids) == 40

    play(opener, scene)


def test_a_seed_repeats_and_another_one_differs(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        params = [SamplingParams(max_tokens=30, seed=seed) for seed in (1, 1, 2, None, None)]
        results = [await engine.generate(PROMPT, one, session="s") for one in params]
        same, again, other, free, free_again = [result.token_ids.tolist() for result in results]
        assert same == again
        assert same != other
        assert free != free_again
        np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=1e-5)

    play(opener, scene)


def test_temperature_zero_is_greedy_whatever_the_seed(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        params = [SamplingParams(max_tokens=30, temperature=0.0, seed=seed) for seed in (1, 2, None)]
        first, *others = [(await engine.generate(PROMPT, one, session="s")).token_ids.tolist() for one in params]
        assert others == [first, first]

    play(opener, scene)


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens"),
    [([], 4), ([VOCAB_SIZE], 4), ([-1], 4), ([2**40], 4), (PROMPT, 0), (PROMPT, MAX_LENGTH), ([1] * MAX_LENGTH, 1)],
)
def test_a_request_that_cannot_be_served_is_a_value_error(
    opener: Opener, prompt_ids: list[int], max_tokens: int
) -> None:
    async def scene(engine: Engine) -> None:
        with pytest.raises(ValueError, match=r"prompt|max_tokens"):
            await engine.generate(prompt_ids, SamplingParams(max_tokens=max_tokens), session="s")
        assert (await engine.health()).running == 0

    play(opener, scene)


def test_concurrent_calls_get_their_own_answers(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        params = [SamplingParams(max_tokens=30, seed=seed) for seed in range(20)]
        alone = [await engine.generate(PROMPT, one, session="s") for one in params]
        batched = await asyncio.gather(
            *(engine.generate(PROMPT, one, session=f"s{index}") for index, one in enumerate(params))
        )
        assert [one.token_ids.tolist() for one in batched] == [one.token_ids.tolist() for one in alone]

    play(opener, scene)


async def listen(engine: Engine, params: SamplingParams, chunks: int | None = None) -> list[TokenChunk]:
    """All chunks of a stream, or the first few; closes the stream."""
    heard = list[TokenChunk]()
    async with aclosing(engine.stream(PROMPT, params, session="s")) as stream:
        async for chunk in stream:
            heard.append(chunk)
            if len(heard) == chunks:
                break
    return heard


def assert_same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    np.testing.assert_array_equal(one.versions, other.versions)
    assert one.finish is other.finish
    assert (one.routes is None, one.sampling_mask is None) == (other.routes is None, other.sampling_mask is None)
    if one.routes is not None and other.routes is not None:
        np.testing.assert_array_equal(one.routes, other.routes)
    if one.sampling_mask is not None and other.sampling_mask is not None:
        np.testing.assert_array_equal(one.sampling_mask.offsets, other.sampling_mask.offsets)
        np.testing.assert_array_equal(one.sampling_mask.token_ids, other.sampling_mask.token_ids)


def test_a_stream_is_the_completion_in_chunks(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        for params in (SamplingParams(max_tokens=20, seed=3), SamplingParams(max_tokens=40, seed=4, stop_ids=STOPS)):
            whole = await engine.generate(PROMPT, params, session="s")
            chunks = await listen(engine, params)
            assert all(chunk.completion is None for chunk in chunks[:-1])
            assert chunks[-1].completion is not None
            assert_same(chunks[-1].completion, whole)
            for name in ("token_ids", "logprobs", "versions"):
                heard = np.concatenate([getattr(chunk, name) for chunk in chunks])
                np.testing.assert_array_equal(heard, getattr(whole, name))

    play(opener, scene)


def test_a_stream_may_be_left_early(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        assert len(await listen(engine, SamplingParams(max_tokens=50), chunks=2)) == 2
        async with asyncio.timeout(WAIT_S):
            while (await engine.health()).running:
                await asyncio.sleep(0.001)
        assert len((await engine.generate(PROMPT, SamplingParams(max_tokens=5), session="s")).token_ids) == 5

    play(opener, scene)


def test_a_stream_that_cannot_be_served_is_a_value_error(opener: Opener) -> None:
    async def scene(engine: Engine) -> None:
        with pytest.raises(ValueError, match="max_tokens"):
            await listen(engine, SamplingParams(max_tokens=MAX_LENGTH))

    play(opener, scene)


# The native engine's HTTP


def test_nothing_is_lost_on_the_way() -> None:
    async def run() -> None:
        async with native() as engine, over_http(engine_app(engine)) as client:
            for params in (
                SamplingParams(max_tokens=20, seed=1, want_routes=True),
                SamplingParams(max_tokens=20, seed=2, top_p=0.7, temperature=0.8, want_routes=True),
                SamplingParams(max_tokens=20, seed=3, top_k=3, stop_ids=STOPS),
            ):
                direct = await engine.generate(PROMPT, params, session="s")
                assert (direct.routes is not None) == params.want_routes
                assert (direct.sampling_mask is not None) == (params.seed != 1)
                assert_same(await client.generate(PROMPT, params, session="s"), direct)
                streamed = (await listen(client, params))[-1].completion
                assert streamed is not None
                assert_same(streamed, direct)

    asyncio.run(run())


def test_an_engine_has_its_figures_for_prometheus_which_has_its_key() -> None:
    async def run() -> None:
        async with fake() as engine, TestServer(engine_app(engine, "key")) as server, ClientSession() as http:
            async with http.get(server.make_url("/metrics")) as answer:
                assert answer.status == 401
            async with http.get(server.make_url("/metrics"), headers={"Authorization": "Bearer key"}) as answer:
                text = await answer.text()
        assert f"\netude_served_version {(await engine.health()).version}.0\n" in text

    asyncio.run(run())


def test_a_busy_engine_is_told_from_one_that_is_down() -> None:
    async def run() -> None:
        config = altered(CONFIG, max_running=1, max_waiting=1)
        model = Decoder(SPEC)
        model.initialise(0)
        engine = NativeEngine(Weights(model, 0, "digest"), config, seed=0)  # nobody steps it: its line stays full
        async with (
            over_http(engine_app(engine), timeout_s=0.0) as client,
            over_http(engine_app(engine), timeout_s=30.0) as patient,
        ):
            waiting = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=4), session="s"))
            await asyncio.sleep(0)
            with pytest.raises(EngineBusy, match="429"):
                await client.generate(PROMPT, SamplingParams(max_tokens=4), session="s")
            with pytest.raises(EngineBusy, match="1 requests are waiting"):
                await listen(client, SamplingParams(max_tokens=4))
            again = asyncio.create_task(patient.generate(PROMPT, SamplingParams(max_tokens=4), session="s"))
            while engine.step() or not again.done():
                await asyncio.sleep(0.001)
            assert len((await again).token_ids) == len((await waiting).token_ids) == 4

    asyncio.run(run())


def answering(path: str, body: bytes, status: int = 200) -> web.Application:
    """A server with one answer."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post(path, answer)
    return app


def make_completion(tokens: int = 3) -> Completion:
    return Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=np.zeros(tokens, np.int32),
        finish=Finish.LENGTH,
        routes=np.zeros((tokens + 2, 2, 2), np.uint16),
    )


def make_chunk(completion: Completion | None = None) -> TokenChunk:
    return TokenChunk(
        token_ids=np.array([1], np.int32),
        logprobs=np.array([-0.5], np.float32),
        versions=np.array([0], np.int32),
        completion=completion,
    )


WHOLE = encode_completion(make_completion())
LAST = encode_chunk(make_chunk(make_completion()))


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 200), (WHOLE[:-1], 200), (WHOLE[20:], 200), (WHOLE + b"!", 200), (b"{}", 200), (WHOLE, 500), (b"", 429)],
)
def test_a_damaged_answer_is_an_unavailable_engine(body: bytes, status: int) -> None:
    async def run() -> None:
        async with over_http(answering("/generate", body, status), timeout_s=0.0) as client:
            with pytest.raises(EngineUnavailable) as caught:
                await client.generate(PROMPT, SamplingParams(max_tokens=3), session="s")
            assert isinstance(caught.value, EngineBusy) == (status == BUSY)

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        encode_chunk(make_chunk()),
        encode_chunk(make_chunk())[:-9],
        encode_chunk(make_chunk()) + b"{}\n",
        LAST[:-1],
        LAST[: LAST.index(b"\n") + 1],
        LAST.replace(b"token_ids", b"token_id2"),
        b"no end of a line" * 100_000,
    ],
    ids=["nothing", "no last", "half a line", "no chunk", "half", "no completion", "no completion's", "no lines"],
)
def test_a_damaged_stream_is_an_unavailable_engine(body: bytes) -> None:
    async def run() -> None:
        async with over_http(answering("/stream", body)) as client:
            with pytest.raises(EngineUnavailable):
                await listen(client, SamplingParams(max_tokens=3))

    asyncio.run(run())


def test_a_stream_that_breaks_off_at_the_engine_breaks_off_at_the_caller() -> None:
    async def run() -> None:
        broken = Decoder(SPEC, InvariantArithmetic())
        broken.initialise(0, std=math.inf)
        async with native() as engine, over_http(engine_app(engine), timeout_s=0.0) as client:
            heard = list[TokenChunk]()
            with pytest.raises(EngineUnavailable, match=r"no answer|broke off"):
                async for chunk in client.stream(PROMPT, SamplingParams(max_tokens=50), session="s"):
                    heard.append(chunk)
                    await engine.swap(Weights(broken, 1, "broken"))
            assert heard
            with pytest.raises(EngineUnavailable, match=r"503.*step failed"):
                await client.generate(PROMPT, SamplingParams(max_tokens=1), session="s")

    asyncio.run(run())
