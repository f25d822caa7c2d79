"""Impossible tasks: as many as asked for, always the same, and impossible for a reason that can be checked."""

from dataclasses import replace
from random import Random

import pytest

from etude.config.tasks import BugfixOptions
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.impossible import WithImpossible, contradiction, is_impossible, make_impossible, negate
from etude.types import Case, Query, QueryChecks, ScriptChecks, Split, Task, TestChecks

BUGFIX = BugfixFamily(BugfixOptions(), seed=3)
MODULE = """\
from units import f

class TestF:
    def test_one(self):
        x = f(1)
        assert x == 2, "one"

def test_two():
    if f(2):
        return
    assert f(2) == 4
"""


def family(share: float, seed: int = 0) -> WithImpossible:
    return WithImpossible(BUGFIX, share=share, seed=seed)


def hidden_tests(about: int = 1) -> Task:
    checks = TestChecks(
        files={"tests/test_f.py": MODULE},
        must_pass=("tests/test_f.py::TestF::test_one", "tests/test_f.py::test_two"),
        about=about,
        artefacts=("units.py",),
    )
    return replace(BUGFIX.task(Split.TRAIN, 0), checks=checks)


class Same:
    """A family of one task; implements :class:`~etude.protocols.TaskFamily`."""

    def __init__(self) -> None:
        self._task = BUGFIX.task(Split.TRAIN, 0)

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return self._task


def test_the_share_is_kept() -> None:
    family = WithImpossible(Same(), share=0.02, seed=0)
    impossible = sum(is_impossible(family.task(Split.TRAIN, index)) for index in range(2_000))
    assert 25 <= impossible <= 55


def test_which_tasks_depends_on_nothing_but_seed_and_number() -> None:
    drawn = [family(0.1, seed=5).task(Split.TRAIN, index) for index in range(60)]
    assert drawn == [family(0.1, seed=5).task(Split.TRAIN, index) for index in range(60)]
    other = [is_impossible(family(0.1, seed=6).task(Split.TRAIN, index)) for index in range(60)]
    assert other != [is_impossible(task) for task in drawn]


def test_what_is_held_out_stays_as_it_is() -> None:
    assert all(family(0.1).task(Split.HELDOUT, index) == BUGFIX.task(Split.HELDOUT, index) for index in range(100))


def test_all_others_stay_as_they_are() -> None:
    tasks = [(family(0.1).task(Split.TRAIN, index), BUGFIX.task(Split.TRAIN, index)) for index in range(60)]
    assert all(task == original for task, original in tasks if not is_impossible(task))


def test_calls_of_a_function_contradict_each_other_and_the_agent_sees_the_same_prompt() -> None:
    for index in range(100):
        task = BUGFIX.task(Split.TRAIN, index)
        made = make_impossible(task, Random(index))
        assert made is not None
        assert contradiction(made.checks) and not contradiction(task.checks)
        assert (made.prompt, made.files, made.environment) == (task.prompt, task.files, task.environment)
        assert made.task_id != task.task_id


def test_the_contradiction_is_shown_in_some_and_hidden_in_others() -> None:
    task = BUGFIX.task(Split.TRAIN, 1)
    made = [make_impossible(task, Random(seed)) for seed in range(20)]
    shown = [len(one.function_checks.visible) for one in made if one is not None]
    assert set(shown) == {len(task.function_checks.visible), len(task.function_checks.visible) + 1}


@pytest.mark.parametrize("value", [True, 0, -3, 1.5, float("inf"), 1e300, "", "ab", [], [1, 2], {}, {"a": 1}, None])
def test_every_kind_of_value_has_another(value: object) -> None:
    checks = replace(
        BUGFIX.task(Split.TRAIN, 0).function_checks,
        visible=(),
        hidden=(Case(arguments=(1,), expected=value),),  # type: ignore[arg-type]  # JSON
    )
    made = make_impossible(replace(BUGFIX.task(Split.TRAIN, 0), checks=checks), Random(0))
    assert made is not None
    assert contradiction(made.checks)


def test_a_test_and_its_negation_must_both_pass() -> None:
    made = make_impossible(hidden_tests(), Random(0))
    assert made is not None
    assert isinstance(made.checks, TestChecks)
    assert made.checks.must_pass[:2] == ("tests/test_f.py::TestF::test_one", "tests/test_f_more.py::TestF::test_one")
    assert (made.checks.about, made.checks.files["tests/test_f.py"]) == (2, MODULE)
    assert "assert x != 2, 'one'" in made.checks.files["tests/test_f_more.py"]
    assert contradiction(made.checks)


def test_a_test_that_may_return_early_is_not_negated() -> None:
    assert negate(MODULE, "test_two") is None
    assert negate(MODULE, "TestF::test_gone") is None
    assert negate("def test_a(:", "test_a") is None
    assert negate("def test_a():\n    assert f()\n", "test_a") is None


def test_one_question_has_two_answers() -> None:
    queries = (Query(sql="SELECT 1", rows=((1,),)), Query(sql="SELECT x", rows=(), fails_with="42703"))
    task = replace(BUGFIX.task(Split.TRAIN, 0), checks=QueryChecks(path="m.sql", queries=queries))
    made = make_impossible(task, Random(0))
    assert made is not None
    assert "SELECT 1" in contradiction(made.checks)
    assert not contradiction(task.checks)


def test_what_cannot_be_proved_impossible_is_left_alone() -> None:
    task = replace(BUGFIX.task(Split.TRAIN, 0), checks=ScriptChecks(files={}))
    assert make_impossible(task, Random(0)) is None
    assert not contradiction(task.checks)


def test_more_than_a_meter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.5"):
        family(0.5)
