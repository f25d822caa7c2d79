"""Grammars of tool calls and reasoning, and the detection of a call's end in streamed text.

    text <tool_call>{"name": …}</tool_call> <tool_call>{…}</tool_call>
         opening    form       closing     again

Owns the types, and the end of a call. Does not own the syntax of one call (:mod:`etude.tokens.call_syntax`), the table
of grammars (:mod:`etude.tokens.grammars`), the choice for a checkpoint (:mod:`etude.tokens.grammar_detection`), the
incremental parsing of a reply (:mod:`etude.tokens.reader`) or calls in a prompt (the chat template).

A text that its grammar rejects is not a call; the caller receives it as text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from etude.tokens.messages import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One tool call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object, as text."""
    call_id: str = ""
    """The id that the model wrote, if the grammar has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallScope:
    """The brackets around the arguments of a call; inside them, marks within quotes are text."""

    opening: str
    closing: str
    quotes: str


JSON_SCOPE = CallScope(opening="{", closing="}", quotes='"')
PYTHON_SCOPE = CallScope(opening="(", closing=")", quotes="\"'")


class CallForm(Protocol):
    """One syntax of a call between its marks."""

    @property
    def scope(self) -> CallScope | None:
        """The brackets around its arguments; ``None`` if only marks delimit them."""
        ...

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """Parse ``text`` as a call, with ``tools`` by name; ``None`` if it is not a call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The marks around a model's reasoning."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One grammar of tool calls."""

    name: str
    form: CallForm
    openings: tuple[str, ...] = ()
    """Marks before a call, one or several."""
    starts: tuple[str, ...] = ()
    """Beginnings of a call that needs no opening."""
    again: tuple[str, ...] = ()
    """Further beginnings of a call directly after another one."""
    closings: tuple[str, ...] = ()
    """Marks that end a call, outside of quotes; empty if a call ends with its scope."""
    between: tuple[str, ...] = ()
    """Marks between and after calls, which are dropped."""
    inside: tuple[str, ...] = ()
    """Marks within a call."""
    framing: tuple[str, ...] = ()
    """Marks around text, which are dropped."""
    first: bool = False
    """True if calls open only where a reply begins."""
    short_ids: bool = False
    """True if the template accepts only call ids of nine letters and digits."""
    thinking: Thinking | None = None
    """The marks of thoughts that are specific to this grammar."""
    sign: str = ""
    """Text in a template by which it has this grammar if it renders no call; empty for never."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark; special tokens in them must be decoded to text so that calls are found."""
        parts = (self.openings, self.starts, self.again, self.closings, self.between, self.inside, self.framing)
        return tuple(mark for part in parts for mark in part)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """Parse a call from its opening to its closing, which may be missing if the call has a scope."""
        text = text.strip()
        while opening := next((mark for mark in self.openings if text.startswith(mark)), None):
            text = text.removeprefix(opening).lstrip()
        if self.form.scope is None and not text.endswith(self.closings):
            return None
        while closing := next((mark for mark in self.closings if text.endswith(mark)), None):
            text = text.removesuffix(closing).rstrip()
        return self.form.read(text, tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMarks:
    """The reply grammar of one checkpoint."""

    grammar: Grammar | None = None
    """``None`` if there are no calls."""
    thinking: Thinking | None = None
    """``None`` if there are no thoughts."""
    starts_thinking: bool = False
    """True if the template opens the thoughts at the end of the prompt."""


THINKING = (Thinking(opening="<think>", closing="</think>"), Thinking(opening="[THINK]", closing="[/THINK]"))
"""The marks of thoughts in checkpoints."""


def thinking_of(template: str) -> Thinking | None:
    """The marks of thoughts in a chat template; ``None`` if it has none."""
    return next((marks for marks in THINKING if marks.closing in template), None)


class CallEnd:
    """Finds the end of a call in streamed text; reads every character once per closing mark.

    A closing mark inside a quoted string is text, e.g. if a call writes a file about tool calls.
    """

    def __init__(self, grammar: Grammar, start: int) -> None:
        self.start = start
        """Offset of the call."""
        self._scope = grammar.form.scope
        self._closing = re.compile("|".join(map(re.escape, grammar.closings))) if grammar.closings else None
        self._longest = max(map(len, grammar.closings), default=0)
        self._at = start  # next character to look at
        self._search = start  # where the next closing mark may begin
        self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int | None:
        """The end of the call in ``text``, which extends the text of the last call; ``None`` if there is none yet."""
        if self._closing is None:
            return self._scan(text, len(text), to_scope_end=True)
        while match := self._closing.search(text, self._search):
            self._scan(text, match.start(), to_scope_end=False)
            if not self._quote:
                return match.end()
            self._search = match.start() + 1
        self._search = max(self._search, len(text) - self._longest + 1)
        return None

    def _scan(self, text: str, limit: int, *, to_scope_end: bool) -> int | None:
        """Track quotes and the scope's brackets up to ``limit``; with ``to_scope_end`` return the end of the scope."""
        scope = self._scope
        while scope is not None and self._at < limit:
            marks = f"{self._quote}\\" if self._quote else scope.opening + scope.closing + scope.quotes
            match = _any_of(marks).search(text, self._at, limit)
            if match is None:
                self._at = limit
                return None
            mark, self._at = match[0], match.end()
            if mark == "\\":
                self._at += 1
            elif self._quote:
                self._quote = ""
            elif mark in scope.quotes:
                self._quote = mark if self._depth > 0 else ""
            else:
                self._depth += 1 if mark == scope.opening else -1
                if to_scope_end and mark == scope.closing and self._depth <= 0:
                    return self._at
        return None


@cache
def _any_of(marks: str) -> re.Pattern[str]:
    return re.compile("[" + re.escape(marks) + "]")
