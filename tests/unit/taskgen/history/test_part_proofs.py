"""The verdict on a part of a change whose tests pass without it."""

from dataclasses import replace
from pathlib import Path

import pytest

from etude.sandbox_spec import Image
from etude.taskgen.history.changed_files import ChangedFiles
from etude.taskgen.history.proposals import Proposal
from etude.taskgen.history.slices import Slice
from etude.taskgen.history.sources import Change, Commits
from etude.taskgen.history.validator import ChangePart, ChangeTrees, record_of, task_of
from etude.taskgen.projects import read_project
from etude.taskgen.testruns import RunObservation, RunOutcome
from etude.taskgen.verdicts import Proof, Rejection
from etude.types import TestChecks

ASSERTED = {"new": "mean([1]) == 1", "old": "mean", "other": "1"}
TESTS = "".join(f"def test_{name}():\n    assert {what}\n\n\n" for name, what in ASSERTED.items())
FILES = {"pyproject.toml": '[project]\nname = "tally"\n', "tally.py": "", "tests/test_mean.py": TESTS}
TREES = ChangeTrees(
    change=Change(before="1", after="2", subject="", day=""),
    files=ChangedFiles(before={}, after=FILES),
    project=read_project(FILES),
    before=Path(),
)
ALL = frozenset(ASSERTED)


def seen(passing: frozenset[str], ended: str = "") -> RunObservation:
    tests = {
        f"tests/test_mean.py::test_{name}": RunOutcome(
            status="passed" if name in passing else "failed", seconds=0, message=""
        )
        for name in ALL
    }
    return RunObservation(tests=tests, errors=(), reached={}, calls={}, results=(), ended=ended, seconds=1.0, output="")


def made_part(broken: list[RunObservation], right: list[RunObservation]) -> ChangePart:
    return ChangePart(
        proposal=Proposal(prompt="add mean", template="tally:tally:mean", path="tally.py", name="mean", lines=1),
        slice=Slice(answer={}, hidden={}, changed=frozenset({"mean"}), lines=1),
        broken=broken,
        right=right,
    )


@pytest.mark.parametrize(
    ("broken", "right", "rejection"),
    [
        ([ALL - {"new"}] * 2, [ALL] * 2, None),
        ([ALL] * 2, [ALL] * 2, Rejection.SURVIVED),
        ([ALL - {"new"}] * 2, [ALL - {"new"}] * 2, Rejection.INCOMPLETE),
        ([ALL - {"new", "old"}] * 2, [frozenset({"other"})] * 2, Rejection.INCOMPLETE),
        ([ALL - {"new"}, ALL], [ALL] * 2, Rejection.FLAKY),
        ([frozenset({"other"})] * 2, [ALL, frozenset({"other"})], Rejection.UNSOLVED),
    ],
)
def test_a_part_that_fails_its_own_tests_is_not_called_flaky(
    broken: list[frozenset[str]], right: list[frozenset[str]], rejection: Rejection | None
) -> None:
    part = made_part([seen(each) for each in broken], [seen(each) for each in right])
    assert part.proof(TREES).rejection is rejection


def test_a_part_that_ends_the_run_of_its_tests_is_unsolved() -> None:
    part = made_part([seen(ALL - {"new"})], [seen(frozenset(), ended="crash")])
    assert part.proof(TREES).rejection is Rejection.UNSOLVED


def test_tests_that_must_go_on_passing_are_in_a_module_that_can_be_imported_without_the_part() -> None:
    runs = [seen(ALL - {"new"})] * 2, [seen(ALL)] * 2
    files = {**FILES, "tally.py": "def mean(numbers): ...\n"}
    for imports, others in (("", {"old", "other"}), ("from tally import mean\n\n\n", set())):
        after = {**files, "tests/test_mean.py": imports + TESTS}
        trees = replace(TREES, files=ChangedFiles(before={}, after=after))
        part = trees.slice("tally.py", "mean")
        assert part is not None
        proof = replace(made_part(*runs), slice=part).proof(trees)
        assert proof.about == ("tests/test_mean.py::test_new",)
        assert set(proof.others) == {f"tests/test_mean.py::test_{name}" for name in others}


def test_what_a_new_module_of_a_package_with_its_tests_inside_holds_is_the_agents_work() -> None:
    before = {"pyproject.toml": '[project]\nname = "tally"\n', "tally/__init__.py": "", "tally/tests/test_mean.py": ""}
    after = {**before, "tally/means.py": "def mean(numbers): ...\n", "tally/tests/test_mean.py": TESTS}
    files = ChangedFiles(before=before, after=after)
    trees = replace(TREES, files=files, project=read_project(after))
    part = trees.slice("tally/means.py", "mean")
    assert part is not None
    made = replace(made_part([seen(ALL - {"new"})], [seen(ALL)]), slice=part)
    proof = Proof(about=("tally/tests/test_mean.py::test_new",), others=())
    record = record_of(Commits("tally"), trees, made, proof)
    task = task_of(record, trees, part, Image(layers=()))
    assert isinstance(task.checks, TestChecks)
    assert task.checks.artefacts == ("tally/__init__.py", "tally/means.py")
