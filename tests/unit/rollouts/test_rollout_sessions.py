"""The gateway as rollouts reach it over HTTP: a real server with the same API, and an unavailable one."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.aio import background_task
from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.gateway.capture.sessions import DEFAULT_LIMITS
from etude.ledger.turns import encode_turns
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sessions import KEEP_ALIVE_S, GatewaySessions
from etude.types import Finish, PayloadRef, Turn
from gateways import ADMIN_KEY, Setting, fake_engine, gateway
from waiting import WAIT_S, until

Answer = TypeVar("Answer")
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
TURN = Turn(
    prompt_ids=np.array([1, 2], np.int32),
    completion_ids=np.array([3, 4], np.int32),
    logprobs=np.array([-0.5, -0.25], np.float32),
    versions=np.array([6, 7], np.int32),
    finish=Finish.LENGTH,
    temperature=0.7,
    payload=PayloadRef(digest="ab" * 32, size_bytes=12),
)


async def open_session(request: web.Request) -> web.Response:
    if request.headers["Authorization"] != "Bearer right":
        return web.json_response({"error": "this route needs the admin key"}, status=401)
    origin = (await request.json()).get("fork_of") if request.can_read_body else None
    if origin not in (None, "s1"):
        return web.json_response({"error": "no such session"}, status=404)
    turns = 3 if origin else 0
    name = "s2" if origin else "s1"
    return web.json_response({"session_id": name, "api_key": "k1", "base_url": f"/s/{name}/v1", "turns": turns})


async def close_session(request: web.Request) -> web.Response:
    if request.match_info["session_id"] == "busy":
        return web.Response(status=503, text="later")
    if request.match_info["session_id"] == "damaged":
        return web.Response(body=encode_turns([TURN])[:-1])
    if request.match_info["session_id"] != "s1":
        return web.json_response({"error": "no such session"}, status=404)
    return web.Response(body=encode_turns([TURN]), content_type="application/octet-stream")


def with_gateway(
    use: Callable[[GatewaySessions], Awaitable[Answer]],
    key: str = "right",
    *,
    troubles: Sequence[int] = (),
    timeout_s: float = 60.0,
) -> Answer:
    """Use a gateway whose first answers are ``troubles``: HTTP statuses, or 0 for a broken connection."""
    ahead = list(troubles)

    @web.middleware
    async def trouble(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not ahead:
            return await handler(request)
        status = ahead.pop(0)
        if not status:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 200)

    async def run() -> Answer:
        app = web.Application(middlewares=[trouble])
        app.router.add_post("/sessions", open_session)
        app.router.add_delete("/sessions/{session_id}", close_session)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            return await use(GatewaySessions(GatewayTable([str(server.make_url("/"))]), key, http, timeout_s=timeout_s))

    answer = asyncio.run(run())
    assert ahead == []
    return answer


def test_an_opened_session_leads_a_harness_to_the_gateway() -> None:
    session = with_gateway(lambda sessions: sessions.open())
    assert (session.session_id, session.api_key) == ("s1", "k1")
    assert session.base_url.startswith("http://127.0.0.1:")
    assert session.base_url.removeprefix("http://").partition("/")[2] == "s/s1/v1"


def test_a_forked_session_begins_with_turns() -> None:
    session, turns = with_gateway(lambda sessions: sessions.fork("s1"), troubles=[503, 0])
    assert (session.session_id, session.base_url.rpartition("/s/")[2], turns) == ("s2", "s2/v1", 3)
    with pytest.raises(SessionLost, match="no such session"):
        with_gateway(lambda sessions: sessions.fork("gone"))


def test_a_closed_session_hands_over_its_turns() -> None:
    (turn,) = with_gateway(lambda sessions: sessions.close("s1"))
    assert (turn.finish, turn.temperature, turn.payload) == (Finish.LENGTH, 0.7, TURN.payload)
    for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
        array, sent = getattr(turn, name), getattr(TURN, name)
        assert array.dtype == sent.dtype
        assert array.tolist() == sent.tolist()


def test_turns_that_come_damaged_are_lost_with_their_session() -> None:
    with pytest.raises(SessionLost, match="damaged"):
        with_gateway(lambda sessions: sessions.close("damaged"))


def test_an_unknown_session_is_lost() -> None:
    with pytest.raises(SessionLost, match="no such session"):
        with_gateway(lambda sessions: sessions.close("s2"))


def test_an_error_body_is_quoted() -> None:
    with pytest.raises(EngineUnavailable, match="503: later"):
        with_gateway(lambda sessions: sessions.close("busy"), timeout_s=3.0)


def test_a_wrong_admin_key_is_for_the_user_to_repair() -> None:
    with pytest.raises(ConfigError, match="same admin key"):
        with_gateway(lambda sessions: sessions.open(), key="wrong")


def test_a_gateway_that_is_down_is_unavailable() -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            await GatewaySessions(GatewayTable(["http://127.0.0.1:9"]), "right", http, timeout_s=3.0).open()

    with pytest.raises(EngineUnavailable, match=r"POST http://127\.0\.0\.1:9/sessions: ClientConnectorError"):
        asyncio.run(run())


def test_opening_outlives_a_gateway_that_restarts() -> None:
    refused = asyncio.Event()

    async def note(*_: object) -> None:
        refused.set()

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/sessions", open_session)
        tracing = aiohttp.TraceConfig()
        tracing.on_request_exception.append(note)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))  # nobody listens yet, and nobody else gets the port
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            async with aiohttp.ClientSession(trace_configs=[tracing]) as http:
                opening = asyncio.create_task(GatewaySessions(GatewayTable([url]), "right", http).open())
                await asyncio.wait_for(refused.wait(), WAIT_S)
                assert not opening.done()
                async with TestServer(app, socket_factory=lambda *_: server):
                    assert (await opening).session_id == "s1"

    asyncio.run(run())


def test_trouble_that_passes_is_waited_out() -> None:
    assert with_gateway(lambda sessions: sessions.open(), troubles=[503, 429, 0]).session_id == "s1"
    assert len(with_gateway(lambda sessions: sessions.close("s1"), troubles=[0, 0, 503])) == 1


def test_a_session_that_was_closed_without_an_answer_is_lost() -> None:
    with pytest.raises(SessionLost):
        with_gateway(lambda sessions: sessions.close("s2"), troubles=[0, 503])


def test_an_unneeded_session_is_ended_at_once_or_left_to_expire() -> None:
    with_gateway(lambda sessions: sessions.discard("s1"))
    with pytest.raises(EngineUnavailable):
        with_gateway(lambda sessions: sessions.discard("busy"))


def test_a_bug_of_the_gateway_is_not_waited_out() -> None:
    with pytest.raises(EngineUnavailable, match="500"):
        with_gateway(lambda sessions: sessions.open(), troubles=[500])  # a second try would be answered well


def test_waiting_ends_when_the_rollout_is_out_of_time() -> None:
    async def hurried(sessions: GatewaySessions) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await sessions.close("busy")

    with_gateway(hurried)


class SeveralGateways:
    """Gateways that number their own sessions, and can be stopped and started again."""

    def __init__(self, count: int) -> None:
        self.opened = [0] * count
        self.bodies = list[object]()
        self._servers: list[TestServer] = []
        self._up = [True] * count

    async def __aenter__(self) -> list[str]:
        for number in range(len(self.opened)):
            app = web.Application()
            app.router.add_post("/sessions", partial(self._open, number))
            app.router.add_delete("/sessions/{session_id}", partial(self._close, number))
            server = TestServer(app)
            await server.start_server()
            self._servers.append(server)
        return [str(server.make_url("")).rstrip("/") for server in self._servers]

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.close()

    def set_up(self, number: int, *, up: bool) -> None:
        self._up[number] = up

    async def _open(self, number: int, request: web.Request) -> web.StreamResponse:
        if not self._up[number]:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        body = await request.json() if request.can_read_body else {}
        self.bodies.append(body)
        self.opened[number] += 1
        name = f"{number}-{self.opened[number]}"
        turns = 1 if "fork_of" in body else 0
        return web.json_response({"session_id": name, "api_key": "k", "base_url": f"/s/{name}/v1", "turns": turns})

    async def _close(self, number: int, request: web.Request) -> web.StreamResponse:
        if not request.match_info["session_id"].startswith(f"{number}-"):
            return web.json_response({"error": "no such session"}, status=404)
        return web.Response(body=encode_turns([TURN]))


def test_sessions_are_spread_and_each_ends_and_forks_where_it_began() -> None:
    async def run() -> None:
        gateways = SeveralGateways(2)
        async with gateways as urls, aiohttp.ClientSession() as http:
            sessions = GatewaySessions(GatewayTable(urls), "right", http)
            opened = [await sessions.open(min_version=4) for _ in range(6)]
            assert gateways.opened == [3, 3]
            assert gateways.bodies == [{"min_version": 4}] * 6
            for session in opened:
                number = int(session.session_id.partition("-")[0])
                assert session.base_url.startswith(urls[number])
                forked, turns = await sessions.fork(session.session_id)
                assert forked.base_url.startswith(urls[number]) and turns == 1
                assert len(await sessions.close(session.session_id)) == 1
                await sessions.discard(forked.session_id)

    asyncio.run(run())


def test_a_gateway_that_is_down_gets_no_sessions_until_it_answers() -> None:
    async def run() -> None:
        gateways = SeveralGateways(2)
        async with gateways as urls, aiohttp.ClientSession() as http:
            table = GatewayTable(urls)
            sessions = GatewaySessions(table, "right", http)
            for url in urls:
                table.record_answer(url, 0)
            gateways.set_up(0, up=False)
            for _ in range(3):
                await sessions.open()
            assert gateways.opened == [0, 3]
            gateways.set_up(0, up=True)
            table.record_answer(urls[0], 0)
            for _ in range(3):
                await sessions.open()
            assert gateways.opened == [3, 3]

    asyncio.run(run())


def test_a_session_outlives_any_grading_but_not_its_rollouts_process() -> None:
    used = list[str]()

    async def note(*args: object) -> None:
        params = args[2]
        assert isinstance(params, aiohttp.TraceRequestEndParams)
        if params.method == "GET":
            used.append(params.url.path)

    async def run() -> None:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_end.append(note)
        async with gateway(Setting(fake_engine())) as caller, aiohttp.ClientSession(trace_configs=[tracing]) as http:
            sessions = GatewaySessions(GatewayTable([caller.url]), ADMIN_KEY, http, keep_alive_s=0.01)
            graded = await sessions.open()
            waiting, _ = await sessions.fork(graded.session_id)
            abandoned, _ = await caller.open_session()
            idle_since = time.monotonic()
            async with background_task(sessions.keep_alive()):
                await until(lambda: len(set(used)) == 2)
                await sessions.discard(waiting.session_id)
                before = len(used)
                await until(lambda: len(used) >= before + 5)  # the closed one's last use may be among them
                assert set(used[before + 2 :]) == {f"/s/{graded.session_id}/v1/queue_time"}
            expired = caller.parts.sessions.expire(idle_since + DEFAULT_LIMITS.idle_s)
            assert expired == (abandoned,)
            assert await sessions.close(graded.session_id) == ()

    asyncio.run(run())


def test_sessions_are_kept_even_if_several_attempts_fail() -> None:
    assert DEFAULT_LIMITS.idle_s >= 6 * KEEP_ALIVE_S  # the first attempt comes in the second interval
