"""Grammars of tool calls and reasoning, and the detection of a call's end in streamed text.

    text <tool_call>{"name": …}</tool_call> <tool_call>{…}</tool_call>
         opening    form       closing     again

Owns the nouns, and the end of a call. Does not own how one call is written (:mod:`etude.tokens.call_syntax`), the table
of grammars (:mod:`etude.tokens.grammars`), which of them a checkpoint has (:mod:`etude.tokens.grammar_detection`), how
a reply is read while it comes (:mod:`etude.tokens.reader`) or how calls look in a prompt (the chat template).

A text that its grammar does not take is no call, and its caller sees it as the text it is.
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
    """Positions where the grammar carries one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallScope:
    """The brackets that hold the arguments of a call together; inside of them quotes make text of every mark."""

    opening: str
    closing: str
    quotes: str


JSON_SCOPE = CallScope(opening="{", closing="}", quotes='"')
PYTHON_SCOPE = CallScope(opening="(", closing=")", quotes="\"'")


class CallForm(Protocol):
    """One syntax of a call between its marks."""

    @property
    def scope(self) -> CallScope | None:
        """The brackets around its arguments; ``None`` where only marks hold them together."""
        ...

    def read(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call that ``text`` is, by the tools of that name; ``None`` if it is none."""
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
    """Any of these, or several, stand before a call and say nothing else."""
    starts: tuple[str, ...] = ()
    """A call may itself begin like this, without an opening."""
    again: tuple[str, ...] = ()
    """So may one directly behind another one."""
    closings: tuple[str, ...] = ()
    """Any of these ends a call, outside of quotes; none where a call ends with its scope."""
    between: tuple[str, ...] = ()
    """Says nothing, between and behind calls."""
    inside: tuple[str, ...] = ()
    """Marks within a call."""
    framing: tuple[str, ...] = ()
    """Says nothing, around text."""
    first: bool = False
    """True if calls open only where a reply begins."""
    short_ids: bool = False
    """True if the template takes call ids of nine letters and digits only."""
    thinking: Thinking | None = None
    """The marks of thoughts that come with these calls alone."""
    sign: str = ""
    """A checkpoint has this grammar if its template mentions this and shows no call; empty: never."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark; special tokens in them must be spelt for a call to be seen."""
        parts = (self.openings, self.starts, self.again, self.closings, self.between, self.inside, self.framing)
        return tuple(mark for part in parts for mark in part)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedCall | None:
        """The call from its opening to its closing, which it may lack if its scope says that it is whole."""
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
    """``None``: all is text."""
    thinking: Thinking | None = None
    """``None``: there are no thoughts."""
    starts_thinking: bool = False
    """True if the template opens the thoughts at the end of the prompt."""


THINKING = (Thinking(opening="<think>", closing="</think>"), Thinking(opening="[THINK]", closing="[/THINK]"))
"""The pairs of marks that checkpoints think between."""


def thinking_of(template: str) -> Thinking | None:
    """The marks between which the model of a chat template thinks; ``None`` if it does not."""
    return next((marks for marks in THINKING if marks.closing in template), None)


class CallEnd:
    """Finds the end of a call in streamed text; every character is read once for each closing mark.

    A closing mark inside of a quoted string is text, e.g. where a call writes a file about tool calls.
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
        """The end of the call in ``text``, which begins as it did last time; ``None`` if it has none yet."""
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
        """Follow quotes and the scope's brackets up to ``limit``; says where the scope ends, if that is asked for."""
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
