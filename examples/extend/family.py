"""A task family: sums to be answered. ``tasks.family = "@family.py:Sums"``."""

import random

from pydantic import Field

from etude.config.section import Section
from etude.protocols import FamilyContext
from etude.types import AnswerChecks, Split, Task


class SumOptions(Section):
    """Sums of two numbers."""

    largest: int = Field(default=20, ge=5)
    """The largest number."""


class Sums:
    Options = SumOptions

    def __init__(self, options: SumOptions, context: FamilyContext) -> None:
        self._largest, self._context = options.largest, context

    def task(self, split: Split, index: int) -> Task:
        rng, every = random.Random(f"{self._context.seed} {split} {index}"), self._context.heldout_every
        side = [n for n in range(self._largest + 1) if (n % every == 0) == (split is Split.HELDOUT)]
        a, b = rng.choice(side), rng.randint(0, self._largest)
        checks, prompt = AnswerChecks(answer=str(a + b)), f"{a} + {b} = ?"
        return Task(task_id=prompt, family="sums", template=str(a), split=split, prompt=prompt, files={}, checks=checks)
