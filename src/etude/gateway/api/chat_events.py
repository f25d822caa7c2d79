"""Answers in OpenAI's chat dialect: the ``chat.completion`` and the stream of its chunks.

Owns their shape; requests are :mod:`etude.gateway.api.chat`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, Call, Refusal, Reply
from etude.gateway.api.openai import (
    DONE,
    View,
    event,
    failure_event,
    fingerprint,
    finish_reason,
    logprob,
    token_name,
    usage,
)
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, Delta, Message, TextDelta, ThinkingDelta
from etude.types import Floats, Ids, Json

NOTHING_SHOWN: Mapping[str, object] = MappingProxyType({})
"""What a chunk shows that has only a delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsked:
    """A request to ``/v1/chat/completions``."""

    call: Call
    view: View

    def body(self, answer: Answer) -> bytes:
        """The answer as a ``chat.completion``."""
        data: dict[str, object] = {
            "id": f"chatcmpl-{answer.answer_id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": self.call.model,
            "system_fingerprint": fingerprint(reply.turn.versions for reply in answer.replies),
            "choices": [_choice(index, reply, self.view) for index, reply in enumerate(answer.replies)],
            "usage": usage(answer),
        }
        if self.view.token_ids:
            data["prompt_token_ids"] = answer.replies[0].turn.prompt_ids
        return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)

    def events(self) -> "ChatEvents":
        """The answer as a stream of ``chat.completion.chunk``."""
        return ChatEvents(self.call, self.view)


class ChatEvents:
    """Encodes one answer as chunks; see :class:`~etude.gateway.api.calls.Events`.

    Each chunk names the weight versions of its own tokens as ``system_fingerprint``, the last ones those of the answer.
    """

    def __init__(self, call: Call, view: View) -> None:
        self._call = call
        self._view = view
        self._head: dict[str, object] = {}

    def opening(self, answer_id: str, created: int) -> bytes:
        """The role, once for each reply."""
        self._head = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": self._call.model,
        }
        if self._view.usage_event:
            self._head["usage"] = None
        role: dict[str, object] = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, role) for index in range(self._call.sampling.count))

    def delta(self, index: int, deltas: Sequence[Delta], piece: TokenChunk) -> bytes:
        """One chunk with all that a piece adds; none where that is nothing the caller wants."""
        if not deltas and not (self._view.logprobs or self._view.token_ids):
            return b""
        shown: dict[str, object] = {}
        if self._view.logprobs:
            shown["logprobs"] = _logprobs(piece.token_ids, piece.logprobs)
        if self._view.token_ids:
            shown["token_ids"] = piece.token_ids
        return self._chunk(index, _merged(deltas), fingerprint([piece.versions]), shown)

    def closing(self, answer: Answer) -> bytes:
        """Why each reply ended, the usage if it was asked for, and the end mark."""
        whole = fingerprint(reply.turn.versions for reply in answer.replies)
        if self._view.token_ids:
            self._head["prompt_token_ids"] = answer.replies[0].turn.prompt_ids
        events: list[bytes] = []
        for index, reply in enumerate(answer.replies):
            events.append(self._chunk(index, {}, whole, _ending(reply)))
            self._head.pop("prompt_token_ids", None)  # once is enough
        if self._view.usage_event:
            events.append(event({**self._head, "system_fingerprint": whole, "choices": [], "usage": usage(answer)}))
        return b"".join([*events, DONE])

    def failure(self, refusal: Refusal) -> bytes:
        """An error in the middle."""
        return failure_event(refusal)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        versions: str | None = None,
        shown: Mapping[str, object] = NOTHING_SHOWN,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **shown}
        return event({**self._head, "system_fingerprint": versions, "choices": [choice]})


def _choice(index: int, reply: Reply, view: View) -> dict[str, object]:
    turn = reply.turn
    shown: dict[str, object] = {
        "index": index,
        "message": _reply_message(reply.message),
        "logprobs": _logprobs(turn.completion_ids, turn.logprobs) if view.logprobs else None,
        **_ending(reply),
    }
    if view.token_ids:
        shown["token_ids"] = turn.completion_ids
    return shown


def _ending(reply: Reply) -> dict[str, object]:
    """``stop_reason`` is vLLM's: which stop string it was."""
    return {"finish_reason": finish_reason(reply.ending), "stop_reason": reply.stop_text}


def _reply_message(message: Message) -> dict[str, object]:
    """Content is null only where there is nothing but tool calls."""
    said = message.content or (None if message.tool_calls else "")
    shown: dict[str, object] = {"role": "assistant", "content": said, "refusal": None}
    if message.thinking:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return shown


def _logprobs(token_ids: Ids, logprobs: Floats) -> dict[str, object]:
    content: list[Json] = [
        {"token": token_name(token_id), "logprob": logprob(value), "bytes": None, "top_logprobs": []}
        for token_id, value in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}


def _merged(deltas: Sequence[Delta]) -> dict[str, object]:
    """Deltas as one: clients add up one entry per tool call and chunk, so no chunk may have two of the same call."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    thinking = "".join(delta.text for delta in deltas if isinstance(delta, ThinkingDelta))
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        if isinstance(delta, CallDelta):
            begun = calls.get(delta.index)
            calls[delta.index] = delta if begun is None else _joined(begun, delta)
    merged: dict[str, object] = {}
    if text:
        merged["content"] = text
    if thinking:
        merged["reasoning_content"] = thinking
    if calls:
        merged["tool_calls"] = [_call_delta(call) for call in calls.values()]
    return merged


def _joined(one: CallDelta, two: CallDelta) -> CallDelta:
    return CallDelta(one.index, one.call_id, one.name, one.arguments + two.arguments)


def _call_delta(call: CallDelta) -> dict[str, object]:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}
