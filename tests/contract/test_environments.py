"""Runs that train on other people's environments, from recipe to report: the real packages of both."""

import statistics
from pathlib import Path

import pytest

from environments import PYTHON, openenv_server, real, write_verifiers
from etude.api.run import open_run
from tiny_runs import DEADLINE_S, make_tiny_start, run_etude

pytestmark = [real, pytest.mark.timeout(3 * DEADLINE_S)]

STEPS = 2
RECIPE = """
[midtrain]
tokens = 0

[rollouts]
groups_per_step = 2
group_size = 4
concurrency = 8

[trainer]
steps = 2

[eval]
tasks = 3
"""


def train(tmp_path: Path, tasks: str) -> list[float]:
    """Check a recipe and run it; returns the rewards of all rollouts that were trained on."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "run.toml").write_text(tasks + RECIPE, encoding="utf-8")
    checkpoint = make_tiny_start(tmp_path / "checkpoint")
    arguments = [str(tmp_path / "recipe"), "--set", f"model.checkpoint={checkpoint}"]
    run_etude("check", *arguments)
    run_etude("run", *arguments, "--out", str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert len(list(run.steps())) == STEPS
    return [rollout.reward for rollout in run.rollouts() if rollout.reward is not None]


def test_an_environment_of_verifiers_is_trained_on(tmp_path: Path) -> None:
    folder = write_verifiers(tmp_path / "environments")
    tasks = f"""
[tasks]
family = "verifiers"
folder = "{folder}"
options = {{ env = "etude-sums", args = {{ step = 3 }}, python = "{PYTHON}", max_tasks = 60 }}
"""
    rewards = train(tmp_path, tasks)
    assert len(rewards) >= STEPS * 8
    assert statistics.pvariance(rewards) > 0, "the environment's own reward tells answers apart"


def test_an_openenv_server_is_trained_on(tmp_path: Path) -> None:
    with openenv_server(tmp_path) as url:
        tasks = f"""
[tasks]
family = "openenv"
options = {{ url = "{url}" }}

[harness.options]
max_steps = 3
max_tokens_per_turn = 16
"""
        rewards = train(tmp_path, tasks)
    assert len(rewards) >= STEPS * 8
    assert all(-0.05 < reward <= 1 for reward in rewards)
