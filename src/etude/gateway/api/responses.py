"""OpenAI's responses, ``/v1/responses``: requests, responses and events.

Owns their format and the supported options. An unsupported option that would change the output is rejected by name,
never ignored. Pure; other modules handle tokens, sessions and HTTP.

Differences from OpenAI's reference that are easy to miss:

* ``store`` may have either value: within its session, and while the session is open, an answer can be continued by
  ``previous_response_id``; it cannot be fetched.
* ``instructions`` come before the whole conversation, and those of the previous response are not carried over.
* ``reasoning`` and ``text.verbosity`` are hints for models trained with them: no model here has such settings, and its
  thinking is delivered unchanged. ``reasoning.encrypted_content`` may be requested; there is nothing to encrypt.
* A tool's ``strict`` is accepted without effect, as in chat completions.
* Adjacent assistant items form one reply: thinking, text and calls become one message.

A reply is a sequence of output items: thinking, text, one item per call. The last item is always text or a call, even
in an empty reply, so a client that sends the items back identifies the reply.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, ApiError, ApiProtocol, Call, FinishReason, Sampling
from etude.gateway.api.fields import (
    FLAG,
    MAX_NAME_CHARACTERS,
    OBJECT,
    TEXT,
    TOP_P,
    JsonObject,
    any_of,
    array_schema,
    enum_schema,
    field_names,
    integer_schema,
    object_schema,
    read_object,
    short_text,
    temperature_schema,
)
from etude.gateway.api.openai import (
    MAX_TEMPERATURE,
    MAX_WHOLE,
    error_body,
    neutral_schema,
    read_model,
    read_tools,
)
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, ChatMessage, Delta, Role, ThinkingDelta, Tool, ToolCall
from etude.types import Json

PATH = "/v1/responses"
"""The path of responses."""
ID_PREFIX = "resp_"
"""Prefix of a response's id; the rest is the answer's id."""
INFORMATIVE = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        "service_tier",
        "max_tool_calls",  # of tools that run at OpenAI; none here
        "client_metadata",  # Codex's
    }
)
"""Fields that could never change the output."""
NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {"background": (False,), "truncation": ("disabled",), "top_logprobs": (0,), "context_management": ([],)}
)
"""Fields that are accepted only with the value that has no effect."""
INCLUDABLE = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
        "reasoning.encrypted_content",
    }
)
"""Optional additions to a response that may be requested; no reply here has the data for them."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Supported values for the amount of reasoning."""
SUMMARIES = ("auto", "concise", "detailed")
"""Supported values for a reasoning summary."""
CONTEXTS = ("auto", "current_turn", "all_turns")
"""Supported values for the reasoning that is shown to the model again."""
VERBOSITIES = ("low", "medium", "high")
"""Supported values for the length of the text."""
ROLES: Mapping[str, Role] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
)
"""Role in the request → role of a message."""
PART_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text")
"""Types of text parts."""
PART_FIELDS = frozenset({"type", "text", "annotations", "prompt_cache_breakpoint"})
"""Fields of a part; the last two are metadata of its text."""
ITEM_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "message": frozenset({"type", "id", "status", "phase", "role", "content"}),
        "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
        "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
        "function_call_output": frozenset({"type", "id", "status", "call_id", "name", "output"}),
    }
)
"""Fields by type of item. ``id``, ``status`` and ``phase`` come from a server and mean nothing to a model;
``encrypted_content`` is another server's reasoning, unreadable here.
"""
ITEM_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType({"caller": ({"type": "direct"},)})
"""Fields of any item that are accepted only with the value that has no effect."""
TOOL_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {"defer_loading": (False,), "allowed_callers": (["direct"],)}
)
"""Fields of a tool that are accepted only with the value that has no effect."""
MAX_METADATA = 16
"""Pairs in ``metadata``: OpenAI's limit, like the next two."""
MAX_METADATA_KEY = 64
"""Characters."""
MAX_METADATA_VALUE = 512
"""Characters."""


def parse(body: bytes) -> "ResponseRequest":
    """Parse a request body. Raises :class:`~etude.gateway.api.calls.ApiError` naming the invalid field."""
    fields = read_object(body)
    fields.refuse_unknown(FIELDS, NEUTRAL)
    _check_options(fields)
    instructions = fields.text("instructions", "")
    leading = (ChatMessage(role="system", content=instructions),) if instructions else ()
    call = Call(
        messages=(*leading, *_messages(fields)),
        tools=read_tools(fields, _tool),
        previous=_previous(fields),
        instructed=bool(instructions),
        sampling=_sampling(fields),
        stream=fields.flag("stream"),
        single_call=not fields.flag("parallel_tool_calls", default=True),
        model=read_model(fields),
    )
    return ResponseRequest(call=call, echo=_echo(fields, call))


def _check_options(fields: JsonObject) -> None:
    """Reject unsupported options in fields of which only hints are used."""
    fields.flag("store")
    options = fields.child("stream_options")
    if options is not None:
        options.refuse_unknown((), {"include_obfuscation": (False,)})
    for index, addition in enumerate(fields.items("include")):
        if not isinstance(addition, str) or addition not in INCLUDABLE:
            raise fields.invalid(f"include[{index}]", "nothing that would have to be added to a response", addition)
    reasoning = fields.child("reasoning")
    if reasoning is not None:
        reasoning.refuse_unknown(("effort", "summary", "generate_summary", "context"), {"mode": ("standard",)})
        reasoning.choice("effort", EFFORTS)
        reasoning.choice("summary", SUMMARIES)
        reasoning.choice("generate_summary", SUMMARIES)
        reasoning.choice("context", CONTEXTS)
    text = fields.child("text")
    if text is not None:
        text.refuse_unknown(("verbosity",), {"format": ({"type": "text"},)})
        text.choice("verbosity", VERBOSITIES)


def _sampling(fields: JsonObject) -> Sampling:
    return Sampling(
        temperature=fields.temperature(high=MAX_TEMPERATURE),
        top_p=fields.top_p(),
        max_tokens=fields.integer("max_output_tokens", low=1, high=MAX_WHOLE),
    )


def _previous(fields: JsonObject) -> str | None:
    if fields.value("previous_response_id") is None:
        return None
    answer_id = fields.text("previous_response_id").removeprefix(ID_PREFIX)
    if not 0 < len(answer_id) <= MAX_NAME_CHARACTERS:
        raise fields.invalid("previous_response_id", f"the id of an earlier response, {ID_PREFIX}…")
    return answer_id


def _tool(tool: JsonObject) -> Tool:
    if tool.text("type") != "function":
        raise tool.unsupported("type", "no tool runs on this side, declare it as a function")
    tool.refuse_unknown(("type", "name", "description", "parameters", "strict"), TOOL_NEUTRAL)
    tool.flag("strict")
    return Tool(
        name=tool.short_text("name"), description=tool.text("description", ""), parameters=tool.document("parameters")
    )


def _messages(fields: JsonObject) -> Iterator[ChatMessage]:
    text = fields.value("input")
    if isinstance(text, str):
        yield ChatMessage(role="user", content=text)
        return
    if not isinstance(text, list) or not text:
        raise fields.invalid("input", "a string or a list of at least one item")
    items = map(_item, fields.children("input"))
    for is_reply, run in groupby(items, key=lambda message: message.role == "assistant"):
        if is_reply:
            yield _joined(run)
        else:
            yield from run


def _joined(parts: Iterable[ChatMessage]) -> ChatMessage:
    """Join the messages of a reply's items into one."""
    some = tuple(parts)
    return ChatMessage(
        role="assistant",
        content="".join(part.content for part in some),
        thinking="".join(part.thinking for part in some),
        tool_calls=tuple(call for part in some for call in part.tool_calls),
    )


def _item(item: JsonObject) -> ChatMessage:
    kind = item.text("type", "message")
    if kind == "item_reference":
        raise item.unsupported("type", "send the item itself, or previous_response_id")
    if kind not in ITEM_FIELDS:
        raise item.unsupported("type", f"items are of type {', '.join(ITEM_FIELDS)}")
    item.refuse_unknown(ITEM_FIELDS[kind], ITEM_NEUTRAL)
    if kind == "reasoning":
        return ChatMessage(role="assistant", thinking=_parts(item, "content") or _parts(item, "summary"))
    if kind == "function_call":
        call = ToolCall(call_id=item.text("call_id"), name=item.short_text("name"), arguments=item.text("arguments"))
        return ChatMessage(role="assistant", tool_calls=(call,))
    if kind == "function_call_output":
        return ChatMessage(role="tool", content=_text(item, "output"), tool_call_id=item.text("call_id"))
    role = ROLES.get(item.text("role"))
    if role is None:
        raise item.invalid("role", "user, assistant, system or developer")
    return ChatMessage(role=role, content=_text(item, "content"))


def _text(item: JsonObject, name: str) -> str:
    value = item.value(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.invalid(name, "a string or a list of text parts")
    return _parts(item, name)


def _parts(item: JsonObject, name: str) -> str:
    """The text of some parts, joined without a separator."""
    texts: list[str] = []
    for part in item.children(name):
        if part.text("type") not in PART_TYPES:
            raise part.unsupported("type", "a message is text, send only text parts")
        part.refuse_unknown(PART_FIELDS, {"logprobs": ([],)})
        texts.append(part.text("text"))
    return "".join(texts)


def _echo(fields: JsonObject, call: Call) -> dict[str, object]:
    """The fields of a request that its response repeats."""
    reasoning, text = fields.child("reasoning"), fields.child("text")
    verbosity = text.value("verbosity") if text is not None else None
    return {
        "instructions": fields.value("instructions"),
        "previous_response_id": fields.value("previous_response_id"),
        "metadata": _metadata(fields),
        "tools": [_tool_echo(tool) for tool in fields.children("tools")],
        "tool_choice": fields.text("tool_choice", "auto"),
        "parallel_tool_calls": not call.single_call,
        "max_output_tokens": call.sampling.max_tokens,
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "reasoning": {
            "effort": reasoning.value("effort") if reasoning is not None else None,
            "summary": reasoning.value("summary") if reasoning is not None else None,
        },
        "text": {"format": {"type": "text"}, **({} if verbosity is None else {"verbosity": verbosity})},
        "store": fields.flag("store", default=True),
        "background": False,
        "truncation": "disabled",
        "top_logprobs": 0,
    }


def _metadata(fields: JsonObject) -> dict[str, Json]:
    metadata = fields.document("metadata")
    if len(metadata) > MAX_METADATA:
        raise fields.invalid("metadata", f"at most {MAX_METADATA} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            expected = f"names of up to {MAX_METADATA_KEY} and strings of up to {MAX_METADATA_VALUE} characters"
            raise fields.invalid("metadata", expected)
    return metadata


def _tool_echo(tool: JsonObject) -> dict[str, object]:
    """Serialise a tool's schema once: a response repeats it in its first two events and its last."""
    parameters = orjson.Fragment(orjson.dumps(tool.document("parameters")))
    return {
        "type": "function",
        "name": tool.value("name"),
        "description": tool.value("description"),
        "parameters": parameters,
        "strict": tool.flag("strict"),
    }


NAME_SCHEMA = short_text(MAX_NAME_CHARACTERS)
"""Schema of a name."""
PART_SCHEMA = object_schema("type text", type=enum_schema("input_text", "output_text"), text=TEXT)
"""Schema of a part of a message."""
TEXTS_SCHEMA = any_of(TEXT, array_schema(PART_SCHEMA))
"""Schema of content that is text."""
ITEM_SCHEMA = any_of(
    object_schema("role content", type=enum_schema("message"), role=enum_schema(*ROLES), content=TEXTS_SCHEMA),
    object_schema(
        "type",
        type=enum_schema("reasoning"),
        content=array_schema(object_schema("type text", type=enum_schema("reasoning_text"), text=TEXT)),
    ),
    object_schema(
        "type call_id name arguments", type=enum_schema("function_call"), call_id=TEXT, name=NAME_SCHEMA, arguments=TEXT
    ),
    object_schema("type call_id output", type=enum_schema("function_call_output"), call_id=TEXT, output=TEXTS_SCHEMA),
)
"""Schema of an item of the input."""
TOOL_SCHEMA = object_schema(
    "type name", type=enum_schema("function"), name=NAME_SCHEMA, description=TEXT, parameters=OBJECT, strict=FLAG
)
"""Schema of a tool; no two have the same name."""
SCHEMA = object_schema(
    "input",
    model=NAME_SCHEMA,
    input=any_of(TEXT, array_schema(ITEM_SCHEMA, least=1)),
    instructions=TEXT,
    previous_response_id=short_text(MAX_NAME_CHARACTERS),
    tools=array_schema(TOOL_SCHEMA),
    tool_choice=enum_schema("auto", "none"),
    parallel_tool_calls=FLAG,
    max_output_tokens=integer_schema(1, MAX_WHOLE),
    temperature=temperature_schema(MAX_TEMPERATURE),
    top_p=TOP_P,
    stream=FLAG,
    stream_options=object_schema("", include_obfuscation={"const": False}),
    store=FLAG,
    text=object_schema("", format=object_schema("type", type=enum_schema("text")), verbosity=enum_schema(*VERBOSITIES)),
    reasoning=object_schema(
        "", effort=enum_schema(*EFFORTS), summary=enum_schema(*SUMMARIES), context=enum_schema(*CONTEXTS)
    ),
    include=array_schema(enum_schema(*sorted(INCLUDABLE))),
    metadata={
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
    },
    **neutral_schema(NEUTRAL),
    **dict.fromkeys(sorted(INFORMATIVE), True),
)
"""JSON schema of the body of ``/v1/responses``."""
FIELDS = field_names(SCHEMA) - NEUTRAL.keys()
"""Fields of a body that are used, or could not change the output."""
Shape = dict[str, object]
"""An object to be written as JSON."""


class ItemKind(StrEnum):
    """Types of output items."""

    REASONING = "reasoning"
    MESSAGE = "message"
    CALL = "function_call"


PREFIXES: Mapping[ItemKind, str] = MappingProxyType(
    {ItemKind.REASONING: "rs", ItemKind.MESSAGE: "msg", ItemKind.CALL: "fc"}
)
"""Prefix of the id of an item."""
TEXT_EVENTS: Mapping[ItemKind, str] = MappingProxyType(
    {
        ItemKind.REASONING: "response.reasoning_text",
        ItemKind.MESSAGE: "response.output_text",
        ItemKind.CALL: "response.function_call_arguments",
    }
)
"""Names of the events with an item's text, without ``.delta`` and ``.done``."""
RATE_LIMITED = 429
"""The only status for which a failed response has a specific code; all others are server errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One output item, complete or in progress."""

    kind: ItemKind
    index: int
    """Its index among the reply's items."""
    text: str = ""
    """The thinking or the text, or the arguments of the call."""
    call_id: str = ""
    name: str = ""
    """The name of the called function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A request to ``/v1/responses``."""

    call: Call
    echo: Mapping[str, object]
    """Fields of the request that its response repeats."""

    def body(self, answer: Answer) -> bytes:
        """The response as one JSON document."""
        status = _status(answer)
        items = _items(answer.replies[0].message)
        output = [_output_item(item, answer.answer_id, "completed") for item in items[:-1]]
        output.append(_output_item(items[-1], answer.answer_id, status))
        frame = _frame(self, answer.answer_id, answer.created)
        return orjson.dumps({**frame, **_response_end(answer), "output": output})

    def events(self) -> "ResponseEventEncoder":
        """The response as a stream."""
        return ResponseEventEncoder(self)


class ResponseEventEncoder:
    """Encodes one response as events: an item is open from the first delta of its kind to the first of another kind."""

    __slots__ = ("_frame", "_id", "_item", "_output", "_request", "_sequence", "_texts")

    def __init__(self, request: ResponseRequest) -> None:
        self._request = request
        self._id = ""
        self._frame: Shape = {}
        """The response without output."""
        self._sequence = 0
        """Number of events so far."""
        self._output: list[Shape] = []
        """The completed items."""
        self._item: Item | None = None
        """The open item as it was at its start."""
        self._texts: list[str] = []
        """The text of the open item so far."""

    def opening(self, answer_id: str, created: int) -> bytes:
        """The response without output, in two events: created, and in progress."""
        self._id = answer_id
        self._frame = _frame(self._request, answer_id, created)
        response = {**self._frame, "status": "in_progress", "output": []}
        exists = self._event("response.created", response=response)
        return exists + self._event("response.in_progress", response=response)

    def delta(self, index: int, deltas: Sequence[Delta], chunk: TokenChunk) -> bytes:
        """Further output; ``index`` is always 0."""
        return b"".join(self._added(delta) for delta in deltas)

    def closing(self, answer: Answer) -> bytes:
        """The end of the last item, and the complete response."""
        begun = b""
        if self._item is None or self._item.kind is ItemKind.REASONING:
            begun = self._open(ItemKind.MESSAGE)
        status = _status(answer)
        ended = begun + self._close(status)
        response = {**self._frame, **_response_end(answer), "output": self._output}
        return ended + self._event(f"response.{status}", response=response)

    def failure(self, api_error: ApiError) -> bytes:
        """The failed response, with the completed items."""
        code = "rate_limit_exceeded" if api_error.status == RATE_LIMITED else "server_error"
        error = {"code": code, "message": api_error.message}
        response = {**self._frame, "status": "failed", "error": error, "output": self._output}
        return self._event("response.failed", response=response)

    def _added(self, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            begun = self._open(ItemKind.CALL, delta.call_id, delta.name) if delta.call_id else b""
            return begun + self._more(delta.arguments)
        kind = ItemKind.REASONING if isinstance(delta, ThinkingDelta) else ItemKind.MESSAGE
        if not delta.text:
            return b""
        begun = b"" if self._item is not None and self._item.kind is kind else self._open(kind)
        return begun + self._more(delta.text)

    def _open(self, kind: ItemKind, call_id: str = "", name: str = "") -> bytes:
        closed = self._close("completed")
        item = self._item = Item(kind=kind, index=len(self._output), call_id=call_id, name=name)
        shape = _output_item(item, self._id, "in_progress")
        if kind is not ItemKind.CALL:
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
        whole = {"arguments": item.text, "name": item.name} if item.kind is ItemKind.CALL else {"text": item.text}
        done = self._text_event("done", item, whole) + self._part_event("response.content_part.done", item)
        self._item, self._texts = None, []
        self._output.append(_output_item(item, self._id, status))
        return done + self._event("response.output_item.done", output_index=item.index, item=self._output[-1])

    def _text_event(self, step: str, item: Item, text: Mapping[str, str]) -> bytes:
        place: Shape = {"item_id": _item_id(item, self._id), "output_index": item.index}
        if item.kind is not ItemKind.CALL:
            place["content_index"] = 0
        if item.kind is ItemKind.MESSAGE:
            place["logprobs"] = []
        return self._event(f"{TEXT_EVENTS[item.kind]}.{step}", **place, **text)

    def _part_event(self, name: str, item: Item) -> bytes:
        if item.kind is ItemKind.CALL:  # it has no parts
            return b""
        place: Shape = {"item_id": _item_id(item, self._id), "output_index": item.index, "content_index": 0}
        return self._event(name, **place, part=_part(item))

    def _event(self, name: str, /, **fields: object) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _items(message: ChatMessage) -> list[Item]:
    """The items of a message: at least one; the last is never reasoning."""
    items = [Item(kind=ItemKind.REASONING, index=0, text=message.thinking)] if message.thinking else []
    if message.content or not message.tool_calls:
        items.append(Item(kind=ItemKind.MESSAGE, index=len(items), text=message.content))
    for call in message.tool_calls:
        called = Item(kind=ItemKind.CALL, index=len(items), text=call.arguments, call_id=call.call_id, name=call.name)
        items.append(called)
    return items


def _output_item(item: Item, answer_id: str, status: str) -> Shape:
    shape: Shape = {"id": _item_id(item, answer_id), "type": item.kind.value, "status": status}
    if item.kind is ItemKind.CALL:
        return {**shape, "call_id": item.call_id, "name": item.name, "arguments": item.text}
    if item.kind is ItemKind.MESSAGE:
        return {**shape, "role": "assistant", "content": [_part(item)]}
    return {**shape, "summary": [], "content": [_part(item)], "encrypted_content": None}


def _item_id(item: Item, answer_id: str) -> str:
    return f"{PREFIXES[item.kind]}_{answer_id}_{item.index}"


def _part(item: Item) -> Shape:
    if item.kind is ItemKind.REASONING:
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _frame(request: ResponseRequest, answer_id: str, created: int) -> Shape:
    """A response before any output."""
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created,
        "model": request.call.model,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **request.echo,
    }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.replies[0].finish_reason is FinishReason.LENGTH else "completed"


def _response_end(answer: Answer) -> Shape:
    """The fields of a response that are known only at its end."""
    status = _status(answer)
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted separately
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


PROTOCOL = ApiProtocol(path=PATH, parse=parse, error_body=error_body, request_id_header="x-request-id")
"""OpenAI's responses."""
