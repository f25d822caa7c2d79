"""OpenAI's chat completions: valid fields are read, others are refused by name, and OpenAI's SDK reads the answers."""

from collections.abc import Sequence

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageFunctionToolCall

from etude.gateway.api.calls import Answer, ApiError, FinishReason, Reply, Sampling
from etude.gateway.api.chat import CHAT_FIELDS, CHAT_NEUTRAL, PROTOCOL, parse
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, ChatMessage, Delta, TextDelta, ThinkingDelta, Tool, ToolCall
from etude.types import Finish, Json, Turn

QUESTION: list[Json] = [{"role": "user", "content": "go"}]
BASH: dict[str, Json] = {
    "type": "function",
    "function": {"name": "bash", "description": "runs", "parameters": {"type": "object"}, "strict": True},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | JSON},
    optional={
        "content": st.text()
        | st.lists(st.fixed_dictionaries({"type": st.just("text") | JSON, "text": st.text() | JSON}))
        | JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {"id": st.text(), "function": st.fixed_dictionaries({"name": st.text(), "arguments": st.text() | JSON})}
            )
        )
        | JSON,
        "tool_call_id": st.text() | JSON,
        "reasoning": st.text() | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional=dict.fromkeys(sorted((CHAT_FIELDS | CHAT_NEUTRAL.keys()) - {"messages"}), JSON),
)


def body_of(messages: Json = QUESTION, **fields: Json) -> bytes:
    return orjson.dumps({"messages": messages, **fields})


def test_a_whole_conversation_is_read() -> None:
    messages: list[Json] = [
        {"role": "developer", "content": "be brief", "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}], "images": []},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
            "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
            "tool_calls": [
                {"index": 0, "id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}},
                {"id": "b", "function": {"name": "bash", "arguments": "cut sh"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x", "name": "bash"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "y"}]},
        {"role": "assistant", "reasoning": "so"},
        {"role": "system", "content": ""},
    ]
    parsed = parse(body_of(messages, tools=[BASH], model="gpt-9", parallel_tool_calls=False, stream=True))
    assert parsed.call.messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="go"),
        ChatMessage(
            role="assistant",
            thinking="hm",
            tool_calls=(
                ToolCall(call_id="a", name="bash", arguments="{}"),
                ToolCall(call_id="b", name="bash", arguments="cut sh"),
            ),
        ),
        ChatMessage(role="tool", content="x", tool_call_id="a"),
        ChatMessage(role="tool", content="y", tool_call_id="b"),
        ChatMessage(role="assistant", thinking="so"),
        ChatMessage(role="system"),
    )
    assert parsed.call.tools == (Tool(name="bash", description="runs", parameters={"type": "object"}),)
    assert (parsed.call.model, parsed.call.single_call, parsed.call.stream) == ("gpt-9", True, True)
    assert parsed.call.prompt is None


def test_a_short_body_is_the_defaults() -> None:
    call = parse(body_of()).call
    assert call.messages == (ChatMessage(role="user", content="go"),)
    assert (call.tools, call.sampling, call.stream, call.single_call, call.model) == (
        *((), Sampling(), False, False, "policy"),
    )


def test_what_asks_for_nothing_is_accepted() -> None:
    for name, values in CHAT_NEUTRAL.items():
        for value in values:
            assert parse(body_of(**{name: value})).call == parse(body_of()).call
    for name in ("user", "metadata", "reasoning_effort", "prompt_cache_key", "safety_identifier"):
        assert parse(body_of(**{name: "x"})).call == parse(body_of()).call


def test_no_tool_choice_is_no_tools() -> None:
    assert parse(body_of(tools=[BASH], tool_choice="none")).call.tools == ()
    assert len(parse(body_of(tools=[BASH], tool_choice="auto")).call.tools) == 1
    assert parse(body_of(tools=[{"type": "function", "function": {"name": "f"}}])).call.tools == (Tool(name="f"),)


def test_both_names_of_the_allowance_are_read() -> None:
    assert parse(body_of(max_tokens=3)).call.sampling.max_tokens == 3
    assert parse(body_of(max_completion_tokens=4)).call.sampling.max_tokens == 4
    assert parse(body_of(max_tokens=4, max_completion_tokens=4)).call.sampling.max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": None}, "invalid_request", "messages"),
        ({"messages": "go"}, "invalid_request", "messages"),
        ({"messages": ["go"]}, "invalid_request", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
        ({"messages": [{"content": "go"}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "oracle", "content": "go"}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "function", "content": "go"}]}, "invalid_request", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "", "name": "x"}]}, "unsupported_parameter", "messages[0].name"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_request", "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "invalid_request", "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_request",
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_request", "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "unsupported_parameter",
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "unsupported_parameter", "messages[0].audio"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
            "unsupported_parameter",
            "messages[0].tool_calls[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "invalid_request",
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]},
            "invalid_request",
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
        ({"max_tokens": 8, "max_completion_tokens": 7}, "invalid_request", "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "invalid_request", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "invalid_request", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_request", "tools[0].function.name"),
        ({"tools": [BASH, BASH]}, "invalid_request", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "unsupported_parameter", "tool_choice"),
        ({"logprobs": 1}, "invalid_request", "logprobs"),
        ({"logprobs": True, "top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
        ({"presence_penalty": 0.5}, "unsupported_parameter", "presence_penalty"),
        ({"priority": 1}, "unsupported_parameter", "priority"),
        ({"min_p": 0.1}, "unsupported_parameter", "min_p"),
        ({"chat_template_kwargs": [1]}, "invalid_request", "chat_template_kwargs"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"web_search_options": {}}, "unsupported_parameter", "web_search_options"),
        ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Json], code: str, param: str) -> None:
    with pytest.raises(ApiError) as error:
        PROTOCOL.parse(orjson.dumps({"messages": QUESTION, **fields}))
    assert (error.value.status, error.value.code, error.value.param) == (400, code, param)
    assert param in error.value.message


@given(BODY)
def test_any_json_is_read_or_refused(body: dict[str, Json]) -> None:
    try:
        data = orjson.dumps(body)
    except orjson.JSONEncodeError:  # beyond 64 bits
        data = repr(body).encode()
    try:
        call = parse(data).call
    except ApiError as api_error:
        assert api_error.status == 400
        assert len(api_error.message) < 400
    else:
        assert call.messages


@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(ApiError):
        parse(data)


CALLS = (
    ToolCall(call_id="call_0", name="bash", arguments='{"command": "ls"}'),
    ToolCall(call_id="call_1", name="read", arguments="{}"),
)
CHUNKS = 4


def turn(tokens: int = 8, version: int = 12) -> Turn:
    return Turn(
        prompt_ids=np.arange(100, 105, dtype=np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=np.array([version] * (tokens - 1) + [version + 1], np.int32),
        finish=Finish.STOP,
    )


def answer_of(
    *messages: ChatMessage, finish_reason: FinishReason = FinishReason.STOP, stop_text: str | None = None
) -> Answer:
    replies = [
        Reply(message=message, finish_reason=finish_reason, stop_text=stop_text, turn=turn()) for message in messages
    ]
    return Answer(answer_id="0" * 24, created=1_700_000_000, model="policy", replies=tuple(replies), reused_tokens=3)


def scripted(content: str = "done", thinking: str = "", calls: tuple[ToolCall, ...] = ()) -> ChatMessage:
    return ChatMessage(role="assistant", content=content, thinking=thinking, tool_calls=calls)


def deltas_of(message: ChatMessage) -> list[Delta]:
    """A message in small pieces, as a reader gives it."""
    deltas: list[Delta] = [ThinkingDelta(letter) for letter in message.thinking]
    deltas += [TextDelta(letter) for letter in message.content]
    for index, call in enumerate(message.tool_calls):
        deltas.append(CallDelta(index, call_id=call.call_id, name=call.name))
        deltas += [CallDelta(index, arguments=letter) for letter in call.arguments]
    return deltas


def thinking_of(extra: dict[str, object] | None) -> object:
    return (extra or {}).get("reasoning_content")


def calls_of(calls: Sequence[object] | None) -> list[ToolCall]:
    """The tool calls in the SDK's types."""
    tool_calls = []
    for call in calls or ():
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        tool_calls.append(ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments))
    return tool_calls


def stream_of(body: bytes, answer: Answer, split: Sequence[int] = (2, 5, 11)) -> list[dict[str, Json]]:
    """The chunks of an answer whose replies come in four parts of two tokens each."""
    events = parse(body).events()
    data = events.opening(answer.answer_id, answer.created)
    for index, reply in enumerate(answer.replies):
        deltas, bounds = deltas_of(reply.message), [0, *split, 10**9]
        for number in range(CHUNKS):
            tokens = slice(2 * number, 2 * number + 2)
            chunk = TokenChunk(
                token_ids=reply.turn.completion_ids[tokens],
                logprobs=reply.turn.logprobs[tokens],
                versions=reply.turn.versions[tokens],
            )
            data += events.delta(index, deltas[bounds[number] : bounds[number + 1]], chunk)
    data += events.closing(answer)
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [orjson.loads(line[6:]) for line in lines[:-2]]


def test_the_body_is_openais() -> None:
    body = parse(body_of(model="gpt-9")).body(answer_of(scripted()))
    assert orjson.loads(body) == {
        "id": "chatcmpl-" + "0" * 24,
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "gpt-9",
        "system_fingerprint": "v12-v13",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "done", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert ChatCompletion.model_validate_json(body).choices[0].message.content == "done"


def test_tool_calls_and_thinking_reach_the_sdk() -> None:
    body = parse(body_of()).body(answer_of(scripted("", "hm", CALLS), finish_reason=FinishReason.TOOL_CALLS))
    choice = ChatCompletion.model_validate_json(body).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [call.id for call in choice.message.tool_calls or ()] == ["call_0", "call_1"]
    assert (choice.message.model_extra or {})["reasoning_content"] == "hm"
    again: list[Json] = [*QUESTION, choice.message.model_dump(mode="json")]
    assert parse(body_of(again)).call.messages[1] == scripted("", "hm", CALLS)


@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.STOP_TEXT, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.TOOL_CALLS, "tool_calls"),
    ],
)
def test_every_ending_has_a_reason(finish_reason: FinishReason, reason: str) -> None:
    stop = "END" if finish_reason is FinishReason.STOP_TEXT else None
    answer = answer_of(scripted(), finish_reason=finish_reason, stop_text=stop)
    choice = orjson.loads(parse(body_of()).body(answer))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    last = stream_of(body_of(stream=True), answer)[-1]["choices"]
    assert isinstance(last, list)
    assert last == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": reason, "stop_reason": stop}]


def test_a_user_can_check_what_is_captured() -> None:
    data = orjson.loads(parse(body_of(return_token_ids=True, logprobs=True)).body(answer_of(scripted())))
    assert data["prompt_token_ids"] == [100, 101, 102, 103, 104]
    choice = data["choices"][0]
    assert choice["token_ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    entry = {"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    assert (len(choice["logprobs"]["content"]), choice["logprobs"]["content"][7]) == (8, entry)
    assert ChatCompletion.model_validate(data).choices[0].logprobs is not None


def test_a_stream_begins_with_the_role_and_ends_with_the_usage() -> None:
    body = body_of(stream=True, stream_options={"include_usage": True})
    first, *_, last, usage = stream_of(body, answer_of(scripted("abcdefghijklmnop")))
    assert first == {
        "id": "chatcmpl-" + "0" * 24,
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "policy",
        "usage": None,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    assert (last["usage"], last["system_fingerprint"]) == (None, "v12-v13")
    assert usage["choices"] == []
    assert usage["usage"] == orjson.loads(parse(body_of()).body(answer_of(scripted())))["usage"]


def test_a_stream_says_which_weights_said_what() -> None:
    chunks = stream_of(body_of(stream=True), answer_of(scripted("abcdefghijklmnop")))
    assert [chunk["system_fingerprint"] for chunk in chunks] == [None, "v12", "v12", "v12", "v12-v13", "v12-v13"]


def test_tokens_without_text_are_shown_to_those_who_count_them() -> None:
    answer = answer_of(scripted(""))
    assert len(stream_of(body_of(stream=True), answer)) == 2
    chunks = stream_of(body_of(stream=True, return_token_ids=True, logprobs=True), answer)
    choices = [choice for chunk in chunks if isinstance(chunk["choices"], list) for choice in chunk["choices"]]
    ids = [choice["token_ids"] for choice in choices if isinstance(choice, dict) and "token_ids" in choice]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert chunks[-1]["prompt_token_ids"] == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("count", [1, 3])
def test_each_reply_has_its_index_in_the_stream(count: int) -> None:
    answer = answer_of(*[scripted(f"reply {index}") for index in range(count)])
    chunks = stream_of(body_of(stream=True, n=count), answer)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    final = state.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [f"reply {index}" for index in range(count)]


@given(
    message=st.builds(
        scripted,
        st.text(st.characters(codec="utf-8"), max_size=12),
        st.text(st.characters(codec="utf-8"), max_size=4),
        st.sampled_from([(), CALLS[:1], CALLS]),
    ),
    split=st.lists(st.integers(0, 60), min_size=3, max_size=3).map(sorted),
    logprobs=st.booleans(),
)
def test_the_sdk_adds_a_stream_up_to_the_body(message: ChatMessage, split: list[int], logprobs: bool) -> None:
    answer = answer_of(message, finish_reason=FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP)
    parsed = body_of(stream=True, logprobs=logprobs, stream_options={"include_usage": True})
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in stream_of(parsed, answer, split):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    streamed = state.get_final_completion()
    whole = ChatCompletion.model_validate_json(parse(parsed).body(answer))
    one, two = streamed.choices[0], whole.choices[0]
    assert (one.message.content or "") == (two.message.content or "")
    assert thinking_of(one.message.model_extra) == thinking_of(two.message.model_extra)
    assert calls_of(one.message.tool_calls) == calls_of(two.message.tool_calls) == list(message.tool_calls)
    assert (one.finish_reason, one.logprobs) == (two.finish_reason, two.logprobs)
    assert (streamed.usage, streamed.id, streamed.system_fingerprint) == (whole.usage, whole.id, "v12-v13")


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    event = parse(body_of(stream=True)).events().failure(ApiError(503, "engine_unavailable", "gone"))
    assert orjson.loads(event[6:])["error"]["type"] == "server_error"
