"""The examples of ``docs/extending.md``, in a run: a family, a harness, a loss, a reward function and a sink."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etude.config.loading import default_recipe, load_recipe
from etude.run.folder import RunFolder
from etude.run.phases import make_start
from etude.run.preflight import check_ready

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
STEPS = 3
DEADLINE_S = 600.0
"""A bound on what hangs, not on what a busy machine is slow at."""

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def test_a_run_of_ones_own_parts_outlives_the_folder_of_its_recipe(tmp_path: Path) -> None:
    recipe, checkpoint, curve = tmp_path / "recipe", tmp_path / "checkpoint", tmp_path / "rewards.txt"
    shutil.copytree(EXAMPLES, recipe)
    checkpoint.mkdir()
    shape = ("hidden_size=32", "layers=1", "heads=2", "kv_heads=2", "head_dim=16", "experts=4", "expert_size=32")
    make_start(checkpoint, default_recipe([f"model.shape.{key}" for key in shape]))
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
    command = [sys.executable, "-m", "etude", "run", "--resume", str(folder.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rewards = [float(line.split()[1]) for line in curve.read_text(encoding="utf-8").splitlines()]
    assert len(rewards) == STEPS
    assert all(0 < reward <= 1 for reward in rewards)
