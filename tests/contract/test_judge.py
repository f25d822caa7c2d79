"""A judge over real HTTP: any server of OpenAI's chat completions, including our own gateway and engine."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import TypeVar

import aiohttp
import pytest
import torch
from aiohttp import web

from etude.clock import SystemClock
from etude.config.inference import EngineConfig, GatewayConfig
from etude.config.training import ModelShape
from etude.engines.fake import FakeEngine
from etude.engines.native.engine import NativeEngine, Weights
from etude.errors import JudgeDeclined, JudgeUnavailable
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Scope
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.models.checkpoint import spec_from_shape
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.protocols import Completion, Engine, SamplingParams
from etude.rewards.judge.endpoint import HIDDEN_KEY, REFUSED, Address, Endpoint, JudgeCall
from etude.rewards.judge.judge import JudgeLimits
from etude.rewards.judge.prompts import JudgeInput, JudgeParams, ReplyFault
from etude.rewards.judge.rules import SUMMARY_RULES, rules_app
from etude.rewards.judge.votes import Judgement
from etude.run.gateway import GatewaySpec, open_gateway
from etude.run.serving import listening
from etude.tokens.chat import ChatTemplate
from etude.types import Json, TokenIds
from gateways import key_of
from judges import INJECTIONS, NONCE, STYLE, court, style_rubric, verdict
from scripted_model import API_KEY, ScriptedModel, serving

MAX_LENGTH = 4096
KEY = "sk-a-very-secret-key"
JUDGE_INPUT = JudgeInput(task="def area(w, h):\n    return w * h", work="area returns w * h")
CALL = JudgeCall(messages=[{"role": "user", "content": "?"}], schema={}, max_tokens=64, temperature=0.0, seed=0)
T = TypeVar("T")


@cache
def chat() -> ChatTemplate:
    """Tokens that a verdict has few of."""
    return ChatTemplate.train([STYLE, verdict("", 3), SYSTEM_WORDS] * 4, vocab_size=400)


SYSTEM_WORDS = "You grade one aspect of a piece of work. Answer with one JSON object and nothing else"


class JudgingEngine(FakeEngine):
    """An engine that computes a verdict from the prompt and returns it token by token."""

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        query = chat().decode([int(token) for token in prompt_ids])
        self.script([*chat().encode(verdict(query, 4)), chat().stop_ids[0]])
        return await super().generate(prompt_ids, params, session=session)


@asynccontextmanager
async def behind_gateway(engine: Engine) -> AsyncIterator[Address]:
    """Our own gateway before an engine, as a product's key sees it."""
    plan = GatewaySpec(
        chat=chat(),
        max_length=MAX_LENGTH,
        recorder=Recorder(None),
        engines=(EngineEntry(name="one", url="http://fake"),),
        keys=(key_of("judge", KEY, Scope.PRODUCTION),),
    )
    config = GatewayConfig()
    async with open_gateway(plan, config, SystemClock(), lambda _url: engine) as parts:
        server = http_server(parts.gateway.handle)
        async with listening(server, 0) as port:
            while not parts.pool.versions():
                await asyncio.sleep(0.005)
            yield Address(url=f"http://127.0.0.1:{port}/v1", model="policy", key=KEY)


@asynccontextmanager
async def native_engine() -> AsyncGenerator[NativeEngine, None]:
    """The real engine with a random model."""
    shape = ModelShape(
        vocab_size=400, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, experts=2, expert_size=16
    )
    model = Decoder(spec_from_shape(shape, shape.vocab_size))
    model.initialise(0, std=0.05)
    model.arithmetic = InvariantArithmetic()
    engine = NativeEngine(Weights(model.eval(), 0, "0" * 32), EngineConfig(max_length=MAX_LENGTH), seed=1)
    steps = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)


async def judged(address: Address, params: JudgeParams, judged: JudgeInput = JUDGE_INPUT) -> Judgement:
    async with aiohttp.ClientSession() as http:
        judging = court(Endpoint(http, address), params=params, bounds=JudgeLimits(timeout_s=60.0))
        return await judging.judge.judge(style_rubric(), judged, judging.deps.budget)


def test_our_gateway_with_a_model_that_judges() -> None:
    async def scenario() -> Judgement:
        engine = JudgingEngine(SystemClock(), vocab_size=chat().vocab_size, max_length=MAX_LENGTH)
        async with behind_gateway(engine) as address:
            return await judged(address, JudgeParams(model="policy", votes=3, temperature=1.0))

    judgement = asyncio.run(scenario())
    assert (judgement.score, len(judgement.votes), judgement.invalid) == (4, 3, ())


def test_the_native_engine_with_a_model_that_knows_nothing_gives_invalid_votes() -> None:
    async def scenario() -> Judgement:
        torch.manual_seed(0)
        async with native_engine() as engine, behind_gateway(engine) as address:
            return await judged(address, JudgeParams(model="policy", votes=2, temperature=1.0, max_tokens=48))

    judgement = asyncio.run(scenario())
    assert (judgement.score, judgement.votes, len(judgement.invalid)) == (None, (), 2)
    assert set(judgement.invalid) <= {ReplyFault.CUT, ReplyFault.NOT_JSON}


def test_our_gateway_refuses_a_schema_and_the_error_says_what_to_do() -> None:
    async def scenario() -> None:
        engine = JudgingEngine(SystemClock(), vocab_size=chat().vocab_size, max_length=MAX_LENGTH)
        async with behind_gateway(engine) as address:
            structured = Address(url=address.url, model="policy", key=KEY, structured=True)
            with pytest.raises(JudgeUnavailable, match=r"HTTP 400.*set judge\.options\.structured = false"):
                await judged(structured, JudgeParams(model="policy"))

    asyncio.run(scenario())


@pytest.mark.parametrize("work", ["area returns w * h", *INJECTIONS[:12]])
def test_rules_behind_the_same_api(work: str) -> None:
    async def scenario() -> Judgement:
        async with listening(rules_app(SUMMARY_RULES, "7"), 0) as port:
            address = Address(url=f"http://127.0.0.1:{port}/v1", model="etude-rules-7")
            return await judged(address, JudgeParams(model="m"), JudgeInput(task=JUDGE_INPUT.task, work=work))

    judgement = asyncio.run(scenario())
    assert judgement.score is not None
    assert (judgement.score == 5) == (work == "area returns w * h")


def test_rules_refuse_what_is_no_question_of_ours() -> None:
    async def scenario() -> None:
        async with listening(rules_app(SUMMARY_RULES, "7"), 0) as port, aiohttp.ClientSession() as http:
            with pytest.raises(JudgeUnavailable, match=r"HTTP 400: .*expected a question about factuality, style"):
                await Endpoint(http, Address(url=f"http://127.0.0.1:{port}/v1", model="m")).ask(CALL)

    asyncio.run(scenario())


def scripted(model: ScriptedModel, play: Callable[[Endpoint], Coroutine[None, None, T]], key: str = API_KEY) -> T:
    async def scenario() -> T:
        async with serving(model) as session, aiohttp.ClientSession() as http:
            return await play(Endpoint(http, Address(url=session.base_url, model="m", key=key, structured=True)))

    return asyncio.run(scenario())


def test_the_wish_for_a_schema_is_sent_and_the_key_with_it() -> None:
    model = ScriptedModel(lambda messages: verdict(str(messages[-1]["content"]), 2))

    async def play(endpoint: Endpoint) -> Judgement:
        judging = court(endpoint, params=JudgeParams(model="m", votes=2, temperature=0.5))
        return await judging.judge.judge(style_rubric(), JUDGE_INPUT, judging.deps.budget)

    assert scripted(model, play).score == 2
    assert set(model.keys) == {f"Bearer {API_KEY}"}
    wish = model.requests[0]["response_format"]
    assert isinstance(wish, dict)
    assert wish["type"] == "json_schema"
    assert '"enum": [1, 2, 3, 4, 5, null]' in json.dumps(wish)
    assert {json.dumps(request["seed"]) for request in model.requests} == {"0", "2"}


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_a_busy_endpoint_is_asked_again(status: int) -> None:
    model = ScriptedModel(lambda _messages: "said", [status, status])

    async def play(endpoint: Endpoint) -> str:
        return (await endpoint.ask(CALL)).text

    assert scripted(model, play) == "said"
    assert len(model.requests) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422])
def test_an_endpoint_that_refuses_is_not_asked_again(status: int) -> None:
    model = ScriptedModel(lambda _messages: "said", [status])

    async def play(endpoint: Endpoint) -> None:
        with pytest.raises(JudgeUnavailable, match=f"HTTP {status}") as caught:
            await endpoint.ask(CALL)
        assert isinstance(caught.value, JudgeDeclined) == (status in REFUSED)

    scripted(model, play)
    assert len(model.requests) == 1


def answering(body: Json, status: int = 200, **headers: str) -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(body, status=status, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app


async def ask_at(app: web.Application) -> tuple[str, bool, str, bool]:
    async with listening(app, 0) as port, aiohttp.ClientSession() as http:
        reply = await Endpoint(http, Address(url=f"http://127.0.0.1:{port}/v1/", model="m", key=KEY)).ask(CALL)
        return reply.text, reply.was_cut, reply.identity, reply.used is not None


CHOICE: Json = {"message": {"content": "hi"}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ({"choices": [CHOICE]}, ("hi", False, "", False)),
        ({"choices": [{"message": {"content": None}}], "model": "m"}, ("", False, "m", False)),
        ({"choices": [CHOICE | {"finish_reason": "length"}]}, ("hi", True, "", False)),  # type: ignore[operator]
        ({"choices": [CHOICE], "model": "m", "system_fingerprint": "f"}, ("hi", False, "m f", False)),
        ({"choices": [CHOICE], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, ("hi", False, "", True)),
        ({"choices": [CHOICE], "usage": {"prompt_tokens": "many"}}, ("hi", False, "", False)),
    ],
)
def test_answers_are_read_as_they_come(body: Json, result: tuple[str, bool, str, bool]) -> None:
    assert asyncio.run(ask_at(answering(body))) == result


@pytest.mark.parametrize(
    "body", [None, [], "text", {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": 3}]}]
)
def test_what_is_no_completion_is_no_judgement(body: Json) -> None:
    with pytest.raises(JudgeUnavailable, match="answered HTTP 200"):
        asyncio.run(ask_at(answering(body)))


def test_a_key_that_an_endpoint_repeats_stands_in_no_error() -> None:
    with pytest.raises(JudgeUnavailable, match=f"wrong: \\{HIDDEN_KEY}") as caught:
        asyncio.run(ask_at(answering({"error": f"wrong: {KEY}"}, 401)))
    assert KEY not in str(caught.value)
    assert KEY not in repr(Address(url="u", model="m", key=KEY))
    for padding in range(150, 200):
        with pytest.raises(JudgeUnavailable) as caught:
            asyncio.run(ask_at(answering({"error": "." * padding + KEY}, 401)))
        assert KEY[:6] not in str(caught.value)


def test_a_judge_that_went_away_is_unavailable_in_time() -> None:
    async def scenario() -> None:
        async with listening(web.Application(), 0) as port:
            pass
        address = Address(url=f"http://127.0.0.1:{port}/v1", model="m")
        async with aiohttp.ClientSession() as http:
            judging = court(Endpoint(http, address), bounds=JudgeLimits(timeout_s=3.0))
            with pytest.raises(JudgeUnavailable, match=r"within 3 s: ClientConnectorError"):
                await judging.judge.judge(style_rubric(), JUDGE_INPUT, judging.deps.budget)

    asyncio.run(scenario())


def test_what_speaks_no_http_is_no_judge() -> None:
    async def gibberish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n")
        writer.write(b"HELO who is there?\r\n\r\n")
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(gibberish, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:
            address = Address(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", model="m")
            judging = court(Endpoint(http, address), bounds=JudgeLimits(timeout_s=3.0))
            with pytest.raises(JudgeUnavailable, match=r"within 3 s: ClientResponseError"):
                await judging.judge.judge(style_rubric(), JUDGE_INPUT, judging.deps.budget)

    asyncio.run(scenario())


def test_a_flood_is_not_read_to_its_end() -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b" " * 65_536)
        return response

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", flood)
        await ask_at(app)

    with pytest.raises(JudgeUnavailable, match="answered HTTP 200"):
        asyncio.run(asyncio.wait_for(scenario(), 30))


def test_nonces_of_different_calls_differ() -> None:
    model = ScriptedModel(lambda messages: verdict(str(messages[-1]["content"]), 2))

    async def play(endpoint: Endpoint) -> None:
        judging = court(endpoint, params=JudgeParams(model="m", votes=5, temperature=0.5))
        await judging.judge.judge(style_rubric(), JUDGE_INPUT, judging.deps.budget)

    scripted(model, play)
    questions: Sequence[str] = [json.dumps(request["messages"]).replace('\\"', '"') for request in model.requests]
    assert len({NONCE.findall(question)[-1] for question in questions}) == 5
