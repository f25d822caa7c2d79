"""Calls of other people's APIs in words: what was new in each, and the reply, whole or streamed."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from etude.gateway.upstream.words import CallTranscript
from etude.protocols import SpokenCall

TOOL = {"name": "read", "arguments": '{"path":"a.py"}'}
CHAT = {"choices": [{"message": {"role": "assistant", "content": "I look.", "tool_calls": [{"function": TOOL}]}}]}
USE = {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "a.py"}}
MESSAGE = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]}
RESPONSE = {
    "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", **TOOL},
    ]
}


def events(*parts: Mapping[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


CHAT_STREAM = events(
    {"choices": [{"delta": {"role": "assistant", "content": "I "}}]},
    {"choices": [{"delta": {"content": "look.\n"}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "read", "arguments": ""}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"path":"a.py"}'}}]}}]},
    {"choices": [], "usage": {"completion_tokens": 4}},
)
MESSAGE_STREAM = events(
    {"type": "message_start", "message": {"role": "assistant", "content": []}},
    {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "I look.\n"}},
    {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "t", "name": "read", "input": {}}},
    {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": '{"path":"a.py"}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
)
RESPONSE_STREAM = events(
    {"type": "response.created", "response": {"output": []}},
    {"type": "response.output_text.delta", "delta": "I look."},
    {"type": "response.completed", "response": RESPONSE},
)


@pytest.mark.parametrize(
    "answer",
    [*map(orjson.dumps, (CHAT, MESSAGE, RESPONSE)), CHAT_STREAM, MESSAGE_STREAM, RESPONSE_STREAM],
    ids=["chat", "message", "response", "chat stream", "message stream", "response stream"],
)
def test_a_reply_has_its_text_and_its_tools_in_every_form(answer: bytes) -> None:
    transcript = CallTranscript()
    transcript.add({"messages": [{"role": "user", "content": "fix it"}]}, answer)
    assert transcript.calls == [SpokenCall(heard="fix it", text='I look.\nread {"path":"a.py"}')]


def test_each_call_has_what_no_earlier_one_had() -> None:
    request = [{"role": "system", "content": "You fix."}, {"role": "user", "content": "fix it"}]
    reply = {"role": "assistant", "content": "I look."}
    result = {"role": "tool", "content": "1 def f(): ..."}
    transcript = CallTranscript()
    transcript.add({"messages": request}, orjson.dumps(CHAT))
    transcript.add({"messages": [*request, reply, result]}, orjson.dumps(CHAT))
    transcript.add({"messages": [{"role": "user", "content": "summarise"}]}, orjson.dumps(CHAT))  # a new context
    transcript.add({"messages": [*request, reply, result, reply, result]}, orjson.dumps(CHAT))
    assert [call.heard for call in transcript.calls] == [
        "You fix.\nfix it",
        "1 def f(): ...",
        "summarise",
        "1 def f(): ...",
    ]


def test_results_of_tools_and_what_has_no_words() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1 def f(): ..."}]}
    request = [{"role": "user", "content": [{"type": "image", "source": {}}, result]}]
    transcript = CallTranscript()
    transcript.add({"system": "You fix.", "messages": request}, orjson.dumps(MESSAGE))
    assert transcript.calls[0].heard == "You fix.\n[image]\n1 def f(): ..."


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[1]", b'{"choices": [{}]}'])
def test_what_cannot_be_read_has_no_words(answer: bytes) -> None:
    transcript = CallTranscript()
    transcript.add({"input": "fix it", "instructions": "You fix."}, answer)
    assert transcript.calls == [SpokenCall(heard="You fix.\nfix it", text="")]
