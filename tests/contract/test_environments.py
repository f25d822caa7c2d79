"""Runs that train on other people's environments, from recipe to report: the real packages of both."""

from pathlib import Path

import pytest

from environments import PYTHON, openenv_server, real, write_verifiers
from etude.api.records import Records, StepRecord
from etude.api.run import open_run
from tiny_runs import DEADLINE_S, make_tiny_start, run_etude

pytestmark = pytest.mark.timeout(3 * DEADLINE_S)

STEPS = 2
WORDS = """
import numpy as np

def words(rollout):
    ids = np.concatenate([turn.completion_ids for turn in rollout.turns])
    return len(set(ids.tolist())) / len(ids)
"""
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
PARTS = """
[[reward.parts]]
name = "grade"
source = "grader"
version = 1
weight = 1.0
range = [-1.0, 3.0]

[[reward.parts]]
name = "words"
source = "@words.py:words"
version = 1
weight = 1.0
range = [0.0, 1.0]
"""
"""The environment's reward, and a part that tells random answers apart: of a random model hardly any is right."""


def train(tmp_path: Path, tasks: str) -> Records[StepRecord]:
    """Check a recipe and run it; returns its steps."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "run.toml").write_text(tasks + RECIPE, encoding="utf-8")
    (tmp_path / "recipe" / "words.py").write_text(WORDS, encoding="utf-8")
    checkpoint = make_tiny_start(tmp_path / "checkpoint")
    arguments = [str(tmp_path / "recipe"), "--set", f"model.checkpoint={checkpoint}"]
    run_etude("check", *arguments)
    run_etude("run", *arguments, "--out", str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    steps = run.steps()
    assert len(steps) == STEPS
    assert not [rollout.cause for rollout in run.rollouts(outcome="failed")]
    return steps


@real
def test_an_environment_of_verifiers_is_trained_on(tmp_path: Path) -> None:
    folder = write_verifiers(tmp_path / "environments")
    tasks = f"""
[tasks]
family = "verifiers"
folder = "{folder}"
options = {{ env = "etude-sums", args = {{ step = 3 }}, python = "{PYTHON}", max_tasks = 60 }}
"""
    steps = train(tmp_path, tasks)
    assert all({"right", "variety", "length"} <= step.reward_parts.keys() for step in steps)
    assert all(step.reward is not None and 0 < step.reward <= 3 for step in steps)


@real
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
        steps = train(tmp_path, tasks + PARTS)
    assert all("steps" in step.reward_parts for step in steps)
    assert all(sum(step.ended.values()) == step.ended.get("turns", 0) + step.ended.get("submit", 0) for step in steps)
