"""Translation of OpenAI's chat completions to Anthropic's messages, and of the answers back. Pure.

    harness ──chat completion──▶ request_of ──▶ Anthropic's API ──message──▶ answer_of ──chat completion──▶ harness

It lets a harness for one API use a model that is available only in the other. Text, tools and their results are
translated; unsupported features (several choices, logprobs, response formats) are rejected by name, never dropped
silently.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from etude.types import Json

MAX_TOKENS = 4096
"""Sampled tokens of a call without a limit: Anthropic's API requires one."""
FINISHES: Mapping[str, str] = {"max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}
"""Anthropic's reason → OpenAI's; any other is ``stop``."""
TAKEN = frozenset(
    {
        *("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream"),
        *("tools", "tool_choice", "stream_options", "user", "metadata", "parallel_tool_calls", "n"),
    }
)
"""Fields of a chat completion that are translated, or have no effect."""
TOO_LONG = ("prompt is too long", "context window", "context length", "maximum context")
"""Phrases by which an API reports that a conversation is too long."""
CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code for a conversation that is too long."""


MISFITS = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors from a field that is missing or has the wrong type."""


class Untranslatable(Exception):
    """A request that Anthropic's API cannot express, or data that violates its API; the message names the field."""


def request_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's request for a chat completion request. Raises :class:`Untranslatable`."""
    try:
        return _request_of(body)
    except MISFITS as error:
        raise Untranslatable(f"this is not a request for a chat completion: {error!r}") from error


def completion_of(answer: bytes, *, stream: bool) -> bytes:
    """The chat completion for Anthropic's answer, whole or as a stream. Raises :class:`Untranslatable`."""
    try:
        completion = answer_of(orjson.loads(answer))
        return events_of(completion) if stream else orjson.dumps(completion)
    except MISFITS as error:
        raise Untranslatable(f"this is not a message of Anthropic's API: {error!r}") from error


def _request_of(body: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(name for name, value in body.items() if name not in TAKEN and value is not None)
    if unknown or body.get("n", 1) not in (1, None):
        raise Untranslatable(f"{', '.join(unknown) or 'n'}: Anthropic's API has no such field; leave it out")
    system, messages = _messages(body.get("messages", []))
    sent: dict[str, Any] = {
        "model": body.get("model"),
        "messages": messages,
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or MAX_TOKENS,
    }
    if system:
        sent["system"] = system
    sent |= {name: body[name] for name in ("temperature", "top_p") if body.get(name) is not None}
    if stop := body.get("stop"):
        sent["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if tools := body.get("tools"):
        sent["tools"] = [_tool(each["function"]) for each in tools]
        if (choice := body.get("tool_choice")) is not None:
            sent["tool_choice"] = _tool_choice(choice)
    return sent


def answer_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion for one of Anthropic's messages."""
    blocks = message.get("content", [])
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    text = "".join(block["text"] for block in blocks if block.get("type") == "text")
    reply: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    usage = message.get("usage", {})
    cached = usage.get("cache_read_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + cached + (usage.get("cache_creation_input_tokens") or 0)
    sampled = usage.get("output_tokens") or 0
    return {
        "id": message.get("id", ""),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": message.get("model", ""),
        "choices": [
            {
                "index": 0,
                "message": reply | ({"tool_calls": calls} if calls else {}),
                "finish_reason": FINISHES.get(str(message.get("stop_reason")), "stop"),
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def events_of(completion: Mapping[str, Any]) -> bytes:
    """A whole chat completion as a stream of events, for a harness that requested one."""
    (choice,) = completion["choices"]
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        head | {"choices": [], "usage": completion["usage"]},
    ]
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def error_of(body: bytes) -> dict[str, Json]:
    """An API's error in OpenAI's format, with the code for a conversation that is too long if its text says so."""
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), error.get("code") or error.get("type")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        message, code = body[:500].decode(errors="replace"), None
    if any(words in message.lower() for words in TOO_LONG):
        code = CONTEXT_CODE
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": str(code or "error")}}


def _messages(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The system text, and the other messages, merged where adjacent ones have the same role."""
    system = "\n\n".join(_text(each) for each in messages if each["role"] in ("system", "developer"))
    merged: list[dict[str, Any]] = []
    for each in messages:
        if each["role"] in ("system", "developer"):
            continue
        role = "assistant" if each["role"] == "assistant" else "user"
        blocks = list(_blocks(each))
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += blocks
        elif blocks:
            merged.append({"role": role, "content": blocks})
    return system, merged


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of one message, without empty texts, which Anthropic's API rejects."""
    text = _text(message)
    if message["role"] == "tool":
        yield {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}
        return
    if text.strip():
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = orjson.loads(function["arguments"] or "{}")
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    kinds = sorted({str(part.get("type")) for part in content} - {"text"})
    if kinds:
        raise Untranslatable(f"messages has parts of type {', '.join(kinds)}: only text is translated")
    return "".join(part["text"] for part in content)


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": function["name"],
        "description": function.get("description", ""),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }


def _tool_choice(choice: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(choice, str):
        return {"type": {"required": "any"}.get(choice, choice)}
    return {"type": "tool", "name": choice["function"]["name"]}
