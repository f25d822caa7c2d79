"""Candidates proposed for a package, and the text of their tasks."""

import pytest

from etude.taskgen.candidates import BUG, BUGS_PER_FUNCTION, DELETION, propose
from etude.taskgen.hiding import TestView
from etude.taskgen.instructions import instruct
from etude.taskgen.projects import Project, read_project
from etude.taskgen.survey import Survey
from etude.taskgen.validator import artefacts_of
from etude.types import Case

MODULE = '''__all__ = ["mean_of"]


def mean_of(values, default=0):
    """The mean of numbers."""
    numbers = list(values)
    if not numbers:
        return default
    return sum(numbers) / len(numbers)


def untested(values):
    """Nobody calls this one."""
    numbers = list(values)
    numbers.sort()
    return numbers[0]
'''
TEXTS = {
    "pkg/__init__.py": "from .sums import mean_of\n",
    "pkg/sums.py": MODULE,
    "pkg/tests/test_sums.py": "from pkg import mean_of\n\ndef test_mean(): assert mean_of([2]) == 2\n",
    "README.md": "Use mean_of.\n",
}


@pytest.fixture
def project() -> Project:
    return read_project(TEXTS)


@pytest.fixture
def survey() -> Survey:
    test = "pkg/tests/test_sums.py::test_mean"
    return Survey(
        stable={test: 0.1},
        flaky=(),
        failing=(),
        skipped=0,
        unfit=(),
        broken=(),
        reached={"pkg/sums.py:4": (test,)},
        calls={},
    )


def test_candidates_are_in_functions_that_tests_reach(project: Project, survey: Survey) -> None:
    candidates = propose(project, TEXTS, survey, seed=1)
    assert {candidate.target for candidate in candidates} == {"mean_of"}
    assert {candidate.kind for candidate in candidates} == {BUG, DELETION}
    bugs = [candidate for candidate in candidates if candidate.kind == BUG]
    assert len(bugs) == BUGS_PER_FUNCTION == len({bug.operator for bug in bugs})
    whole = next(candidate for candidate in candidates if candidate.gone)
    assert whole.before == {path: TEXTS[path] for path in ("pkg/__init__.py", "pkg/sums.py", "README.md")}
    assert not any("mean_of" in text for text in whole.after.values())


def test_the_same_seed_gives_the_same_candidates(project: Project, survey: Survey) -> None:
    first = propose(project, TEXTS, survey, seed=1)
    assert propose(project, TEXTS, survey, seed=1) == first
    others = [[candidate.candidate_id for candidate in propose(project, TEXTS, survey, seed=n)] for n in range(2, 8)]
    assert [candidate.candidate_id for candidate in first] not in others


def test_an_instruction_says_what_is_wanted_and_nothing_of_the_answer(project: Project, survey: Survey) -> None:
    candidates = propose(project, TEXTS, survey, seed=1)
    hidden = TestView(changed={}, hidden=frozenset(survey.stable), visible=frozenset())
    example = Case(arguments=([1, 3],), expected=2.0)
    for candidate in candidates:
        text = instruct(project, candidate, hidden, {}, [example])
        assert "sum(numbers)" not in text
        assert "list(values)" not in text
        if candidate.kind == DELETION:
            assert "def mean_of(values, default=0):" in text
            assert ">>> mean_of([1, 3])\n2.0" in text
        assert ("The mean of numbers." in text) == bool(candidate.gone)


def test_a_bug_is_told_by_what_fails(project: Project, survey: Survey) -> None:
    bug = next(candidate for candidate in propose(project, TEXTS, survey, seed=1) if candidate.kind == BUG)
    tests = frozenset(survey.stable)
    messages = dict.fromkeys(tests, "assert 3 == 2")
    seen = TestView(changed={}, hidden=frozenset(), visible=tests)
    unseen = TestView(changed={}, hidden=tests, visible=frozenset())
    assert "- pkg/tests/test_sums.py::test_mean: assert 3 == 2" in instruct(project, bug, seen, messages, [])
    assert "not in this repository, fail:" in instruct(project, bug, unseen, messages, [])
    assert bug.path not in instruct(project, bug, seen, messages, [])


def test_tests_inside_of_a_package_are_no_artefacts(project: Project) -> None:
    assert artefacts_of(project, tuple(TEXTS)) == ("pkg/__init__.py", "pkg/sums.py")
    flat = read_project({"pkg/__init__.py": "", "pkg/deep/a.py": "", "tests/test_a.py": "def test_a(): pass\n"})
    assert artefacts_of(flat, ("pkg/__init__.py", "pkg/deep/a.py", "tests/test_a.py")) == ("pkg",)


def test_a_candidate_s_texts_are_not_printed(project: Project, survey: Survey) -> None:
    assert all("numbers" not in repr(candidate) for candidate in propose(project, TEXTS, survey, seed=1))
