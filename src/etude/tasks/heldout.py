"""Held-out tasks drawn evenly over templates: equal shares, up to one task, and no task twice.

    templates a b c ──▶ a₀ b₀ c₀ a₁ b₁ c₁ a₂ …        the first n of them are the evaluation set of n tasks

Tasks of one template are similar, so a template with many of them would dominate a measurement. A larger evaluation set
extends a smaller one. Owns the order of held-out tasks; the family makes a task from a template.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random
from typing import Generic, TypeVar

from etude.types import Task

SEED = "heldout"
"""Seed of the evaluation set; independent of a run's seed, so that runs can be compared."""
MAX_REPEATS = 100
"""Consecutive draws without a new task after which a template counts as exhausted."""

Template = TypeVar("Template")
Item = TypeVar("Item")


class HeldoutTasks(Generic[Template]):
    """The held-out tasks of a family that draws them, in round-robin order over its templates."""

    def __init__(self, templates: Sequence[Template], draw: Callable[[Template, Random], Task]) -> None:
        """``draw`` makes a task of a template, chosen by the random generator that it receives."""
        self._templates = list(templates)
        Random(SEED).shuffle(self._templates)  # so that the first few are diverse
        self._draw = draw
        self._drawn: list[dict[str, Task]] = [{} for _ in templates]
        """The tasks of each template by id, in drawing order."""
        self._draws = [0] * len(templates)

    def task(self, index: int) -> Task:
        """Task number ``index``; a template without a further task repeats one of its tasks."""
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
    """Interleave items by template: the first item of each, then the second of each that has one, and so on."""
    seen: defaultdict[Hashable, int] = defaultdict(int)
    turns: defaultdict[int, list[Item]] = defaultdict(list)
    for item in items:
        name = template(item)
        turns[seen[name]].append(item)
        seen[name] += 1
    return [item for turn in sorted(turns) for item in turns[turn]]
