"""The words of calls of somebody else's API, for judges and people: what was new to the model in each, and its reply.

    request   system, user, reply, tool's result     ──▶ heard: the messages that no earlier request began with
    answer    whole, or a stream of events           ──▶ text:  words, and tools that it calls: `name {"argument": 1}`

Reads what OpenAI's chat completions, completions and responses and Anthropic's messages look like; what has no words,
such as an image, is named. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from etude.gateway.upstream.calls import json_objects
from etude.protocols import SpokenCall


@dataclass(slots=True)
class CallTranscript:
    """The answered calls of a session in words."""

    calls: list[SpokenCall] = field(default_factory=list)
    _requests: list[list[Mapping[str, Any]]] = field(default_factory=list)

    def add(self, request: Mapping[str, Any], answer: bytes) -> None:
        """Add a call, both sides as the API has them. What cannot be read has no words."""
        messages = list(_messages(request))
        common = [_common(messages, earlier) for earlier in self._requests]
        shared = max(common, default=0)
        fresh = messages[shared:]
        if shared and fresh and fresh[0].get("role") == "assistant":
            fresh = fresh[1:]  # the reply to the request that it goes on from
        ended = [earlier for earlier, count in zip(self._requests, common, strict=True) if count < len(earlier)]
        self._requests = [*ended, messages]  # one that this begins with whole has nothing more to share
        heard = "\n".join(filter(None, (_text(message) for message in fresh)))
        self.calls.append(SpokenCall(heard=heard, text=_reply(answer)))


def _messages(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All that a request asks with, in order."""
    for name in ("system", "instructions"):
        if request.get(name):
            yield {"role": "system", "content": request[name]}
    listed = next((request[name] for name in ("messages", "input", "prompt") if request.get(name)), ())
    if isinstance(listed, str):
        yield {"role": "user", "content": listed}
    elif isinstance(listed, Sequence):
        yield from (message for message in listed if isinstance(message, dict))


def _common(messages: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> int:
    """Messages with which both begin."""
    for number, (one, other) in enumerate(zip(messages, earlier, strict=False)):
        if one != other:
            return number
    return min(len(messages), len(earlier))


def _reply(answer: bytes) -> str:
    """The reply in an answer, or in all events of a stream."""
    chunks: list[str] = []
    for part in json_objects(answer):
        if isinstance(whole := part.get("response"), dict):  # an event about all that there is so far
            if whole.get("output"):
                chunks = [_text({"content": whole["output"]})]
        elif choices := part.get("choices"):
            choice = choices[0]
            chunks.append(_text(choice.get("message") or choice.get("delta") or {"content": choice.get("text")}))
        elif isinstance(delta := part.get("delta"), dict):  # of Anthropic's stream
            chunks.append(delta.get("text") or delta.get("partial_json") or "")
        elif isinstance(block := part.get("content_block"), dict):
            chunks.append(_text({"content": [{**block, "input": None}]}))
        else:
            chunks.append(_text({"content": part.get("content") or part.get("output")}))
    return "".join(chunks)


def _text(message: Mapping[str, Any]) -> str:
    """The words of a message: its text, the tools that it calls, the results of tools."""
    calls = [each for each in message.get("tool_calls") or () if isinstance(each, dict)]
    parts = message.get("content", message.get("output"))
    texts = [parts] if isinstance(parts, str) else [_part(each) for each in parts or () if isinstance(each, dict)]
    if message.get("type") == "function_call":
        texts.append(_part(message))
    return "\n".join(filter(None, [*texts, *(_call(each.get("function") or {}, "arguments") for each in calls)]))


def _part(part: Mapping[str, Any]) -> str:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return str(part.get("text") or "")
        case "tool_use":
            return _call(part, "input")
        case "function_call":
            return _call(part, "arguments")
        case "message" | "tool_result" | "function_call_output":
            return _text(part)
        case kind:
            return f"[{kind}]"


def _call(call: Mapping[str, Any], arguments: str) -> str:
    """``name {"argument": 1}``; of a stream's later chunks the arguments alone."""
    given = call.get(arguments)
    text = given if isinstance(given, str) else "" if given is None else orjson.dumps(given).decode()
    name = call.get("name")
    return f"{name} {text}" if name else text
