"""Requests in OpenAI's responses dialect: ``/v1/responses``.

Owns their shape and which options are understood; replies are :mod:`etude.gateway.api.response_events`'.
Everything that would change the output and is not understood is refused by name, never ignored. Pure; tokens, sessions
and HTTP are others'.

Decisions that a reader of OpenAI's reference may miss there:

* ``store`` is accepted either way: an answer can be continued by ``previous_response_id`` for as long as its session
  lives, within it, and can be fetched by nobody.
* ``instructions`` come before the whole conversation, and those of the previous response are not carried over.
* ``reasoning`` and ``text.verbosity`` are hints to models that were trained with them: no model here has such settings.
  What it thinks is delivered as it is. ``reasoning.encrypted_content`` may be asked for; there is nothing to encrypt.
* A tool's ``strict`` is accepted and constrains nothing, as in chat completions.
* Neighbouring items of the assistant are one reply: what it thought, said and called becomes one message.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Call, Dialect, Sampling
from etude.gateway.api.fields import Fields, read_object
from etude.gateway.api.openai import (
    MAX_NAME_CHARACTERS,
    MAX_TEMPERATURE,
    MAX_WHOLE,
    neutral_schema,
    read_model,
    read_tools,
    refuse,
)
from etude.gateway.api.response_events import ResponseAsked
from etude.gateway.api.schemas import FLAG, OBJECT, TEXT, bounded, either, listed, record, temperature, whole, word
from etude.tokens.messages import Message, Role, Tool, ToolCall
from etude.types import Json

PATH = "/v1/responses"
"""Where responses are asked for."""
ID_PREFIX = "resp_"
"""What the id of a response begins with; the rest is the answer's."""

UNDERSTOOD = frozenset(
    {
        *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls"),
        *("max_output_tokens", "temperature", "top_p", "stream", "text", "reasoning", "include", "metadata", "store"),
        "stream_options",
    }
)
"""Fields that are read."""
INFORMATIVE = frozenset(
    {
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        "service_tier",
        "max_tool_calls",  # of tools that run at OpenAI; none does here
        "client_metadata",  # Codex's
    }
)
"""Fields that could not change the output anywhere."""
NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {"background": (False,), "truncation": ("disabled",), "top_logprobs": (0,), "context_management": ([],)}
)
"""Fields that are accepted with the value that asks for nothing."""

INCLUDABLE = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
        "reasoning.encrypted_content",
    }
)
"""Additions to a response that may be asked for: no reply here has what they would be added to."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Ways to ask for more reasoning."""
SUMMARIES = ("auto", "concise", "detailed")
"""Ways to ask for a summary of it."""
CONTEXTS = ("auto", "current_turn", "all_turns")
"""Ways to ask for the reasoning that is shown to the model again."""
VERBOSITIES = ("low", "medium", "high")
"""Ways to ask for more words."""

ROLES: Mapping[str, Role] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
)
"""Role on the wire → role of a message."""
PART_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text")
"""Parts that are text."""
PART_FIELDS = frozenset({"type", "text", "annotations", "prompt_cache_breakpoint"})
"""Fields of a part; the last two stand beside its text."""
ITEM_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "message": frozenset({"type", "id", "status", "phase", "role", "content"}),
        "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
        "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
        "function_call_output": frozenset({"type", "id", "status", "call_id", "name", "output"}),
    }
)
"""Fields by type of item. An ``id``, a ``status`` and a ``phase`` were given by a server and say nothing to a model;
``encrypted_content`` is another server's reasoning, which nobody here can read.
"""
ITEM_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType({"caller": ({"type": "direct"},)})
"""Fields of any item that are accepted with the value that asks for nothing."""
TOOL_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {"defer_loading": (False,), "allowed_callers": (["direct"],)}
)
"""Fields of a tool that are accepted with the value that asks for nothing."""

MAX_METADATA = 16
"""Pairs in ``metadata``: OpenAI's own bound, as the next two."""
MAX_METADATA_KEY = 64
"""Characters."""
MAX_METADATA_VALUE = 512
"""Characters."""


def parse(body: bytes) -> ResponseAsked:
    """Read a request body. Raises :class:`~etude.gateway.api.calls.Refusal` naming the field at fault."""
    fields = read_object(body)
    fields.only(UNDERSTOOD | INFORMATIVE, NEUTRAL)
    _check_options(fields)
    instructions = fields.text("instructions", "")
    leading = (Message(role="system", content=instructions),) if instructions else ()
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
    return ResponseAsked(call=call, echo=_echo(fields, call))


def _check_options(fields: Fields) -> None:
    """Refuse what asks for something in a field of which only hints are read."""
    fields.flag("store")
    options = fields.child("stream_options")
    if options is not None:
        options.only((), {"include_obfuscation": (False,)})
    for index, addition in enumerate(fields.items("include")):
        if not isinstance(addition, str) or addition not in INCLUDABLE:
            raise fields.invalid(f"include[{index}]", "nothing that would have to be added to a response", addition)
    reasoning = fields.child("reasoning")
    if reasoning is not None:
        reasoning.only(("effort", "summary", "generate_summary", "context"), {"mode": ("standard",)})
        reasoning.choice("effort", EFFORTS)
        reasoning.choice("summary", SUMMARIES)
        reasoning.choice("generate_summary", SUMMARIES)
        reasoning.choice("context", CONTEXTS)
    text = fields.child("text")
    if text is not None:
        text.only(("verbosity",), {"format": ({"type": "text"},)})
        text.choice("verbosity", VERBOSITIES)


def _sampling(fields: Fields) -> Sampling:
    top_p = fields.number("top_p", low=0, high=1, above=True)
    return Sampling(
        temperature=fields.temperature(high=MAX_TEMPERATURE),
        top_p=1.0 if top_p is None else top_p,
        max_tokens=fields.integer("max_output_tokens", low=1, high=MAX_WHOLE),
    )


def _previous(fields: Fields) -> str | None:
    if fields.value("previous_response_id") is None:
        return None
    answer_id = fields.text("previous_response_id").removeprefix(ID_PREFIX)
    if not 0 < len(answer_id) <= MAX_NAME_CHARACTERS:
        raise fields.invalid("previous_response_id", f"the id of an earlier response, {ID_PREFIX}…")
    return answer_id


def _tool(tool: Fields) -> Tool:
    if tool.text("type") != "function":
        raise tool.unsupported("type", "no tool runs on this side, declare it as a function")
    tool.only(("type", "name", "description", "parameters", "strict"), TOOL_NEUTRAL)
    tool.flag("strict")
    return Tool(name=_name(tool), description=tool.text("description", ""), parameters=tool.document("parameters"))


def _name(fields: Fields) -> str:
    name = fields.text("name")
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise fields.invalid("name", f"a name of 1 to {MAX_NAME_CHARACTERS} characters")
    return name


def _messages(fields: Fields) -> Iterator[Message]:
    text = fields.value("input")
    if isinstance(text, str):
        yield Message(role="user", content=text)
        return
    if not isinstance(text, list) or not text:
        raise fields.invalid("input", "a string or a list of at least one item")
    items = map(_item, fields.children("input"))
    for is_reply, run in groupby(items, key=lambda message: message.role == "assistant"):
        if is_reply:
            yield _joined(run)
        else:
            yield from run


def _joined(parts: Iterable[Message]) -> Message:
    """One reply from the messages that its items make."""
    some = tuple(parts)
    return Message(
        role="assistant",
        content="".join(part.content for part in some),
        thinking="".join(part.thinking for part in some),
        tool_calls=tuple(call for part in some for call in part.tool_calls),
    )


def _item(item: Fields) -> Message:
    kind = item.text("type", "message")
    if kind == "item_reference":
        raise item.unsupported("type", "send the item itself, or previous_response_id")
    if kind not in ITEM_FIELDS:
        raise item.unsupported("type", f"items are of type {', '.join(ITEM_FIELDS)}")
    item.only(ITEM_FIELDS[kind], ITEM_NEUTRAL)
    if kind == "reasoning":
        return Message(role="assistant", thinking=_parts(item, "content") or _parts(item, "summary"))
    if kind == "function_call":
        call = ToolCall(call_id=item.text("call_id"), name=_name(item), arguments=item.text("arguments"))
        return Message(role="assistant", tool_calls=(call,))
    if kind == "function_call_output":
        return Message(role="tool", content=_text(item, "output"), tool_call_id=item.text("call_id"))
    role = ROLES.get(item.text("role"))
    if role is None:
        raise item.invalid("role", "user, assistant, system or developer")
    return Message(role=role, content=_text(item, "content"))


def _text(item: Fields, name: str) -> str:
    value = item.value(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.invalid(name, "a string or a list of text parts")
    return _parts(item, name)


def _parts(item: Fields, name: str) -> str:
    """The text of some parts, nothing between them."""
    texts: list[str] = []
    for part in item.children(name):
        if part.text("type") not in PART_TYPES:
            raise part.unsupported("type", "a message is text, send only text parts")
        part.only(PART_FIELDS, {"logprobs": ([],)})
        texts.append(part.text("text"))
    return "".join(texts)


def _echo(fields: Fields, call: Call) -> dict[str, object]:
    """What a response says of its request."""
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


def _metadata(fields: Fields) -> dict[str, Json]:
    metadata = fields.document("metadata")
    if len(metadata) > MAX_METADATA:
        raise fields.invalid("metadata", f"at most {MAX_METADATA} pairs")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            expected = f"names of up to {MAX_METADATA_KEY} and strings of up to {MAX_METADATA_VALUE} characters"
            raise fields.invalid("metadata", expected)
    return metadata


def _tool_echo(tool: Fields) -> dict[str, object]:
    """The schema is written once: a response repeats it with its first two events and its last."""
    parameters = orjson.Fragment(orjson.dumps(tool.document("parameters")))
    return {
        "type": "function",
        "name": tool.value("name"),
        "description": tool.value("description"),
        "parameters": parameters,
        "strict": tool.flag("strict"),
    }


NAME_SCHEMA = bounded(MAX_NAME_CHARACTERS)
"""Of a name."""
PART_SCHEMA = record("type text", type=word("input_text", "output_text"), text=TEXT)
"""Of a part of a message."""
TEXTS_SCHEMA = either(TEXT, listed(PART_SCHEMA))
"""Of content that is text."""
ITEM_SCHEMA = either(
    record("role content", type=word("message"), role=word(*ROLES), content=TEXTS_SCHEMA),
    record("type", type=word("reasoning"), content=listed(record("type text", type=word("reasoning_text"), text=TEXT))),
    record("type call_id name arguments", type=word("function_call"), call_id=TEXT, name=NAME_SCHEMA, arguments=TEXT),
    record("type call_id output", type=word("function_call_output"), call_id=TEXT, output=TEXTS_SCHEMA),
)
"""Of an item of the input."""
TOOL_SCHEMA = record(
    "type name", type=word("function"), name=NAME_SCHEMA, description=TEXT, parameters=OBJECT, strict=FLAG
)
"""Of a tool; no two have the same name."""
SCHEMA = record(
    "input",
    model=NAME_SCHEMA,
    input=either(TEXT, listed(ITEM_SCHEMA, least=1)),
    instructions=TEXT,
    previous_response_id=bounded(MAX_NAME_CHARACTERS),
    tools=listed(TOOL_SCHEMA),
    tool_choice=word("auto", "none"),
    parallel_tool_calls=FLAG,
    max_output_tokens=whole(1, MAX_WHOLE),
    temperature=temperature(MAX_TEMPERATURE),
    top_p={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    stream=FLAG,
    store=FLAG,
    text=record("", format=record("type", type=word("text")), verbosity=word(*VERBOSITIES)),
    reasoning=record("", effort=word(*EFFORTS), summary=word(*SUMMARIES), context=word(*CONTEXTS)),
    include=listed(word(*sorted(INCLUDABLE))),
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

DIALECT = Dialect(path=PATH, parse=parse, refuse=refuse, request_id_header="x-request-id")
"""OpenAI's responses."""
