"""Replies and events of OpenAI's responses dialect.

Owns how they are spelt. What was asked is read in :mod:`etude.gateway.api.responses`. Pure.

A reply is a run of output items: what was thought, what was said, one item per call. The last one is always what was
said or called, even of an empty reply: a client that sends the items back says which reply they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, Call, Ending, Refusal
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, Delta, Message, ThinkingDelta

Shape = dict[str, object]
"""An object that is about to be written as JSON."""


class Kind(StrEnum):
    """Types of output items."""

    REASONING = "reasoning"
    MESSAGE = "message"
    CALL = "function_call"


PREFIXES: Mapping[Kind, str] = MappingProxyType({Kind.REASONING: "rs", Kind.MESSAGE: "msg", Kind.CALL: "fc"})
"""What the id of an item begins with."""
TEXT_EVENTS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.REASONING: "response.reasoning_text",
        Kind.MESSAGE: "response.output_text",
        Kind.CALL: "response.function_call_arguments",
    }
)
"""Names of the events that carry an item's text, without ``.delta`` and ``.done``."""
RATE_LIMITED = 429
"""The one status that a failed response has a code of its own for; all others are the server's errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One output item, whole or as far as it came."""

    kind: Kind
    index: int
    """Its place among the reply's items."""
    text: str = ""
    """What was thought or said, or the arguments of the call."""
    call_id: str = ""
    name: str = ""
    """What was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAsked:
    """A request for one response."""

    call: Call
    echo: Mapping[str, object]
    """Fields of the request that its response gives back."""

    def body(self, answer: Answer) -> bytes:
        """The response as one JSON document."""
        status = _status(answer)
        items = _items(answer.replies[0].message)
        output = [_item(item, answer.answer_id, "completed") for item in items[:-1]]
        output.append(_item(items[-1], answer.answer_id, status))
        frame = _frame(self, answer.answer_id, answer.created)
        return orjson.dumps({**frame, **_ending(answer), "output": output})

    def events(self) -> "ResponseEvents":
        """The response as a stream."""
        return ResponseEvents(self)


class ResponseEvents:
    """Encodes one response as events: an item is open from the first delta of its kind to the first of another."""

    __slots__ = ("_asked", "_frame", "_id", "_item", "_output", "_sequence", "_texts")

    def __init__(self, asked: ResponseAsked) -> None:
        self._asked = asked
        self._id = ""
        self._frame: Shape = {}
        """The response without output."""
        self._sequence = 0
        """Events so far."""
        self._output: list[Shape] = []
        """Items that are complete."""
        self._item: Item | None = None
        """What the open item began with."""
        self._texts: list[str] = []
        """What it says."""

    def opening(self, answer_id: str, created: int) -> bytes:
        """The response without output, twice: it exists, and it is worked on."""
        self._id = answer_id
        self._frame = _frame(self._asked, answer_id, created)
        response = {**self._frame, "status": "in_progress", "output": []}
        exists = self._event("response.created", response=response)
        return exists + self._event("response.in_progress", response=response)

    def delta(self, index: int, deltas: Sequence[Delta], piece: TokenChunk) -> bytes:
        """More of the output; ``index`` is always 0."""
        return b"".join(self._added(delta) for delta in deltas)

    def closing(self, answer: Answer) -> bytes:
        """The end of the last item, and the whole response."""
        begun = b""
        if self._item is None or self._item.kind is Kind.REASONING:
            begun = self._open(Kind.MESSAGE)
        status = _status(answer)
        ended = begun + self._close(status)
        response = {**self._frame, **_ending(answer), "output": self._output}
        return ended + self._event(f"response.{status}", response=response)

    def failure(self, refusal: Refusal) -> bytes:
        """The response as a failed one, with the items that were complete."""
        code = "rate_limit_exceeded" if refusal.status == RATE_LIMITED else "server_error"
        error = {"code": code, "message": refusal.message}
        response = {**self._frame, "status": "failed", "error": error, "output": self._output}
        return self._event("response.failed", response=response)

    def _added(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            begun = self._open(Kind.CALL, delta.call_id, delta.name) if delta.call_id else b""
            return begun + self._more(delta.arguments)
        kind = Kind.REASONING if isinstance(delta, ThinkingDelta) else Kind.MESSAGE
        if not delta.text:
            return b""
        begun = b"" if self._item is not None and self._item.kind is kind else self._open(kind)
        return begun + self._more(delta.text)

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> bytes:
        closed = self._close("completed")
        item = self._item = Item(kind=kind, index=len(self._output), call_id=call_id, name=name)
        shape = _item(item, self._id, "in_progress")
        if kind is not Kind.CALL:
            shape["content"] = []
        added = self._event("response.output_item.added", output_index=item.index, item=shape)
        return closed + added + self._part_event("response.content_part.added", item)

    def _more(self, text: str) -> bytes:
        if self._item is None or not text:
            return b""
        self._texts.append(text)
        return self._text_event("delta", self._item, {"delta": text})

    def _close(self, status: str) -> bytes:
        if self._item is None:
            return b""
        item = replace(self._item, text="".join(self._texts))
        whole = {"arguments": item.text, "name": item.name} if item.kind is Kind.CALL else {"text": item.text}
        done = self._text_event("done", item, whole) + self._part_event("response.content_part.done", item)
        self._item, self._texts = None, []
        self._output.append(_item(item, self._id, status))
        return done + self._event("response.output_item.done", output_index=item.index, item=self._output[-1])

    def _text_event(self, step: str, item: Item, said: Mapping[str, str]) -> bytes:
        place: Shape = {"item_id": _item_id(item, self._id), "output_index": item.index}
        if item.kind is not Kind.CALL:
            place["content_index"] = 0
        if item.kind is Kind.MESSAGE:
            place["logprobs"] = []
        return self._event(f"{TEXT_EVENTS[item.kind]}.{step}", **place, **said)

    def _part_event(self, name: str, item: Item) -> bytes:
        if item.kind is Kind.CALL:  # it has no parts
            return b""
        place: Shape = {"item_id": _item_id(item, self._id), "output_index": item.index, "content_index": 0}
        return self._event(name, **place, part=_part(item))

    def _event(self, name: str, /, **fields: object) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _items(message: Message) -> list[Item]:
    """At least one; the last is no reasoning."""
    items = [Item(kind=Kind.REASONING, index=0, text=message.thinking)] if message.thinking else []
    if message.content or not message.tool_calls:
        items.append(Item(kind=Kind.MESSAGE, index=len(items), text=message.content))
    for call in message.tool_calls:
        called = Item(kind=Kind.CALL, index=len(items), text=call.arguments, call_id=call.call_id, name=call.name)
        items.append(called)
    return items


def _item(item: Item, answer_id: str, status: str) -> Shape:
    shape: Shape = {"id": _item_id(item, answer_id), "type": item.kind.value, "status": status}
    if item.kind is Kind.CALL:
        return {**shape, "call_id": item.call_id, "name": item.name, "arguments": item.text}
    if item.kind is Kind.MESSAGE:
        return {**shape, "role": "assistant", "content": [_part(item)]}
    return {**shape, "summary": [], "content": [_part(item)], "encrypted_content": None}


def _item_id(item: Item, answer_id: str) -> str:
    return f"{PREFIXES[item.kind]}_{answer_id}_{item.index}"


def _part(item: Item) -> Shape:
    if item.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _frame(asked: ResponseAsked, answer_id: str, created: int) -> Shape:
    """A response of which nothing is known yet but what was asked."""
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created,
        "model": asked.call.model,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **asked.echo,
    }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.replies[0].ending is Ending.LENGTH else "completed"


def _ending(answer: Answer) -> Shape:
    """What is known of a response when it is over."""
    status = _status(answer)
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # no model here counts its reasoning apart
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }
