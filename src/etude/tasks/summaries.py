"""The summaries family: describe a short function of Python's standard library in one line.

    sum up                         the prompt: real code without comments and docstring
    def first(items):
        return items[0]

    answer first returns items[0]  the agent's answer, in one turn

A judge with a rubric grades the line (``recipes/summaries``). In addition the line above is *the* reference answer, so
that an evaluation also has a number that does not depend on a judge (:mod:`etude.rewards.graders.functions`).

Whole modules are held out by the hash of their names, so they are the same for every seed. Owns the functions, the
split and the mid-training corpus. The library is that of the running Python: another version has other functions.
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from textwrap import dedent

import orjson

from etude.config.section import Section
from etude.harnesses.tools import ANSWER
from etude.protocols import FamilyContext
from etude.tasks.corpora.transcripts import Message
from etude.tasks.heldout import in_turns
from etude.types import AnswerChecks, Split, Task

REQUEST = "sum up"
"""The first line of a prompt."""
MOST_LINES, MOST_CHARACTERS = 5, 150
"""Largest function, in lines and characters: limited by a small model's context."""
LONGEST_NAME, LONGEST_RETURN = 14, 26
"""In characters."""
WELL, MISTAKE = 0.25, 0.25
"""Shares of an imperfect agent's lines that are well written, and that describe another function's result."""
SLOPPY = (
    "I think {name} returns {returned}",
    "it probably returns {returned}!",
    "hm, maybe {returned}",
    "{name} basically just returns {returned}, I guess",
    "this function simply gives {returned}!",
)
"""Phrases of badly written summaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarisedFunction:
    """A function whose only ``return`` is its last statement."""

    module: str
    name: str
    text: str
    returned: str

    @property
    def line(self) -> str:
        """The right summary."""
        return f"{self.name} returns {self.returned}"


class SummariesFamily:
    """A few hundred functions to summarise; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: Section, context: FamilyContext) -> "SummariesFamily":
        """The family of a recipe."""
        return cls(heldout_every=context.heldout_every)

    def __init__(self, *, heldout_every: int) -> None:
        functions = sorted(library(), key=lambda one: hashlib.sha256(one.text.encode()).digest())
        sides = {
            split: [one for one in functions if is_heldout(one.module, heldout_every) == (split is Split.HELDOUT)]
            for split in Split
        }
        self._functions: Mapping[Split, Sequence[SummarisedFunction]] = {
            split: in_turns(functions, lambda one: one.module) for split, functions in sides.items()
        }

    def size(self, split: Split) -> int | None:
        """Number of functions of a split."""
        return len(self._functions[split])

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split, in round-robin order over modules."""
        return _task(self._functions[split][index], split)

    def function(self, split: Split, rng: Random) -> SummarisedFunction:
        """Draw a function."""
        return rng.choice(self._functions[split])


class SummaryDemonstrations:
    """The family's demonstrations for mid-training; implements :class:`~etude.tasks.corpora.corpus.Demonstrations`."""

    def __init__(self, family: SummariesFamily, split: Split) -> None:
        self._family = family
        self._split = split

    def code(self, rng: Random) -> str:
        """A function and its summary: an exercise in copying."""
        function = self._exchanged(rng)
        return f"{function.text}\n# {function.line}"

    def session(self, rng: Random) -> Sequence[Message]:
        """A function summarised by an agent that finds the result but usually writes badly."""
        function = self._exchanged(rng)
        message = self._family.function(self._split, rng) if rng.random() < MISTAKE else function
        phrase = "{name} returns {returned}" if rng.random() < WELL else rng.choice(SLOPPY)
        line = phrase.format(name=function.name, returned=message.returned)
        return [Message("user", prompt_of(function)), Message("assistant", f"{ANSWER} {line}")]

    def _exchanged(self, rng: Random) -> SummarisedFunction:
        """A function made from three: the body of one, the name of another, the result of a third. A model could
        memorise a few hundred right lines; this many combinations it must copy.
        """
        one, name, returned = (self._family.function(self._split, rng) for _ in range(3))
        body = one.text.removeprefix(f"def {one.name}").removesuffix(one.returned)
        text = f"def {name.name}{body}{returned.returned}"
        return SummarisedFunction(module=one.module, name=name.name, text=text, returned=returned.returned)


def prompt_of(function: SummarisedFunction) -> str:
    """The prompt of a summary task."""
    return f"{REQUEST}\n{function.text}"


def is_heldout(module: str, one_in: int) -> bool:
    """True if a module's functions are held out."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % one_in == 0


@cache
def library() -> Sequence[SummarisedFunction]:
    """All short functions of the library's modules, in order, each text once."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    by_text: dict[str, SummarisedFunction] = {}
    for file in sorted(folder.glob("*.py")):
        for function in functions_of(file.stem, file.read_text(encoding="utf-8", errors="replace")):
            by_text.setdefault(function.text, function)
    return tuple(by_text.values())


def functions_of(module: str, source: str) -> Iterator[SummarisedFunction]:
    """The short functions of a source text whose only ``return`` is their last statement."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            last = node.body[-1]
            if isinstance(last, ast.Return) and last.value is not None and _exits(node) == 1:
                function = SummarisedFunction(
                    module=module, name=node.name, text=_text(node, lines), returned=_segment(last.value, lines)
                )
                if _is_short(function):
                    yield function


def _exits(node: ast.FunctionDef) -> int:
    """Number of returns, inner functions and lambdas: 1 means one return and none of the others."""
    return sum(isinstance(inner, (ast.Return, ast.FunctionDef, ast.Lambda)) for inner in ast.walk(node)) - 1


def _segment(value: ast.expr, lines: Sequence[str]) -> str:
    """The text of an expression; empty if it has several lines."""
    if value.end_lineno != value.lineno:
        return ""
    return lines[value.lineno - 1].encode()[value.col_offset : value.end_col_offset].decode()


def _text(node: ast.FunctionDef, lines: Sequence[str]) -> str:
    """The lines of a function without docstring, comments and empty lines."""
    left_out: range = range(0)
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        left_out = range(first.lineno, (first.end_lineno or first.lineno) + 1)
    numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    selected = [lines[number - 1] for number in numbers if number not in left_out]
    return dedent("\n".join(line.rstrip() for line in selected if line.strip() and not line.lstrip().startswith("#")))


def _is_short(function: SummarisedFunction) -> bool:
    text, returned = function.text, function.returned
    plain = text.isascii() and "\t" not in text and "#" not in text and text.startswith(f"def {function.name}(")
    fits = len(text) <= MOST_CHARACTERS and text.count("\n") < MOST_LINES and len(function.name) <= LONGEST_NAME
    ends = re.search(r"return (.*)\Z", text)
    return plain and fits and 0 < len(returned) <= LONGEST_RETURN and ends is not None and ends[1] == returned


def _task(function: SummarisedFunction, split: Split) -> Task:
    identity = orjson.dumps([function.text, function.line])
    return Task(
        task_id=hashlib.sha256(identity).hexdigest()[:16],
        family="summaries",
        template=function.module,
        split=split,
        prompt=prompt_of(function),
        files={},
        checks=AnswerChecks(answer=function.line),
    )
