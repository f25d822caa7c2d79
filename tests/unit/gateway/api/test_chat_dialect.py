"""OpenAI's chat completions: what is read, and that all else is refused by name."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.api.calls import ApiError, Sampling
from etude.gateway.api.chat import CHAT_FIELDS, CHAT_NEUTRAL, PROTOCOL, parse
from etude.tokens.messages import ChatMessage, Tool, ToolCall
from etude.types import Json

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
    asked = parse(body_of(messages, tools=[BASH], model="gpt-9", parallel_tool_calls=False, stream=True))
    assert asked.call.messages == (
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
    assert asked.call.tools == (Tool(name="bash", description="runs", parameters={"type": "object"}),)
    assert (asked.call.model, asked.call.single_call, asked.call.stream) == ("gpt-9", True, True)
    assert asked.call.prompt is None


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
