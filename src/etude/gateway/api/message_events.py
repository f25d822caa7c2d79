"""Replies, events and errors of Anthropic's dialect.

Owns how they are spelt. What was asked is read in :mod:`etude.gateway.api.messages`. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, Call, Ending, Refusal
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, Delta, Message, ThinkingDelta
from etude.types import Json

SIGNATURE = "etude"
"""What clients get and send back as the proof of thinking."""
STOP_REASONS: Mapping[Ending, str] = MappingProxyType(
    {
        Ending.STOP: "end_turn",
        Ending.STOP_TEXT: "stop_sequence",
        Ending.TOOL_CALLS: "tool_use",
        Ending.LENGTH: "max_tokens",
    }
)
"""Why a reply ended → Anthropic's word."""
ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        402: "billing_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""HTTP status → Anthropic's error type; any other is ``invalid_request_error`` below 500, ``api_error`` from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAsked:
    """A request for one message."""

    call: Call

    def body(self, answer: Answer) -> bytes:
        """The message as one JSON document."""
        reply = answer.replies[0]
        return orjson.dumps(
            {
                **_opening(answer.answer_id, self.call.model),
                "content": _blocks(reply.message),
                "stop_reason": STOP_REASONS[reply.ending],
                "stop_sequence": reply.stop_text,
                "usage": _usage(answer),
            }
        )

    def events(self) -> "MessageEvents":
        """The message as a stream."""
        return MessageEvents(self.call.model)


class MessageEvents:
    """Encodes one message as Anthropic's events: a content block for each stretch of thinking, text, or one call.

    A block is open from the first delta of its kind to the first of another.
    """

    __slots__ = ("_blocks", "_kind", "_model")

    def __init__(self, model: str) -> None:
        self._model = model
        self._blocks = 0
        """How many were opened."""
        self._kind = ""
        """Type of the open block; empty: none is."""

    def opening(self, answer_id: str, created: int) -> bytes:
        """The message without content. What the prompt counts is only known to ``closing``."""
        message = {**_opening(answer_id, self._model), "usage": {"input_tokens": 0, "output_tokens": 0}}
        return _event("message_start", message=message) + _event("ping")

    def delta(self, index: int, deltas: Sequence[Delta], piece: TokenChunk) -> bytes:
        """More of the content; ``index`` is always 0."""
        return b"".join(self._added(delta) for delta in deltas)

    def closing(self, answer: Answer) -> bytes:
        """The end of the last block, why the message ended, and its usage."""
        reply = answer.replies[0]
        ending: Json = {"stop_reason": STOP_REASONS[reply.ending], "stop_sequence": reply.stop_text}
        return self._close() + _event("message_delta", delta=ending, usage=_usage(answer)) + _event("message_stop")

    def failure(self, refusal: Refusal) -> bytes:
        """An error event; blocks stay open, since their content is not whole."""
        return b"event: error\ndata: " + refuse(refusal) + b"\n\n"

    def _added(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            begun = self._open(_call_block(delta.call_id, delta.name, {})) if delta.call_id else b""
            return begun + self._more("input_json_delta", "partial_json", delta.arguments)
        if isinstance(delta, ThinkingDelta):
            begun = b"" if self._kind == "thinking" or not delta.text else self._open(_thinking_block("", ""))
            return begun + self._more("thinking_delta", "thinking", delta.text)
        begun = b"" if self._kind == "text" or not delta.text else self._open(_text_block(""))
        return begun + self._more("text_delta", "text", delta.text)

    def _open(self, block: dict[str, object]) -> bytes:
        closed = self._close()
        self._kind = str(block["type"])
        self._blocks += 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _more(self, kind: str, field: str, text: str) -> bytes:
        if not text:
            return b""
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, field: text})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signed = self._more("signature_delta", "signature", SIGNATURE) if self._kind == "thinking" else b""
        self._kind = ""
        return signed + _event("content_block_stop", index=self._blocks - 1)


def refuse(refusal: Refusal) -> bytes:
    """The body of an error, as Anthropic's clients understand it."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": refusal.message}})


def _opening(answer_id: str, model: str) -> dict[str, object]:
    """A message before anything was said."""
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
    }


def _blocks(message: Message) -> list[dict[str, object]]:
    """The content. Arguments of calls go in as they were sampled: the reader saw that they are an object."""
    blocks = [_thinking_block(message.thinking, SIGNATURE)] if message.thinking else []
    if message.content:
        blocks.append(_text_block(message.content))
    return blocks + [
        _call_block(call.call_id, call.name, orjson.Fragment(call.arguments)) for call in message.tool_calls
    ]


def _text_block(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "citations": None}


def _thinking_block(thinking: str, signature: str) -> dict[str, object]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def _call_block(call_id: str, name: str, arguments: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _usage(answer: Answer) -> dict[str, Json]:
    """Anthropic counts what was read from a cache apart from the rest of the prompt."""
    return {
        "input_tokens": answer.prompt_tokens - answer.reused_tokens,
        "cache_read_input_tokens": answer.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def _event(kind: str, /, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
