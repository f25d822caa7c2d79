"""A folder of Harbor tasks as a family: the split of each task, and the handling of broken ones."""

from pathlib import Path

import pytest

from etude.tasks.harbor.family import HarborTasks, read_tasks, side_of
from etude.tasks.harbor.settings import TaskFolderError
from etude.types import ScriptChecks, Split
from harbor_folders import write_folder

EXAMPLES = Path(__file__).parents[4] / "examples" / "tasks"


def write_many(folder: Path, count: int) -> None:
    for number in range(count):
        write_folder(folder / f"task-{number:02}", {"instruction.md": f"task {number}"})


def test_every_task_is_on_one_side_whatever_else_is_there(tmp_path: Path) -> None:
    write_many(tmp_path, 24)
    family = HarborTasks(tmp_path)
    names = [{task.name for task in family.sources(split)} for split in Split]
    assert [family.size(split) for split in Split] == [len(side) for side in names]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 24
    assert all(names)


def test_broken_tasks_are_set_aside_with_the_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_many(tmp_path, 8)
    write_folder(tmp_path / "torn", {"task.toml": "["})
    write_folder(tmp_path / "twin", {"task.toml": "[task]\nname = 'task-00'"})
    write_folder(tmp_path / "built", {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nRUN true"})
    family = HarborTasks(tmp_path)
    assert sorted(family.refused) == ["built", "torn", "twin"]
    assert "is not TOML" in family.refused["torn"]
    assert "rename one" in family.refused["twin"]
    assert "`etude tasks check` builds it" in family.refused["built"]
    assert sum(len(family.sources(split)) for split in Split) == 8


def test_a_folder_with_nothing_left_is_refused_with_every_reason(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"task.toml": "["})
    write_folder(tmp_path / "b", {"instruction.md": None})
    with pytest.raises(TaskFolderError, match="none of its tasks") as refused:
        HarborTasks(tmp_path)
    assert "is not TOML" in str(refused.value)
    assert "is missing" in str(refused.value)


def test_a_side_may_have_no_tasks(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"task.toml": "[metadata.etude]\nsplit = 'heldout'"})
    family = HarborTasks(tmp_path)
    assert (family.size(Split.TRAIN), family.size(Split.HELDOUT)) == (0, 1)
    assert family.task(Split.HELDOUT, 0).split is Split.HELDOUT


def test_a_task_says_its_side_itself(tmp_path: Path) -> None:
    for split in Split:
        folder = write_folder(tmp_path / split.value, {"task.toml": f"[metadata.etude]\nsplit = '{split.value}'"})
        [task] = read_tasks(folder).tasks
        assert side_of(task) is split


def test_a_task_carries_its_canary(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"task.toml": "[metadata.etude]\ncanary = 'grade.py'"})
    write_folder(tmp_path / "b")
    tasks = [HarborTasks(tmp_path, heldout_every=1).task(Split.HELDOUT, index) for index in range(2)]
    canaries = {task.template: task.checks.canary for task in tasks if isinstance(task.checks, ScriptChecks)}
    assert canaries == {"a": "grade.py", "b": ""}


def test_the_examples_can_be_read() -> None:
    reading = read_tasks(EXAMPLES)
    assert not reading.refused
    assert [task.name for task in reading.tasks] == ["etude/greeting", "etude/word-count"]
    assert all(task.solution for task in reading.tasks)
