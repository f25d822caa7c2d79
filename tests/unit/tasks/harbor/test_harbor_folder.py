"""One task in Harbor's format, read from its folder: nothing of the grading reaches the agent."""

import re
from pathlib import Path

import pytest

from etude.sandbox_spec import EnvironmentSpec, Image
from etude.tasks.harbor.folder import digest_files, read_task, task_folders
from etude.tasks.harbor.images import plain_files
from etude.tasks.harbor.settings import TaskFolderError
from etude.types import ScriptChecks, Split
from harbor_folders import WHOLE, write_folder

SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    source = read_task(write_folder(tmp_path / "yes"))
    task = source.task(Split.HELDOUT, image=Image(), files=plain_files(source))
    assert (task.family, task.template, task.split) == ("harbor", "yes", Split.HELDOUT)
    assert task.prompt == "Write yes into answer.txt."
    assert task.files == {"notes/a.txt": "a note\n"}
    assert task.checks == ScriptChecks(
        files={"grade.py": WHOLE["tests/grade.py"], "test.sh": WHOLE["tests/test.sh"]},
        environment={"MODE": "strict"},
        timeout_s=20,
    )
    assert isinstance(task.environment, EnvironmentSpec)
    assert (task.environment.workdir, task.environment.variables) == ("/app", {"TONGUE": "en"})
    assert task.environment.limits.memory_bytes == 256 << 20


def test_the_agents_sandbox_has_neither_tests_nor_solution(tmp_path: Path) -> None:
    source = read_task(write_folder(tmp_path / "yes"))
    task = source.task(Split.TRAIN, image=Image(), files=plain_files(source))
    seen = f"{task.prompt} {task.files} {task.environment}"
    assert "reward" not in seen
    assert "echo yes" not in seen


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"instruction.md": "# canary\n\n"}, "instruction.md is empty"),
        ({"tests/test.sh": None}, "tests/test.sh is missing"),
        ({"solution/solve.sh": None, "solution/other": ""}, "solution/solve.sh is missing"),
        ({"environment/Dockerfile": None}, "Dockerfile is missing"),
        ({"environment/Dockerfile": "FROM debian:12"}, "the working folder is '/'"),
        ({"environment/Dockerfile": "FROM debian:12\nWORKDIR /tests/x"}, "the working folder is '/tests/x'"),
        ({"environment/Dockerfile": "FROM a", "task.toml": "environment.workdir = '/'"}, "the working folder is '/'"),
        ({"trajectory.json": "{}"}, "trajectory.json is there"),
        ({"task.toml": "[task]\nname = 3"}, "task.name = 3"),
        ({"task.toml": "[environment.env]\nA = '${B}'"}, "environment.env.A"),
        ({"task.toml": "[verifier.env]\nA = '${B}'"}, "verifier.env.A"),
        ({"task.toml": SEPARATE}, "artifacts is empty"),
        ({"task.toml": f"artifacts = ['/etc/x']\n{SEPARATE}"}, "outside of the working folder /app"),
        ({"task.toml": f"artifacts = ['../x']\n{SEPARATE}"}, "outside of the working folder /app"),
        ({"task.toml": f"artifacts = ['x']\n{SEPARATE}", "tests/Dockerfile": "FROM a"}, "tests/Dockerfile is there"),
        ({"task.toml": "[metadata.etude]\nsplit = 'both'"}, "metadata.etude.split = 'both'"),
        ({"task.toml": "[metadata.etude]\ncanary = 'test_x.py'"}, "metadata.etude.canary = 'test_x.py'"),
        ({"task.toml": "[metadata.etude]\ncolour = 1"}, "metadata.etude.colour = 1"),
        ({"task.toml": "[metadata.etude]\nallow = ['x']"}, "a place is written host:port"),
        ({"task.toml": "[metadata.etude]\nallow = ['localhost:5432']"}, "the machine that the task runs on"),
        ({"task.toml": "[metadata.etude]\nallow = ['169.254.169.254:80']"}, "no task may ask for that"),
        ({"task.toml": "[metadata.etude]\nallow = ['10.0.0.7:5432']"}, "no task may ask for that"),
    ],
)
def test_a_broken_folder_is_refused_with_place_and_fix(
    changes: dict[str, str | None], words: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "broken", changes)
    with pytest.raises(TaskFolderError, match=re.escape(str(folder))) as refused:
        read_task(folder)
    assert words in str(refused.value)


def test_only_text_is_kept_in_memory(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "binary")
    (folder / "tests" / "data.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskFolderError, match=r"data\.bin cannot be read as UTF-8"):
        read_task(folder)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "link")
    (folder / "tests" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(TaskFolderError, match="points outside of"):
        read_task(folder)


def test_a_separate_verifier_sees_what_was_declared_and_any_other_the_whole_folder(tmp_path: Path) -> None:
    declared = write_folder(tmp_path / "declared", {"task.toml": f"artifacts = ['/app/out', 'b.txt']\n{SEPARATE}"})
    shared = write_folder(tmp_path / "shared")
    checks = [read_task(folder).task(Split.TRAIN, image=Image()).checks for folder in (declared, shared)]
    assert [check.artefacts for check in checks if isinstance(check, ScriptChecks)] == [("out", "b.txt"), (".",)]


def test_the_digest_is_of_all_that_counts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    first = digest_files(folder)
    (folder / "tests" / "__pycache__").mkdir()
    (folder / "tests" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert digest_files(folder) == first == digest_files(write_folder(tmp_path / "b"))
    (folder / "tests" / "test.sh").chmod(0o755)
    second = digest_files(folder)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\n", encoding="utf-8")
    assert len({first, second, digest_files(folder)}) == 3


def test_one_folder_is_its_own_task_and_many_are_found_below(tmp_path: Path) -> None:
    one = write_folder(tmp_path / "b")
    write_folder(tmp_path / "a")
    assert task_folders(one) == [one]
    assert [folder.name for folder in task_folders(tmp_path)] == ["a", "b"]
    with pytest.raises(TaskFolderError, match="has no task"):
        task_folders(one / "tests")
