"""A task family that shows how its tasks are done. ``tasks.family = "@shown.py:Letters"``, with ``midtrain.tokens``."""

from random import Random

from etude.tasks.corpora.transcripts import Message
from etude.types import AnswerChecks, Split, Task


class Letters:
    def __init__(self, options: object, context: object) -> None:
        self._of = {Split.TRAIN: "bcdefhijklnopqrtuvwxz", Split.HELDOUT: "agmsy"}

    def size(self, split: Split) -> int | None:
        return len(self._of[split])

    def task(self, split: Split, index: int) -> Task:
        x = self._of[split][index]
        checks = AnswerChecks(answer=x.upper())
        return Task(task_id=x, family="letters", template=x, split=split, prompt=x, files={}, checks=checks)

    def demonstrations(self, split: Split) -> "Shown":
        return Shown(self._of[split])


class Shown(str):
    def code(self, rng: Random) -> str:
        return f"{rng.choice(self)!r}.upper()"

    def session(self, rng: Random) -> list[Message]:
        return [Message("user", x := rng.choice(self)), Message("assistant", rng.choice([x.upper(), "?"]))]
