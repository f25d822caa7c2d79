"""The text protocol of the built-in coding tools: pure.

    read FILE              → the file, lines numbered from 1    or: no file
    read FILE N            → lines N to N + 23 of it            or: no file
    edit FILE N⏎TEXT       → TEXT replaces line N: ok           or: bad edit
    test                   → PASS                               or: FAIL f(1, 2) = 3 want 4
                                                                or: FAIL tests/test_f.py::test_two - assert 3 == 4
    todo TEXT              → todo N                             an item of the list that outlives a context
    done N                 → ok                                 or: no todo
    find NAME              → paths of the files with that word  or: no file      if the recipe enables it
    submit                 → the session ends
    answer TEXT            → the session ends with this answer
    anything else          → bad call                           or: bad call: edit FILE N     if the recipe enables it

A truncated observation ends with the line ``[cut]``. A file cannot be edited if its text is incomplete because of its
length or encoding.

Owns the parsing of calls and the exact text of observations: models are mid-trained on transcripts made with these
functions and then see the same text from the real tools. Does not access a sandbox.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from etude.types import Case

READ, EDIT, TEST, TODO, DONE, SUBMIT, ANSWER = "read", "edit", "test", "todo", "done", "submit", "answer"
FIND = "find"
"""First words of calls."""
USAGE: Mapping[str, str] = MappingProxyType(
    {READ: f"{READ} FILE", EDIT: f"{EDIT} FILE N", TODO: f"{TODO} TEXT", DONE: f"{DONE} N", FIND: f"{FIND} NAME"}
)
"""First word → form of the first line, for calls with arguments."""
OK, PASS, NO_FILE, NO_TESTS, BAD_EDIT, BAD_CALL = "ok", "PASS", "no file", "no tests", "bad edit", "bad call"
NO_TODO = "no todo"
"""Constant observations."""
CUT = "[cut]"
"""The last line of a truncated observation."""
SHOWN_CHARACTERS = 24
"""Limit of a wrong result: enough to recognise it, too little to fill the context."""

WINDOW_LINES = 24
"""Number of lines that ``read FILE N`` shows: enough for a function and its surroundings."""
REPORT_CHARACTERS = 120
"""Limit of pytest's line about a failing test."""

READ_PATTERN = re.compile(rf"{READ} (\S+)(?: ([0-9]{{1,6}}))?\s*")
REPORT_PATTERN = re.compile(r"^(?:FAILED|ERROR) (.+)$", re.MULTILINE)
"""A line about a failing test in pytest's final summary."""
EDIT_PATTERN = re.compile(rf"{EDIT} (\S+) ([0-9]{{1,6}}) *\n(.*)", re.DOTALL)
TODO_PATTERN = re.compile(rf"{TODO} (\S.*)")
FIND_PATTERN = re.compile(rf"{FIND} (\S+)")
DONE_PATTERN = re.compile(rf"{DONE} ([0-9]{{1,6}})")
ANSWER_PATTERN = re.compile(rf"{ANSWER} (\S.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Tool call ``read FILE``, or ``read FILE N``."""

    path: str
    first: int | None = None
    """First line to show; ``None`` for the whole file."""


@dataclass(frozen=True, slots=True)
class EditFile:
    """Tool call ``edit FILE N`` with the text that replaces line N: one or more lines, possibly empty."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class RunTests:
    """Tool call ``test``."""


@dataclass(frozen=True, slots=True)
class FindName:
    """Tool call ``find NAME``."""

    name: str


@dataclass(frozen=True, slots=True)
class OpenItem:
    """Tool call ``todo TEXT``; the text is one line."""

    text: str


@dataclass(frozen=True, slots=True)
class CloseItem:
    """Tool call ``done N``."""

    number: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Tool call ``submit``, or ``answer TEXT``: the work is done."""

    answer: str = ""
    """The answer, if the task asks for one."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that is not a valid tool call."""


Call: TypeAlias = ReadFile | EditFile | RunTests | FindName | OpenItem | CloseItem | Submit | Malformed
"""The call in an assistant's message."""


def parse_call(text: str) -> Call:
    """Parse one tool call. Trailing white space is ignored; any other deviation is malformed."""
    if match := READ_PATTERN.fullmatch(text):
        return ReadFile(match[1], None if match[2] is None else int(match[2]))
    if match := EDIT_PATTERN.fullmatch(text):
        return EditFile(match[1], int(match[2]), match[3].removesuffix("\n"))
    words = text.rstrip()
    if match := TODO_PATTERN.fullmatch(words):
        return OpenItem(match[1])
    if match := DONE_PATTERN.fullmatch(words):
        return CloseItem(int(match[1]))
    if match := FIND_PATTERN.fullmatch(words):
        return FindName(match[1])
    if match := ANSWER_PATTERN.fullmatch(words):
        return Submit(match[1])
    if words == TEST:
        return RunTests()
    return Submit() if words == SUBMIT else Malformed()


def explain(text: str) -> str:
    """The observation of a malformed call with the form of a call of its first word: ``bad call: edit FILE N``."""
    usage = USAGE.get(text.partition(" ")[0])
    return f"{BAD_CALL}: {usage}" if usage else BAD_CALL


def list_files(name: str, texts: Mapping[str, str]) -> str:
    """Paths of the files in ``texts`` (path → text) that contain ``name`` as a word, one per line."""
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    return "\n".join(path for path, text in texts.items() if word.search(text)) or NO_FILE


def number_lines(text: str, first: int | None = None) -> str:
    """File text with line numbers: ``1 first line``, ``2 second line``, no final line break. With ``first``, only
    ``WINDOW_LINES`` lines from there.
    """
    numbered = [f"{number} {line}" for number, line in enumerate(_lines(text), start=1)]
    return "\n".join(numbered if first is None else numbered[max(first, 1) - 1 :][:WINDOW_LINES])


def apply_edit(text: str, edit: EditFile) -> str | None:
    """The file after an edit, or ``None`` if it has no such line. A final line break stays, and the replacement of a
    line with a Windows line end has Windows line ends, too.
    """
    lines = _lines(text)
    if not 1 <= edit.line <= len(lines):
        return None
    new = edit.text
    if lines[edit.line - 1].endswith("\r"):
        new = "\n".join(line.removesuffix("\r") + "\r" for line in new.split("\n"))
    lines[edit.line - 1] = new
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def render_failure(function: str, case: Case, shown: str) -> str:
    """Output of ``test`` for the first case that fails; ``shown`` is the result's ``repr`` or the exception's name."""
    arguments = ", ".join(map(repr, case.arguments))
    return f"FAIL {function}({arguments}) = {shown[:SHOWN_CHARACTERS]} want {case.expected!r}"


def render_report(output: str) -> str:
    """Output of ``test`` for the first failing test, from pytest's output."""
    match = REPORT_PATTERN.search(output)
    last_line = (output.strip().splitlines() or ["no output"])[-1]
    shown = match[1] if match else last_line
    return f"FAIL {shown[:REPORT_CHARACTERS]}"


def limit(observation: str, characters: int) -> str:
    """Truncate an observation to a number of characters; a truncated one ends with :data:`CUT`."""
    return observation if len(observation) <= characters else f"{observation[:characters]}\n{CUT}"


def shorten(observation: str) -> str | None:
    """Halve an observation and add :data:`CUT`; ``None`` if nothing else is left."""
    shown = observation.removesuffix(CUT).rstrip()
    if not shown:
        return None
    head = shown[: len(shown) // 2].rstrip()
    return f"{head}\n{CUT}" if head else CUT


def _lines(text: str) -> list[str]:
    """Lines as an editor counts them; only ``\\n`` ends a line, as in Python source."""
    return text.removesuffix("\n").split("\n") if text else []
