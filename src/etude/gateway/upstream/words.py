"""The text of calls of an external API, for judges and people: the new input of each call, and its reply.

    request   system, user, reply, tool's result     ──▶ heard: the messages that its conversation did not have yet
    answer    whole, or a stream of events           ──▶ text:  words, and tools that it calls: `name {"argument": 1}`
    both                                             ──▶ and the call that it goes on from, by their beginnings

Parses OpenAI's chat completions, completions and responses and Anthropic's messages; content without text, such as an
image, is named. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from etude.gateway.upstream.calls import json_objects
from etude.protocols import SpokenCall

REPLY = "assistant"
"""Role of the model's messages."""
DEEPEST = 8
"""Deepest nesting of tool results whose text is extracted."""
REPLIED = ("function_call", "reasoning")
"""Types of items without a role that the model wrote."""

Words: TypeAlias = tuple[str, str]
"""Role and text of a message; messages that agree in both are equal, since cache markers move between calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallContext:
    """The context of a call, and its reply's id."""

    messages: list[Words]
    conversation: int
    """The first call of its conversation."""
    response_id: str
    """Id of the reply, by which an API that stores histories can continue it; empty for none."""


@dataclass(slots=True)
class CallTranscript:
    """The answered calls of a session as text, each with the call that it continues: agents that call in parallel are
    separate conversations.
    """

    calls: list[SpokenCall] = field(default_factory=list)
    _contexts: list[_CallContext] = field(default_factory=list)

    def add(self, request: Mapping[str, Any], answer: bytes) -> None:
        """Add a call, request and answer in the API's format. Unreadable parts have no text."""
        messages = [(_role(message), _text(message)) for message in _messages(request)]
        before, shared = self._continued(messages), 0
        if named := request.get("previous_response_id"):
            before = next(
                (index for index, context in enumerate(self._contexts) if context.response_id == named), before
            )
        elif before is not None:
            shared = self._shared(messages, self._contexts[before].conversation)
        heard = "\n".join(filter(None, (text for _, text in messages[shared:])))
        context = _CallContext(
            messages=messages,
            conversation=len(self.calls) if before is None else self._contexts[before].conversation,
            response_id=_response_id(answer),
        )
        self.calls.append(SpokenCall(heard=heard, text=_reply(answer), continues=before))
        self._contexts.append(context)

    def _continued(self, messages: Sequence[Words]) -> int | None:
        """The call that a context continues: the context begins with that call's context, followed by a reply. Of
        several, the longest context wins, then the one whose reply has this text, then the newest.
        """

        def rank(index: int) -> tuple[int, bool, int]:
            length = len(self._contexts[index].messages)
            return length, messages[length][1] == self.calls[index].text, index

        fitting = (
            index
            for index, context in enumerate(self._contexts)
            if len(context.messages) < len(messages)
            and messages[len(context.messages)][0] == REPLY
            and messages[: len(context.messages)] == context.messages
        )
        return max(fitting, key=rank, default=None)

    def _shared(self, messages: Sequence[Words], conversation: int) -> int:
        """Number of leading messages that a conversation had already, including the reply after them."""
        earlier = (context.messages for context in self._contexts if context.conversation == conversation)
        shared = max(_common(messages, each) for each in earlier)
        while shared < len(messages) and messages[shared][0] == REPLY:
            shared += 1
        return shared


def _messages(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All input messages of a request, in order."""
    for name in ("system", "instructions"):
        if request.get(name):
            yield {"role": "system", "content": request[name]}
    listed = next((request[name] for name in ("messages", "input", "prompt") if request.get(name)), ())
    if isinstance(listed, str):
        yield {"role": "user", "content": listed}
    yield from _tables(listed)


def _common(messages: Sequence[Words], earlier: Sequence[Words]) -> int:
    """Number of leading messages that both share."""
    for number, (one, other) in enumerate(zip(messages, earlier, strict=False)):
        if one != other:
            return number
    return min(len(messages), len(earlier))


def _role(message: Mapping[str, Any]) -> str:
    """The role of a message; items of a reply have a type instead."""
    return str(message.get("role") or (REPLY if message.get("type") in REPLIED else message.get("type") or ""))


def _response_id(answer: bytes) -> str:
    """The id of a reply, whole or streamed."""
    parts = (part.get("response") or part for part in json_objects(answer))
    return next((str(part["id"]) for part in parts if isinstance(part, dict) and part.get("id")), "")


def _reply(answer: bytes) -> str:
    """The reply in an answer, or in all events of a stream."""
    chunks: list[str] = []
    for part in json_objects(answer):
        if isinstance(whole := part.get("response"), dict):  # an event with the whole response so far
            if whole.get("output"):
                chunks = [_text({"content": whole["output"]})]
        elif choices := part.get("choices"):
            (choice, *_) = [*_tables(choices), {}]
            forms = _tables([choice.get("message"), choice.get("delta"), {"content": choice.get("text")}])
            chunks.append(_text(next(form for form in forms if form)))
        elif isinstance(delta := part.get("delta"), dict):  # of Anthropic's stream
            chunks.append(str(delta.get("text") or delta.get("partial_json") or ""))
        elif isinstance(block := part.get("content_block"), dict):
            chunks.append(_text({"content": [{**block, "input": None}]}))
        else:
            chunks.append(_text({"content": part.get("content") or part.get("output")}))
    return "".join(chunks)


def _text(message: Mapping[str, Any], depth: int = 0) -> str:
    """The text of a message: its own text, the tool calls, the results of tools."""
    calls = _tables(each.get("function") for each in _tables(message.get("tool_calls")))
    parts = message.get("content", message.get("output"))
    texts = [parts] if isinstance(parts, str) else [_part(each, depth) for each in _tables(parts)]
    if message.get("type") == "function_call":
        texts.append(_part(message, depth))
    return "\n".join(filter(None, [*texts, *(_call(each, "arguments") for each in calls)]))


def _tables(values: object) -> Iterator[Mapping[str, Any]]:
    """The objects among some values; empty if ``values`` is not a list."""
    if isinstance(values, Iterable) and not isinstance(values, str | Mapping):
        yield from (value for value in values if isinstance(value, dict))


def _part(part: Mapping[str, Any], depth: int) -> str:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return str(part.get("text") or "")
        case "tool_use":
            return _call(part, "input")
        case "function_call":
            return _call(part, "arguments")
        case "message" | "tool_result" | "function_call_output":
            return _text(part, depth + 1) if depth < DEEPEST else ""
        case kind:
            return f"[{kind}]"


def _call(call: Mapping[str, Any], arguments: str) -> str:
    """``name {"argument": 1}``; for later chunks of a stream, the arguments alone."""
    given = call.get(arguments)
    try:
        text = given if isinstance(given, str) else "" if given is None else orjson.dumps(given).decode()
    except TypeError:  # orjson parses deeper nesting than it writes
        text = ""
    name = call.get("name")
    return f"{name} {text}" if name else text
