"""The lookup family: reproducible, held out by the kind of fact, and not solvable by guessing."""

import pytest

from etude.config.tasks import LookupOptions
from etude.errors import ConfigError
from etude.tasks.lookup import LAST, NAMES, PAGE_NAMES, LookupFamily
from etude.types import AnswerChecks, Split, Task

CONFIG = LookupOptions(pages=9, page_facts=6, questions=2)


def tasks(split: Split, count: int, seed: int = 0) -> list[Task]:
    family = LookupFamily(CONFIG, seed=seed)
    return [family.task(split, index) for index in range(count)]


def checks_of(task: Task) -> AnswerChecks:
    assert isinstance(task.checks, AnswerChecks)
    return task.checks


def test_training_tasks_follow_the_seed_and_heldout_ones_do_not() -> None:
    assert tasks(Split.TRAIN, 20) == tasks(Split.TRAIN, 20)
    assert not set(map(repr, tasks(Split.TRAIN, 20))) & set(map(repr, tasks(Split.TRAIN, 20, seed=1)))
    assert tasks(Split.HELDOUT, 20) == tasks(Split.HELDOUT, 20, seed=1)


def test_what_is_asked_for_in_an_evaluation_is_never_asked_for_in_training() -> None:
    train, heldout = ({task.template for task in tasks(split, 600)} for split in (Split.TRAIN, Split.HELDOUT))
    assert len(train) > 400
    assert len(heldout) > 250
    assert not train & heldout


def test_the_order_of_the_names_is_on_no_side() -> None:
    family = LookupFamily(CONFIG, seed=0)
    pairs = [(one, other) for one in NAMES[:20] for other in NAMES[20:40]]
    assert all(family.is_heldout(pair) == family.is_heldout(pair[::-1]) for pair in pairs)
    assert 0.1 < sum(map(family.is_heldout, pairs)) / len(pairs) < 0.25


def test_every_fact_that_is_asked_for_stands_on_one_line_of_the_material() -> None:
    for task in tasks(Split.TRAIN, 50):
        lines = [line for text in task.files.values() for line in text.splitlines()]
        facts = checks_of(task).facts
        assert all(lines.count(fact) == 1 and "\n".join(lines).count(fact) == 1 for fact in facts)
        assert checks_of(task).answer == " ".join(facts)
        assert task.prompt.split() == ["find", *(fact.split()[0] for fact in facts)]


def test_pages_lead_from_one_to_the_next() -> None:
    (task,) = tasks(Split.HELDOUT, 1)
    page, read = PAGE_NAMES[0], []
    while page != LAST:
        read.append(page)
        page = task.files[page].splitlines()[-1].removeprefix("next ")
    assert read == list(task.files)
    assert len(read) == CONFIG.pages


def test_a_value_cannot_be_guessed() -> None:
    values = [fact.split()[1] for task in tasks(Split.TRAIN, 2_000) for fact in checks_of(task).facts]
    assert all(len(value) == 2 for value in values)
    assert max(map(values.count, set(values))) / len(values) < 0.02


def test_a_material_of_more_facts_than_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"page_facts = 130: expected 2 .* 90 facts"):
        LookupFamily(LookupOptions(pages=26, page_facts=5), seed=0)


def test_a_few_names_may_be_asked_for_and_all_of_those_stand_in_training() -> None:
    config = CONFIG.model_copy(update={"question_names": 6})
    family = LookupFamily(config, seed=0)
    assert len(set(family.askable)) == 6
    train, heldout = (
        {family.task(split, index).template for index in range(300)} for split in (Split.TRAIN, Split.HELDOUT)
    )
    assert len(train | heldout) == 15
    assert heldout
    assert not train & heldout
    assert {name for template in train for name in template.split()} == set(family.askable)


@pytest.mark.parametrize(("askable", "message"), [(1, r"expected 2 … 90"), (91, "expected 2"), (2, "of 1 sets")])
def test_askable_names_that_cannot_be_held_out_are_refused(askable: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"tasks.options.question_names = {askable}: .*{message}"):
        LookupFamily(CONFIG.model_copy(update={"question_names": askable}), seed=0)
