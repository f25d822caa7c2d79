"""Chat completions in Anthropic's terms, and back."""

import json
from typing import Any

import orjson
import pytest

from etude.gateway.upstream.translation import (
    Untranslatable,
    answer_of,
    completion_of,
    error_of,
    events_of,
    request_of,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
TOOL = {"type": "function", "function": {"name": "run", "description": "d", "parameters": {"type": "object"}}}


def test_a_conversation_with_tools_is_translated_whole() -> None:
    body = {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "stop": "END",
        "tools": [TOOL],
        "tool_choice": "required",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "list"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
            {"role": "user", "content": "go on"},
        ],
    }
    assert request_of(body) == {
        "model": "m",
        "system": "be brief",
        "max_tokens": 9,
        "temperature": 0.5,
        "stop_sequences": ["END"],
        "tools": [{"name": "run", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "list"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "run", "input": {"command": "ls"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "a.py"},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    }


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"logprobs": True}, "logprobs"), ({"n": 2}, "n:"), ({"response_format": {}}, "response_format")],
)
def test_what_the_other_api_has_not_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(Untranslatable, match=named):
        request_of({"model": "m", "messages": [], **fields})


def test_pictures_are_refused() -> None:
    with pytest.raises(Untranslatable, match="image_url"):
        request_of({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"content": "no role"}]},
        {"messages": 3},
        {"messages": [{"role": "tool", "content": "of no call"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "run", "arguments": "{"}}]}]},
        {"messages": [], "tools": [{"type": "function"}]},
        {"messages": [], "tools": [TOOL], "tool_choice": 1},
    ],
)
def test_what_is_no_chat_completion_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Untranslatable, match="not a request for a chat completion"):
        request_of(fields)


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[]", b'{"content": [{"type": "text"}]}', b'{"usage": {"input_tokens": "x"}}']
)
def test_what_is_no_message_is_refused(answer: bytes) -> None:
    with pytest.raises(Untranslatable, match="not a message of Anthropic's API"):
        completion_of(answer, stream=False)


MESSAGE = {
    "id": "m1",
    "model": "m",
    "stop_reason": "tool_use",
    "content": [
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "c1", "name": "run", "input": {"command": "ls"}},
    ],
    "usage": {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 2},
}


def test_an_answer_comes_back_as_a_chat_completion() -> None:
    completion = answer_of(MESSAGE)
    assert completion["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "so", "tool_calls": [CALL]},
            "finish_reason": "tool_calls",
        }
    ]
    assert completion["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


def test_a_stream_of_it_adds_up_to_the_same() -> None:
    lines = events_of(answer_of(MESSAGE)).split(b"\n\n")
    *chunks, done, rest = [line.removeprefix(b"data: ") for line in lines]
    first, last, usage = (json.loads(chunk) for chunk in chunks)
    assert (done, rest) == (b"[DONE]", b"")
    assert first["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **CALL}]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["total_tokens"] == 12


@pytest.mark.parametrize(
    "words", ["prompt is too long: 210000 tokens", "This model's maximum context length is 8192 tokens"]
)
def test_a_conversation_that_is_too_long_has_openais_code(words: str) -> None:
    error = error_of(orjson.dumps({"error": {"type": "invalid_request_error", "message": words}}))["error"]
    assert isinstance(error, dict)
    assert (error["code"], error["message"]) == ("context_length_exceeded", words)


def test_an_error_that_is_no_json_is_quoted() -> None:
    error = error_of(b"<html>bad gateway")["error"]
    assert isinstance(error, dict)
    assert error["message"] == "<html>bad gateway"
