"""Held-out tasks drawn evenly over templates: equal shares, up to one task, and no task twice.

    templates a b c ──▶ a₀ b₀ c₀ a₁ b₁ c₁ a₂ …        the first n of them are the evaluation set of n tasks

Tasks of one template are alike, so a template that many of them are of would decide what a measurement says. More tasks
go on where fewer ended. Owns the order of held-out tasks; what a task of a template is, the family knows.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random
from typing import Generic, TypeVar

from etude.types import Task

SEED = "heldout"
"""The evaluation set does not depend on a run's seed, so that runs can be compared."""
MAX_REPEATS = 100
"""Draws in a row that bring nothing new, after which a template has no further task."""

Template = TypeVar("Template")
Item = TypeVar("Item")


class HeldoutTasks(Generic[Template]):
    """The held-out tasks of a family that draws them, template by template in turns."""

    def __init__(self, templates: Sequence[Template], draw: Callable[[Template, Random], Task]) -> None:
        """``draw`` makes a task of a template; which one is up to the generator that it is given."""
        self._templates = list(templates)
        Random(SEED).shuffle(self._templates)  # so that the first few are of all sorts
        self._draw = draw
        self._drawn: list[dict[str, Task]] = [{} for _ in templates]
        """The tasks of each template by id, in the order in which they were drawn."""
        self._draws = [0] * len(templates)

    def task(self, index: int) -> Task:
        """Task number ``index``; where a template has no further task one of its others comes again."""
        turn, place = divmod(index, len(self._templates))
        drawn = self._drawn[place]
        repeats = 0
        while len(drawn) <= turn and repeats < MAX_REPEATS:
            task = self._draw(self._templates[place], Random(f"{SEED}|{place}|{self._draws[place]}"))
            self._draws[place] += 1
            repeats = repeats + 1 if task.task_id in drawn else 0
            drawn.setdefault(task.task_id, task)
        return list(drawn.values())[turn % len(drawn)]


def in_turns(items: Iterable[Item], template: Callable[[Item], Hashable]) -> list[Item]:
    """Interleave items by template: the first item of each, then the second of each that has two, and so on."""
    seen: defaultdict[Hashable, int] = defaultdict(int)
    turns: defaultdict[int, list[Item]] = defaultdict(list)
    for item in items:
        name = template(item)
        turns[seen[name]].append(item)
        seen[name] += 1
    return [item for turn in sorted(turns) for item in turns[turn]]
