"""Held-out tasks: templates in equal shares, no task twice, the same for every seed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from etude.config.tasks import BugfixOptions, LookupOptions
from etude.protocols import TaskFamily
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.heldout import HeldoutTasks, in_turns
from etude.tasks.lookup import LookupFamily
from etude.tasks.migrations.family import MigrationFamily
from etude.tasks.nextedit import NextEditFamily
from etude.types import Split, Task
from ledgers import task

FAMILIES: dict[str, Callable[[int], TaskFamily]] = {
    "bugfix": lambda seed: BugfixFamily(BugfixOptions(kinds=("arith", "slice", "loop")), seed=seed),
    "lookup": lambda seed: LookupFamily(LookupOptions(), seed=seed),
    "lookup, few names": lambda seed: LookupFamily(LookupOptions(question_names=6, questions=2), seed=seed),
    "lookup, many sets": lambda seed: LookupFamily(LookupOptions(questions=4), seed=seed),
    "migrations": lambda seed: MigrationFamily(seed=seed),
    "nextedit": lambda seed: NextEditFamily(seed=seed, one_in=6),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_have_equal_shares_and_no_task_comes_twice(name: str) -> None:
    family, other = FAMILIES[name](0), FAMILIES[name](1)
    tasks = [family.task(Split.HELDOUT, index) for index in range(100)]
    assert len({each.task_id for each in tasks}) == 100
    shares = Counter(each.template for each in tasks).values()
    assert max(shares) - min(shares) <= 1
    backwards = [other.task(Split.HELDOUT, index) for index in reversed(range(100))]
    assert backwards[::-1] == tasks  # whatever was asked for before


def test_a_template_without_a_further_task_repeats_one() -> None:
    def draw(template: str, rng: Random) -> Task:
        number = rng.randrange(2 if template == "few" else 1000)
        return replace(task(0, Split.HELDOUT), task_id=f"{template}-{number}", template=template)

    heldout = HeldoutTasks(["few", "many"], draw)
    drawn = [heldout.task(index) for index in range(10)]
    assert Counter(each.template for each in drawn) == {"few": 5, "many": 5}
    assert len({each.task_id for each in drawn}) == 2 + 5


def test_items_of_a_list_come_template_by_template_in_turns() -> None:
    assert in_turns(["a1", "a2", "a3", "b1", "c1", "c2"], lambda item: item[0]) == ["a1", "b1", "c1", "a2", "c2", "a3"]
