"""What mid-training reads of the next-edit family: suggestions as they are right, and those of somebody careless.

The careless one knows what a suggestion looks like and makes it, sure or not: the old name stays, another one comes in,
a piece is lost, the end is missing. Now and then it suggests nothing, for no good reason. What reinforcement learning
adds is care, and silence where that is better (:mod:`etude.tasks.nextedit`).
"""

import re
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import TypeAlias

from etude.config.imitation import TranscriptConfig
from etude.harnesses.tools import ANSWER, SUBMIT
from etude.tasks.corpora.transcripts import Message
from etude.tasks.nextedit import Edit, NextEditFamily
from etude.types import Split

SILENT = 0.2
"""Share of sessions without a suggestion."""
PIECE = re.compile(r"\w+|[^\w\s]")

Slip: TypeAlias = Callable[[Edit, str, Random], str]
"""A wrong line instead of the right one, given another name."""


def keep_old(edit: Edit, other: str, rng: Random) -> str:
    """The line as it was."""
    return edit.site.cursor.text


def take_another(edit: Edit, other: str, rng: Random) -> str:
    """A name that nobody spoke of."""
    return edit.site.cursor.renamed(edit.site.name, other)


def lose_a_piece(edit: Edit, other: str, rng: Random) -> str:
    """A word or a sign is missing."""
    piece = rng.choice(list(PIECE.finditer(edit.line)))
    return (edit.line[: piece.start()] + edit.line[piece.end() :]).strip()


def stop_early(edit: Edit, other: str, rng: Random) -> str:
    """Only the beginning."""
    return edit.line[: rng.randrange(len(edit.line) // 2, len(edit.line) - 1)]


SLIPS: Mapping[str, Slip] = MappingProxyType(
    {"old": keep_old, "another": take_another, "lost": lose_a_piece, "early": stop_early}
)


class NextEditPractice:
    """Edits and suggestions of one side of the family; a :class:`~etude.tasks.corpora.corpus.Practice`."""

    def __init__(self, family: NextEditFamily, config: TranscriptConfig, split: Split = Split.TRAIN) -> None:
        self._family = family
        self._config = config
        self._split = split

    def code(self, rng: Random) -> list[Message]:
        """An edit and the right suggestion."""
        edit = self._family.edit(self._split, rng)
        return [Message("user", edit.prompt), Message("assistant", f"{ANSWER} {edit.line}")]

    def session(self, rng: Random) -> list[Message]:
        """One suggestion of the careless one, or none."""
        edit = self._family.edit(self._split, rng)
        return [Message("user", edit.prompt), Message("assistant", self._said(edit, rng))]

    def _said(self, edit: Edit, rng: Random) -> str:
        if rng.random() < SILENT:
            return SUBMIT
        if rng.random() < self._config.right_edit:
            return f"{ANSWER} {edit.line}"
        slip = SLIPS[rng.choice(sorted(SLIPS))]
        return f"{ANSWER} {slip(edit, rng.choice(self._family.names), rng)}"
