"""The examples of ``docs/extending.md`` in a run: a family, a grader, a harness, a loss, a reward function, a sink."""

import shutil
from pathlib import Path

import pytest

from etude.api.run import open_run
from etude.config.loading import load_recipe
from etude.run.folder import RunFolder
from etude.run.preflight import check_ready
from tiny_runs import DEADLINE_S, make_tiny_start, run_etude

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
STEPS = 3

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def test_a_run_of_ones_own_parts_outlives_the_folder_of_its_recipe(tmp_path: Path) -> None:
    recipe, checkpoint, curve = tmp_path / "recipe", tmp_path / "checkpoint", tmp_path / "rewards.txt"
    shutil.copytree(EXAMPLES, recipe)
    make_tiny_start(checkpoint)
    config = load_recipe(
        recipe,
        [
            f"model.checkpoint={checkpoint}",
            f'telemetry.sinks=[{{kind="@sink.py:RewardCurve", options={{file="{curve}"}}}}]',
        ],
    )
    assert [finding.name for finding in check_ready(config, tmp_path / "run")][-2:] == ["tasks", "session"]
    folder = RunFolder.create(tmp_path / "run", config)
    shutil.rmtree(recipe)
    run_etude("run", "--resume", str(folder.path))
    rewards = [float(line.split()[1]) for line in curve.read_text(encoding="utf-8").splitlines()]
    assert len(rewards) == STEPS
    assert all(0 < reward <= 1 for reward in rewards)
    steps = open_run(folder.path).steps()
    assert all({"near", "exact", "variety"} <= step.reward_parts.keys() for step in steps)
