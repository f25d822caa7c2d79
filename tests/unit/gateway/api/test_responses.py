"""OpenAI's Responses API: items become messages, and answers can be sent back as items."""

import json
from itertools import pairwise

import jsonschema_rs
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from etude.gateway.api.calls import MODEL, Answer, ApiError, Call, FinishReason, Reply, Sampling
from etude.gateway.api.responses import FIELDS, INCLUDABLE, NEUTRAL, SCHEMA, ResponseRequest, parse
from etude.tokens.messages import ChatMessage, Tool, ToolCall
from etude.types import Finish, Json, Turn

BASH: dict[str, Json] = {
    "type": "function",
    "name": "bash",
    "description": "runs",
    "parameters": {"type": "object"},
    "strict": True,
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "input_image", "refusal"]) | JSON, "text": st.text() | JSON}
)
TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference", "web_search_call")
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": st.text() | st.lists(PART, max_size=3) | JSON,
        "summary": st.lists(PART, max_size=3) | JSON,
        "call_id": st.text() | JSON,
        "name": st.text() | JSON,
        "arguments": st.text() | JSON,
        "output": st.text() | st.lists(PART, max_size=3) | JSON,
    },
)
BODY = st.fixed_dictionaries(
    {"input": st.text() | st.lists(ITEM, max_size=4) | JSON},
    optional=dict.fromkeys(sorted((FIELDS | NEUTRAL.keys()) - {"input"}), JSON),
)


def body_of(input: Json = "go", **fields: Json) -> bytes:  # noqa: A002  # the field's name
    return orjson.dumps({"input": input, **fields})


def asked_of(input: Json = "go", **fields: Json) -> ResponseRequest:  # noqa: A002  # the field's name
    body = body_of(input, **fields)
    assert fits(body)  # whatever is read here, the document of the API promises
    return parse(body)


def call_of(input: Json = "go", **fields: Json) -> Call:  # noqa: A002  # the field's name
    return asked_of(input, **fields).call


def fits(body: bytes) -> bool:
    return jsonschema_rs.Draft202012Validator(SCHEMA).is_valid(orjson.loads(body))


def response_of(parsed: ResponseRequest, finish_reason: FinishReason = FinishReason.STOP) -> Response:
    empty = np.zeros(0, np.int32)
    turn = Turn(
        prompt_ids=np.zeros(3, np.int32),
        completion_ids=empty,
        logprobs=np.zeros(0, np.float32),
        versions=empty,
        finish=Finish.STOP,
    )
    reply = Reply(
        message=ChatMessage(role="assistant", content="x"), finish_reason=finish_reason, stop_text=None, turn=turn
    )
    answer = Answer(answer_id="0" * 24, created=1, model="m", replies=(reply,), reused_tokens=0)
    return Response.model_validate(orjson.loads(parsed.body(answer)))


def part(text: str, kind: str = "input_text") -> dict[str, Json]:
    return {"type": kind, "text": text}


def test_a_text_is_a_users_message() -> None:
    assert call_of() == Call(messages=(ChatMessage(role="user", content="go"),), sampling=Sampling(), model=MODEL)


def test_options_reach_the_sampler() -> None:
    call = call_of(temperature=0, top_p=0.5, max_output_tokens=3, stream=True, parallel_tool_calls=False, model="x")
    assert call.sampling == Sampling(temperature=0, top_p=0.5, max_tokens=3)
    assert (call.stream, call.single_call, call.model) == (True, True, "x")


def test_instructions_come_first_and_are_marked() -> None:
    call = call_of([{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}], instructions="a")
    assert call.instructed
    assert [(message.role, message.content) for message in call.messages] == [
        ("system", "a"),
        ("system", "b"),
        ("user", "c"),
    ]
    assert not call_of(instructions="").instructed


def test_the_previous_response_is_the_answer_of_its_id() -> None:
    assert call_of(previous_response_id="resp_0123").previous == "0123"
    assert call_of().previous is None


def test_a_run_of_the_assistants_items_is_one_reply() -> None:
    items: list[Json] = [
        {"role": "user", "content": [part("go")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part("hm", "reasoning_text")]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        | {"content": [{**part("I look.", "output_text"), "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "bash", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "bash", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": "out"},
        {"type": "function_call_output", "call_id": "c1", "output": [part("o"), part("k")]},
        {"type": "reasoning", "id": "rs_2", "summary": [part("short", "summary_text")], "encrypted_content": "x"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    assert parse(body_of(items)).call.messages == (
        ChatMessage(role="user", content="go"),
        ChatMessage(
            role="assistant",
            content="I look.",
            thinking="hm",
            tool_calls=(
                ToolCall(call_id="c1", name="bash", arguments='{"a": 1}'),
                ToolCall(call_id="c2", name="bash", arguments="{}"),
            ),
        ),
        ChatMessage(role="tool", content="out", tool_call_id="c2"),
        ChatMessage(role="tool", content="ok", tool_call_id="c1"),
        ChatMessage(role="assistant", content="done", thinking="short"),
        ChatMessage(role="user", content="thanks"),
    )


def test_what_was_answered_can_be_sent_back() -> None:
    response = response_of(parse(body_of()))
    items: list[Json] = orjson.loads(response.to_json())["output"]
    history: list[Json] = [{"role": "user", "content": "go"}, *items]
    assert parse(body_of(history)).call.messages[1] == ChatMessage(role="assistant", content="x")


def test_tools_are_offered_unless_none_may_be_called() -> None:
    assert call_of(tools=[BASH]).tools == (Tool(name="bash", description="runs", parameters={"type": "object"}),)
    assert call_of(tools=[{"type": "function", "name": "f", "parameters": None}]).tools == (Tool(name="f"),)
    assert call_of(tools=[BASH], tool_choice="none").tools == ()


def test_a_response_gives_back_what_was_asked() -> None:
    parsed = asked_of(
        tools=[BASH],
        metadata={"run": "7"},
        instructions="be brief",
        previous_response_id="resp_0",
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        max_output_tokens=5,
        store=False,
        parallel_tool_calls=False,
    )
    response = response_of(parsed)
    assert (response.metadata, response.instructions, response.max_output_tokens) == ({"run": "7"}, "be brief", 5)
    assert (response.previous_response_id, response.parallel_tool_calls) == ("resp_0", False)
    assert response.tools[0].to_dict() == BASH
    assert response.reasoning is not None and response.reasoning.effort == "high"
    assert response.text is not None and response.text.verbosity == "low"


def test_a_cut_response_is_incomplete() -> None:
    response = response_of(asked_of(), FinishReason.LENGTH)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


def test_a_schema_as_deep_as_bodies_may_be_is_given_back() -> None:
    schema: dict[str, Json] = {}
    for _ in range(200):
        schema = {"properties": schema}
    parsed = parse(body_of(tools=[{"type": "function", "name": "f", "parameters": schema}]))
    assert response_of(parsed).tools[0].to_dict()["parameters"] == schema


def test_hints_and_information_change_nothing() -> None:
    assert call_of(reasoning={"effort": "minimal", "context": "auto"}, text={"verbosity": "high"}) == call_of()
    assert call_of(include=[*sorted(INCLUDABLE)], store=True, truncation="disabled", background=False) == call_of()
    assert call_of(user="u", service_tier="flex", prompt_cache_key="k", client_metadata={"a": "b"}) == call_of()
    assert parse(body_of(stream_options={"include_obfuscation": False})).call == call_of()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": 1e-38}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"include": [{}]}, "include[0]"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "bash"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Json], param: str) -> None:
    body = body_of(**fields)
    with pytest.raises(ApiError) as error:
        parse(body)
    assert (error.value.status, error.value.param) == (400, param)
    assert not fits(body)


@given(st.binary() | BODY.map(lambda body: json.dumps(body).encode()))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    try:
        parsed = parse(body)
    except ApiError as api_error:
        assert api_error.status == 400
    else:
        response_of(parsed)


@given(st.lists(ITEM, min_size=1, max_size=4))
def test_neighbouring_messages_are_never_both_the_assistants(items: list[dict[str, Json]]) -> None:
    try:
        roles = [message.role for message in parse(json.dumps({"input": items}).encode()).call.messages]
    except ApiError:
        return
    assert ("assistant", "assistant") not in pairwise(roles)
