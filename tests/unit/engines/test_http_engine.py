"""The client of an engine behind HTTP: its retries, the end of its retries, and who is at fault."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from io import BytesIO

import numpy as np
import orjson
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from etude.clock import VirtualClock
from etude.engines.fake import FakeEngine
from etude.engines.http import MAX_BODY_BYTES, HttpEngine, encode_completion, engine_app
from etude.errors import EngineUnavailable
from etude.protocols import Completion, SamplingParams
from etude.types import Finish, Json

PARAMS = SamplingParams(max_tokens=4)
ANSWER = Completion(
    token_ids=np.array([3], np.int32),
    logprobs=np.array([-0.5], np.float32),
    versions=np.array([7], np.int32),
    finish=Finish.STOP,
)
REQUEST: dict[str, Json] = {"prompt_ids": [1], "session": "s", "max_tokens": 4}


def fake_engine() -> FakeEngine:
    return FakeEngine(VirtualClock(), vocab_size=32, max_length=64)


@asynccontextmanager
async def client(app: web.Application, timeout_s: float, clock: VirtualClock) -> AsyncIterator[HttpEngine]:
    async with TestServer(app) as server, ClientSession() as http:
        with closing(HttpEngine(str(server.make_url("")), http, timeout_s, clock)) as engine:
            yield engine


def app_of(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.Application:
    app = web.Application()
    app.router.add_post("/generate", handler)
    app.router.add_get("/health", handler)
    return app


def test_a_call_outlives_an_engine_that_is_down_for_a_while() -> None:
    async def run() -> None:
        fake, clock = fake_engine(), VirtualClock()
        fake.fail_next(6)
        async with client(engine_app(fake), 30.0, clock) as engine:
            assert len((await engine.generate([1], PARAMS, session="s")).token_ids) == 4
        assert clock.now() == pytest.approx(0.05 + 0.1 + 0.2 + 0.4 + 0.8 + 0.8)

    asyncio.run(run())


def test_a_call_gives_up_when_the_engine_was_down_for_too_long() -> None:
    async def run() -> None:
        clock = VirtualClock()
        async with ClientSession() as http:
            engine = HttpEngine("http://127.0.0.1:9", http, 3.0, clock)
            with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1"):
                await engine.generate([1], PARAMS, session="s")
        assert 2.0 < clock.now() <= 3.0

    asyncio.run(run())


def test_an_engine_that_dies_during_a_call_is_asked_again() -> None:
    calls = 0

    async def dies_twice(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls < 3 and request.transport is not None:
            request.transport.close()
        return web.Response(body=encode_completion(ANSWER))

    async def run() -> None:
        async with client(app_of(dies_twice), 30.0, VirtualClock()) as engine:
            assert (await engine.generate([1], PARAMS, session="s")).versions.tolist() == [7]
        assert calls == 3

    asyncio.run(run())


def test_time_that_an_engine_spent_on_an_answer_it_then_lost_is_no_outage() -> None:
    calls, clock = 0, VirtualClock()

    async def dies_late_twice(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls < 3 and request.transport is not None:
            clock.advance(60.0)
            request.transport.close()
        return web.Response(body=encode_completion(ANSWER))

    async def run() -> None:
        async with client(app_of(dies_late_twice), 30.0, clock) as engine:
            assert (await engine.generate([1], PARAMS, session="s")).versions.tolist() == [7]

    asyncio.run(run())


def test_a_request_that_every_engine_dies_of_is_given_up() -> None:
    clock = VirtualClock()

    async def dies_late(request: web.Request) -> web.StreamResponse:
        clock.advance(60.0)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def run() -> None:
        async with client(app_of(dies_late), 30.0, clock) as engine:
            with pytest.raises(EngineUnavailable, match="the server closed it"):
                await engine.generate([1], PARAMS, session="s")

    asyncio.run(run())


def test_health_is_asked_once() -> None:
    async def run() -> None:
        fake, clock = fake_engine(), VirtualClock()
        fake.fail_next(1)
        async with client(engine_app(fake), 30.0, clock) as engine:
            with pytest.raises(EngineUnavailable, match="503"):
                await engine.health()
            assert await engine.health() == await fake.health()
        assert clock.now() == 0.0

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        b"{}",
        b"[]",
        encode_completion(ANSWER)[:-1],
        encode_completion(replace(ANSWER, logprobs=np.array([np.nan], np.float32))),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_unavailable_engine(answer: bytes) -> None:
    async def nonsense(request: web.Request) -> web.StreamResponse:
        return web.Response(body=answer)

    async def run() -> None:
        async with client(app_of(nonsense), 1.0, VirtualClock()) as engine:
            with pytest.raises(EngineUnavailable):
                await engine.generate([1], PARAMS, session="s")
            with pytest.raises(EngineUnavailable):
                await engine.health()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt_ids": "1 2"}, "prompt_ids"),
        ({"prompt_ids": [1.5]}, r"prompt_ids\[0\]"),
        ({"prompt_ids": [True]}, r"prompt_ids\[0\]"),
        ({"prompt_ids": [99]}, "0 … 31"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 64}, "exceed 64"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_ids": [-1]}, r"stop_ids\[0\]"),
        ({"seed": 2**63}, "seed"),
        ({"session": 1}, "session"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"want_routes": 1}, "want_routes"),
        ({"top_q": 0.5}, "top_q"),
    ],
)
def test_the_server_names_the_field_at_fault(change: dict[str, Json], word: str) -> None:
    status, message = ask(orjson.dumps({**REQUEST, **change}))
    assert status == 400
    with pytest.raises(ValueError, match=word):
        raise ValueError(message)


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b"{", 400), (b"[]", 400), (b"{}", 400), (b" " * (MAX_BODY_BYTES + 1), 413), (orjson.dumps(REQUEST), 200)],
)
def test_the_server_refuses_what_is_no_request(body: bytes, expected: int) -> None:
    status, message = ask(body)
    assert status == expected
    assert bool(message) == (expected != 200)


def test_the_server_says_when_to_try_again() -> None:
    async def run() -> None:
        fake = fake_engine()
        fake.fail_next(2)
        async with TestServer(engine_app(fake)) as server, ClientSession() as http:
            for method, path in (("POST", "/generate"), ("GET", "/health")):
                async with http.request(method, server.make_url(path), data=orjson.dumps(REQUEST)) as response:
                    assert response.status == 503
                    assert int(response.headers["Retry-After"]) > 0

    asyncio.run(run())


def ask(body: bytes) -> tuple[int, str]:
    """Post a body to a server over a fake engine; returns the status and the error message."""

    async def run() -> tuple[int, str]:
        async with (
            TestServer(engine_app(fake_engine())) as server,
            ClientSession() as http,
            http.post(server.make_url("/generate"), data=BytesIO(body)) as response,
        ):
            answer = await response.read()
            return response.status, "" if response.status == 200 else orjson.loads(answer)["error"]

    return asyncio.run(run())


@asynccontextmanager
async def keyed_client(key: str) -> AsyncIterator[HttpEngine]:
    """A client that uses ``key`` with an engine whose key is ``right``."""
    async with TestServer(engine_app(fake_engine(), "right")) as server, ClientSession() as http:
        with closing(HttpEngine(str(server.make_url("")), http, 0.0, VirtualClock(), key=key)) as engine:
            yield engine


@pytest.mark.parametrize("key", ["", "wrong", "rightright", "Right", "ключ"])
def test_an_engine_with_a_key_does_nothing_for_who_has_another(key: str) -> None:
    async def run() -> None:
        async with keyed_client(key) as engine:
            stream = engine.stream([1], PARAMS, session="s")
            for asking in (engine.generate([1], PARAMS, session="s"), engine.health(), anext(stream)):
                with pytest.raises(EngineUnavailable, match="answered 401: this engine requires its key"):
                    await asking

    asyncio.run(run())


def test_an_engine_answers_who_has_its_key() -> None:
    async def run() -> None:
        async with keyed_client("right") as engine:
            assert len((await engine.generate([1], PARAMS, session="s")).token_ids) == 4
            assert [chunk async for chunk in engine.stream([1], PARAMS, session="s")][-1].completion is not None
            assert (await engine.health()).version == 0

    asyncio.run(run())
