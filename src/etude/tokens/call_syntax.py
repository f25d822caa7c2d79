"""Tool-call syntaxes between a grammar's marks, each described by a little data.

    JsonCall     {"name": "edit", "arguments": {"line": 3}}
    HeadedCall   edit[ARGS]{"line": 3}                                a name, then a JSON object
    TaggedCall   <function=edit><parameter=line>3</parameter>         a name, then parameters between tags
    NestedCall   <invoke name="edit"><line>3</line>                   the same, where a tag is named as its parameter
    PythonCall   edit(line=3)
    GemmaCall    call:edit{line:3}

If the text around values differs between models, it is a *pattern*: ``NAME``, ``KEY``, ``KIND``, ``ID``,
``ARGUMENTS`` and ``ANY`` are placeholders, a space matches any white space, all else is literal. Does not find the
beginning and the end of a call (:mod:`etude.tokens.toolcalls`).

Parameters between tags are text, unless the schema of the tool or the tag's ``KIND`` gives another type. JSON keeps the
model's spelling.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, final

from etude.tokens.argument_values import DECODER, GEMMA, NAME, NESTING_PYTHON, PYTHON, read_object, spelt
from etude.tokens.messages import Tool
from etude.tokens.toolcalls import JSON_SCOPE, PYTHON_SCOPE, CallScope, ParsedCall
from etude.types import Json

Schema: TypeAlias = Mapping[str, Json]
"""A JSON schema."""
TEXT: Schema = {"type": "string"}
FIELDS = {
    "NAME": r"(?P<name>[^\s<>\[\]{}()\"',=]+)",
    "KEY": r"(?P<name>[^<>\"\n]+?)",
    "KIND": r"(?P<kind>[^<>\"]*)",
    "ID": r"(?P<id>[^\s<>\[\]{}\"]+)",
    "ARGUMENTS": r"(?P<arguments>.*)",
    "ANY": r"[^{}]*?",
    " ": r"\s*",
}
"""Word of a pattern → the regular expression that it stands for."""
FIELD = re.compile(r"(\b(?:NAME|KEY|KIND|ID|ARGUMENTS|ANY)\b| )")
KINDS: Mapping[str, Schema] = {"string": TEXT, "true": TEXT}
"""Values of ``KIND`` for parameters that are text, whatever the tool declares: a type, or the value of ``string=``."""
ID_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
"""The name inside of an id like ``functions.edit:0``."""


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to a regular expression."""
    parts = (FIELDS.get(part, re.escape(part)) for part in FIELD.split(pattern))
    return re.compile("".join(parts), re.DOTALL)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """Tool-call syntax: a JSON object with name and arguments; these may be a JSON string, as in the OpenAI API."""

    name: str = "name"
    """Key of the name; empty if the name itself is the only key and its value the arguments."""
    arguments: tuple[str, ...] = ("arguments",)
    """Keys of the arguments, in order of preference."""
    call_id: str = "id"
    listed: bool = False
    """True if a bracket may precede the first call."""
    python: bool = False
    """True if Python literals are accepted instead of JSON."""
    scope: CallScope | None = JSON_SCOPE

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call, if ``text`` is one."""
        text = text.removeprefix("[") if self.listed else text
        members = read_object(text)
        if members is None and self.python:
            try:
                members = read_object(PYTHON.whole(text))
            except ValueError:
                return None
        if members is None:
            return None
        if not self.name:
            only = next(iter(members.items())) if len(members) == 1 else ("", (None, ""))
            return checked_call(only[0], only[1][1])
        name, _ = members.get(self.name, (None, ""))
        call_id, _ = members.get(self.call_id, ("", ""))
        arguments, spelling = next((members[key] for key in self.arguments if key in members), (None, ""))
        return checked_call(name, arguments if isinstance(arguments, str) else spelling, call_id)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCall:
    """Tool-call syntax: a name, followed by its arguments as a JSON object."""

    patterns: tuple[str, ...]
    """Patterns; the first match counts. The name may be part of an ``ID``."""
    scope: CallScope | None = JSON_SCOPE

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call, if ``text`` is one."""
        for pattern in self.patterns:
            if match := compile_pattern(pattern).fullmatch(text):
                groups = match.groupdict()
                call_id = groups.get("id") or ""
                named = ID_NAME.fullmatch(call_id)
                name = groups.get("name") or (named[1] if named else "")
                is_plain = "NAME" not in pattern and ":" not in call_id
                return checked_call(name, match["arguments"], "" if is_plain else call_id)
        return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EitherCall:
    """Tool-call syntax with alternatives, for model families that changed it between versions."""

    forms: "tuple[JsonCall | HeadedCall, ...]"
    scope: CallScope | None = JSON_SCOPE

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call of the first form that takes ``text``."""
        return next((call for form in self.forms if (call := form.read(text, tools)) is not None), None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCall:
    """Tool-call syntax: a name, and parameters between tags."""

    call: str
    """Pattern of the text before the parameters."""
    parameter: str
    """Pattern of the opening of a parameter."""
    end: str
    """Closing of a parameter."""
    separator: str = ""
    """Optional text between parameters."""
    trims: bool = False
    """True if one line break on either side of a value belongs to the grammar."""
    recovers: bool = False
    """True if a line that opens the next parameter, or the end of the call, also closes one: models forget to."""
    verbatim: tuple[str, str] = ("", "")
    """Marks around a value that is always text."""
    scope: CallScope | None = None

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call, if ``text`` is one. Takes linear time even for a malformed text."""
        head = compile_pattern(self.call).match(text)
        if head is None:
            return None
        name, at, members = head["name"], head.end(), dict[str, str]()
        schema = tools[name].parameters if name in tools else {}
        opens = compile_pattern(f" {self.parameter}")
        while opened := opens.match(text, at):
            end, at = self._end(text, opened.end())
            if end < 0:
                return None
            at += len(self.separator) * text.startswith(self.separator, at)
            kind = opened.groupdict().get("kind")
            declared = _declared(schema, opened["name"]) if kind is None else KINDS.get(kind, {})
            members[opened["name"]] = self._value(text[opened.end() : end], declared)
        return checked_call(name, spelt(members)) if not text[at:].strip() else None

    def _end(self, text: str, start: int) -> tuple[int, int]:
        """(end of a value, start of the rest); the end is negative if there is none."""
        opening, closing = self.verbatim
        if opening and text.startswith(opening, start):
            at = text.find(closing + self.end, start)
            return (at + len(closing), at + len(closing) + len(self.end)) if at >= 0 else (-1, start)
        limit = len(text)
        if self.recovers:
            following = _line_opens(self.parameter).search(text, start)
            limit = following.start() if following else limit
        at = text.find(self.end, start, limit)
        if at < 0:
            return (limit, limit) if self.recovers else (-1, start)
        return at, at + len(self.end)

    def _value(self, value: str, schema: Schema) -> str:
        opening, closing = self.verbatim
        if opening and value.startswith(opening):
            return json.dumps(value.removeprefix(opening).removesuffix(closing), ensure_ascii=False)
        if self.trims:
            value = value.removeprefix("\n").removesuffix("\n")
        return typed_value(value, schema)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NestedCall:
    """Tool-call syntax: a name, and nested tags for parameters and their parts; list entries are named ``item``.

    ``mark`` precedes every tag, so that no text looks like a tag.
    """

    call: str
    """Pattern of the text before the parameters."""
    mark: str
    item: str = "item"
    scope: CallScope | None = None

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call, if ``text`` is one."""
        head = compile_pattern(self.call).match(text)
        if head is None:
            return None
        tool = tools.get(head["name"])
        parts = text[head.end() :].split(self.mark)
        if parts.pop(0).strip():
            return None
        try:
            value = self._object(iter(parts), "", tool.parameters if tool else {}, "")
        except (ValueError, RecursionError):
            return None
        return checked_call(head["name"], value)

    def _object(self, parts: Iterator[str], before: str, schema: Schema, closing: str) -> str:
        """The JSON of everything up to the tag ``closing``, or to the end; ``before`` is the text before the parts."""
        members: dict[str, str] = {}
        items: list[str] = []
        for part in parts:
            tag, opened, text = part.partition(">")
            if not opened or not tag.startswith("<"):
                raise ValueError(f"{part!r} is not a tag")
            if tag.startswith("</"):
                if tag[2:] != closing or text.strip():
                    raise ValueError(f"{tag!r} closes nothing")
                if items or members:
                    return "[" + ", ".join(items) + "]" if items else spelt(members)
                return typed_value(before, schema)
            name = tag[1:]
            if name == self.item:
                items.append(self._object(parts, text, _schema(schema.get("items")), name))
            else:
                members[name] = self._object(parts, text, _declared(schema, name), name)
        if closing:
            raise ValueError(f"<{closing}> is not closed")
        return spelt(members)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCall:
    """Tool-call syntax: a Python call with keywords and literals, perhaps in brackets."""

    scope: CallScope | None = PYTHON_SCOPE

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call, if ``text`` is one."""
        text = text.removeprefix("[").strip()
        name = NAME.match(text)
        if name is None or not text.startswith("(", name.end()):
            return None
        for notation in (PYTHON, NESTING_PYTHON):
            try:
                arguments = notation.members(text, name.end() + 1, ")", "=")
            except ValueError:
                continue
            if arguments.end == len(text):
                return checked_call(name[0], arguments.json)
        return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCall:
    """Tool-call syntax of Gemma: ``call:edit{line:3}``."""

    scope: CallScope | None = None

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call, if ``text`` is one."""
        head = compile_pattern("call:NAME ").match(text)
        if head is None:
            return None
        try:
            return checked_call(head["name"], GEMMA.whole(text[head.end() :]))
        except ValueError:
            return None


def checked_call(name: Json, arguments: str, call_id: Json = "") -> ParsedCall | None:
    """The call, if it has a name and an object of arguments that can be sent as UTF-8."""
    if not isinstance(name, str) or not name or read_object(arguments) is None:
        return None
    call_id = call_id if isinstance(call_id, str) else ""
    if any("\ud800" <= character <= "\udfff" for text in (name, arguments, call_id) for character in text):
        return None
    return ParsedCall(name=name, arguments=arguments.strip(), call_id=call_id)


def typed_value(value: str, schema: Schema) -> str:
    """The JSON of a parameter: its value if it is JSON or a Python literal and need not be a string; else a string."""
    kind = schema.get("type")
    if not (kind == "string" or (isinstance(kind, list) and "string" in kind and value.strip() != "null")):
        stripped = value.strip()
        try:
            _, end = DECODER.raw_decode(stripped)
            if end == len(stripped):
                return stripped
        except (ValueError, RecursionError):
            pass
        try:
            literal = PYTHON.whole(stripped)
            if not literal.startswith('"'):  # a quoted value that is not JSON is a string with its quotes
                return literal
        except ValueError:
            pass
    return json.dumps(value, ensure_ascii=False)


def _declared(schema: Schema, parameter: str) -> Schema:
    """The schema of a parameter; text if the parameter is not declared."""
    properties = _schema(schema.get("properties"))
    return _schema(properties[parameter]) if parameter in properties else TEXT


def _schema(value: Json) -> Schema:
    return value if isinstance(value, dict) else {}


@cache
def _line_opens(pattern: str) -> re.Pattern[str]:
    """A line that begins with a pattern."""
    return re.compile(r"\n[ \t]*(?=" + compile_pattern(pattern).pattern + ")")
