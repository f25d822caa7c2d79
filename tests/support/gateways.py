"""A gateway under test: its dependencies, and a caller that sends real HTTP requests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path

import orjson
from aiohttp import ClientSession

from etude.aio import background_task
from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.engines.fake import FakeEngine
from etude.engines.http import http_engines
from etude.gateway.capture.sessions import SessionLimits
from etude.gateway.http.app import MAX_BODY_BYTES, http_server
from etude.gateway.http.auth import Key, KeyLimits, Scope, digest_of
from etude.gateway.routing.admission import AdmissionLimits
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.ledger.payloads import Payloads
from etude.ledger.turns import decode_turns
from etude.objects import ObjectStore
from etude.protocols import Engine
from etude.run.gateway import GatewaySpec, RunningGateway, open_gateway
from etude.run.live_sessions import LiveSessions
from etude.run.serving import listening
from etude.tokens.chat import ChatTemplate
from etude.types import Json, RouteSpace, Turn
from waiting import WAIT_S, until

ADMIN_KEY, PRODUCT_KEY, OTHER_KEY = "the admin key", "a product's key", "another product's key"
BROWSER_KEY = "a key of the product's users' browsers"
VOCAB_SIZE = 300
MAX_LENGTH = 64
QUESTION: list[Json] = [{"role": "user", "content": "go"}]
LONG: list[Json] = [{"role": "user", "content": "x" * 99}]
FAKE_URL = "http://fake"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(["return total\n"] * 4, vocab_size=VOCAB_SIZE)


class GatedClock:
    """A clock that stands still until the gate opens; ``waiting`` is set when a task sleeps."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.waiting.set()
        await self.gate.wait()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Json:
        value: Json = orjson.loads(self.raw)
        return value

    def at(self, *path: str | int) -> Json:
        value = self.body
        for key in path:
            if isinstance(key, int):
                assert isinstance(value, list)
                value = value[key]
            else:
                assert isinstance(value, dict)
                value = value[key]
        return value

    @property
    def error(self) -> tuple[int, Json, Json, Json]:
        return self.status, self.at("error", "type"), self.at("error", "code"), self.at("error", "param")

    @property
    def events(self) -> list[dict[str, Json]]:
        lines = [line.removeprefix(b"data: ") for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        return [orjson.loads(line) for line in lines if line != b"[DONE]"]


@dataclass(frozen=True)
class Caller:
    """Talks to a gateway over real HTTP."""

    http: ClientSession
    url: str
    parts: RunningGateway

    async def send(self, method: str, path: str, key: str = "", body: object = None, **headers: str) -> Answer:
        data = BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            named["Authorization"] = f"Bearer {key}"
        async with self.http.request(method, self.url + path, data=data, headers=named) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def open_session(self) -> tuple[str, str]:
        answer = await self.send("POST", "/sessions", ADMIN_KEY, {})
        assert answer.status == 200
        assert answer.at("base_url") == f"/s/{answer.at('session_id')}/v1"
        return str(answer.at("session_id")), str(answer.at("api_key"))

    async def chat(self, key: str, messages: Json = QUESTION, request_id: str = "", **fields: Json) -> Answer:
        headers = {"X_Request_Id": request_id} if request_id else {}
        body = {"messages": messages, "max_tokens": 8, **fields}
        return await self.send("POST", CHAT, key, body, **headers)

    async def close(self, session_id: str, key: str = ADMIN_KEY) -> tuple[Turn, ...]:
        answer = await self.send("DELETE", f"/sessions/{session_id}", key)
        assert answer.status == 200
        return decode_turns(answer.raw)

    async def inflight(self, calls: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.send("GET", "/healthz")).at("inflight") != calls:
                await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Setting:
    """Dependencies of a gateway under test."""

    engine: Engine
    limits: SessionLimits = field(default_factory=SessionLimits)
    config: GatewayConfig = field(default_factory=lambda: GatewayConfig(engine_timeout_s=0.1))
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    max_body_bytes: int = MAX_BODY_BYTES
    space: RouteSpace | None = None
    access_log: Path | None = None
    budget: KeyLimits = field(default_factory=KeyLimits)
    live: LiveSessions | None = None
    port: int = 0
    max_length: int = MAX_LENGTH


def fake_engine(clock: GatedClock | SystemClock | None = None, token_s: float = 0.0) -> FakeEngine:
    return FakeEngine(clock or SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH, token_s=token_s)


def key_of(key_id: str, secret: str, scope: Scope, limits: KeyLimits | None = None, opener: str | None = None) -> Key:
    return Key(key_id=key_id, digest=digest_of(secret), scope=scope, limits=limits or KeyLimits(), opener=opener)


@asynccontextmanager
async def gateway(setting: Setting) -> AsyncIterator[Caller]:
    plan = GatewaySpec(
        chat=template(),
        max_length=setting.max_length,
        recorder=Recorder(Payloads(ObjectStore("memory://")), setting.space),
        engines=(EngineEntry(name="one", url="http://fake"),),
        keys=(
            key_of("admin", ADMIN_KEY, Scope.ADMIN),
            key_of("product", PRODUCT_KEY, Scope.PRODUCTION, setting.budget),
            key_of("other", OTHER_KEY, Scope.PRODUCTION),
            key_of("browser", BROWSER_KEY, Scope.FEEDBACK, setting.budget, opener="product"),
        ),
        sessions=setting.limits,
        admission=setting.admission,
        access_log=setting.access_log,
        live=None if setting.live is None else setting.live.recorder,
        more_routes=(lambda state: {}) if setting.live is None else setting.live.routes,
    )
    config = setting.config
    async with open_gateway(plan, config, SystemClock(), lambda _url: setting.engine) as parts:
        server = http_server(parts.gateway.handle, max_body_bytes=setting.max_body_bytes)
        async with listening(server, 0) as port, ClientSession() as http:
            await until(lambda: bool(parts.pool.versions()))
            yield Caller(http, f"http://127.0.0.1:{port}", parts)


@contextmanager
def gateway_in_a_thread(chat: ChatTemplate, engine: Engine, keys: tuple[Key, ...], max_length: int) -> Iterator[str]:
    """A gateway served in its own thread, for callers that are not asynchronous.

    Engines that callers register are called over HTTP. Its errors are raised in its thread, which fails the test.
    """
    ready, over = threading.Event(), threading.Event()
    result: list[str] = []

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            plan = GatewaySpec(
                chat=chat,
                max_length=max_length,
                recorder=Recorder(None),
                engines=(EngineEntry(name="one", url=FAKE_URL),),
                keys=keys,
            )
            connect = await stack.enter_async_context(http_engines(0.0))
            opened = open_gateway(
                plan, GatewayConfig(), SystemClock(), lambda url: engine if url == FAKE_URL else connect(url)
            )
            parts = await stack.enter_async_context(opened)
            server = http_server(parts.gateway.handle, max_body_bytes=2**20)
            port = await stack.enter_async_context(listening(server, 0))
            lives = await stack.enter_async_context(background_task(parts.wait()))
            result.append(f"http://127.0.0.1:{port}")
            await until(lambda: bool(parts.pool.versions()))
            ready.set()
            while not over.is_set() and not lives.done():
                await asyncio.sleep(0.02)
            if lives.done():
                await lives

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    yield result[0]
    over.set()
    thread.join(WAIT_S)
