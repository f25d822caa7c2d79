"""Requests in Anthropic's dialect: ``/v1/messages`` and ``/v1/messages/count_tokens``.

Owns their shape and which options are understood; replies are :mod:`etude.gateway.api.message_events`'.
Everything that would change the output and is not understood is refused by name, never ignored. Pure; tokens, sessions
and HTTP are others'.

What differs from Anthropic's own models, because the model here is another one:

* Whether it thinks, and how much, is its chat template's business. ``thinking`` and ``output_config.effort`` are hints
  to models that were trained with them: they are accepted, and what the model thinks is delivered, whatever they say.
* A signature of thinking is a fixed mark, and none is checked: the history is trusted, as it is the caller's.
* ``cache_control`` is accepted anywhere: a cache cannot change the output, and prefixes are kept here without asking.
* A reply that the history breaks off (a prefill) is refused: the model's turns are its own, token for token.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import Call, Dialect, Sampling
from etude.gateway.api.fields import Fields, read_object
from etude.gateway.api.message_events import MessageAsked, refuse
from etude.gateway.api.schemas import FLAG, OBJECT, TEXT, bounded, either, listed, record, temperature, whole, word
from etude.tokens.messages import Message, Tool, ToolCall
from etude.types import Json

PATH = "/v1/messages"
"""Where messages are asked for."""
COUNT_PATH = "/v1/messages/count_tokens"
"""Where their tokens are counted."""

UNDERSTOOD = frozenset(
    {
        *("model", "messages", "system", "max_tokens", "stream", "tools", "tool_choice"),
        *("temperature", "top_p", "top_k", "stop_sequences"),
        *("thinking", "output_config"),
    }
)
"""Fields that are read; the last two are hints, see above."""
INFORMATIVE = frozenset(
    {"metadata", "service_tier", "speed", "inference_geo", "cache_control", "user_profile_id", "workspace_id"}
)
"""Fields that could not change the output anywhere."""
NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": ([],),
    }
)
"""Fields that are accepted with values that ask for nothing; the longest is what Claude Code sends."""

MAX_TEMPERATURE = 1.0
"""Anthropic's own bound."""
MAX_TOP_K = 2**31 - 1
"""Above any vocabulary."""
MAX_TOKENS = 2**31 - 1
"""Above any context."""
MAX_STOPS = 16
"""Each is looked for behind every token; as many as in the other dialects."""
MAX_STOP_CHARACTERS = 1000
"""Text of this length at most is held back because it may become a stop string."""
MAX_NAME_CHARACTERS = 256
"""Of a model's or a tool's name: it is given back with every reply."""

THINKING_TYPES = ("enabled", "disabled", "adaptive", "between_tools")
"""Ways to ask for thinking."""
THINKING_DISPLAYS = ("summarized", "omitted")
"""Ways to ask for how it is shown."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Ways to ask for more of it."""
TOOL_NEUTRAL: Mapping[str, Sequence[Json]] = MappingProxyType(
    {"defer_loading": (False,), "allowed_callers": (["direct"],), "input_examples": ([],)}
)
"""Fields of a tool that are accepted with values that ask for nothing."""
TOOL_FIELDS = frozenset(
    {"type", "name", "description", "input_schema", "cache_control", "eager_input_streaming", "strict"}
)
"""Fields of a tool that are read or have no effect. ``strict`` asks that sampling be held to the schema: it is not, and
a call that breaks the schema is delivered and graded like any other.
"""

ERROR_MARK = "[error] "
"""What a tool's text begins with when its caller says ``is_error``: a template has no other place for that."""


def parse(body: bytes) -> MessageAsked:
    """Read a request body. Raises :class:`Refusal` naming the field at fault."""
    fields = read_object(body)
    call = _call(fields)
    if call.sampling.max_tokens is None:
        raise fields.invalid("max_tokens", "how long the reply may be")
    if call.messages[-1].role == "assistant":
        last = f"messages[{len(fields.items('messages')) - 1}]"
        raise fields.invalid(last, "a user's message: a reply that was begun (a prefill) is not continued here")
    return MessageAsked(call=call)


def parse_count(body: bytes) -> Call:
    """Read the body of a request to count tokens: the same fields, no ``max_tokens`` needed, any message may be last.

    Raises like :func:`parse`.
    """
    return _call(read_object(body))


def count_body(tokens: int) -> bytes:
    """The answer to a request to count tokens."""
    return orjson.dumps({"input_tokens": tokens})


def _call(fields: Fields) -> Call:
    fields.only(UNDERSTOOD | INFORMATIVE, NEUTRAL)
    _check_hints(fields)
    tools, single_call = _tools(fields)
    top_p = fields.number("top_p", low=0, high=1, above=True)
    return Call(
        messages=(*_system(fields), *_messages(fields)),
        tools=tools,
        sampling=Sampling(
            temperature=fields.temperature(high=MAX_TEMPERATURE),
            top_p=1.0 if top_p is None else top_p,
            top_k=fields.integer("top_k", low=0, high=MAX_TOP_K) or 0,
            max_tokens=fields.integer("max_tokens", low=1, high=MAX_TOKENS),
            stops=_stops(fields),
        ),
        stream=fields.flag("stream"),
        single_call=single_call,
        model=_name(fields, "model"),
    )


def _check_hints(fields: Fields) -> None:
    thinking = fields.child("thinking")
    if thinking is not None:
        thinking.only(("type", "budget_tokens", "display"))
        thinking.text("type")
        thinking.choice("type", THINKING_TYPES)
        thinking.integer("budget_tokens", low=0, high=MAX_TOKENS)
        thinking.choice("display", THINKING_DISPLAYS)
    output = fields.child("output_config")
    if output is not None:
        output.only(("effort",))
        output.choice("effort", EFFORTS)


def _name(fields: Fields, field: str) -> str:
    name = fields.text(field)
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise fields.invalid(field, f"a name of 1 to {MAX_NAME_CHARACTERS} characters")
    return name


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.items("stop_sequences")
    texts = tuple(stop for stop in stops if isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS)
    if len(texts) != len(stops) or len(stops) > MAX_STOPS:
        raise fields.invalid("stop_sequences", f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return texts


def _tools(fields: Fields) -> tuple[tuple[Tool, ...], bool]:
    """The tools that may be called, and whether one call ends the reply."""
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
    choice.only(("type", "disable_parallel_tool_use"))
    single_call = choice.flag("disable_parallel_tool_use")
    return ((), False) if kind == "none" else (tuple(tools.values()), single_call)


def _tool(fields: Fields) -> Tool:
    if fields.text("type", "custom") != "custom":
        raise fields.unsupported("type", "no tool runs on this side: declare it with a name and an input_schema")
    fields.only(TOOL_FIELDS, TOOL_NEUTRAL)
    if fields.value("input_schema") is None:
        raise fields.invalid("input_schema", "a JSON schema")
    schema = fields.document("input_schema")
    return Tool(name=_name(fields, "name"), description=fields.text("description", ""), parameters=schema)


def _system(fields: Fields) -> Iterator[Message]:
    text = _texts(fields, "system") if fields.value("system") is not None else ""
    if text:
        yield Message(role="system", content=text)


def _messages(fields: Fields) -> Iterator[Message]:
    if not fields.items("messages"):
        raise fields.invalid("messages", "a list of at least one message")
    for message in fields.children("messages"):
        message.only(("role", "content"))
        role = message.text("role")
        if role == "user":
            yield from _user(message)
        elif role == "assistant":
            yield _assistant(message)
        elif role == "system":
            yield Message(role="system", content=_texts(message, "content"))
        else:
            raise message.invalid("role", '"user", "assistant" or "system"')


def _user(message: Fields) -> Iterator[Message]:
    """What tools answered and what a person wrote, in the order of the blocks."""
    if isinstance(message.value("content"), str):
        yield Message(role="user", content=message.text("content"))
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
                yield Message(role="user", content="".join(texts))
            texts = []
            yield _tool_result(block)
        else:
            raise block.unsupported("type", "a user's message has text and tool_result blocks")
    if texts:
        yield Message(role="user", content="".join(texts))


def _tool_result(block: Fields) -> Message:
    block.only(("type", "tool_use_id", "content", "is_error", "cache_control"))
    text = _texts(block, "content") if block.value("content") is not None else ""
    mark = ERROR_MARK if block.flag("is_error") else ""
    return Message(role="tool", content=mark + text, tool_call_id=block.text("tool_use_id"))


def _assistant(message: Fields) -> Message:
    """A reply of the model, or of another one. Thinking that was redacted is left out: nobody here can read it."""
    if isinstance(message.value("content"), str):
        return Message(role="assistant", content=message.text("content"))
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
            block.only(("type", "thinking", "signature"))
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind != "redacted_thinking":
            raise block.unsupported("type", "an assistant's message has text, thinking and tool_use blocks")
    return Message(role="assistant", content="".join(texts), thinking="".join(thoughts), tool_calls=tuple(calls))


def _tool_use(block: Fields) -> ToolCall:
    block.only(("type", "id", "name", "input", "cache_control"), {"caller": ({"type": "direct"},)})
    if block.value("input") is None:
        raise block.invalid("input", "an object")
    arguments = orjson.dumps(block.document("input")).decode()
    return ToolCall(call_id=block.text("id"), name=_name(block, "name"), arguments=arguments)


def _texts(fields: Fields, name: str) -> str:
    """A string, or text blocks and nothing else; they follow each other without anything between."""
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


def _text(block: Fields) -> str:
    block.only(("type", "text", "cache_control"), {"citations": ([],)})
    return block.text("text")


NAME_SCHEMA = bounded(MAX_NAME_CHARACTERS)
"""Of a name."""
TEXT_SCHEMA = record("type text", type=word("text"), text=TEXT, cache_control=OBJECT)
"""Of a text block."""
TEXTS_SCHEMA = either(TEXT, listed(TEXT_SCHEMA))
"""Of content that is text."""
RESULT_SCHEMA = record(
    "type tool_use_id",
    type=word("tool_result"),
    tool_use_id=TEXT,
    content=TEXTS_SCHEMA,
    is_error=FLAG,
    cache_control=OBJECT,
)
"""Of what a tool answered."""
THINKING_SCHEMA = record("type thinking", type=word("thinking"), thinking=TEXT, signature=TEXT)
"""Of thinking in the history."""
USE_SCHEMA = record(
    "type id name input", type=word("tool_use"), id=TEXT, name=NAME_SCHEMA, input=OBJECT, cache_control=OBJECT
)
"""Of a call in the history."""
TOOL_SCHEMA = record(
    "name input_schema",
    type=word("custom"),
    name=NAME_SCHEMA,
    description=TEXT,
    input_schema=OBJECT,
    cache_control=OBJECT,
    strict=FLAG,
)
"""Of a tool; no two have the same name."""
MESSAGE_SCHEMA = either(
    record("role content", role=word("user"), content=either(TEXT, listed(TEXT_SCHEMA, RESULT_SCHEMA, least=1))),
    record(
        "role content",
        role=word("assistant"),
        content=either(TEXT, listed(TEXT_SCHEMA, THINKING_SCHEMA, USE_SCHEMA)),
    ),
    record("role content", role=word("system"), content=TEXTS_SCHEMA),
)
"""Of a message."""
FIELD_SCHEMAS: Mapping[str, Json] = MappingProxyType(
    {
        "model": NAME_SCHEMA,
        "messages": listed(MESSAGE_SCHEMA, least=1),
        "system": TEXTS_SCHEMA,
        "max_tokens": whole(1, MAX_TOKENS),
        "stream": FLAG,
        "tools": listed(TOOL_SCHEMA),
        "tool_choice": record("type", type=word("auto", "none"), disable_parallel_tool_use=FLAG),
        "temperature": temperature(MAX_TEMPERATURE),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": whole(0, MAX_TOP_K),
        "stop_sequences": listed(bounded(MAX_STOP_CHARACTERS), most=MAX_STOPS),
        "thinking": record(
            "type",
            type=word(*THINKING_TYPES),
            budget_tokens=whole(0, MAX_TOKENS),
            display=word(*THINKING_DISPLAYS),
        ),
        "output_config": record("", effort=word(*EFFORTS)),
        **{field: {"enum": [*values]} for field, values in NEUTRAL.items()},
        **dict.fromkeys(sorted(INFORMATIVE), True),
    }
)
"""Of each field of a body."""
SCHEMA = record("model messages max_tokens", **FIELD_SCHEMAS)
"""JSON schema of the body of ``/v1/messages``. Besides, the last message is not an assistant's."""
COUNT_SCHEMA = record("model messages", **FIELD_SCHEMAS)
"""JSON schema of the body of ``/v1/messages/count_tokens``."""

DIALECT = Dialect(
    path=PATH, parse=parse, refuse=refuse, request_id_header="request-id", statuses=MappingProxyType({503: 529})
)
"""``/v1/messages``."""
