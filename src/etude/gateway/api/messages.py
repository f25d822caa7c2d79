"""Anthropic's messages, ``/v1/messages`` and ``/v1/messages/count_tokens``: requests, responses, events, errors.

Owns their format and the supported options. An unsupported option that would change the output is rejected by name,
never ignored. Pure; other modules handle tokens, sessions and HTTP.

Differences from Anthropic's own API:

* The chat template controls thinking. ``thinking`` and ``output_config.effort`` are hints for models trained with
  them: they are accepted, and the model's thinking is delivered either way.
* The signature of thinking is a constant and is never checked: the history is the caller's and is trusted.
* ``cache_control`` is accepted anywhere: caching cannot change the output, and prefixes are always cached here.
* A history that ends with a partial reply (a prefill) is rejected: every token of a reply must be the model's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, ApiError, ApiProtocol, Call, FinishReason, Sampling
from etude.gateway.api.fields import (
    FLAG,
    MAX_NAME_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOP_K,
    OBJECT,
    TEXT,
    TOP_P,
    JsonObject,
    any_of,
    array_schema,
    enum_schema,
    integer_schema,
    object_schema,
    read_object,
    short_text,
    temperature_schema,
)
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, ChatMessage, Delta, ThinkingDelta, Tool, ToolCall
from etude.types import Json

PATH = "/v1/messages"
"""The path of messages."""
COUNT_PATH = "/v1/messages/count_tokens"
"""The path of the token count."""
INFORMATIVE = frozenset(
    {"metadata", "service_tier", "speed", "inference_geo", "cache_control", "user_profile_id", "workspace_id"}
)
"""Fields that could never change the output."""
NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": ([],),
    }
)
"""Fields that are accepted only with values that have no effect; the longest is the one that Claude Code sends."""
MAX_TEMPERATURE = 1.0
"""Anthropic's limit."""
MAX_TOKENS = 2**31 - 1
"""Larger than any context."""
THINKING_TYPES = ("enabled", "disabled", "adaptive", "between_tools")
"""Supported values for requesting thinking."""
THINKING_DISPLAYS = ("summarized", "omitted")
"""Supported values for how thinking is shown."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Supported values for the amount of thinking."""
TOOL_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {"defer_loading": (False,), "allowed_callers": (["direct"],), "input_examples": ([],)}
)
"""Fields of a tool that are accepted only with values that have no effect."""
TOOL_FIELDS = frozenset(
    {"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming", "strict"}
)
"""Fields of a tool that are used or have no effect. ``strict`` requests constrained sampling: it has no effect here,
and a call that violates the schema is delivered and graded like any other.
"""
ERROR_MARK = "[error] "
"""Prefix of a tool's text if the caller sets ``is_error``: a template has no other place for it."""


def parse(body: bytes) -> "MessageRequest":
    """Parse a request body. Raises :class:`ApiError` naming the invalid field."""
    fields = read_object(body)
    call = _call(fields)
    if call.sampling.max_tokens is None:
        raise fields.invalid("max_tokens", "how long the reply may be")
    if call.messages[-1].role == "assistant":
        last = f"messages[{len(fields.items('messages')) - 1}]"
        raise fields.invalid(last, "a user's message: a reply that was begun (a prefill) is not continued here")
    return MessageRequest(call=call)


def parse_count(body: bytes) -> Call:
    """Parse a request to count tokens: the same fields, without a required ``max_tokens``; any message may be last.

    Raises like :func:`parse`.
    """
    return _call(read_object(body))


def count_body(tokens: int) -> bytes:
    """The response body of a token count."""
    return orjson.dumps({"input_tokens": tokens})


def _call(fields: JsonObject) -> Call:
    fields.refuse_unknown(FIELDS, NEUTRAL)
    _check_hints(fields)
    tools, single_call = _tools(fields)
    return Call(
        messages=(*_system(fields), *_messages(fields)),
        tools=tools,
        sampling=Sampling(
            temperature=fields.temperature(high=MAX_TEMPERATURE),
            top_p=fields.top_p(),
            top_k=fields.integer("top_k", low=0, high=MAX_TOP_K) or 0,
            max_tokens=fields.integer("max_tokens", low=1, high=MAX_TOKENS),
            stops=_stops(fields),
        ),
        stream=fields.flag("stream"),
        single_call=single_call,
        model=fields.short_text("model"),
    )


def _check_hints(fields: JsonObject) -> None:
    thinking = fields.child("thinking")
    if thinking is not None:
        thinking.refuse_unknown(("type", "budget_tokens", "display"))
        thinking.text("type")
        thinking.choice("type", THINKING_TYPES)
        thinking.integer("budget_tokens", low=0, high=MAX_TOKENS)
        thinking.choice("display", THINKING_DISPLAYS)
    output = fields.child("output_config")
    if output is not None:
        output.refuse_unknown(("effort",))
        output.choice("effort", EFFORTS)


def _stops(fields: JsonObject) -> tuple[str, ...]:
    stops = fields.items("stop_sequences")
    texts = tuple(stop for stop in stops if isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS)
    if len(texts) != len(stops) or len(stops) > MAX_STOPS:
        raise fields.invalid("stop_sequences", f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return texts


def _tools(fields: JsonObject) -> tuple[tuple[Tool, ...], bool]:
    """The tools that may be called, and whether the reply ends with its first call."""
    tools: dict[str, Tool] = {}
    for item in fields.children("tools"):
        tool = _tool(item)
        if tool.name in tools:
            raise item.invalid("name", "a name that no other tool has")
        tools[tool.name] = tool
    choice = fields.child("tool_choice")
    if choice is None:
        return tuple(tools.values()), False
    kind = choice.text("type")
    if kind not in ("auto", "none"):
        raise choice.unsupported("type", 'nothing here constrains what is sampled, send "auto" or "none"')
    choice.refuse_unknown(("type", "disable_parallel_tool_use"))
    single_call = choice.flag("disable_parallel_tool_use")
    return ((), False) if kind == "none" else (tuple(tools.values()), single_call)


def _tool(fields: JsonObject) -> Tool:
    if fields.text("type", "custom") != "custom":
        raise fields.unsupported("type", "no tool runs on this side: declare it with a name and an input_schema")
    fields.refuse_unknown(TOOL_FIELDS, TOOL_NEUTRAL)
    if fields.value("input_schema") is None:
        raise fields.invalid("input_schema", "a JSON schema")
    schema = fields.document("input_schema")
    return Tool(name=fields.short_text("name"), description=fields.text("description", ""), parameters=schema)


def _system(fields: JsonObject) -> Iterator[ChatMessage]:
    text = _texts(fields, "system") if fields.value("system") is not None else ""
    if text:
        yield ChatMessage(role="system", content=text)


def _messages(fields: JsonObject) -> Iterator[ChatMessage]:
    if not fields.items("messages"):
        raise fields.invalid("messages", "a list of at least one message")
    for message in fields.children("messages"):
        message.refuse_unknown(("role", "content"))
        role = message.text("role")
        if role == "user":
            yield from _user(message)
        elif role == "assistant":
            yield _assistant(message)
        elif role == "system":
            yield ChatMessage(role="system", content=_texts(message, "content"))
        else:
            raise message.invalid("role", '"user", "assistant" or "system"')


def _user(message: JsonObject) -> Iterator[ChatMessage]:
    """Tool outputs and user text, in the order of the blocks."""
    if isinstance(message.value("content"), str):
        yield ChatMessage(role="user", content=message.text("content"))
        return
    if not message.items("content"):
        raise message.invalid("content", "a string or a list of at least one block")
    texts: list[str] = []
    for block in message.children("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(_text(block))
        elif kind == "tool_result":
            if texts:
                yield ChatMessage(role="user", content="".join(texts))
            texts = []
            yield _tool_result(block)
        else:
            raise block.unsupported("type", "a user's message has text and tool_result blocks")
    if texts:
        yield ChatMessage(role="user", content="".join(texts))


def _tool_result(block: JsonObject) -> ChatMessage:
    block.refuse_unknown(("type", "tool_use_id", "content", "is_error", "cache_control"))
    text = _texts(block, "content") if block.value("content") is not None else ""
    mark = ERROR_MARK if block.flag("is_error") else ""
    return ChatMessage(role="tool", content=mark + text, tool_call_id=block.text("tool_use_id"))


def _assistant(message: JsonObject) -> ChatMessage:
    """A reply of this or another model. Redacted thinking is omitted: it is unreadable here."""
    if isinstance(message.value("content"), str):
        return ChatMessage(role="assistant", content=message.text("content"))
    if message.value("content") is None:
        raise message.invalid("content", "a string or a list of blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.children("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(_text(block))
        elif kind == "thinking":
            block.refuse_unknown(("type", "thinking", "signature"))
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind != "redacted_thinking":
            raise block.unsupported("type", "an assistant's message has text, thinking and tool_use blocks")
    return ChatMessage(role="assistant", content="".join(texts), thinking="".join(thoughts), tool_calls=tuple(calls))


def _tool_use(block: JsonObject) -> ToolCall:
    block.refuse_unknown(("type", "id", "name", "input", "cache_control"), {"caller": ({"type": "direct"},)})
    if block.value("input") is None:
        raise block.invalid("input", "an object")
    arguments = orjson.dumps(block.document("input")).decode()
    return ToolCall(call_id=block.text("id"), name=block.short_text("name"), arguments=arguments)


def _texts(fields: JsonObject, name: str) -> str:
    """A string, or only text blocks, joined without a separator."""
    value = fields.value(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.invalid(name, "a string or a list of text blocks")
    texts: list[str] = []
    for block in fields.children(name):
        if block.text("type") != "text":
            raise block.unsupported("type", "only text is read here")
        texts.append(_text(block))
    return "".join(texts)


def _text(block: JsonObject) -> str:
    block.refuse_unknown(("type", "text", "cache_control"), {"citations": ([],)})
    return block.text("text")


NAME_SCHEMA = short_text(MAX_NAME_CHARACTERS)
"""Schema of a name."""
TEXT_SCHEMA = object_schema("type text", type=enum_schema("text"), text=TEXT, cache_control=OBJECT)
"""Schema of a text block."""
TEXTS_SCHEMA = any_of(TEXT, array_schema(TEXT_SCHEMA))
"""Schema of content that is text."""
RESULT_SCHEMA = object_schema(
    "type tool_use_id",
    type=enum_schema("tool_result"),
    tool_use_id=TEXT,
    content=TEXTS_SCHEMA,
    is_error=FLAG,
    cache_control=OBJECT,
)
"""Schema of the output of a tool."""
THINKING_SCHEMA = object_schema("type thinking", type=enum_schema("thinking"), thinking=TEXT, signature=TEXT)
"""Schema of thinking in the history."""
USE_SCHEMA = object_schema(
    "type id name input", type=enum_schema("tool_use"), id=TEXT, name=NAME_SCHEMA, input=OBJECT, cache_control=OBJECT
)
"""Schema of a call in the history."""
TOOL_SCHEMA = object_schema(
    "name input_schema",
    type=enum_schema("custom"),
    name=NAME_SCHEMA,
    description=TEXT,
    input_schema=OBJECT,
    cache_control=OBJECT,
    strict=FLAG,
)
"""Schema of a tool; no two have the same name."""
MESSAGE_SCHEMA = any_of(
    object_schema(
        "role content",
        role=enum_schema("user"),
        content=any_of(TEXT, array_schema(TEXT_SCHEMA, RESULT_SCHEMA, least=1)),
    ),
    object_schema(
        "role content",
        role=enum_schema("assistant"),
        content=any_of(TEXT, array_schema(TEXT_SCHEMA, THINKING_SCHEMA, USE_SCHEMA)),
    ),
    object_schema("role content", role=enum_schema("system"), content=TEXTS_SCHEMA),
)
"""Schema of a message."""
FIELD_SCHEMAS: Mapping[str, Json] = MappingProxyType(
    {
        "model": NAME_SCHEMA,
        "messages": array_schema(MESSAGE_SCHEMA, least=1),
        "system": TEXTS_SCHEMA,
        "max_tokens": integer_schema(1, MAX_TOKENS),
        "stream": FLAG,
        "tools": array_schema(TOOL_SCHEMA),
        "tool_choice": object_schema("type", type=enum_schema("auto", "none"), disable_parallel_tool_use=FLAG),
        "temperature": temperature_schema(MAX_TEMPERATURE),
        "top_p": TOP_P,
        "top_k": integer_schema(0, MAX_TOP_K),
        "stop_sequences": array_schema(short_text(MAX_STOP_CHARACTERS), most=MAX_STOPS),
        "thinking": object_schema(
            "type",
            type=enum_schema(*THINKING_TYPES),
            budget_tokens=integer_schema(0, MAX_TOKENS),
            display=enum_schema(*THINKING_DISPLAYS),
        ),
        "output_config": object_schema("", effort=enum_schema(*EFFORTS)),
        **{field: {"enum": [*values]} for field, values in NEUTRAL.items()},
        **dict.fromkeys(sorted(INFORMATIVE), True),
    }
)
"""Schema of each field of a body; ``thinking`` and ``output_config`` are hints (see the module docstring)."""
FIELDS = FIELD_SCHEMAS.keys() - NEUTRAL.keys()
"""Fields of a body that are used, or could not change the output."""
SCHEMA = object_schema("model messages max_tokens", **FIELD_SCHEMAS)
"""JSON schema of the body of ``/v1/messages``. Additionally, the last message must not be the assistant's."""
COUNT_SCHEMA = object_schema("model messages", **FIELD_SCHEMAS)
"""JSON schema of the body of ``/v1/messages/count_tokens``."""
SIGNATURE = "etude"
"""The constant signature of thinking that clients get and send back."""
STOP_REASONS: Mapping[FinishReason, str] = MappingProxyType(
    {
        FinishReason.STOP: "end_turn",
        FinishReason.STOP_TEXT: "stop_sequence",
        FinishReason.TOOL_CALLS: "tool_use",
        FinishReason.LENGTH: "max_tokens",
    }
)
"""Finish reason → Anthropic's name."""
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
"""HTTP status → Anthropic's error type; others are ``invalid_request_error`` below 500 and ``api_error`` from 500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    """A request to ``/v1/messages``."""

    call: Call

    def body(self, answer: Answer) -> bytes:
        """The message as one JSON document."""
        reply = answer.replies[0]
        return orjson.dumps(
            {
                **_message_head(answer.answer_id, self.call.model),
                "content": _blocks(reply.message),
                "stop_reason": STOP_REASONS[reply.finish_reason],
                "stop_sequence": reply.stop_text,
                "usage": _usage(answer),
            }
        )

    def events(self) -> "MessageEventEncoder":
        """The message as a stream."""
        return MessageEventEncoder(self.call.model)


class MessageEventEncoder:
    """Encodes one message as Anthropic's events: one content block per run of thinking, run of text, or call.

    A block is open from the first delta of its kind to the first delta of another kind.
    """

    __slots__ = ("_blocks", "_kind", "_model")

    def __init__(self, model: str) -> None:
        self._model = model
        self._blocks = 0
        """Number of blocks opened."""
        self._kind = ""
        """Type of the open block; empty if none is open."""

    def opening(self, answer_id: str, created: int) -> bytes:
        """The message without content. The prompt's token count is known only in ``closing``."""
        message = {**_message_head(answer_id, self._model), "usage": {"input_tokens": 0, "output_tokens": 0}}
        return _event("message_start", message=message) + _event("ping")

    def delta(self, index: int, deltas: Sequence[Delta], chunk: TokenChunk) -> bytes:
        """Further content; ``index`` is always 0."""
        return b"".join(self._added(delta) for delta in deltas)

    def closing(self, answer: Answer) -> bytes:
        """The end of the last block, the message's stop reason, and its usage."""
        reply = answer.replies[0]
        ending: Json = {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": reply.stop_text}
        return self._close() + _event("message_delta", delta=ending, usage=_usage(answer)) + _event("message_stop")

    def failure(self, api_error: ApiError) -> bytes:
        """An error event; blocks stay open, since their content is incomplete."""
        return b"event: error\ndata: " + error_body(api_error) + b"\n\n"

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


def error_body(api_error: ApiError) -> bytes:
    """The response body of an error, in Anthropic's format."""
    kind = ERROR_TYPES.get(api_error.status, "invalid_request_error" if api_error.status < 500 else "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": api_error.message}})


def _message_head(answer_id: str, model: str) -> dict[str, object]:
    """A message before any content."""
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


def _blocks(message: ChatMessage) -> list[dict[str, object]]:
    """The content blocks. Arguments of calls are inserted as sampled; the parser has checked that they are
    an object.
    """
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
    """Token counts; Anthropic counts prompt tokens read from a cache separately."""
    return {
        "input_tokens": answer.prompt_tokens - answer.reused_tokens,
        "cache_read_input_tokens": answer.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }


def _event(kind: str, /, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


PROTOCOL = ApiProtocol(
    path=PATH, parse=parse, error_body=error_body, request_id_header="request-id", statuses=MappingProxyType({503: 529})
)
"""``/v1/messages``."""
