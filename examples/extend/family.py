"""A task family: sums to be answered. ``tasks.family = "@family.py:Sums"``."""

from etude.config.section import Section
from etude.protocols import FamilyContext
from etude.types import NamedChecks, Split, Task


class SumOptions(Section):
    """Sums of two numbers."""

    largest: int = 20
    """The largest number."""


class Sums:
    Options = SumOptions

    def __init__(self, options: SumOptions, context: FamilyContext) -> None:
        numbers, every = range(options.largest + 1), context.heldout_every
        sums = [(a, b) for a in numbers for b in numbers]
        self._sums = {side: [ab for ab in sums if (ab[0] % every == 0) == (side is Split.HELDOUT)] for side in Split}

    def size(self, split: Split) -> int | None:
        return len(self._sums[split])

    def task(self, split: Split, index: int) -> Task:
        a, b = self._sums[split][index]
        checks, prompt = NamedChecks(grader="near", options={"right": a + b}), f"{a} + {b} = ?"
        return Task(task_id=prompt, family="sums", template=str(a), split=split, prompt=prompt, files={}, checks=checks)
