"""A task family that shows how its tasks are done, for mid-training. ``tasks.family = "@shown.py:Letters"``."""

from random import Random

from etude.config.section import Section
from etude.protocols import FamilyContext
from etude.tasks.corpora.transcripts import Message
from etude.types import AnswerChecks, Split, Task


class Letters:
    def __init__(self, options: Section, context: FamilyContext) -> None:
        self._of = {Split.TRAIN: "bcdefhijklnopqrtuvwxz", Split.HELDOUT: "agmsy"}

    def size(self, split: Split) -> int | None:
        return len(self._of[split])

    def task(self, split: Split, index: int) -> Task:
        letter, checks = self._of[split][index], AnswerChecks(answer=self._of[split][index].upper())
        return Task(
            task_id=letter, family="letters", template=letter, split=split, prompt=letter, files={}, checks=checks
        )

    def demonstrations(self, split: Split) -> "Shown":
        return Shown(self._of[split])


class Shown(str):
    def code(self, rng: Random) -> str:
        return f"{rng.choice(self)!r}.upper()"

    def session(self, rng: Random) -> list[Message]:
        letter = rng.choice(self)
        return [Message("user", letter), Message("assistant", rng.choice([letter.upper(), "?"]))]
