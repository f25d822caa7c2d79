"""Calls to external APIs as text: the new messages of each, and the reply, whole or streamed."""

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
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
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
    assert [(call.heard, call.continues) for call in transcript.calls] == [
        ("You fix.\nfix it", None),
        ("1 def f(): ...", 0),
        ("summarise", None),
        ("1 def f(): ...", 1),
    ]


def test_results_of_tools_and_what_has_no_words() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1 def f(): ..."}]}
    request = [{"role": "user", "content": [{"type": "image", "source": {}}, result]}]
    transcript = CallTranscript()
    transcript.add({"system": "You fix.", "messages": request}, orjson.dumps(MESSAGE))
    assert transcript.calls[0].heard == "You fix.\n[image]\n1 def f(): ..."


@pytest.mark.parametrize(
    "answer",
    [
        *(
            b"",
            b"<html>",
            b"[1]",
            b'{"choices": [{}]}',
            b'{"choices": 1}',
            b'{"choices": {"0": 1}}',
            b'{"content": 1.5}',
        ),
        *(b'{"choices": [{"message": "x"}]}', b'{"choices": [{"message": {"tool_calls": 1}}]}'),
        b'{"choices": [{"message": {"tool_calls": [{"function": "x"}]}}]}',
        b'{"content": [{"type": "tool_use", "input": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    ],
)
def test_what_cannot_be_read_has_no_words(answer: bytes) -> None:
    transcript = CallTranscript()
    transcript.add({"input": "fix it", "instructions": "You fix."}, answer)
    assert transcript.calls == [SpokenCall(heard="You fix.\nfix it", text="")]


def test_results_within_results_have_words_down_to_a_depth() -> None:
    deep: list[dict[str, Any]] = [{"type": "text", "text": "deep"}]
    for _ in range(300):
        deep = [{"type": "tool_result", "content": deep}]
    transcript = CallTranscript()
    transcript.add({"messages": [message("user", "go"), {"role": "user", "content": deep}]}, b"")
    assert transcript.calls == [SpokenCall(heard="go", text="")]


def chat(text: str) -> bytes:
    return orjson.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_agents_side_by_side_are_conversations_of_their_own() -> None:
    system, transcript = message("system", "You fix."), CallTranscript()
    main = [system, message("user", "fix both")]
    one, other = [system, message("user", "fix a")], [system, message("user", "fix b")]
    transcript.add({"messages": main}, chat("two agents"))
    transcript.add({"messages": one}, chat("read a"))
    transcript.add({"messages": other}, chat("read b"))
    other += [message("assistant", "read b"), message("tool", "b = 1")]
    transcript.add({"messages": other}, chat("edit b"))
    one += [message("assistant", "read a"), message("tool", "a = 1")]
    transcript.add({"messages": one}, chat("edit a"))
    main += [message("assistant", "two agents"), message("tool", "both are done")]
    transcript.add({"messages": main}, chat("submit"))
    assert transcript.calls == [
        SpokenCall(heard="You fix.\nfix both", text="two agents"),
        SpokenCall(heard="You fix.\nfix a", text="read a"),
        SpokenCall(heard="You fix.\nfix b", text="read b"),
        SpokenCall(heard="b = 1", text="edit b", continues=2),
        SpokenCall(heard="a = 1", text="edit a", continues=1),
        SpokenCall(heard="both are done", text="submit", continues=0),
    ]


def test_agents_that_were_asked_the_same_are_told_apart_by_their_replies() -> None:
    request, transcript = [message("user", "fix it")], CallTranscript()
    for text in ("read a", "read b"):
        transcript.add({"messages": request}, chat(text))
    for text in ("read a", "read b"):
        transcript.add(
            {"messages": [*request, message("assistant", text), message("tool", f"did {text}")]}, chat("done")
        )
    assert [call.continues for call in transcript.calls] == [None, None, 0, 1]
    assert transcript.calls[2].heard == "did read a"


def test_a_history_that_was_edited_stays_in_its_conversation() -> None:
    transcript, history = CallTranscript(), [message("user", "fix it")]
    for number in range(3):
        transcript.add({"messages": history}, chat(f"call {number}"))
        history = [*history, message("assistant", f"call {number}"), message("tool", f"result {number}")]
    shorter = [*history[:2], message("tool", "(left out)"), *history[3:]]
    transcript.add({"messages": shorter}, chat("call 3"))
    assert transcript.calls[3] == SpokenCall(
        heard="(left out)\ncall 1\nresult 1\ncall 2\nresult 2", text="call 3", continues=0
    )
    cached = {"role": "user", "content": [{"type": "text", "text": "fix it", "cache_control": {"type": "ephemeral"}}]}
    transcript.add({"messages": [cached, *shorter[1:], message("assistant", "call 3")]}, chat("call 4"))
    assert transcript.calls[4] == SpokenCall(heard="", text="call 4", continues=3), "a mark of a cache is no other word"


def test_an_api_that_keeps_the_history_itself_names_the_call_before() -> None:
    transcript = CallTranscript()
    transcript.add({"input": "fix it"}, orjson.dumps({"id": "r1", **RESPONSE}))
    transcript.add(
        {"input": "look again"}, events({"type": "response.completed", "response": {"id": "r2", **RESPONSE}})
    )
    transcript.add({"input": "1 def f(): ...", "previous_response_id": "r1"}, orjson.dumps(RESPONSE))
    assert [(call.heard, call.continues) for call in transcript.calls] == [
        ("fix it", None),
        ("look again", None),
        ("1 def f(): ...", 0),
    ]
    request = [
        message("user", "fix it"),
        *RESPONSE["output"],
        {"type": "function_call_output", "output": "1 def f(): ..."},
    ]
    transcript.add({"input": request}, orjson.dumps(RESPONSE))
    assert (transcript.calls[3].heard, transcript.calls[3].continues) == ("1 def f(): ...", 0)
