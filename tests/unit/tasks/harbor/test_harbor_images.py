"""Images of Harbor tasks, built from their Dockerfiles, and tasks that are checked before they are used."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.rewards.graders.script import ScriptGrader
from etude.sandbox_spec import Capability
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.taskgen.harbor.soundness import Soundness, SoundnessCheck, faults_of
from etude.tasks.harbor.folder import HarborTask, read_task
from etude.tasks.harbor.images import build_images, plain_files
from harbor_folders import write_folder

EXAMPLES = Path(__file__).parents[4] / "examples" / "tasks"
"""They need no image, so they can be checked without podman."""


def source_of(tmp_path: Path, changes: Mapping[str, str | None], name: str = "task") -> HarborTask:
    return read_task(write_folder(tmp_path / name, changes))


# --- Without a sandbox ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dockerfile", "files"),
    [
        ("WORKDIR /app", {}),
        ("WORKDIR /app\nCOPY start .", {"notes/a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start /app/deep", {"deep/notes/a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start/notes/a.txt .", {"a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start/notes/a.txt b.txt", {"b.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start/notes/a.txt sub/", {"sub/a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start /elsewhere", None),
        ("WORKDIR /app\nCOPY start/* .", None),
        ("WORKDIR /app\nCOPY --chmod=755 start .", None),
        ("WORKDIR /other\nWORKDIR /app", None),
        ("WORKDIR /app\nRUN true", None),
    ],
)
def test_a_dockerfile_that_only_puts_text_in_place_needs_no_image(
    dockerfile: str, files: dict[str, str] | None, tmp_path: Path
) -> None:
    assert plain_files(source_of(tmp_path, {"environment/Dockerfile": f"FROM debian:12\n{dockerfile}"})) == files


def test_programs_bytes_and_links_are_more_than_text(tmp_path: Path) -> None:
    source = source_of(tmp_path, {})
    file = source.context / "start" / "notes" / "a.txt"
    file.chmod(0o755)
    assert plain_files(source) is None
    file.chmod(0o644)
    file.write_bytes(b"\xff")
    assert plain_files(source) is None
    file.unlink()
    file.symlink_to("../notes")
    assert plain_files(source) is None


@pytest.mark.parametrize(
    ("untouched", "solved", "words"),
    [
        ([0.0, 0.5], [1.0, 1.0], "unequally"),
        ([1.0, 1.0], [1.0, 1.0], "doing nothing passes"),
        ([0.0, 0.0], [1.0, 0.9], "its own solution fails"),
        ([0.0, 0.0], [], ""),
        ([0.2, 0.2], [1.0, 1.0], ""),
    ],
)
def test_a_sound_task_fails_untouched_and_passes_solved_each_time(
    untouched: list[float], solved: list[float], words: str
) -> None:
    faults = faults_of(untouched, solved, has_solution=True, log="")
    assert any(words in fault for fault in faults) if words else faults == ()


def test_a_task_needs_a_solution_and_a_check_that_ends() -> None:
    assert len(faults_of([0.0], [], has_solution=False, log="")) == 1
    assert len(faults_of([0.0], [], has_solution=True, log="SandboxError: …")) == 1


# --- In sandboxes ---------------------------------------------------------------------------------------------------


def test_tasks_are_sound_where_their_parts_are_and_broken_ones_are_told(tmp_path: Path) -> None:
    changes: dict[str, dict[str, str | None]] = {
        "fine": {},
        "broken": {"tests/test.sh": "#!/bin/bash\necho no verdict"},
        "easy": {"tests/grade.py": "open('/logs/verifier/reward.txt', 'w').write('1')"},
        "wrong": {"solution/solve.sh": "#!/bin/bash\necho no > answer.txt"},
        "stuck": {"solution/solve.sh": "#!/bin/bash\necho tried; exit 5"},
    }
    examples = [read_task(EXAMPLES / name) for name in ("greeting", "word-count")]
    tasks = [*examples, *(source_of(tmp_path, change, name) for name, change in changes.items())]
    store = ImageStore(tmp_path / "store")

    async def check() -> tuple[Soundness, ...]:
        sandboxes = NamespaceSandboxes()
        try:
            if Capability.IMAGES not in await sandboxes.capabilities():
                pytest.skip("no sandbox with a root inside can be made here")
            builds = await build_images(tasks, store)
            grader = ScriptGrader(sandboxes, store)
            return await SoundnessCheck(sandboxes, grader, repeats=2).check_all(tasks, builds)
        finally:
            await sandboxes.close()

    reports = {report.name: report for report in asyncio.run(check())}
    for task in (*examples, tasks[len(examples)]):
        report = reports[task.name]
        assert (report.is_sound, report.untouched, report.solved) == (True, (0.0, 0.0), (1.0, 1.0)), report
    assert "no verdict" in reports["broken"].log
    assert reports["easy"].faults == ("doing nothing passes: rewards [1.0, 1.0]",)
    assert reports["wrong"].faults == ("its own solution fails: rewards [0.0, 0.0]",)
    assert "exit code 5" in reports["stuck"].log
    assert "tried" in reports["stuck"].log
