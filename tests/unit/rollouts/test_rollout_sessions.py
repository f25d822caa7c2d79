"""The gateway as rollouts reach it over HTTP: a real server that speaks the contract, and one that is not there."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.rollouts.sessions import GatewaySessions
from etude.types import Finish

Answer = TypeVar("Answer")
TURN = {
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4],
    "logprobs": [-0.5, -0.25],
    "versions": [6, 7],
    "finish": "length",
}


async def open_session(request: web.Request) -> web.Response:
    if request.headers["Authorization"] != "Bearer right":
        return web.json_response({"error": "this route needs the admin key"}, status=401)
    return web.json_response({"session_id": "s1", "api_key": "k1"})


async def close_session(request: web.Request) -> web.Response:
    if request.match_info["session_id"] == "busy":
        return web.Response(status=503, text="later")
    if request.match_info["session_id"] != "s1":
        return web.json_response({"error": "no such session"}, status=404)
    return web.json_response({"turns": [TURN]})


def with_gateway(use: Callable[[GatewaySessions], Awaitable[Answer]], key: str = "right") -> Answer:
    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/sessions", open_session)
        app.router.add_delete("/sessions/{session_id}", close_session)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            return await use(GatewaySessions(str(server.make_url("/")), key, http))

    return asyncio.run(run())


def test_an_opened_session_leads_a_harness_to_the_gateway() -> None:
    session = with_gateway(lambda sessions: sessions.open())
    assert (session.session_id, session.api_key) == ("s1", "k1")
    assert session.base_url.startswith("http://127.0.0.1:")
    assert session.base_url.endswith("/v1")
    assert "//v1" not in session.base_url


def test_a_closed_session_hands_over_its_turns() -> None:
    (turn,) = with_gateway(lambda sessions: sessions.close("s1"))
    assert turn.finish is Finish.LENGTH
    for array, values, dtype in [
        (turn.prompt_ids, [1, 2], np.int32),
        (turn.completion_ids, [3, 4], np.int32),
        (turn.logprobs, [-0.5, -0.25], np.float32),
        (turn.versions, [6, 7], np.int32),
    ]:
        assert array.dtype == dtype
        assert array.tolist() == values


def test_an_unknown_session_is_lost() -> None:
    with pytest.raises(SessionLost, match="no such session"):
        with_gateway(lambda sessions: sessions.close("s2"))


def test_a_refusal_is_quoted() -> None:
    with pytest.raises(EngineUnavailable, match="503: later"):
        with_gateway(lambda sessions: sessions.close("busy"))


def test_a_wrong_admin_key_is_for_the_user_to_repair() -> None:
    with pytest.raises(ConfigError, match="same admin key"):
        with_gateway(lambda sessions: sessions.open(), key="wrong")


def test_a_gateway_that_is_down_is_unavailable() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            await GatewaySessions("http://127.0.0.1:9", "right", http).open()

    with pytest.raises(EngineUnavailable, match=r"POST http://127\.0\.0\.1:9/sessions: ClientConnectorError"):
        asyncio.run(run())
