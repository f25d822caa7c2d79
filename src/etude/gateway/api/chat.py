"""Requests in OpenAI's chat dialect: ``/v1/chat/completions``.

Owns their shape and which options are understood; replies are :mod:`etude.gateway.api.chat_events`'. What would
change the output and is not understood is refused by name, never ignored. Pure; tokens, sessions and HTTP are others'.

Decisions that a reader of OpenAI's reference may miss there:

* A tool's ``strict`` is accepted: SDKs set it by default, and the schema reaches the model either way. Nothing here
  constrains what is sampled, so arguments may break the schema, as without it, and a harness has to check them.
  ``tool_choice`` ``required`` or one tool's name would change what a harness does next; they are refused.
* ``chat_template_kwargs`` are what the model's template reads, as in vLLM; others are refused once that is known.
* ``reasoning_effort`` and ``verbosity`` are accepted as the hints they are; no model here has such settings.
* ``developer`` is another word for ``system``.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from etude.gateway.api.calls import Call, Dialect
from etude.gateway.api.chat_events import ChatAsked
from etude.gateway.api.fields import Fields, read_object
from etude.gateway.api.openai import (
    INFORMATIVE,
    MAX_NAME_CHARACTERS,
    MAX_WHOLE,
    NEUTRAL,
    NULL,
    NULLABLE_OBJECT,
    SAMPLING_SCHEMA,
    UNDERSTOOD,
    neutral_schema,
    nullable,
    read_model,
    read_sampling,
    read_tools,
    read_view,
    refuse,
)
from etude.gateway.api.schemas import FLAG, OBJECT, TEXT, bounded, either, listed, record, whole, word
from etude.tokens.messages import Message, Role, Tool, ToolCall
from etude.types import Json

HINTS = frozenset({"reasoning_effort", "verbosity", "prediction", "prompt_cache_retention", "prompt_cache_options"})
"""Fields of a body that advise models made for them, or could only change the price or the speed of an answer."""

CHAT_FIELDS = (
    UNDERSTOOD
    | INFORMATIVE
    | {"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"}
    | HINTS
)
"""Fields of a body that are read, or tolerated."""

CHAT_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {
        **NEUTRAL,
        "top_logprobs": (0,),  # engines report the logprob of what they sampled, of nothing else
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
"""Fields of a body that are accepted with the values that ask for nothing."""

ROLES: Mapping[str, Role] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
)
"""Role on the wire → role of a message."""

IGNORED_IN_REPLIES = frozenset(
    {
        "annotations",  # citations of a web search: marks beside the text
        "provider_specific_fields",  # LiteLLM's: what a provider sent besides
        "thinking_blocks",  # LiteLLM's: reasoning_content once more, in Anthropic's shape
        "reasoning_details",  # OpenRouter's: reasoning once more, in pieces
        "name",  # there is one assistant
    }
)
"""Fields of a reply that clients send back with it and that say nothing the model should see."""

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
"""Fields of a message by role. A tool's ``name`` is the one of the call that it answers; ``cache_control``, there and
in parts, is advice to Anthropic's caches.
"""

MESSAGE_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType({"images": ([],), "tool_calls": ([],)})
"""Fields of a message that some clients always send, and that are empty where they have no place."""

PART_FIELDS = frozenset({"type", "text", "cache_control", "annotations"})
"""Fields of a text part."""

CALL_FIELDS = frozenset({"id", "type", "function", "index", "provider_specific_fields", "extra_content"})
"""Fields of a tool call that comes back; clients that put it together from events leave ``index`` in."""

TOOL_FIELDS = frozenset({"type", "function", "cache_control"})
"""Fields of a tool."""

FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
"""Fields of a tool's function."""


def parse(body: bytes) -> ChatAsked:
    """Read a request body. Raises :class:`Refusal` naming the field at fault."""
    fields = read_object(body)
    fields.only(CHAT_FIELDS, CHAT_NEUTRAL)
    view = read_view(fields, logprobs=fields.flag("logprobs"))
    call = Call(
        messages=_read_messages(fields),
        tools=read_tools(fields, _read_tool),
        template_kwargs=fields.document("chat_template_kwargs"),
        sampling=read_sampling(fields, _read_max_tokens(fields)),
        stream=fields.flag("stream"),
        single_call=not fields.flag("parallel_tool_calls", default=True),
        model=read_model(fields),
    )
    return ChatAsked(call=call, view=view)


def _read_max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", low=1, high=MAX_WHOLE)
    new = fields.integer("max_completion_tokens", low=1, high=MAX_WHOLE)
    if old is not None and new is not None and old != new:
        raise fields.invalid("max_tokens", f"the same as max_completion_tokens={new}, or only one of them")
    return old if new is None else new


def _read_messages(fields: Fields) -> tuple[Message, ...]:
    messages = tuple([_read_message(message) for message in fields.children("messages")])
    if not messages:
        raise fields.invalid("messages", "a list of at least one message")
    return messages


def _read_message(fields: Fields) -> Message:
    name = fields.text("role")
    role = ROLES.get(name)
    if role is None:
        raise fields.invalid("role", "system, developer, user, assistant or tool; a function's reply is a tool's")
    fields.only(MESSAGE_FIELDS[name], MESSAGE_NEUTRAL)
    if role == "assistant":
        return Message(
            role=role,
            content=_read_content(fields, needed=False),  # it may only have called tools, or said nothing
            thinking=fields.text("reasoning_content", "") or fields.text("reasoning", ""),
            tool_calls=tuple([_read_call(call) for call in fields.children("tool_calls")]),
        )
    content = _read_content(fields, needed=True)
    if role == "tool":
        return Message(role=role, content=content, tool_call_id=fields.text("tool_call_id"))
    return Message(role=role, content=content)


def _read_content(fields: Fields, *, needed: bool) -> str:
    value = fields.value("content")
    if isinstance(value, str):
        return value
    if value is None and not needed:
        return ""
    if not isinstance(value, list):
        raise fields.invalid("content", "a string or a list of text parts")
    return "".join(_read_part(part) for part in fields.children("content"))


def _read_part(part: Fields) -> str:
    if part.text("type") != "text":
        raise part.unsupported("type", "a message is text, send only parts of type text")
    part.only(PART_FIELDS)
    return part.text("text")


def _read_call(call: Fields) -> ToolCall:
    """Arguments are taken as they come, JSON or not: a harness may send back what it cut short."""
    call.only(CALL_FIELDS)
    if call.text("type", "function") != "function":
        raise call.unsupported("type", "only calls of functions are understood")
    function = call.child("function")
    if function is None:
        raise call.invalid("function", "an object with name and arguments")
    return ToolCall(call_id=call.text("id"), name=function.text("name"), arguments=function.text("arguments"))


def _read_tool(tool: Fields) -> Tool:
    if tool.text("type") != "function":
        raise tool.unsupported("type", "only tools of type function are understood")
    tool.only(TOOL_FIELDS)
    function = tool.child("function")
    if function is None:
        raise tool.invalid("function", "an object with name and parameters")
    function.only(FUNCTION_FIELDS)
    function.flag("strict")
    name = function.text("name")
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise function.invalid("name", f"a name of 1 to {MAX_NAME_CHARACTERS} characters")
    return Tool(name=name, description=function.text("description", ""), parameters=function.document("parameters"))


PART_SCHEMA = record("type text", type=word("text"), text=TEXT, cache_control=NULLABLE_OBJECT)
"""Of a text part."""
CONTENT_SCHEMA = either(TEXT, listed(PART_SCHEMA))
"""Of what a message says."""
CALL_SCHEMA = record(
    "id function", id=TEXT, type=word("function"), function=record("name arguments", name=TEXT, arguments=TEXT)
)
"""Of a tool call in the history."""
MESSAGE_SCHEMA = either(
    record("role content", role=word("system", "developer", "user"), content=CONTENT_SCHEMA),
    record(
        "role",
        role=word("assistant"),
        content=nullable(CONTENT_SCHEMA),
        tool_calls=nullable(listed(CALL_SCHEMA)),
        reasoning_content=nullable(TEXT),
        reasoning=nullable(TEXT),
        refusal=NULL,
        audio=NULL,
        function_call=NULL,
        **dict.fromkeys(IGNORED_IN_REPLIES, True),
    ),
    record("role content tool_call_id", role=word("tool"), content=CONTENT_SCHEMA, tool_call_id=TEXT),
)
"""Of a message."""
TOOL_SCHEMA = record(
    "type function",
    type=word("function"),
    function=record(
        "name",
        name=bounded(MAX_NAME_CHARACTERS),
        description=nullable(TEXT),
        parameters=nullable(OBJECT),
        strict=nullable(FLAG),
    ),
)
"""Of a tool; no two have the same name."""
SCHEMA = record(
    "messages",
    **neutral_schema(CHAT_NEUTRAL),
    **SAMPLING_SCHEMA,
    messages=listed(MESSAGE_SCHEMA, least=1),
    tools=nullable(listed(TOOL_SCHEMA)),
    tool_choice=nullable(word("auto", "none")),
    parallel_tool_calls=nullable(FLAG),
    chat_template_kwargs=nullable(OBJECT),
    max_tokens=nullable(whole(1, MAX_WHOLE)),
    max_completion_tokens=nullable(whole(1, MAX_WHOLE)),
    logprobs=nullable(FLAG),
    **dict.fromkeys(HINTS, True),
)
"""JSON schema of the body. Besides, ``stream_options`` needs ``stream``, and the two allowances agree."""

DIALECT = Dialect(path="/v1/chat/completions", parse=parse, refuse=refuse, request_id_header="x-request-id")
"""OpenAI's chat completions."""
