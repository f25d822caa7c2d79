"""What every engine promises, whatever samples behind it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from etude.clock import SystemClock
from etude.config import EngineConfig
from etude.engines.fake import FakeEngine
from etude.engines.http import HttpEngine
from etude.engines.native import NativeEngine, Weights
from etude.engines.server import engine_app
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.protocols import Engine, SamplingParams
from etude.types import Finish

VOCAB_SIZE = 64
MAX_LENGTH = 64
PROMPT = [5, 6, 7]

SPEC = replace(TINY, vocab_size=VOCAB_SIZE)

Opener = Callable[[], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def fake() -> AsyncIterator[Engine]:
    yield FakeEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)


@asynccontextmanager
async def fake_over_http() -> AsyncIterator[Engine]:
    async with fake() as engine, TestServer(engine_app(engine)) as server, ClientSession() as http:
        yield HttpEngine(str(server.make_url("")), http, timeout_s=1.0)


@asynccontextmanager
async def native() -> AsyncIterator[Engine]:
    model = Decoder(SPEC)
    model.initialise(0, std=0.2)
    engine = NativeEngine(Weights(model, 0, "digest"), EngineConfig(max_running=4, max_length=MAX_LENGTH), seed=0)
    stepping = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        stepping.cancel()


@pytest.fixture(params=[fake, fake_over_http, native])
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
        together = await asyncio.gather(
            *(engine.generate(PROMPT, one, session=f"s{index}") for index, one in enumerate(params))
        )
        assert [one.token_ids.tolist() for one in together] == [one.token_ids.tolist() for one in alone]

    play(opener, scene)
