"""Detects a model that memorised a suite's tests, and accepts one that writes ordinary Python."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox_spec import EnvironmentSpec
from etude.taskgen.history.completions import HalfTest, check_memory, half_tests, rouge_l
from etude.types import Split, Task, TestChecks

FILE = """import pytest


def test_short():
    assert fold([]) == 0


class TestFold:
    @pytest.mark.parametrize("start", [0, 1])
    def test_long(self, start):
        items = [3, 4, 5]
        expected = start + 12
        got = fold(items, start=start)
        assert got == expected, f"{items} from {start}"
"""
WORDS = st.lists(st.sampled_from(["assert", "==", "x", "(", "7"]), max_size=12).map(" ".join)


def task_about(*tests: str, path: str = "tests/test_fold.py", text: str = FILE) -> Task:
    checks = TestChecks(files={path: text}, must_pass=tests, about=len(tests), artefacts=(".",))
    return Task(
        task_id="t",
        family="repository",
        template="folds:fold",
        split=Split.HELDOUT,
        prompt="fold",
        files={},
        checks=checks,
        environment=EnvironmentSpec(),
    )


def halves(count: int) -> list[HalfTest]:
    second = "    got = fold(items, start=start)\n    assert got == expected"
    return [
        HalfTest(task_id=str(n), template=str(n), project="folds", path="tests/test_fold.py", first="", second=second)
        for n in range(count)
    ]


def test_the_longest_test_of_a_task_is_cut_in_two_between_lines() -> None:
    task = task_about("tests/test_fold.py::test_short", "tests/test_fold.py::TestFold::test_long[0]")
    (half,) = half_tests([task], {"t": "folds"})
    assert half.first.splitlines()[0].strip() == "def test_long(self, start):"
    assert half.first.splitlines()[-1].strip() == "expected = start + 12"
    assert half.second.splitlines()[0].strip() == "got = fold(items, start=start)"
    guided, general = half.instructions
    assert "tests/test_fold.py of the project folds" in guided
    assert "folds" not in general
    assert all(half.first in text and half.second not in text for text in (guided, general))


@pytest.mark.parametrize(
    "task",
    [
        task_about("tests/test_fold.py::test_gone"),
        task_about("tests/test_fold.py"),
        task_about("tests/test_fold.py::test_long", text="def test_long(:\n"),
        task_about("tests/test_a.py::test_a", path="tests/test_a.py", text="def test_a():\n    assert a\n"),
    ],
    ids=["no such test", "a whole file", "no Python", "too short"],
)
def test_a_task_without_a_test_to_be_cut_has_none(task: Task) -> None:
    assert half_tests([task], {}) == []


def test_a_model_that_finishes_tests_only_where_their_place_is_named_remembers_them() -> None:
    tests = halves(6)
    words = ["a ", "b ", "", "got ", "c d ", "items "]
    by_heart = check_memory(
        tests, [(f"```python\n{half.second}\n```", each) for half, each in zip(tests, words, strict=True)]
    )
    assert {each.guided for each in by_heart.tests} == {1.0}
    assert by_heart.is_remembered
    writer = check_memory(tests, [(f"{each} assert fold", f"assert fold {each}") for each in words])
    assert not writer.is_remembered


@given(WORDS, WORDS)
def test_rouge_l_is_symmetric_and_one_for_equal_texts_alone(first: str, second: str) -> None:
    likeness = rouge_l(first, second)
    assert 0.0 <= likeness <= 1.0
    assert likeness == rouge_l(second, first)
    assert (likeness == 1.0) == (first == second != "")


def test_rouge_l_of_the_papers_example() -> None:
    # Lin 2004, section 3.1: the longest common subsequence is "police the gunman": 3 of 4 words of each
    assert rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)
