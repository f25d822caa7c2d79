"""Corpora of the next-edit family for mid-training: right suggestions, and careless ones.

The careless agent knows the form of a suggestion and makes one even if unsure: the old name stays, a wrong name is
inserted, a word is lost, the end is missing. Sometimes it suggests nothing, without a reason. Reinforcement learning
adds care, and no suggestion where that is better (:mod:`etude.tasks.nextedit`).
"""

import re
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import TypeAlias

from etude.config.tasks import NextEditOptions
from etude.harnesses.tools import ANSWER, SUBMIT
from etude.tasks.corpora.transcripts import Message
from etude.tasks.nextedit import LineEdit, NextEditFamily
from etude.types import Split

SILENT = 0.2
"""Share of sessions without a suggestion."""
CHUNK = re.compile(r"\w+|[^\w\s]")

Mistake: TypeAlias = Callable[[LineEdit, str, Random], str]
"""Makes a wrong line from an edit, another name and a random generator."""


def keep_old(edit: LineEdit, other: str, rng: Random) -> str:
    """Careless suggestion: the line unchanged."""
    return edit.site.cursor.text


def take_another(edit: LineEdit, other: str, rng: Random) -> str:
    """Careless suggestion: a wrong name."""
    return edit.site.cursor.renamed(edit.site.name, other)


def lose_a_chunk(edit: LineEdit, other: str, rng: Random) -> str:
    """Careless suggestion: a missing word or sign."""
    chunk = rng.choice(list(CHUNK.finditer(edit.line)))
    return (edit.line[: chunk.start()] + edit.line[chunk.end() :]).strip()


def stop_early(edit: LineEdit, other: str, rng: Random) -> str:
    """Careless suggestion: only the beginning of the line."""
    return edit.line[: rng.randrange(len(edit.line) // 2, len(edit.line) - 1)]


MISTAKES: Mapping[str, Mistake] = MappingProxyType(
    {"old": keep_old, "another": take_another, "lost": lose_a_chunk, "early": stop_early}
)


class NextEditDemonstrations:
    """Edits and suggestions of one side; implements :class:`~etude.tasks.corpora.corpus.Demonstrations`."""

    def __init__(self, family: NextEditFamily, options: NextEditOptions, split: Split = Split.TRAIN) -> None:
        self._family = family
        self._options = options
        self._split = split

    def code(self, rng: Random) -> list[Message]:
        """An edit and the right suggestion."""
        edit = self._family.edit(self._split, rng)
        return [Message("user", edit.prompt), Message("assistant", f"{ANSWER} {edit.line}")]

    def session(self, rng: Random) -> list[Message]:
        """An edit and the answer of the careless agent: a suggestion or none."""
        edit = self._family.edit(self._split, rng)
        return [Message("user", edit.prompt), Message("assistant", self._utterance(edit, rng))]

    def _utterance(self, edit: LineEdit, rng: Random) -> str:
        if rng.random() < SILENT:
            return SUBMIT
        if rng.random() < self._options.right_edit:
            return f"{ANSWER} {edit.line}"
        mistake = MISTAKES[rng.choice(sorted(MISTAKES))]
        return f"{ANSWER} {mistake(edit, rng.choice(self._family.names), rng)}"
