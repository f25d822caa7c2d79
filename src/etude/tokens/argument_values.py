"""Tool-call arguments as text: members of JSON objects as they were spelled, and values that are nearly JSON.

    {'a': [1, "b"], 'c': True}          Python: either quote, True and None, tuples
    {a:[1,<|"|>b<|"|>],c:true}          Gemma: a quote of its own, names bare

Owns the parsing of one such value into JSON text, in linear time. A number keeps its spelling. Does not own calls
(:mod:`etude.tokens.call_syntax`).
"""

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from etude.types import Json

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
"""Constants of either language → JSON."""
SPACE = re.compile(r"\s*")
JSON_SPACE = re.compile(r"[ \t\r\n]*")
"""White space that JSON allows between its parts."""
NAME = re.compile(r"[^\W\d][\w.\-$]*")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U(00(?:0\d|10|0[a-fA-F])[0-9a-fA-F]{4})|(.))", re.DOTALL)
BEHIND_VALUE = re.compile(r"\s*(?:[)\]}:]|\Z|,\s*(?:[\[{('\"\d-]|[^\W\d]\w*\s*[=,)\]}]))")
"""Text that may follow a string: an end, a colon, or a comma and another value or name."""
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
"""Character behind a backslash → its meaning; quotes, slashes and backslashes mean themselves."""
PLAIN = "\\'\"/"
DEEPEST = 100
"""Nested values; no tool takes more."""


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Parses standard JSON: without ``NaN`` and infinities."""


class Read(NamedTuple):
    """A parsed part of a text."""

    json: str
    end: int
    """Index at which the rest of the text begins."""


@dataclass(frozen=True, slots=True)
class ValueNotation:
    """One notation of values. Its methods raise ``ValueError`` for a text in another notation."""

    quotes: tuple[str, ...]
    escapes: bool
    """True if a backslash in a string is an escape."""
    nested: bool = False
    """True if a quote ends a string only if the text after it may follow a value."""

    def whole(self, text: str) -> str:
        """The JSON of a text that is one value and nothing else."""
        read = self.value(text, _skip(text, 0))
        if _skip(text, read.end) != len(text):
            raise ValueError(f"more than a value: {text[read.end : read.end + 20]!r}")
        return read.json

    def value(self, text: str, at: int, depth: int = 0) -> Read:
        """The value that begins at ``at``."""
        if depth > DEEPEST:
            raise ValueError(f"values nested deeper than {DEEPEST}")
        for quote in self.quotes:
            if text.startswith(quote, at):
                string, end = self._string(text, at + len(quote), quote)
                return Read(json.dumps(string, ensure_ascii=False), end)
        match text[at : at + 1]:
            case "{":
                return self.members(text, at + 1, "}", ":", depth)
            case "[":
                return self._items(text, at + 1, "]", depth)
            case "(":
                return self._items(text, at + 1, ")", depth)
        if number := NUMBER.match(text, at):
            return Read(number[0], number.end())
        if (word := NAME.match(text, at)) and word[0] in WORDS:
            return Read(WORDS[word[0]], word.end())
        raise ValueError(f"no value at {at}: {text[at : at + 20]!r}")

    def members(self, text: str, at: int, closing: str, between: str, depth: int = 0) -> Read:
        """The object whose members (``name``, ``between``, value) end with ``closing``; commas may be left out."""
        members: dict[str, str] = {}
        while not text.startswith(closing, at := _skip(text, at)):
            name, at = self._name(text, at)
            at = _expect(text, _skip(text, at), between)
            member = self.value(text, _skip(text, at), depth + 1)
            members[name] = member.json
            at = _comma(text, member.end)
        return Read(spelt(members), at + len(closing))

    def _items(self, text: str, at: int, closing: str, depth: int) -> Read:
        items: list[str] = []
        while not text.startswith(closing, at := _skip(text, at)):
            item = self.value(text, at, depth + 1)
            items.append(item.json)
            at = _comma(text, item.end)
        return Read("[" + ", ".join(items) + "]", at + len(closing))

    def _name(self, text: str, at: int) -> tuple[str, int]:
        for quote in self.quotes:
            if text.startswith(quote, at):
                return self._string(text, at + len(quote), quote)
        if name := NAME.match(text, at):
            return name[0], name.end()
        raise ValueError(f"no name at {at}: {text[at : at + 20]!r}")

    def _string(self, text: str, at: int, quote: str) -> tuple[str, int]:
        end = text.find(quote, at)
        while end >= 0 and self._is_inside(text, at, end, quote):
            end = text.find(quote, end + len(quote))
        if end < 0:
            raise ValueError(f"a string that begins at {at} has no end")
        string = text[at:end]
        return (ESCAPE.sub(_unescaped, string) if self.escapes else string), end + len(quote)

    def _is_inside(self, text: str, start: int, at: int, quote: str) -> bool:
        """True if the quote at ``at`` belongs to the string."""
        is_escaped = self.escapes and _is_escaped(text, start, at)
        return is_escaped or (self.nested and BEHIND_VALUE.match(text, at + len(quote)) is None)


PYTHON = ValueNotation(("'", '"'), escapes=True)
"""Literals of Python and JSON."""
NESTING_PYTHON = ValueNotation(("'", '"'), escapes=True, nested=True)
"""The same from models that forget to escape quotes: ``'sed -n '3,4p' f.py'``."""
GEMMA = ValueNotation(('<|"|>',), escapes=False)
"""Notation of Gemma 4: the quote is a control token, so nothing needs an escape."""


def spelt(members: dict[str, str]) -> str:
    """A JSON object from members whose values are JSON text."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members.items()) + "}"


def read_object(text: str) -> dict[str, tuple[Json, str]] | None:
    """Parse the members of a JSON object: name → (value, its spelling). ``None`` if ``text`` is anything else."""
    members: dict[str, tuple[Json, str]] = {}
    try:
        at = _behind(text, 0, "{")
        if text[at : at + 1] != "}":
            while True:
                name, at = DECODER.raw_decode(text, at)
                start = _behind(text, at, ":")
                value, end = DECODER.raw_decode(text, start)
                if not isinstance(name, str):
                    return None
                members[name] = (value, text[start:end])
                at = _skip(text, end, JSON_SPACE)
                if text[at : at + 1] == "}":
                    break
                at = _behind(text, at, ",")
        return members if _skip(text, at + 1, JSON_SPACE) == len(text) else None
    except (ValueError, RecursionError):
        return None


def _behind(text: str, at: int, mark: str) -> int:
    """Index behind a mark of JSON and the white space around it."""
    return _skip(text, _expect(text, _skip(text, at, JSON_SPACE), mark), JSON_SPACE)


def _skip(text: str, at: int, space: re.Pattern[str] = SPACE) -> int:
    match = space.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, mark: str) -> int:
    if not text.startswith(mark, at):
        raise ValueError(f"expected {mark!r} at {at}, not {text[at : at + 20]!r}")
    return at + len(mark)


def _comma(text: str, at: int) -> int:
    at = _skip(text, at)
    return at + text.startswith(",", at)


def _is_escaped(text: str, start: int, at: int) -> bool:
    """True if an odd number of backslashes stands before ``at``."""
    first = at
    while first > start and text[first - 1] == "\\":
        first -= 1
    return (at - first) % 2 == 1


def _unescaped(match: "re.Match[str]") -> str:
    if code := match[1] or match[2] or match[3]:
        return chr(int(code, 16))
    return ESCAPED.get(match[4], match[4] if match[4] in PLAIN else match[0])
