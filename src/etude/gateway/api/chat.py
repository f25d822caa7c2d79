"""OpenAI's chat completions, ``/v1/chat/completions``: requests, responses and the stream of chunks.

Owns their format and the supported options. An unsupported option that would change the output is rejected by name,
never ignored. Pure; other modules handle tokens, sessions and HTTP.

Differences from OpenAI's reference that are easy to miss:

* A tool's ``strict`` is accepted: SDKs set it by default, and the schema reaches the model either way. Sampling is not
  constrained here, so arguments may violate the schema and a harness has to check them. ``tool_choice`` with
  ``required`` or one tool's name would change what a harness does next; both are rejected.
* ``chat_template_kwargs`` are the variables of the model's template, as in vLLM; unknown ones are rejected when it is
  rendered.
* ``reasoning_effort`` and ``verbosity`` are accepted as hints without effect; no model here has such settings.
* ``developer`` is a synonym of ``system``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Answer, ApiError, ApiProtocol, Call, Reply
from etude.gateway.api.fields import (
    FLAG,
    MAX_NAME_CHARACTERS,
    NULL,
    OBJECT,
    TEXT,
    JsonObject,
    any_of,
    array_schema,
    enum_schema,
    field_names,
    integer_schema,
    object_schema,
    read_object,
    short_text,
)
from etude.gateway.api.openai import (
    DONE,
    MAX_WHOLE,
    NEUTRAL,
    SAMPLING_SCHEMA,
    OutputOptions,
    error_body,
    event,
    failure_event,
    fingerprint,
    finish_reason_name,
    logprob,
    neutral_schema,
    read_model,
    read_output_options,
    read_sampling,
    read_tools,
    token_name,
    usage,
)
from etude.protocols import TokenChunk
from etude.tokens.messages import CallDelta, ChatMessage, Delta, Role, TextDelta, ThinkingDelta, Tool, ToolCall
from etude.types import Floats, Ids, Json

HINTS = frozenset({"reasoning_effort", "verbosity", "prediction", "prompt_cache_retention", "prompt_cache_options"})
"""Fields that are hints for other models, or affect only the price or speed of an answer."""
CHAT_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {
        **NEUTRAL,
        "top_logprobs": (0,),  # engines report only the logprob of the sampled token
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "functions": ([],),
        "function_call": ("none",),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }
)
"""Fields of a body that are accepted only with values that have no effect."""
ROLES: Mapping[str, Role] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
)
"""Role in the request → role of a message."""
IGNORED_IN_REPLIES = frozenset(
    {
        "annotations",  # citations of a web search: annotations of the text
        "provider_specific_fields",  # LiteLLM's: additional data from a provider
        "thinking_blocks",  # LiteLLM's: reasoning_content again, in Anthropic's format
        "reasoning_details",  # OpenRouter's: reasoning again, in parts
        "name",  # there is only one assistant
    }
)
"""Fields of a reply that clients send back and that carry nothing the model should see."""
MESSAGE_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "system": frozenset({"role", "content", "cache_control"}),
        "developer": frozenset({"role", "content", "cache_control"}),
        "user": frozenset({"role", "content", "cache_control"}),
        "assistant": IGNORED_IN_REPLIES
        | {"role", "content", "tool_calls", "reasoning_content", "reasoning", "cache_control"},
        "tool": frozenset({"role", "content", "tool_call_id", "name", "cache_control"}),
    }
)
"""Fields of a message by role. A tool's ``name`` is that of the call it answers; ``cache_control``, also in parts, is a
hint for Anthropic's caches.
"""
MESSAGE_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType({"images": ([],), "tool_calls": ([],)})
"""Fields of a message that some clients always send, empty where they do not apply."""
PART_FIELDS = frozenset({"type", "text", "cache_control", "annotations"})
"""Fields of a text part."""
CALL_FIELDS = frozenset({"id", "type", "function", "index", "provider_specific_fields", "extra_content"})
"""Fields of a tool call in the history; clients that assemble it from events keep ``index``."""
TOOL_FIELDS = frozenset({"type", "function", "cache_control"})
"""Fields of a tool."""
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
"""Fields of a tool's function."""


def parse(body: bytes) -> "ChatRequest":
    """Parse a request body. Raises :class:`ApiError` naming the invalid field."""
    fields = read_object(body)
    fields.refuse_unknown(CHAT_FIELDS, CHAT_NEUTRAL)
    output = read_output_options(fields, logprobs=fields.flag("logprobs"))
    call = Call(
        messages=_read_messages(fields),
        tools=read_tools(fields, _read_tool),
        template_kwargs=fields.document("chat_template_kwargs"),
        sampling=read_sampling(fields, _read_max_tokens(fields)),
        stream=fields.flag("stream"),
        single_call=not fields.flag("parallel_tool_calls", default=True),
        model=read_model(fields),
    )
    return ChatRequest(call=call, output=output)


def _read_max_tokens(fields: JsonObject) -> int | None:
    old = fields.integer("max_tokens", low=1, high=MAX_WHOLE)
    new = fields.integer("max_completion_tokens", low=1, high=MAX_WHOLE)
    if old is not None and new is not None and old != new:
        raise fields.invalid("max_tokens", f"the same as max_completion_tokens={new}, or only one of them")
    return old if new is None else new


def _read_messages(fields: JsonObject) -> tuple[ChatMessage, ...]:
    messages = tuple([_read_message(message) for message in fields.children("messages")])
    if not messages:
        raise fields.invalid("messages", "a list of at least one message")
    return messages


def _read_message(fields: JsonObject) -> ChatMessage:
    name = fields.text("role")
    role = ROLES.get(name)
    if role is None:
        raise fields.invalid("role", "system, developer, user, assistant or tool; a function's reply is a tool's")
    fields.refuse_unknown(MESSAGE_FIELDS[name], MESSAGE_NEUTRAL)
    if role == "assistant":
        return ChatMessage(
            role=role,
            content=_read_content(fields, needed=False),  # it may have only tool calls, or be empty
            thinking=fields.text("reasoning_content", "") or fields.text("reasoning", ""),
            tool_calls=tuple([_read_call(call) for call in fields.children("tool_calls")]),
        )
    content = _read_content(fields, needed=True)
    if role == "tool":
        return ChatMessage(role=role, content=content, tool_call_id=fields.text("tool_call_id"))
    return ChatMessage(role=role, content=content)


def _read_content(fields: JsonObject, *, needed: bool) -> str:
    value = fields.value("content")
    if isinstance(value, str):
        return value
    if value is None and not needed:
        return ""
    if not isinstance(value, list):
        raise fields.invalid("content", "a string or a list of text parts")
    return "".join(_read_part(part) for part in fields.children("content"))


def _read_part(part: JsonObject) -> str:
    if part.text("type") != "text":
        raise part.unsupported("type", "a message is text, send only parts of type text")
    part.refuse_unknown(PART_FIELDS)
    return part.text("text")


def _read_call(call: JsonObject) -> ToolCall:
    """Keep arguments unchanged, JSON or not: a harness may send back a truncated call."""
    call.refuse_unknown(CALL_FIELDS)
    if call.text("type", "function") != "function":
        raise call.unsupported("type", "only calls of functions are understood")
    function = call.child("function")
    if function is None:
        raise call.invalid("function", "an object with name and arguments")
    return ToolCall(call_id=call.text("id"), name=function.text("name"), arguments=function.text("arguments"))


def _read_tool(tool: JsonObject) -> Tool:
    if tool.text("type") != "function":
        raise tool.unsupported("type", "only tools of type function are understood")
    tool.refuse_unknown(TOOL_FIELDS)
    function = tool.child("function")
    if function is None:
        raise tool.invalid("function", "an object with name and parameters")
    function.refuse_unknown(FUNCTION_FIELDS)
    function.flag("strict")
    return Tool(
        name=function.short_text("name"),
        description=function.text("description", ""),
        parameters=function.document("parameters"),
    )


PART_SCHEMA = object_schema("type text", type=enum_schema("text"), text=TEXT, cache_control=OBJECT)
"""Schema of a text part."""
CONTENT_SCHEMA = any_of(TEXT, array_schema(PART_SCHEMA))
"""Schema of the content of a message."""
CALL_SCHEMA = object_schema(
    "id function",
    id=TEXT,
    type=enum_schema("function"),
    function=object_schema("name arguments", name=TEXT, arguments=TEXT),
)
"""Schema of a tool call in the history."""
MESSAGE_SCHEMA = any_of(
    object_schema("role content", role=enum_schema("system", "developer", "user"), content=CONTENT_SCHEMA),
    object_schema(
        "role",
        role=enum_schema("assistant"),
        content=CONTENT_SCHEMA,
        tool_calls=array_schema(CALL_SCHEMA),
        reasoning_content=TEXT,
        reasoning=TEXT,
        audio=NULL,
        function_call=NULL,
        refusal=NULL,
        **dict.fromkeys(IGNORED_IN_REPLIES, True),
    ),
    object_schema("role content tool_call_id", role=enum_schema("tool"), content=CONTENT_SCHEMA, tool_call_id=TEXT),
)
"""Schema of a message."""
TOOL_SCHEMA = object_schema(
    "type function",
    type=enum_schema("function"),
    function=object_schema(
        "name",
        name=short_text(MAX_NAME_CHARACTERS),
        description=TEXT,
        parameters=OBJECT,
        strict=FLAG,
    ),
)
"""Schema of a tool; no two have the same name."""
SCHEMA = object_schema(
    "messages",
    **neutral_schema(CHAT_NEUTRAL),
    **SAMPLING_SCHEMA,
    messages=array_schema(MESSAGE_SCHEMA, least=1),
    tools=array_schema(TOOL_SCHEMA),
    tool_choice=enum_schema("auto", "none"),
    parallel_tool_calls=FLAG,
    chat_template_kwargs=OBJECT,
    max_tokens=integer_schema(1, MAX_WHOLE),
    max_completion_tokens=integer_schema(1, MAX_WHOLE),
    logprobs=FLAG,
    **dict.fromkeys(HINTS, True),
)
"""JSON schema of the body. Additionally, ``stream_options`` requires ``stream``, and the two token limits must agree.
"""
CHAT_FIELDS = field_names(SCHEMA) - CHAT_NEUTRAL.keys()
"""Fields of a body that are used, or accepted without effect."""
NOTHING_SHOWN: Mapping[str, object] = MappingProxyType({})
"""The additional fields of a chunk that has only a delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request to ``/v1/chat/completions``."""

    call: Call
    output: OutputOptions

    def body(self, answer: Answer) -> bytes:
        """The answer as a ``chat.completion``."""
        data: dict[str, object] = {
            "id": f"chatcmpl-{answer.answer_id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": self.call.model,
            "system_fingerprint": fingerprint(reply.turn.versions for reply in answer.replies),
            "choices": [_choice(index, reply, self.output) for index, reply in enumerate(answer.replies)],
            "usage": usage(answer),
        }
        if self.output.token_ids:
            data["prompt_token_ids"] = answer.replies[0].turn.prompt_ids
        return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY)

    def events(self) -> "ChatEventEncoder":
        """The answer as a stream of ``chat.completion.chunk``."""
        return ChatEventEncoder(self.call, self.output)


class ChatEventEncoder:
    """Encodes one answer as chunks; see :class:`~etude.gateway.api.calls.EventEncoder`.

    Each chunk gives the weight versions of its own tokens as ``system_fingerprint``, the last ones those of the answer.
    """

    def __init__(self, call: Call, output: OutputOptions) -> None:
        self._call = call
        self._output = output
        self._head: dict[str, object] = {}

    def opening(self, answer_id: str, created: int) -> bytes:
        """The role, once for each reply."""
        self._head = {
            "id": f"chatcmpl-{answer_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": self._call.model,
        }
        if self._output.usage_event:
            self._head["usage"] = None
        role: dict[str, object] = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(index, role) for index in range(self._call.sampling.count))

    def delta(self, index: int, deltas: Sequence[Delta], chunk: TokenChunk) -> bytes:
        """One chunk with everything that some tokens add; none if the caller requested none of it."""
        if not deltas and not (self._output.logprobs or self._output.token_ids):
            return b""
        shown: dict[str, object] = {}
        if self._output.logprobs:
            shown["logprobs"] = _logprobs(chunk.token_ids, chunk.logprobs)
        if self._output.token_ids:
            shown["token_ids"] = chunk.token_ids
        return self._chunk(index, _merged(deltas), fingerprint([chunk.versions]), shown)

    def closing(self, answer: Answer) -> bytes:
        """The finish reason of each reply, the usage if requested, and the end mark."""
        whole = fingerprint(reply.turn.versions for reply in answer.replies)
        if self._output.token_ids:
            self._head["prompt_token_ids"] = answer.replies[0].turn.prompt_ids
        events: list[bytes] = []
        for index, reply in enumerate(answer.replies):
            events.append(self._chunk(index, {}, whole, _finish(reply)))
            self._head.pop("prompt_token_ids", None)  # once is enough
        if self._output.usage_event:
            events.append(event({**self._head, "system_fingerprint": whole, "choices": [], "usage": usage(answer)}))
        return b"".join([*events, DONE])

    def failure(self, api_error: ApiError) -> bytes:
        """An error in the middle of a stream."""
        return failure_event(api_error)

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        versions: str | None = None,
        shown: Mapping[str, object] = NOTHING_SHOWN,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **shown}
        return event({**self._head, "system_fingerprint": versions, "choices": [choice]})


def _choice(index: int, reply: Reply, output: OutputOptions) -> dict[str, object]:
    turn = reply.turn
    shown: dict[str, object] = {
        "index": index,
        "message": _reply_message(reply.message),
        "logprobs": _logprobs(turn.completion_ids, turn.logprobs) if output.logprobs else None,
        **_finish(reply),
    }
    if output.token_ids:
        shown["token_ids"] = turn.completion_ids
    return shown


def _finish(reply: Reply) -> dict[str, object]:
    """``stop_reason`` is vLLM's extension: the stop string that ended the reply."""
    return {"finish_reason": finish_reason_name(reply.finish_reason), "stop_reason": reply.stop_text}


def _reply_message(message: ChatMessage) -> dict[str, object]:
    """The message of a reply; content is null only if there are only tool calls."""
    content = message.content or (None if message.tool_calls else "")
    shown: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
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
    """Deltas merged into one: clients add up one entry per tool call and chunk, so a chunk has at most one per call."""
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


PROTOCOL = ApiProtocol(
    path="/v1/chat/completions", parse=parse, error_body=error_body, request_id_header="x-request-id"
)
"""OpenAI's chat completions."""
