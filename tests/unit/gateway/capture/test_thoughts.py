"""Thoughts and template kwargs, from the wire to the record: a template in DeepSeek-R1's form."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import orjson
import pytest

from chat_formats import TEMPLATES, make_jinja
from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.gateway.api.calls import ApiError
from etude.gateway.api.chat import parse
from etude.gateway.capture.conversations import Conversation
from etude.gateway.request_log import RequestRecord
from etude.gateway.routing.admission import AdmissionController, AdmissionLimits, AdmissionQueue, TrafficClass
from etude.gateway.routing.pool import EnginePool
from etude.gateway.routing.router import EngineEntry, Router
from etude.gateway.service import Caller, CallService, Recorder, ReplySampler
from etude.types import Json

CLOCK = SystemClock()
CHAT = make_jinja((TEMPLATES / "r1.jinja").read_text(), "<｜end▁of▁sentence｜>")
REPLY = "It is sunny."
FUNCTION: Json = {"name": "weather", "parameters": {"type": "object"}}
CALL: Json = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
REQUEST: Json = {"role": "user", "content": "Is it sunny?"}
SHOWN: list[Json] = [
    REQUEST,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "yes", "tool_call_id": "a"},
]


def converse(*bodies: dict[str, Json]) -> tuple[list[dict[str, Json]], Conversation]:
    """The replies to one session's calls, as OpenAI's messages; the model always samples ``REPLY``."""
    conversation = Conversation("session", CHAT)

    async def run() -> list[dict[str, Json]]:
        engine = FakeEngine(CLOCK, vocab_size=CHAT.vocab_size, max_length=512)
        engine.script(*[[*CHAT.encode(REPLY), CHAT.stop_ids[0]]] * len(bodies))
        admission = AdmissionController(AdmissionLimits(rollouts=1, floor=1))
        pool = EnginePool(lambda _url: engine, Router(), CLOCK, admission=admission)
        pool.add(EngineEntry(name="one", url="http://fake"))
        sampler = ReplySampler(CHAT, pool, AdmissionQueue(admission, CLOCK), Recorder(None), CLOCK)
        service = CallService(sampler, max_length=512)
        caller = Caller(conversation=conversation, traffic=TrafficClass.ROLLOUT, deadline=CLOCK.now() + 600.0)
        polling = asyncio.create_task(pool.watch())
        try:
            return [await _answer(service, caller, body) for body in bodies]
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    return asyncio.run(run()), conversation


async def _answer(service: CallService, caller: Caller, body: dict[str, Json]) -> dict[str, Json]:
    tools: Json = [{"type": "function", "function": FUNCTION}]
    request = parse(orjson.dumps({"tools": tools, "max_tokens": 32, **body}))
    if not request.call.stream:
        answer = await service.answer(request.call, caller, RequestRecord(began=0.0))
        return _only(orjson.loads(request.body(answer))["choices"], "message")
    async with aclosing(service.stream(request.call, request.events(), caller, RequestRecord(began=0.0))) as chunks:
        lines = b"".join([chunk async for chunk in chunks]).split(b"\n")
    events = [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    deltas = [_only(event["choices"], "delta") for event in events if event["choices"]]
    return {name: "".join(str(delta.get(name) or "") for delta in deltas) for name in ("content", "reasoning_content")}


def _only(choices: Sequence[dict[str, dict[str, Json]]], field: str) -> dict[str, Json]:
    return choices[0][field]


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_reply_whose_prompt_opens_a_thought_begins_inside_one(*, stream: bool) -> None:
    messages, _ = converse({"messages": [REQUEST], "stream": stream}, {"messages": SHOWN, "stream": stream})
    output = [(message.get("reasoning_content") or "", message["content"] or "") for message in messages]
    assert output == [(REPLY, ""), ("", REPLY)]


def test_kwargs_of_the_template_reach_it_and_are_in_what_is_recorded() -> None:
    quiet: dict[str, Json] = {"enable_thinking": False}
    reply: Json = {"role": "assistant", "content": REPLY}
    again: list[Json] = [REQUEST, reply, REQUEST]
    messages, conversation = converse(
        {"messages": [REQUEST], "chat_template_kwargs": quiet},
        {"messages": again, "chat_template_kwargs": quiet},
        {"messages": again, "chat_template_kwargs": None},
    )
    assert [message["content"] for message in messages] == [REPLY, REPLY, ""]
    first, second, third = conversation.turns
    whole = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(whole)] == whole
    assert third.prompt_ids.tolist()[: len(whole)] != whole


def test_kwargs_that_the_template_does_not_read_are_refused_with_those_that_it_does() -> None:
    with pytest.raises(ApiError, match="does not read thinking; it reads enable_thinking, identity") as error:
        converse({"messages": [REQUEST], "chat_template_kwargs": {"thinking": True}})
    assert (error.value.status, error.value.param) == (400, "chat_template_kwargs")
