"""Attacks of an agent on its gateway, on the API behind which the model of a suite is, and of strangers on servers that
want a key.

The attacker is in a sandbox and has the key of one session.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from aiohttp import web

from etude.clock import SystemClock
from etude.gateway.routing.admission import AdmissionLimits
from etude.gateway.upstream.apis import Api
from etude.gateway.upstream.calls import Upstream
from etude.gateway.upstream.passthrough import Passthrough
from etude.protocols import Session
from etude.run.serving import listening
from etude.ui.runs import RunList
from etude.ui.server import ui_app
from gateways import Setting, fake_engine, gateway

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
REMOTE = "https://attacker.example/solution"


class Account:
    """A fake API that answers every request with the right key and records each request."""

    def __init__(self) -> None:
        self.called: list[tuple[str, Any]] = []

    async def obey(self, request: web.Request) -> web.Response:
        self.called.append((request.path, orjson.loads(await request.read())))
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}}]})


def attack(work: Callable[[Session], Awaitable[None]], *, anthropic: bool = False) -> Account:
    """Run ``work`` with a gateway session as an attacker would; returns the API, which has recorded what reached it."""
    account = Account()

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", account.obey)
        async with aiohttp.ClientSession() as http, listening(app, 0) as port:
            api: Api = "anthropic" if anthropic else "openai"
            upstream = Upstream(url=f"http://127.0.0.1:{port}/v1", model="m", key="SECRET", api=api)
            passthrough = Passthrough(upstream, http, SystemClock(), retry_s=1.0)
            async with listening(passthrough.app(), 0) as own_port:
                passthrough.serves_at(f"http://127.0.0.1:{own_port}")
                await work(await passthrough.open())

    asyncio.run(run())
    return account


async def send(url: str, path: str, body: Any, *headers: tuple[str, bytes]) -> int:
    """The status of a request that no client of HTTP has tidied up."""
    parts, data = urlsplit(url), orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: x", b"Connection: close", b"Content-Length: %d" % len(data)]
    lines += [name.encode() + b": " + value for name, value in headers]
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"\r\n".join([*lines, b"", data]))
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def post(session: Session, path: str, body: Any) -> int:
    key = ("x-api-key", session.api_key.encode())
    return await send(session.base_url, f"/s/{session.session_id}/v1/{path}", body, key)


@pytest.mark.parametrize(
    "path",
    [
        *("files", "batches", "fine_tuning/jobs", "images/generations", "organizations/keys", "embeddings"),
        *("%2e%2e/admin/keys", "..%2f..%2fadmin", "%2e%2e%2fv1/chat/completions", "chat/completions%3Fuser=me"),
        *("chat/completions%23", "chat//completions", "chat/completions/", "messages"),
    ],
)
def test_to_spend_and_read_the_owners_account_beside_the_model(path: str) -> None:
    async def work(session: Session) -> None:
        assert await post(session, path, HELLO) == 400

    assert attack(work).called == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"tools": [{"type": "web_search"}]}),
        (RESPONSES, {"tools": [{"type": "mcp", "server_url": REMOTE, "server_label": "x"}]}),
        (RESPONSES, {"tools": [{"type": "function", "name": "run"}, {"type": "code_interpreter"}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": REMOTE}]}]}),
        (CHAT, {**HELLO, "web_search_options": {}}),
        (CHAT, {**HELLO, "plugins": [{"id": "web"}]}),
        (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": REMOTE}}]}]}),
        (MESSAGES, {**HELLO, "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}),
        (MESSAGES, {**HELLO, "mcp_servers": [{"type": "url", "url": REMOTE, "name": "x"}]}),
        (MESSAGES, {"messages": [{"content": [{"type": "document", "source": {"type": "url", "url": REMOTE}}]}]}),
    ],
)
def test_to_reach_the_network_through_the_api(path: str, fields: Any) -> None:
    async def work(session: Session) -> None:
        assert await post(session, path, fields) == 400

    assert attack(work, anthropic=path == MESSAGES).called == []


def test_to_have_a_stronger_model_answer_in_its_place() -> None:
    async def work(session: Session) -> None:
        assert await post(session, CHAT, {**HELLO, "models": ["strongest"]}) == 400
        assert await post(session, CHAT, {**HELLO, "model": "strongest"}) == 200

    (call,) = attack(work).called
    assert call == ("/v1/chat/completions", {**HELLO, "model": "m"})


def test_what_an_agent_needs_is_passed_on() -> None:
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"properties": {"url": {}}}}}]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [picture]}], "tools": tools}

    async def work(session: Session) -> None:
        assert await post(session, CHAT, body) == 200
        assert await post(session, RESPONSES, {"input": "hello", "tools": [{"type": "custom", "name": "x"}]}) == 200

    assert len(attack(work).called) == 2


def test_to_call_in_the_session_of_another_or_to_break_the_server_with_its_key() -> None:
    async def work(session: Session) -> None:
        for key in (b"", b"\xe9\xff", session.api_key.encode()[:-1], session.api_key.encode() + b"x"):
            status = await send(
                session.base_url, f"/s/{session.session_id}/v1/{CHAT}", HELLO, ("Authorization", b"Bearer " + key)
            )
            assert status == 401
        assert await send(session.base_url, f"/s/{'0' * 16}/v1/{CHAT}", HELLO, ("x-api-key", b"x")) == 404

    assert attack(work).called == []


async def leave(url: str, data: bytes, after_s: float) -> None:
    """Send bytes of a request, and close the connection without reading an answer."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(data)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.transport.abort()


@pytest.mark.parametrize("sent", [0, 20])
def test_to_turn_a_verdict_into_a_failure_of_the_engines(sent: int) -> None:
    """A rollout is tried again, and not graded, if its last call found no engine."""

    async def run() -> None:
        async with gateway(Setting(fake_engine(token_s=0.001))) as caller:
            _, key = await caller.open_session()
            body = orjson.dumps({**HELLO, "max_tokens": 8})
            lines = (f"POST /v1/{CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}")
            head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
            for _ in range(5):
                await leave(caller.url, head + body[:sent], after_s=0.3)
            await caller.inflight(0)
            await asyncio.sleep(0.1)
            times = (await caller.send("GET", "/v1/queue_time", key)).body
            assert isinstance(times, dict)
            assert times["unserved"] is False
            assert isinstance(times["waited_s"], float)
            assert times["waited_s"] < 0.3

    asyncio.run(run())


def test_to_have_neighbours_wait_behind_calls_of_ones_own() -> None:
    async def run() -> None:
        setting = Setting(fake_engine(token_s=0.01), admission=AdmissionLimits(rollouts=1, start=1, floor=1))
        async with gateway(setting) as caller:
            (_, own), (_, neighbours) = [await caller.open_session() for _ in range(2)]
            flood = [asyncio.create_task(caller.chat(own)) for _ in range(20)]
            await caller.inflight(20)
            assert (await caller.chat(neighbours)).status == 200
            assert sum(call.done() for call in flood) < 5
            await asyncio.gather(*flood)

    asyncio.run(run())


PAGE_PATHS = ["/api/runs", "/%61pi/runs", "/api%2Fruns", "/api//runs", "http://x/api/runs", "/api/../api/runs"]


def test_to_read_the_page_without_its_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with listening(ui_app(RunList([tmp_path]), "token"), 0) as port:
            for path in PAGE_PATHS:
                for key in (b"", b"\xe9\xff", b"toke", b"token2"):
                    status = await send(f"http://127.0.0.1:{port}", path, {}, ("Authorization", b"Bearer " + key))
                    assert status == 401, (path, key)
            for path in ("//api/runs", "/./api/runs", "/x/../api/runs", "/%2e/api/runs", "/API/runs", "/app.js/../api"):
                assert await send(f"http://127.0.0.1:{port}", path, {}) in (404, 405), path

    asyncio.run(run())
    assert not caplog.records  # each line would be a way to fill the disk
