"""Anthropic's Messages API: valid fields are read, and others are refused by name."""

import json
from itertools import pairwise

import jsonschema_rs
import orjson
import pytest
from anthropic.types import MessageTokensCount
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.api.calls import ApiError, Call, Sampling
from etude.gateway.api.fields import MAX_NAME_CHARACTERS, MAX_STOP_CHARACTERS, MAX_STOPS
from etude.gateway.api.messages import (
    COUNT_SCHEMA,
    FIELDS,
    NEUTRAL,
    SCHEMA,
    count_body,
    parse,
    parse_count,
)
from etude.tokens.messages import ChatMessage, Tool, ToolCall
from etude.types import Json

QUESTION: list[Json] = [{"role": "user", "content": "go"}]
BASH: dict[str, Json] = {"name": "bash", "description": "runs", "input_schema": {"type": "object"}}
CACHED: Json = {"type": "ephemeral", "ttl": "1h"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"]) | JSON},
    optional={"text": st.text(), "thinking": st.text(), "id": st.text(), "name": st.text(), "input": JSON}
    | {"tool_use_id": st.text(), "content": JSON, "is_error": JSON, "cache_control": JSON},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON},
    optional={"content": st.text() | st.lists(BLOCK, max_size=4) | JSON},
)
BODY = st.fixed_dictionaries(
    {"model": st.just("m") | JSON, "max_tokens": st.just(9) | JSON, "messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional=dict.fromkeys(sorted((FIELDS | NEUTRAL.keys()) - {"model", "messages", "max_tokens"}), JSON),
)


def body_of(messages: Json = QUESTION, **fields: Json) -> bytes:
    return orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages, **fields})


def call_of(messages: Json = QUESTION, **fields: Json) -> Call:
    body = body_of(messages, **fields)
    assert fits(SCHEMA, body)  # whatever is read here, the document of the API promises
    return parse(body).call


def refused(messages: Json = QUESTION, **fields: Json) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(body_of(messages, **fields))
    assert error.value.status == 400
    return error.value


def fits(schema: dict[str, Json], body: bytes) -> bool:
    return jsonschema_rs.Draft202012Validator(schema).is_valid(orjson.loads(body))


def content(role: str, *blocks: Json) -> list[Json]:
    return [{"role": role, "content": [*blocks]}]


def test_a_bare_request_is_a_call_with_anthropics_defaults() -> None:
    assert call_of() == Call(
        messages=(ChatMessage(role="user", content="go"),), sampling=Sampling(max_tokens=9), model="m", stream=False
    )


def test_options_reach_the_sampler() -> None:
    call = call_of(temperature=0, top_p=0.5, top_k=3, stop_sequences=["a", "b"], stream=True, max_tokens=1)
    assert call.sampling == Sampling(temperature=0, top_p=0.5, top_k=3, stops=("a", "b"), max_tokens=1)
    assert call.stream


def test_system_blocks_are_one_system_message_and_cache_marks_say_nothing() -> None:
    blocks: list[Json] = [{"type": "text", "text": text, "cache_control": CACHED} for text in ("a", "b")]
    assert call_of(system=blocks, cache_control=CACHED) == call_of(system="ab")
    assert call_of(system="ab").messages[0] == ChatMessage(role="system", content="ab")
    assert call_of(system="") == call_of()


def test_a_whole_agent_loop_is_read_in_order() -> None:
    messages: list[Json] = [
        {"role": "user", "content": "go"},
        *content(
            "assistant",
            {"type": "thinking", "thinking": "hm", "signature": "from elsewhere"},
            {"type": "redacted_thinking", "data": "unreadable"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "bash", "input": {"b": 1, "a": [None]}},
            {"type": "tool_use", "id": "t2", "name": "bash", "input": {}},
        ),
        *content(
            "user",
            {"type": "tool_result", "tool_use_id": "t2", "content": "out"},
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "text", "text": "and "},
            {"type": "text", "text": "now?"},
        ),
        {"role": "system", "content": "be brief"},
    ]
    assert parse(body_of(messages)).call.messages == (
        ChatMessage(role="user", content="go"),
        ChatMessage(
            role="assistant",
            content="I look.",
            thinking="hm",
            tool_calls=(
                ToolCall(call_id="t1", name="bash", arguments='{"b":1,"a":[null]}'),
                ToolCall(call_id="t2", name="bash", arguments="{}"),
            ),
        ),
        ChatMessage(role="tool", content="out", tool_call_id="t2"),
        ChatMessage(role="tool", content="[error] no", tool_call_id="t1"),
        ChatMessage(role="tool", content="", tool_call_id="t3"),
        ChatMessage(role="user", content="and now?"),
        ChatMessage(role="system", content="be brief"),
    )


def test_text_before_a_tools_output_stays_before_it() -> None:
    blocks: list[Json] = [{"type": "text", "text": "see"}, {"type": "tool_result", "tool_use_id": "t"}]
    assert [message.role for message in call_of(content("user", *blocks)).messages] == ["user", "tool"]


def test_an_empty_reply_may_come_back() -> None:
    empty: list[Json] = [{"role": "assistant", "content": []}, {"role": "assistant", "content": ""}]
    assert call_of([*QUESTION, *empty, *QUESTION]).messages[1:3] == (ChatMessage(role="assistant"),) * 2


def test_tools_are_offered_unless_none_may_be_called() -> None:
    tool = Tool(name="bash", description="runs", parameters={"type": "object"})
    assert call_of(tools=[{**BASH, "cache_control": CACHED, "type": "custom"}]).tools == (tool,)
    assert call_of(tools=[BASH], tool_choice={"type": "none"}).tools == ()
    alone = call_of(tools=[BASH], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert (alone.tools, alone.single_call) == ((tool,), True)


def test_hints_and_information_change_nothing() -> None:
    thoughts: tuple[Json, ...] = (
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "disabled"},
        {"type": "adaptive"},
    )
    for thinking in thoughts:
        assert call_of(thinking=thinking) == call_of()
    assert call_of(output_config={"effort": "max"}, metadata={"user_id": "u"}, service_tier="auto") == call_of()
    assert call_of(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}) == call_of()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": 1e-38}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"model": ""}, "model"),
        ({"model": "m" * (MAX_NAME_CHARACTERS + 1)}, "model"),
        ({"model": None}, "model"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x" * (MAX_STOP_CHARACTERS + 1)]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * (MAX_STOPS + 1)}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"seed": 1}, "seed"),
        ({"n": 2}, "n"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": {"effort": "high", "format": {"type": "json_schema"}}}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "bash"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "name": "bash"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "bash"}]}, "tools[0].input_schema"),
        ({"tools": [{**BASH, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"messages": []}, "messages"),
        ({"messages": "go"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": content("user", {"type": "image", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": content("user", {"type": "document", "source": {}})}, "messages[0].content[0].type"),
        ({"messages": content("user", {"type": "thinking", "thinking": "x"})}, "messages[0].content[0].type"),
        ({"messages": content("assistant", {"type": "tool_result"})}, "messages[0].content[0].type"),
        ({"messages": content("user", {"type": "tool_result"})}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": content("user", {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})},
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": content("assistant", {"type": "tool_use", "id": "t", "name": "f", "input": "{}"})},
            "messages[0].content[0].input",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Json], param: str) -> None:
    assert refused(**fields).param == param
    assert not fits(SCHEMA, body_of(**fields))


def test_two_tools_of_one_name_are_refused() -> None:
    assert refused(tools=[BASH, BASH]).param == "tools[1].name"


def test_a_begun_reply_is_refused_but_may_be_counted() -> None:
    begun: list[Json] = [*QUESTION, {"role": "assistant", "content": "The answer is ("}]
    api_error = refused(begun)
    assert api_error.param == "messages[1]" and "prefill" in api_error.message
    assert parse_count(body_of(begun)).messages[-1].role == "assistant"


def test_tokens_are_counted_of_the_same_call() -> None:
    body = orjson.dumps({"model": "m", "messages": QUESTION, "system": "s", "tools": [BASH]})
    assert fits(COUNT_SCHEMA, body) and not fits(SCHEMA, body)
    assert parse_count(body).messages == call_of(system="s", tools=[BASH]).messages
    assert MessageTokensCount.model_validate(orjson.loads(count_body(7))).input_tokens == 7


def test_long_values_are_not_repeated_in_errors() -> None:
    assert len(refused([{"role": "x" * 10**6, "content": "y" * 10**6}]).message) < 300


@given(st.binary() | BODY.map(lambda body: json.dumps(body).encode()))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for read in (parse, parse_count):
        try:
            read(body)
        except ApiError as api_error:
            assert api_error.status == 400


@given(st.lists(st.tuples(st.booleans(), st.text(st.characters(codec="utf-8"))), min_size=1, max_size=6))
def test_no_text_of_a_user_is_lost_or_moved(scripted: list[tuple[bool, str]]) -> None:
    blocks: list[Json] = [
        {"type": "tool_result", "tool_use_id": "t", "content": text} if is_result else {"type": "text", "text": text}
        for is_result, text in scripted
    ]
    messages = call_of([{"role": "user", "content": blocks}]).messages
    assert "".join(message.content for message in messages) == "".join(text for _, text in scripted)
    roles = [message.role for message in messages]
    assert roles.count("tool") == sum(is_result for is_result, _ in scripted)
    assert ("user", "user") not in pairwise(roles)
