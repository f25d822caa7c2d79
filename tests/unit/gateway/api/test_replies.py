"""The same random answers through the real SDKs of both APIs: streamed answers equal whole ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import anthropic
import httpx
import httpx2
import numpy as np
import openai
import orjson
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from etude.gateway.api import messages, responses
from etude.gateway.api.calls import Answer, ApiError, ApiProtocol, FinishReason, ParsedRequest, Reply
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, ChatMessage, Delta, TextDelta, ThinkingDelta, ToolCall
from etude.types import Finish, Json, Turn

ANTHROPIC_EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
OPENAI_EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
MESSAGE_BODY: dict[str, Json] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
RESPONSE_BODY: dict[str, Json] = {"model": "m", "input": "go"}

PROMPT, REUSED = 7, 3
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | TEXT, lambda inner: st.lists(inner, max_size=2), max_leaves=4
)
CALLS = st.builds(
    ToolCall,
    call_id=st.uuids().map(lambda value: f"call_{value.hex}"),
    name=st.text("abc_", min_size=1, max_size=9),
    arguments=st.dictionaries(TEXT, VALUES, max_size=3).flatmap(
        lambda value: st.sampled_from([json.dumps(value), json.dumps(value, indent=1, ensure_ascii=False)])
    ),
)
MESSAGES = st.builds(
    ChatMessage,
    role=st.just("assistant"),
    content=TEXT,
    thinking=TEXT,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
)


@dataclass(frozen=True)
class ScriptedAnswer:
    """An answer, and the deltas of its stream."""

    answer: Answer
    deltas: tuple[Delta, ...]


@st.composite
def scripted(draw: st.DrawFn) -> ScriptedAnswer:
    message = draw(MESSAGES)
    finish_reason = draw(st.sampled_from(FinishReason))
    stop_text = draw(TEXT.filter(bool)) if finish_reason is FinishReason.STOP_TEXT else None
    deltas: list[Delta] = [ThinkingDelta(text) for text in chunks(draw, message.thinking)]
    deltas += [TextDelta(text) for text in chunks(draw, message.content)]
    for index, call in enumerate(message.tool_calls):
        first, *more = chunks(draw, call.arguments)
        at_once = draw(st.booleans())
        deltas.append(CallDelta(index, call.call_id, call.name, first if at_once else ""))
        deltas += [CallDelta(index, arguments=text) for text in ([] if at_once else [first]) + more]
    return ScriptedAnswer(answer_of(message, finish_reason, stop_text, draw(st.integers(0, 9))), tuple(deltas))


def chunks(draw: st.DrawFn, text: str) -> list[str]:
    truncated = draw(st.integers(0, len(text)))
    return [text[:truncated], text[truncated:]]


def answer_of(
    message: ChatMessage,
    finish_reason: FinishReason = FinishReason.STOP,
    stop_text: str | None = None,
    sampled: int = 4,
) -> Answer:
    turn = Turn(
        prompt_ids=np.zeros(PROMPT, np.int32),
        completion_ids=np.zeros(sampled, np.int32),
        logprobs=np.zeros(sampled, np.float32),
        versions=np.zeros(sampled, np.int32),
        finish=Finish.LENGTH if finish_reason is FinishReason.LENGTH else Finish.STOP,
    )
    reply = Reply(message=message, finish_reason=finish_reason, stop_text=stop_text, turn=turn)
    return Answer(answer_id="0" * 24, created=1, model="m", replies=(reply,), reused_tokens=REUSED)


def stream_of(parsed: ParsedRequest, answer: Answer, deltas: Sequence[Delta]) -> bytes:
    events, turn = parsed.events(), answer.replies[0].turn
    chunk = TokenChunk(token_ids=turn.completion_ids, logprobs=turn.logprobs, versions=turn.versions)
    stream = [events.opening(answer.answer_id, answer.created)]
    stream += [events.delta(0, [delta], chunk) for delta in deltas]
    return b"".join([*stream, events.closing(answer)])


def data_of(stream: bytes) -> list[dict[str, Json]]:
    events = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        events.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode()
    return events


def served(api: ApiProtocol, body: bytes, scripted: ScriptedAnswer | ApiError) -> tuple[int, str, bytes]:
    """Status, content type and body that the server would return."""
    parsed = api.parse(body)
    if isinstance(scripted, ApiError):
        return api.statuses.get(scripted.status, scripted.status), "application/json", api.error_body(scripted)
    if parsed.call.stream:
        return 200, "text/event-stream", stream_of(parsed, scripted.answer, scripted.deltas)
    return 200, "application/json", parsed.body(scripted.answer)


def anthropic_client(scripted: ScriptedAnswer | ApiError) -> anthropic.Anthropic:
    def handle(request: httpx2.Request) -> httpx2.Response:
        status, kind, body = served(messages.PROTOCOL, request.read(), scripted)
        return httpx2.Response(status, headers={"content-type": kind}, content=body)

    http = anthropic.DefaultHttpxClient(transport=httpx2.MockTransport(handle))
    return anthropic.Anthropic(api_key="k", base_url="http://gateway", http_client=http, max_retries=0)


def openai_client(scripted: ScriptedAnswer | ApiError) -> openai.OpenAI:
    def handle(request: httpx.Request) -> httpx.Response:
        status, kind, body = served(responses.PROTOCOL, request.read(), scripted)
        return httpx.Response(status, headers={"content-type": kind}, content=body)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(api_key="k", base_url="http://gateway/v1", http_client=http, max_retries=0)


@settings(max_examples=100, deadline=None)
@given(scripted())
def test_every_message_and_event_is_what_anthropics_sdk_knows(scripted: ScriptedAnswer) -> None:
    parsed = messages.parse(orjson.dumps(MESSAGE_BODY))
    body = parsed.body(scripted.answer)
    message = AnthropicMessage.model_validate(json.loads(body))
    reply = scripted.answer.replies[0]
    assert [block.text for block in message.content if block.type == "text"] == [reply.message.content] * bool(
        reply.message.content
    )
    assert [block.input for block in message.content if block.type == "tool_use"] == [
        json.loads(call.arguments) for call in reply.message.tool_calls
    ]
    assert message.usage.input_tokens + REUSED == PROMPT and message.usage.cache_read_input_tokens == REUSED
    assert (message.stop_reason == "stop_sequence") == (message.stop_sequence is not None)

    events = [
        event for event in data_of(stream_of(parsed, scripted.answer, scripted.deltas)) if event["type"] != "ping"
    ]
    for event in events:
        ANTHROPIC_EVENTS.validate_python(event)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    steps = [(event["type"], event["index"]) for event in events if "index" in event]
    starts = [index for kind, index in steps if kind == "content_block_start"]
    assert starts == list(range(len(message.content)))  # blocks do not overlap: each stops before the next starts
    assert [index for _, index in steps] == sorted(index for _, index in steps if isinstance(index, int))
    assert [index for kind, index in steps if kind == "content_block_stop"] == starts


@settings(max_examples=30, deadline=None)
@given(scripted())
def test_a_streamed_message_is_the_whole_one(scripted: ScriptedAnswer) -> None:
    client = anthropic_client(scripted)
    question = [{"role": "user", "content": "go"}]
    whole = client.messages.create(model="m", max_tokens=9, messages=question)  # type: ignore[arg-type]  # a plain dict
    with client.messages.stream(model="m", max_tokens=9, messages=question) as stream:  # type: ignore[arg-type]  # ditto
        streamed = stream.get_final_message()
    assert AnthropicMessage.model_validate(streamed.to_dict()).to_dict() == whole.to_dict()


@settings(max_examples=100, deadline=None)
@given(scripted())
def test_every_response_and_event_is_what_openais_sdk_knows(scripted: ScriptedAnswer) -> None:
    parsed = responses.parse(orjson.dumps(RESPONSE_BODY))
    response = Response.model_validate(orjson.loads(parsed.body(scripted.answer)))
    assert response.output_text == scripted.answer.replies[0].message.content
    assert [item.arguments for item in response.output if item.type == "function_call"] == [
        call.arguments for call in scripted.answer.replies[0].message.tool_calls
    ]
    assert response.usage is not None and response.usage.total_tokens == PROMPT + scripted.answer.completion_tokens

    events = data_of(stream_of(parsed, scripted.answer, scripted.deltas))
    for event in events:
        OPENAI_EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == orjson.loads(parsed.body(scripted.answer))["output"]
    assert events[-1]["type"] == f"response.{response.status}"


@settings(max_examples=30, deadline=None)
@given(scripted())
def test_a_streamed_response_is_the_whole_one(scripted: ScriptedAnswer) -> None:
    client = openai_client(scripted)
    whole = client.responses.create(model="m", input="go")
    last = list(client.responses.create(model="m", input="go", stream=True))[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.to_dict() == whole.to_dict()
    with client.responses.stream(model="m", input="go") as stream:
        events = list(stream)
    texts = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert (texts or [""])[-1] == whole.output_text
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == "".join(item.arguments for item in whole.output if item.type == "function_call")


def test_text_between_calls_streams_in_the_order_it_was_said() -> None:
    call = ToolCall(call_id="c", name="f", arguments="{}")
    answer = answer_of(ChatMessage(role="assistant", content="ab", tool_calls=(call,)), FinishReason.TOOL_CALLS)
    scripted = ScriptedAnswer(answer, (TextDelta("a"), CallDelta(0, "c", "f", "{}"), TextDelta("b")))
    with anthropic_client(scripted).messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}]
    ) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["text", "tool_use", "text"]
    with openai_client(scripted).responses.stream(model="m", input="go") as events:
        output = events.get_final_response().output
    assert [item.type for item in output] == ["message", "function_call", "message"]


def test_an_empty_reply_still_has_a_message_item() -> None:
    scripted = ScriptedAnswer(answer_of(ChatMessage(role="assistant")), ())
    assert [item.type for item in openai_client(scripted).responses.create(input="go").output] == ["message"]


@pytest.mark.parametrize(
    ("status", "kind", "name"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (401, anthropic.AuthenticationError, "authentication_error"),
        (403, anthropic.PermissionDeniedError, "permission_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (409, anthropic.ConflictError, "conflict_error"),
        (413, anthropic.ContentTooLargeError, "request_too_large"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (503, anthropic.OverloadedError, "overloaded_error"),
    ],
)
def test_errors_raise_what_anthropics_clients_expect(status: int, kind: type[Exception], name: str) -> None:
    client = anthropic_client(ApiError(status, "some_code", "no such thing"))
    with pytest.raises(kind, match="no such thing") as error:
        client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}])
    assert isinstance(error.value, anthropic.APIStatusError)
    assert error.value.type == name


def test_errors_raise_what_openais_clients_expect() -> None:
    client = openai_client(ApiError(409, "version_not_served", "not yet", param="min_version"))
    with pytest.raises(openai.ConflictError, match="not yet") as error:
        client.responses.create(input="go")
    assert (error.value.code, error.value.param) == ("version_not_served", "min_version")


def test_failures_inside_a_stream_reach_the_clients() -> None:
    api_error = ApiError(503, "engine_unavailable", "no engine answered")
    events = messages.parse(orjson.dumps(MESSAGE_BODY)).events()
    stream = events.opening("0", 1) + events.failure(api_error)
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    )
    client = anthropic.Anthropic(api_key="k", http_client=anthropic.DefaultHttpxClient(transport=transport))
    with (
        pytest.raises(anthropic.APIStatusError, match="no engine answered"),
        client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}]) as answer,
    ):
        answer.get_final_message()

    scripted = responses.parse(orjson.dumps(RESPONSE_BODY)).events()
    turn = answer_of(ChatMessage(role="assistant")).replies[0].turn
    chunk = TokenChunk(token_ids=turn.completion_ids, logprobs=turn.logprobs, versions=turn.versions)
    begun = scripted.opening("0", 1) + scripted.delta(0, [TextDelta("half")], chunk)
    event = OPENAI_EVENTS.validate_python(data_of(begun + scripted.failure(api_error))[-1])
    assert event.type == "response.failed" and event.response.error is not None
    assert (event.response.error.code, event.response.output) == ("server_error", [])
