"""A suite is a folder whose tasks are all held out, except for retired ones."""

import json
from pathlib import Path

import pytest

from etude.config.loading import default_recipe
from etude.errors import ConfigError, DamagedError
from etude.protocols import TaskFamily
from etude.run.task_families import open_family
from etude.tasks.suites import Retirement, digest_of_tasks, is_suite, read_retired, suite_of, task_config, write_retired
from etude.types import Split
from harbor_folders import write_folder

BUGS = '[tasks]\nfamily = "bugfix"\n[sandboxes]\nkind = "local"\n'


def write_suite(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text(text, encoding="utf-8")
    return folder


def open_tasks(folder: Path) -> TaskFamily:
    tasks, sandboxes = task_config(folder)
    return open_family(default_recipe().model_copy(update={"tasks": tasks, "sandboxes": sandboxes}))


def test_a_bare_folder_of_harbor_tasks_is_a_suite_of_all_of_them(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_folder(tmp_path / "My Tasks" / name, {"instruction.md": f"Write {name}."})
    folder = tmp_path / "My Tasks"
    assert is_suite(folder)
    assert suite_of(folder).name == "my-tasks"
    family = open_tasks(folder)
    assert (family.size(Split.TRAIN), family.size(Split.HELDOUT)) == (0, 3)
    tasks = [family.task(Split.HELDOUT, index) for index in range(3)]
    assert {task.prompt for task in tasks} == {"Write a.", "Write b.", "Write c."}
    assert {task.split for task in tasks} == {Split.HELDOUT}


def test_retired_tasks_are_left_out_and_change_the_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_folder(tmp_path / "tasks" / name, {"instruction.md": f"Write {name}."})
    folder = tmp_path / "tasks"
    tasks = [open_tasks(folder).task(Split.HELDOUT, index) for index in range(2)]
    gone = {tasks[0].task_id: Retirement(date="2026-01-02", reason="solved always")}
    write_retired(folder, gone)
    assert read_retired(folder) == gone
    family = open_tasks(folder)
    assert family.size(Split.HELDOUT) == 1
    assert family.task(Split.HELDOUT, 0) == tasks[1]
    assert digest_of_tasks(tasks) != digest_of_tasks(tasks[1:])


def test_a_damaged_list_of_retired_tasks_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "retired.json").write_text(json.dumps({"a": {"since": 1}}))
    with pytest.raises(DamagedError, match=r"retired\.json"):
        read_retired(tmp_path)


def test_a_family_without_end_gives_those_that_it_holds_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split = 'heldout'"):
        open_tasks(write_suite(tmp_path / "all", f'name = "bugs"\n{BUGS}'))
    family = open_tasks(write_suite(tmp_path / "some", f'name = "bugs"\nsplit = "heldout"\n{BUGS}'))
    assert family.size(Split.HELDOUT) is None
    assert family.task(Split.HELDOUT, 0).split is Split.HELDOUT


def test_the_folder_of_the_tasks_is_the_suites_own(tmp_path: Path) -> None:
    write_folder(tmp_path / "s" / "inner" / "a")
    folder = write_suite(tmp_path / "s", 'name = "s"\n[tasks]\nfamily = "harbor"\nfolder = "inner"\n')
    assert open_tasks(folder).size(Split.HELDOUT) == 1
    folder = write_suite(tmp_path / "s" / "inner", 'name = "s"\n[tasks]\nfamily = "harbor"\n')
    assert open_tasks(folder).size(Split.HELDOUT) == 1


def test_a_relative_path_is_taken_from_where_the_command_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "s" / "a")
    write_suite(tmp_path / "s", 'name = "s"\n[tasks]\nfamily = "harbor"\n')
    monkeypatch.chdir(tmp_path)
    assert open_tasks(Path("s")).size(Split.HELDOUT) == 1


def test_what_is_no_suite_is_named(tmp_path: Path) -> None:
    assert not is_suite(tmp_path)
    with pytest.raises(ConfigError, match=r"expected a folder with suite\.toml"):
        suite_of(tmp_path)
    with pytest.raises(ConfigError, match="unknown key 'licens'"):
        suite_of(write_suite(tmp_path / "s", f'name = "bugs"\nlicens = "MIT"\n{BUGS}'))
