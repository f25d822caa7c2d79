"""How models write tool calls and thoughts: grammars as data, and pure parsers of one call each.

Owns the marks of each grammar, where a call ends, how its text becomes a name and arguments, and which grammar a
checkpoint has. Does not own how a reply is read while it comes (:mod:`etude.tokens.reader`)
or how calls look in a prompt (the chat template).

A text that its grammar's parser does not take is no call, and its caller sees it as the text it is. Arguments that are
JSON keep the spelling that the model gave them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from etude.tokens.messages import Tool
from etude.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object, as text."""
    call_id: str = ""
    """Where the grammar carries one."""


Parser: TypeAlias = Callable[[str, Mapping[str, Tool]], ParsedCall | None]
"""(a call from its opening to its closing, tools by name) → the call, or ``None`` if it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One way to write tool calls."""

    name: str
    sign: str
    """What only templates with this grammar contain."""
    openings: tuple[str, ...]
    """Any of these begins a call."""
    parse: Parser
    closing: str = ""
    """Ends a call, outside of JSON strings; empty where a call ends with its first JSON object."""
    again: tuple[str, ...] = ()
    """Begins a call, too, directly behind another one."""
    between: tuple[str, ...] = ()
    """Says nothing, between and behind calls."""
    inside: tuple[str, ...] = ()
    """Marks within a call."""
    json: bool = True
    """Whether a call holds a JSON object."""
    first: bool = False
    """Whether calls open only where a reply begins."""
    short_ids: bool = False
    """Whether the template takes call ids of nine letters and digits only."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark; those that are special tokens must be spelt for a call to be seen."""
        return (*self.openings, self.closing, *self.between, *self.inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The marks around what a model thinks before it speaks."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMarks:
    """What has a meaning in the replies of one checkpoint."""

    grammar: Grammar | None = None
    """``None``: all is text."""
    thinking: Thinking | None = None
    """``None``: there are no thoughts."""
    starts_thinking: bool = False
    """Whether the template opens the thoughts at the end of the prompt."""


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Reads JSON as the standard has it: ``NaN`` and kin are none."""
SPACE = re.compile(r"[ \t\r\n]*")
"""What JSON allows between its parts."""


def read_object(text: str) -> dict[str, tuple[Json, str]] | None:
    """The members of a JSON object: name → (value, its spelling). ``None`` if ``text`` is anything else."""
    members: dict[str, tuple[Json, str]] = {}
    try:
        at = _skip(text, 0, "{")
        if text[at : at + 1] != "}":
            while True:
                name, at = DECODER.raw_decode(text, at)
                start = _skip(text, at, ":")
                value, end = DECODER.raw_decode(text, start)
                if not isinstance(name, str):
                    return None
                members[name] = (value, text[start:end])
                at = _space(text, end)
                if text[at : at + 1] == "}":
                    break
                at = _skip(text, at, ",")
        return members if _space(text, at + 1) == len(text) else None
    except (ValueError, RecursionError):
        return None


def _skip(text: str, at: int, mark: str) -> int:
    at = _space(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark!r} at {at}")
    return _space(text, at + 1)


def _space(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    return match.end() if match else at


def _call_object(text: str, keys: tuple[str, ...] = ("arguments",)) -> ParsedCall | None:
    """``{"name": …, "arguments": {…}}``; arguments may be a JSON object inside a string, as the OpenAI API has them."""
    members = read_object(text)
    if members is None:
        return None
    name, _ = members.get("name", (None, ""))
    call_id, _ = members.get("id", ("", ""))
    arguments, spelling = next((members[key] for key in keys if key in members), (None, ""))
    if isinstance(arguments, str):
        spelling = arguments
    elif not isinstance(arguments, dict):
        return None
    return _parsed(name, spelling, call_id)


def _parsed(name: Json, arguments: str, call_id: Json = "") -> ParsedCall | None:
    """The call, if it has a name and an object for arguments that can be sent as UTF-8."""
    if not isinstance(name, str) or not name or read_object(arguments) is None:
        return None
    call_id = call_id if isinstance(call_id, str) else ""
    if any("\ud800" <= character <= "\udfff" for text in (name, arguments, call_id) for character in text):
        return None
    return ParsedCall(name=name, arguments=arguments.strip(), call_id=call_id)


def _hermes(text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
    return _call_object(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))


def _llama(text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
    return _call_object(text.removeprefix("<|python_tag|>"), keys=("parameters", "arguments"))


MISTRAL_CALL = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)
"""``name[CALL_ID]id[ARGS]{…}``; the id came later and went again, and some checkpoints leave ``[ARGS]`` out."""


def _mistral(text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
    body = text.removeprefix("[TOOL_CALLS]").lstrip()
    if body.startswith(("[", "{")):
        return _call_object(body.removeprefix("["))
    match = MISTRAL_CALL.fullmatch(body)
    return _parsed(match[1], match[3], match[2] or "") if match else None


DEEPSEEK_CALL = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
    r"(?:function<｜tool▁sep｜>(?P<old>[^\n]+)\n```json\n(?P<fenced>.*)\n```|(?P<name>.+?)<｜tool▁sep｜>(?P<bare>.*))\s*",
    re.DOTALL,
)
"""V3 and R1 name a type and fence their JSON, V3.1 does not."""


def _deepseek(text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
    match = DEEPSEEK_CALL.fullmatch(text.removesuffix("<｜tool▁call▁end｜>"))
    if match is None:
        return None
    return _parsed((match["old"] or match["name"]).strip(), match["fenced"] or match["bare"] or "")


KIMI_CALL = re.compile(
    r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
    r"(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*)",
    re.DOTALL,
)
"""``functions.name:0`` is both id and name."""


def _kimi(text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
    match = KIMI_CALL.fullmatch(text.removesuffix("<|tool_call_end|>"))
    if match is None:
        return None
    return _parsed(match["name"], match["arguments"], match["id"] if ":" in match["id"] else "")


CODER_CALL = re.compile(
    r"<tool_call>\s*<function=([^\s>]+)>(.*)</function>\s*(?:</tool_call>)?",
    re.DOTALL,
)
CODER_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
"""One line break on either side of a value belongs to the grammar."""


def _qwen_coder(text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
    match = CODER_CALL.fullmatch(text)
    if match is None:
        return None
    name, body, at = match[1], match[2].strip(), 0
    schema = tools[name].parameters if name in tools else {}
    members: dict[str, str] = {}
    while at < len(body):
        parameter = CODER_PARAMETER.match(body, at)
        if parameter is None:
            return None
        members[parameter[1]] = _typed(parameter[2], _type(schema, parameter[1]))
        at = parameter.end()
    spelt = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items()]
    return _parsed(name, "{" + ", ".join(spelt) + "}")


def _type(schema: Mapping[str, Json], parameter: str) -> Json:
    """The declared type of a parameter; text where the parameter is not declared."""
    properties = schema.get("properties")
    declared = properties.get(parameter) if isinstance(properties, dict) else None
    return declared.get("type") if isinstance(declared, dict) else "string"


def _typed(value: str, kind: Json) -> str:
    """The JSON of an XML parameter: its own where it is JSON and the schema asks for more than text."""
    is_text = kind == "string" or (isinstance(kind, list) and "string" in kind and value.strip() != "null")
    if not is_text:
        try:
            _, end = DECODER.raw_decode(value.strip())
            if end == len(value.strip()):
                return value.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)


HERMES = Grammar(name="hermes", sign="<tool_call>", openings=("<tool_call>",), closing="</tool_call>", parse=_hermes)
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen2.5, Qwen3, and étude's own format."""
QWEN_CODER = Grammar(
    name="qwen-coder",
    sign="<function=",
    openings=("<tool_call>",),
    closing="</tool_call>",
    parse=_qwen_coder,
    json=False,
)
"""``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>``: Qwen3-Coder."""
LLAMA = Grammar(
    name="llama",
    sign="ipython",
    openings=("<|python_tag|>", '{"name"', '{ "name"', '{\n"name"', '{\n  "name"', '{\n    "name"', '{"type"'),
    again=("{",),
    between=(";",),
    first=True,
    parse=_llama,
)
"""``{"name": …, "parameters": {…}}`` and nothing else, or several behind semicolons: Llama 3.1 and later."""
MISTRAL = Grammar(
    name="mistral",
    sign="[TOOL_CALLS]",
    openings=("[TOOL_CALLS]",),
    again=("{",),
    between=(",", "]"),
    inside=("[CALL_ID]", "[ARGS]"),
    parse=_mistral,
    short_ids=True,
)
"""``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` since version 11."""
DEEPSEEK = Grammar(
    name="deepseek",
    sign="<｜tool▁call▁begin｜>",
    openings=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    closing="<｜tool▁call▁end｜>",
    between=("<｜tool▁calls▁end｜>",),
    inside=("<｜tool▁sep｜>",),
    parse=_deepseek,
)
"""``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`` inside of a section: DeepSeek V3, V3.1, R1."""
KIMI = Grammar(
    name="kimi",
    sign="<|tool_call_argument_begin|>",
    openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    closing="<|tool_call_end|>",
    between=("<|tool_calls_section_end|>",),
    inside=("<|tool_call_argument_begin|>",),
    parse=_kimi,
)
"""``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`` in a section: Kimi K2."""

GRAMMARS = (KIMI, DEEPSEEK, QWEN_CODER, HERMES, MISTRAL, LLAMA)
"""In the order in which their signs are looked for: Qwen3-Coder's templates have Hermes' sign, too."""
THINKING = (Thinking(opening="<think>", closing="</think>"), Thinking(opening="[THINK]", closing="[/THINK]"))
"""The pairs of marks that checkpoints think between."""


def grammar_of(template: str) -> Grammar | None:
    """The grammar of a chat template, by its sign; ``None`` if it has none that is known."""
    return next((grammar for grammar in GRAMMARS if grammar.sign in template), None)


def thinking_of(template: str) -> Thinking | None:
    """The marks between which the model of a chat template thinks; ``None`` if it does not."""
    return next((marks for marks in THINKING if marks.closing in template), None)


_OUTSIDE = re.compile(r'["{}]')
_INSIDE = re.compile(r'["\\]')


class CallEnd:
    """Finds where a call ends in a text that grows; every character is looked at once.

    A closing mark inside of a JSON string is text, e.g. where a call writes a file about tool calls.
    """

    def __init__(self, grammar: Grammar, start: int) -> None:
        self.start = start
        """Where the call begins."""
        self._grammar = grammar
        self._at = start  # next character to look at
        self._search = start  # where the next closing mark may begin
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The end of the call in ``text``, which begins as it did last time; ``None`` if it has none yet."""
        closing = self._grammar.closing
        if not closing:
            return self._scan(text, len(text), to_object_end=True)
        while True:
            at = text.find(closing, self._search)
            if at < 0:
                self._search = max(self._search, len(text) - len(closing) + 1)
                return None
            if self._grammar.json:
                self._scan(text, at, to_object_end=False)
            if not self._in_string:
                return at + len(closing)
            self._search = at + 1

    def _scan(self, text: str, limit: int, *, to_object_end: bool) -> int | None:
        """Follow strings and braces up to ``limit``; says where the outermost object ends, if that is asked for."""
        while self._at < limit:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            match = pattern.search(text, self._at, limit)
            if match is None:
                self._at = limit
                return None
            mark, self._at = match[0], match.end()
            if mark == '"':
                self._in_string = not self._in_string and self._depth > 0
            elif mark == "\\":
                self._at += 1
            else:
                self._depth += 1 if mark == "{" else -1
                if to_object_end and mark == "}" and self._depth <= 0:
                    return self._at
        return None
