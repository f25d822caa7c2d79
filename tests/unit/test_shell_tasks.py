"""The tasks of recipes/pretrained: a right command solves each, held-out ones are apart, demonstrations are theirs."""

import json
import subprocess
from pathlib import Path

import pytest

from etude.protocols import FamilyContext
from etude.types import ScriptChecks, Split
from recipes.pretrained import shell_tasks
from recipes.pretrained.shell_tasks import SKILLS, ShellTasks, make_exercise

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrained"
CONTEXT = FamilyContext(seed=0, heldout_every=4, texts_heldout_every=4, folder=RECIPE, images=None)


@pytest.mark.parametrize("name", SKILLS)
def test_the_right_command_leaves_the_files_that_should_be_there(name: str, tmp_path: Path) -> None:
    skill = SKILLS[name]
    exercise = make_exercise(skill, skill.held_out, seed="test")
    for path, text in exercise.before.items():
        (tmp_path / path).write_text(text)
    assert exercise.before != exercise.after
    subprocess.run(["sh", "-c", exercise.command], cwd=tmp_path, check=True)
    left = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert left == {path: text.split() for path, text in exercise.after.items()}


def test_held_out_tasks_are_of_templates_of_their_own_and_none_is_there_twice() -> None:
    family = ShellTasks(None, CONTEXT)
    tasks = {split: [family.task(split, index) for index in range(family.size(split) or 0)] for split in Split}
    templates = {split: {task.template for task in tasks[split]} for split in Split}
    assert not templates[Split.TRAIN] & templates[Split.HELDOUT]
    assert len(tasks[Split.HELDOUT]) == 64
    assert not {task.prompt for task in tasks[Split.HELDOUT]} & {task.prompt for task in tasks[Split.TRAIN]}
    every = [task.task_id for split in Split for task in tasks[split]]
    assert len(set(every)) == len(every)
    checks = tasks[Split.TRAIN][0].checks
    assert isinstance(checks, ScriptChecks)
    assert set(checks.files) > {"test.sh"}


def test_the_demonstrations_are_those_that_the_file_makes() -> None:
    """Under the harness's own system message; two in five are right as they stand."""
    lines = (RECIPE / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == shell_tasks.demonstrations()
    replies = [json.loads(line)["messages"][-1]["content"] for line in lines]
    bare = [reply for reply in replies if not reply.startswith("You can") and not reply.endswith(".bak")]
    assert len(bare) / len(replies) == 0.4
    assert f'SYSTEM = "{shell_tasks.SYSTEM}"' in (RECIPE / "agent.py").read_text(encoding="utf-8")
