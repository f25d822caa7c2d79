import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

import orjson
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from etude.clock import SystemClock
from etude.config import GatewayConfig
from etude.engines.fake import FakeEngine
from etude.gateway.app import MAX_BODY_BYTES, Gateway
from etude.gateway.recorder import Recorder
from etude.gateway.sessions import SessionLimits, Sessions
from etude.ledger.payloads import Payloads
from etude.protocols import Completion, Engine, EngineHealth, Piece, SamplingParams
from etude.tokens.chat import ChatTemplate
from etude.types import Json, RouteSpace

ADMIN_KEY = "the admin key"
VOCAB_SIZE = 300
MAX_LENGTH = 64
QUESTION: list[Json] = [{"role": "user", "content": "go"}]
LONG: list[Json] = [{"role": "user", "content": "x" * 99}]


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(["return total\n"] * 4, vocab_size=VOCAB_SIZE)


class GatedClock:
    """Time stands still until the gate opens; ``waiting`` says that someone sleeps."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.waiting.set()
        await self.gate.wait()


class BrokenEngine:
    """An engine with a bug whose error quotes its prompt."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        raise RuntimeError(f"prompt {template().decode(prompt_ids)}")

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str
    ) -> AsyncGenerator[Piece, None]:
        sampled = await self.generate(prompt_ids, params, session=session)
        yield Piece(token_ids=sampled.token_ids, logprobs=sampled.logprobs, versions=sampled.versions)

    async def health(self) -> EngineHealth:
        raise RuntimeError("no health")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Json

    def at(self, *path: str | int) -> Json:
        value: Json = self.body
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


class Caller:
    """Talks to a gateway over real HTTP."""

    def __init__(self, http: ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def send(self, method: str, path: str, key: str = "", body: object = None, request_id: str = "") -> Answer:
        data = BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if request_id:
            headers["X-Request-Id"] = request_id
        async with self._http.request(method, self._url + path, data=data, headers=headers) as response:
            answer: Json = orjson.loads(await response.read())
            return Answer(response.status, dict(response.headers), answer)

    async def open_session(self) -> tuple[str, str]:
        answer = await self.send("POST", "/sessions", ADMIN_KEY)
        assert answer.status == 200
        return str(answer.at("session_id")), str(answer.at("api_key"))

    async def chat(self, key: str, messages: Json = QUESTION, request_id: str = "", **fields: Json) -> Answer:
        body = {"messages": messages, "max_tokens": 8, **fields}
        return await self.send("POST", "/v1/chat/completions", key, body, request_id)


def fake_engine(clock: GatedClock | SystemClock | None = None, token_s: float = 0.0) -> FakeEngine:
    return FakeEngine(clock or SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH, token_s=token_s)


@asynccontextmanager
async def gateway(
    engine: Engine,
    limits: SessionLimits | None = None,
    config: GatewayConfig | None = None,
    space: RouteSpace | None = None,
) -> AsyncIterator[Caller]:
    door = Gateway(
        Recorder(engine, Payloads(Path("/nowhere")), space),
        Sessions(template(), limits or SessionLimits()),
        SystemClock(),
        config or GatewayConfig(),
        admin_key=ADMIN_KEY,
        max_length=MAX_LENGTH,
    )
    async with TestServer(door.app()) as server, ClientSession() as http:
        yield Caller(http, str(server.make_url("")).rstrip("/"))


def play(engine: Engine, scene: Callable[[Caller], Awaitable[None]]) -> None:
    async def run() -> None:
        async with gateway(engine) as caller:
            await scene(caller)

    asyncio.run(run())


def test_a_session_is_captured_token_for_token() -> None:
    engine, end = fake_engine(), template().end_id
    letters = [token for letter in "return" for token in template().encode(letter)]
    engine.script([*letters, end], template().encode("total total total total"))

    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        first = await caller.chat(key)
        assert first.at("choices", 0) == {
            "index": 0,
            "message": {"role": "assistant", "content": "return"},
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert first.at("object") == "chat.completion"
        assert first.at("model") == "policy"
        engine.version = 3
        reply = first.at("choices", 0, "message")
        assert isinstance(reply, dict)
        echoed: Json = [*QUESTION, {**reply, "tool_calls": None}, {"role": "user", "content": "on"}]
        second = await caller.chat(key, echoed, max_tokens=2)
        assert second.at("choices", 0, "finish_reason") == "length"
        assert second.at("id") != first.at("id")
        closed = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        one, two = closed.at("turns", 0), closed.at("turns", 1)
        assert isinstance(one, dict)
        assert isinstance(two, dict)
        start = [*template().render_message("user", "go"), *template().generation_prompt()]
        turn = [*template().render_message("user", "on"), *template().generation_prompt()]
        assert one["prompt_ids"] == start
        assert one["completion_ids"] == [*letters, end]
        assert two["prompt_ids"] == [*start, *letters, end, *turn]
        assert (one["finish"], two["finish"]) == ("stop", "length")
        assert one["versions"] == [0] * (len(letters) + 1)
        assert two["versions"] == [3, 3]
        assert (one["temperature"], one["payload"]) == (1.0, None)
        assert isinstance(one["logprobs"], list)
        assert len(one["logprobs"]) == len(letters) + 1
        assert second.at("usage") == {
            "prompt_tokens": len(start) + len(letters) + 1 + len(turn),
            "completion_tokens": 2,
            "total_tokens": len(start) + len(letters) + 1 + len(turn) + 2,
        }

    play(engine, scene)


def test_text_parts_are_joined_and_options_reach_the_engine() -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        parts: Json = [{"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]}]
        same = [await caller.chat(key, messages, seed=5) for messages in (QUESTION, parts)]
        other = await caller.chat(key, seed=6)
        assert same[0].at("choices") == same[1].at("choices") != other.at("choices")
        greedy = [await caller.chat(key, temperature=0, max_tokens=None, max_completion_tokens=4) for _ in range(2)]
        assert greedy[0].at("choices") == greedy[1].at("choices")
        neutral = await caller.chat(key, model="policy", n=1, stream=False, top_p=1.0, stop=None, user="someone")
        assert neutral.status == 200

    play(fake_engine(), scene)


def test_every_sampling_option_reaches_the_engine() -> None:
    class Listening(FakeEngine):
        heard: SamplingParams | None = None

        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
            self.heard = params
            raise ValueError("enough heard")

    engine = Listening(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH)

    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.chat(key, temperature=0.5, top_p=0.75, top_k=9, seed=3, priority=-2)
        assert answer.error == (400, "invalid_request_error", "invalid_request", None)

    play(engine, scene)
    assert engine.heard == SamplingParams(
        max_tokens=8, temperature=0.5, top_p=0.75, top_k=9, stop_ids=(template().end_id,), seed=3, priority=-2
    )


def test_an_engine_without_the_routes_that_a_trainer_needs_is_named_and_leaves_no_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with gateway(fake_engine(), space=RouteSpace(layers=1, slots=1, experts=2)) as caller:
            session_id, key = await caller.open_session()
            answer = await caller.chat(key)
            assert answer.error == (500, "server_error", "capture_failed", None)
            assert "no routes although they were asked for" in str(answer.at("error", "message"))
            assert (await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)).at("turns") == []

    asyncio.run(run())
    assert "no routes" in caplog.text


def test_without_an_allowance_the_model_may_fill_the_context() -> None:
    engine = fake_engine()
    prompt_tokens = len(template().render_message("user", "go")) + 1
    engine.script([40] * MAX_LENGTH)

    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.chat(key, max_tokens=None)
        assert answer.at("usage", "completion_tokens") == MAX_LENGTH - prompt_tokens

    play(engine, scene)


def test_concurrent_sessions_do_not_mix() -> None:
    async def one(caller: Caller, number: int) -> None:
        session_id, key = await caller.open_session()
        messages: list[Json] = [{"role": "user", "content": f"go {number}"}]
        for _ in range(2):
            answer = await caller.chat(key, messages)
            assert answer.status == 200
            messages += [answer.at("choices", 0, "message"), {"role": "user", "content": "on"}]
        closed = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        first, second = closed.at("turns", 0), closed.at("turns", 1)
        assert isinstance(first, dict)
        assert isinstance(second, dict)
        assert isinstance(first["prompt_ids"], list)
        assert isinstance(first["completion_ids"], list)
        assert isinstance(second["prompt_ids"], list)
        known = first["prompt_ids"] + first["completion_ids"]
        assert template().encode(f"go {number}") == first["prompt_ids"][1:-2]
        assert second["prompt_ids"][: len(known)] == known

    async def scene(caller: Caller) -> None:
        await asyncio.gather(*(one(caller, number) for number in range(20)))
        health = await caller.send("GET", "/healthz")
        assert (health.at("sessions"), health.at("inflight")) == (0, 0)

    play(fake_engine(SystemClock(), token_s=0.001), scene)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": None}, "invalid_request", "messages"),
        ({"messages": ["go"]}, "invalid_request", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
        ({"messages": [{"content": "go"}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "oracle", "content": "go"}]}, "invalid_request", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "invalid_request", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "name": "x"}]}, "unsupported_parameter", "messages[0].name"),
        ({"temperature": 2.5}, "invalid_request", "temperature"),
        ({"temperature": True}, "invalid_request", "temperature"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
        ({"max_completion_tokens": 7}, "invalid_request", "max_tokens"),
        ({"max_tokens": 1000}, "context_length_exceeded", "messages"),
        ({"messages": LONG}, "context_length_exceeded", "messages"),
        ({"messages": LONG, "max_tokens": None}, "context_length_exceeded", "messages"),
        ({"seed": -1}, "invalid_request", "seed"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"top_p": 0}, "invalid_request", "top_p"),
        ({"top_p": True}, "invalid_request", "top_p"),
        ({"top_k": -1}, "invalid_request", "top_k"),
        ({"priority": 0.5}, "invalid_request", "priority"),
        ({"stop": ["x"]}, "unsupported_parameter", "stop"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"logprobs": True}, "unsupported_parameter", "logprobs"),
        ({"min_p": 0.1}, "unsupported_parameter", "min_p"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Json], code: str, param: str) -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        answer = await caller.send(
            "POST", "/v1/chat/completions", key, {"messages": QUESTION, "max_tokens": 8, **fields}
        )
        assert answer.error == (400, "invalid_request_error", code, param)
        assert answer.at("error", "message")
        assert (await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)).at("turns") == []

    play(fake_engine(), scene)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.send("POST", "/v1/chat/completions", key, body)
        assert answer.error == (400, "invalid_request_error", "invalid_request", None)

    play(fake_engine(), scene)


def test_every_door_but_health_needs_its_own_key() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        refused = (401, "authentication_error", "invalid_api_key", None)
        assert (await caller.send("POST", "/sessions", key)).error == refused
        assert (await caller.send("POST", "/sessions")).error == refused
        assert (await caller.send("DELETE", f"/sessions/{session_id}", key)).error == refused
        for wrong in ("", "wrong", ADMIN_KEY, "clé"):
            assert (await caller.chat(wrong)).error == refused
            assert (await caller.send("GET", "/v1/models", wrong)).error == refused
        models = await caller.send("GET", "/v1/models", key)
        assert models.at("data", 0, "id") == "policy"

    play(fake_engine(), scene)


def test_the_key_of_a_closed_session_is_dead() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        assert (await caller.chat(key)).error == (401, "authentication_error", "invalid_api_key", None)
        again = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        assert again.error == (404, "invalid_request_error", "session_not_found", None)

    play(fake_engine(), scene)


def test_the_web_servers_own_refusals_have_the_same_shape() -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        assert (await caller.send("GET", "/nowhere")).error == (404, "invalid_request_error", "not_found", None)
        wrong_method = await caller.send("GET", "/v1/chat/completions", key)
        assert wrong_method.error == (405, "invalid_request_error", "method_not_allowed", None)
        large = await caller.send("POST", "/v1/chat/completions", key, b" " * (MAX_BODY_BYTES + 1))
        assert large.error == (413, "invalid_request_error", "request_too_large", None)
        wrong_model = await caller.chat(key, model="another")
        assert wrong_model.error == (404, "invalid_request_error", "model_not_found", "model")

    play(fake_engine(), scene)


def test_an_engine_that_is_down_is_503_and_leaves_no_turn() -> None:
    engine = fake_engine()

    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        engine.fail_next(2)
        answer = await caller.chat(key)
        assert answer.error == (503, "server_error", "engine_unavailable", None)
        assert int(answer.headers["Retry-After"]) > 0
        sick = await caller.send("GET", "/healthz")
        assert (sick.status, sick.body) == (503, {"engine": None, "inflight": 0, "sessions": 1})
        well = await caller.send("GET", "/healthz")
        assert (well.status, well.at("engine", "version")) == (200, 0)
        assert well.at("engine", "digest") == (await engine.health()).digest
        assert (await caller.chat(key)).status == 200
        closed = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        turns = closed.at("turns")
        assert isinstance(turns, list)
        assert len(turns) == 1

    play(engine, scene)


def test_calls_beyond_the_limit_are_429_until_one_is_done() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(fake_engine(clock, token_s=1.0), config=GatewayConfig(max_inflight=1)) as caller:
            _, key = await caller.open_session()
            first = asyncio.create_task(caller.chat(key))
            await clock.waiting.wait()
            assert (await caller.send("GET", "/healthz")).at("inflight") == 1
            second = await caller.chat(key)
            assert second.error == (429, "rate_limit_error", "rate_limit_exceeded", None)
            assert int(second.headers["Retry-After"]) > 0
            clock.gate.set()
            assert (await first).status == 200
            assert (await caller.chat(key)).status == 200

    asyncio.run(run())


def test_sessions_beyond_the_limit_are_429() -> None:
    async def run() -> None:
        async with gateway(fake_engine(), SessionLimits(max_sessions=1)) as caller:
            await caller.open_session()
            answer = await caller.send("POST", "/sessions", ADMIN_KEY)
            assert answer.error == (429, "rate_limit_error", "too_many_sessions", None)

    asyncio.run(run())


def test_a_session_closed_during_a_call_never_shows_a_reply_that_was_not_captured() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(fake_engine(clock, token_s=1.0)) as caller:
            session_id, key = await caller.open_session()
            call = asyncio.create_task(caller.chat(key))
            await clock.waiting.wait()
            closed = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
            assert closed.at("turns") == []
            clock.gate.set()
            assert (await call).error == (404, "invalid_request_error", "session_not_found", None)

    asyncio.run(run())


def test_a_caller_that_hangs_up_frees_its_place_and_leaves_no_turn() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(fake_engine(clock, token_s=1.0)) as caller:
            session_id, key = await caller.open_session()
            call = asyncio.create_task(caller.chat(key))
            await clock.waiting.wait()
            call.cancel()
            async with asyncio.timeout(5):
                while (await caller.send("GET", "/healthz")).at("inflight") != 0:
                    await asyncio.sleep(0.01)
            clock.gate.set()
            assert (await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)).at("turns") == []

    asyncio.run(run())


def test_a_retry_of_a_call_whose_answer_was_lost_gets_that_answer() -> None:
    async def scene(caller: Caller) -> None:
        session_id, key = await caller.open_session()
        lost = await caller.chat(key, request_id="a")
        again = await caller.chat(key, request_id="a")
        assert again.at("choices") == lost.at("choices")
        assert (again.at("id"), again.at("usage")) == (lost.at("id"), lost.at("usage"))
        other = await caller.chat(key, request_id="b")
        assert other.at("choices") != lost.at("choices")
        assert (await caller.chat(key, [{"role": "user", "content": "on"}], request_id="a")).at("id") != lost.at("id")
        assert (await caller.chat(key, request_id="\udcff")).status == 200  # a header need not be text
        closed = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
        turns = closed.at("turns")
        assert isinstance(turns, list)
        assert len(turns) == 4

    play(fake_engine(), scene)


def test_a_retry_during_its_first_attempt_leaves_one_turn() -> None:
    async def run() -> None:
        clock = GatedClock()
        async with gateway(fake_engine(clock, token_s=1.0)) as caller:
            session_id, key = await caller.open_session()
            attempts = [asyncio.create_task(caller.chat(key, request_id="a")) for _ in range(2)]
            async with asyncio.timeout(5):
                while (await caller.send("GET", "/healthz")).at("inflight") != 2:
                    await asyncio.sleep(0.01)
            clock.gate.set()
            first, second = await asyncio.gather(*attempts)
            assert first.at("choices") == second.at("choices")
            closed = await caller.send("DELETE", f"/sessions/{session_id}", ADMIN_KEY)
            turns = closed.at("turns")
            assert isinstance(turns, list)
            assert len(turns) == 1

    asyncio.run(run())


def test_a_bug_is_500_and_neither_answer_nor_log_quotes_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(caller: Caller) -> None:
        _, key = await caller.open_session()
        answer = await caller.chat(key, [{"role": "user", "content": "my secret"}])
        assert answer.error == (500, "server_error", "internal_error", None)
        assert "secret" not in str(answer.body)

    with caplog.at_level(logging.DEBUG):
        play(BrokenEngine(), scene)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("admin_key", ["", "clé"])
def test_an_admin_key_that_guards_nothing_is_refused_at_start(admin_key: str) -> None:
    recorder = Recorder(fake_engine(), Payloads(Path("/nowhere")))
    with pytest.raises(ValueError, match="admin key"):
        Gateway(recorder, Sessions(template()), SystemClock(), GatewayConfig(), admin_key=admin_key, max_length=64)
