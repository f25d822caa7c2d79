"""The migration family: reproducible, held out by template, and telling right from wrong on a real PostgreSQL."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from databases import ask, temporary_postgres, verdict
from etude.rewards.graders.queries import MigrationResult
from etude.sandbox_spec import ServiceKind
from etude.tasks.migrations.family import KINDS, PATH, MigrationFamily, choose_heldout, migration_task
from etude.tasks.migrations.problems import MigrationKind, inserts, literal
from etude.types import QueryChecks, Split, Task

TEMPLATES = [(kind, variant) for kind in KINDS for variant in kind.variants]
INSTANCES = 12 if os.environ.get("ETUDE_LONG") == "1" else 1
"""Of each template, on the real server."""


@pytest.fixture(scope="module")
def server(postgresql: None) -> Iterator[Path]:
    with temporary_postgres() as folder:
        yield folder


def setup_of(task: Task) -> str:
    """The setup of the agent's database."""
    assert task.environment is not None
    (service,) = task.environment.services
    assert service.kind is ServiceKind.POSTGRES
    return service.setup


@pytest.mark.parametrize(("kind", "variant"), TEMPLATES, ids=lambda value: getattr(value, "name", value))
def test_the_reference_is_right_and_neither_nothing_nor_a_mistake_is(
    server: Path, kind: MigrationKind, variant: str
) -> None:
    for seed in range(INSTANCES):
        problem = kind.write(variant, Random(f"test {seed}"))
        task = migration_task(problem, variant, Split.TRAIN)
        assert isinstance(task.checks, QueryChecks)
        requested = len(problem.queries)
        assert verdict(server, setup_of(task), task.checks, problem.reference) == MigrationResult(
            True, requested, False
        )
        assert len(problem.mistakes) >= 2
        for wrong in ("", *problem.mistakes):
            outcome = verdict(server, setup_of(task), task.checks, wrong, patient=False)
            assert not outcome.applied or outcome.right < requested, f"seed {seed}: {wrong}"


@pytest.mark.parametrize(("kind", "variant"), TEMPLATES, ids=lambda value: getattr(value, "name", value))
def test_both_databases_show_the_same_oddities(kind: MigrationKind, variant: str) -> None:
    """Otherwise the agent's rows would not show all cases that a right migration must handle."""
    for seed in range(20):
        problem = kind.write(variant, Random(seed))
        assert problem.seen != problem.unseen
        for table, rows in problem.seen.items():
            assert abs(len(rows) - len(problem.unseen[table])) <= 1
            assert [list(row) for row in rows[:1]] == [list(row) for row in problem.unseen[table][:1]]
            assert len({row["id"] for row in rows}) == len(rows)


def test_the_same_index_gives_the_same_task_and_only_training_depends_on_the_seed() -> None:
    one, same, other = MigrationFamily(seed=1), MigrationFamily(seed=1), MigrationFamily(seed=2)
    assert [one.task(Split.TRAIN, i) for i in range(30)] == [same.task(Split.TRAIN, i) for i in range(30)]
    assert one.task(Split.TRAIN, 0) != other.task(Split.TRAIN, 0)
    assert one.task(Split.HELDOUT, 0) == other.task(Split.HELDOUT, 0)


def test_no_template_is_on_both_sides_and_each_kind_is() -> None:
    family = MigrationFamily(seed=0)
    for kind in KINDS:
        train, heldout = (set(family.variants(kind, split)) for split in Split)
        assert train
        assert heldout
        assert not train & heldout
        assert train | heldout == set(kind.variants)
    drawn = {split: {family.task(split, i).template for i in range(300)} for split in Split}
    assert not drawn[Split.TRAIN] & drawn[Split.HELDOUT]
    assert len(drawn[Split.TRAIN] | drawn[Split.HELDOUT]) == len(TEMPLATES)


def test_the_answer_of_one_template_is_never_that_of_another() -> None:
    owners: dict[str, str] = {}
    for kind, variant in TEMPLATES:
        for seed in range(40):
            problem = kind.write(variant, Random(seed))
            template = f"{kind.name}: {variant}"
            assert owners.setdefault(problem.reference, template) == template


def test_thousands_of_tasks_are_different_and_small_enough_to_be_kept() -> None:
    family = MigrationFamily(seed=0)
    tasks = [family.task(Split.TRAIN, index) for index in range(400)]
    assert len({task.task_id for task in tasks}) == len(tasks)
    assert max(len(setup_of(task)) for task in tasks) < 16_000


def test_neither_unseen_rows_nor_the_reference_are_in_what_the_agent_gets() -> None:
    for kind, variant in TEMPLATES:
        problem = kind.write(variant, Random(5))
        task = migration_task(problem, variant, Split.TRAIN)
        given = "\n".join((task.prompt, setup_of(task), *task.files.values()))
        assert PATH in task.prompt
        assert problem.reference not in given
        assert inserts(problem.unseen) not in given


def test_of_a_kind_something_is_held_out_and_something_is_left() -> None:
    for kind in KINDS:
        for one_in in (2, 3, 100):
            assert 0 < len(choose_heldout(kind, one_in)) < len(kind.variants)
    with pytest.raises(ValueError, match="heldout_every=1"):
        MigrationFamily(seed=0, heldout_every=1)


@pytest.mark.parametrize("value", ["", "O'Brien", "\\'; DROP TABLE x; --", "Zoë ☃", "a\nb", -3, 2.5, True, None])
def test_literals_are_read_as_what_they_stand_for(server: Path, value: str | float | None) -> None:
    assert ask(server, f"SELECT {literal(value)}") in ([[value]], [[str(value)]])
