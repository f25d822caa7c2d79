"""Tasks on disk, the log of a build, and the split."""

from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import ConfigError, DamagedError
from etude.sandbox_spec import EnvironmentSpec
from etude.tasks.repositories.folder import CandidateVerdict, PackageFolder, RepositoryTasks, split_of
from etude.types import Case, Probe, Split, Task, TestChecks

CHECKS = TestChecks(
    files={"tests/test_a.py": "def test_a(): pass\n"},
    must_pass=("tests/test_a.py::test_a", "tests/test_a.py::test_b"),
    about=1,
    artefacts=("src/pkg",),
    command=("python3", "-m", "pytest", "--rootdir=."),
    probes=(Probe(module="pkg", function="f", cases=(Case(arguments=(1, [2.5]), expected={"a": None}),)),),
    timeout_s=12.5,
)
TASK = Task(
    task_id="0",
    family="repository",
    template="pkg:pkg:f",
    split=Split.TRAIN,
    prompt="mend it",
    files={},
    checks=CHECKS,
    environment=EnvironmentSpec(image="ab" * 32),
)
VERDICT = CandidateVerdict(
    candidate_id="c", operator="boundary", path="a.py", target="f", outcome="kept", seconds=1.5, tests=("t::a",)
)


def folder_of(tmp_path: Path, count: int) -> Path:
    package = PackageFolder(tmp_path / "pkg-1")
    for number in range(count):
        template = f"pkg:pkg:f{number}"
        package.add(
            replace(TASK, task_id=f"{number:016d}", template=template, split=split_of(template)), {"a.py": template}
        )
    return tmp_path


def test_tasks_come_back_as_they_were_in_a_fixed_order(tmp_path: Path) -> None:
    tasks = RepositoryTasks(folder_of(tmp_path, 30))
    train = tasks.tasks(Split.TRAIN)
    assert len(train) + len(tasks.tasks(Split.HELDOUT)) == 30
    assert len(tasks.tasks(Split.HELDOUT)) > 0
    assert train[0].checks == CHECKS
    assert tasks.size(Split.TRAIN) == len(train)
    assert [tasks.task(Split.TRAIN, index) for index in range(len(train))] == list(train)
    assert RepositoryTasks(tmp_path).task(Split.TRAIN, 3) == tasks.task(Split.TRAIN, 3)
    assert [task.task_id for task in train] != sorted(task.task_id for task in train)
    assert tasks.images == tmp_path / "images"
    assert tasks.answer(train[0]) == {"a.py": train[0].template}
    with pytest.raises(DamagedError, match="answer of task nobody"):
        tasks.answer(replace(TASK, task_id="nobody"))


def test_a_template_is_on_one_side(tmp_path: Path) -> None:
    tasks = RepositoryTasks(folder_of(tmp_path, 60))
    sides = {split: {task.template for task in tasks.tasks(split)} for split in Split}
    assert not sides[Split.TRAIN] & sides[Split.HELDOUT]


def test_an_empty_folder_and_a_damaged_task_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tasks"):
        RepositoryTasks(tmp_path)
    folder_of(tmp_path, 1)
    one_side = RepositoryTasks(tmp_path)
    empty = Split.HELDOUT if one_side.tasks(Split.TRAIN) else Split.TRAIN
    assert one_side.size(empty) == 0
    (tmp_path / "pkg-1" / "tasks" / "x.json").write_text("{}")
    with pytest.raises(DamagedError, match="unreadable task"):
        RepositoryTasks(tmp_path)


def test_the_log_survives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    package = PackageFolder(tmp_path / "pkg-1")
    package.record(VERDICT)
    with package.log.open("ab") as file:
        file.write(b'{"candidate_id": "cut sho')
    later = replace(VERDICT, candidate_id="d", outcome="leaks", detail="here", counts={"about": 2})
    package.record(later)
    assert package.verdicts() == [VERDICT, later]
