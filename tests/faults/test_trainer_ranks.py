"""A run whose trainer is several processes: it trains, loses one of them, and continues from its checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.config.loading import parse_config
from etude.run.folder import RunFolder
from etude.run.launchers.fork_server import THREADING
from etude.run.weight_log import open_log
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventReader

STEPS = 12
DEADLINE_S = 600.0

pytestmark = pytest.mark.timeout(DEADLINE_S * 1.5)

RECIPE = {
    "name": "ranks",
    "tasks": {"options": {"kinds": ["arith"]}},
    "midtrain": {"tokens": 700_000, "batch_tokens": 2_000},
    "rollouts": {"groups_per_step": 4, "group_size": 4, "max_staleness": 1, "concurrency": 16, "max_attempts": 8},
    "trainer": {"steps": STEPS, "checkpoint_steps": 4, "mismatch_share": 1.0, "checkpoint_activations": True},
    "eval": {"enabled": False},
    "optimiser": {"kind": "muon"},
    "parallel": {"dp": 2, "ep": 2},
}


def steps_done(folder: RunFolder) -> list[StepDone]:
    return [logged.event for logged in EventReader(folder.events).new() if isinstance(logged.event, StepDone)]


def trainers(folder: RunFolder) -> list[int]:
    """Process ids of the ranks of this run."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode().split("\0")
            is_rank = b"\0RANK=" in path.with_name("environ").read_bytes()
        except OSError:
            continue
        if arguments[-2:-1] == [str(folder.path)] and "train" in arguments and is_rank:
            result.append(int(path.parent.name))
    return result


@pytest.mark.skipif(os.environ.get("ETUDE_LONG") != "1", reason="minutes; the crew is tested always")
def test_a_killed_rank_costs_one_step_at_most(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", parse_config(RECIPE, source="test"))
    command = [sys.executable, "-m", "etude", "run", "--resume", str(folder.path)]
    deadline_s = time.monotonic() + DEADLINE_S
    with subprocess.Popen(command, env={**THREADING, **os.environ}, stdout=subprocess.DEVNULL) as run:
        try:
            while len(steps_done(folder)) < STEPS // 2:
                assert time.monotonic() < deadline_s
                assert run.poll() is None
                time.sleep(0.2)
            ranks = trainers(folder)
            assert len(ranks) == 2
            os.kill(max(ranks), signal.SIGKILL)
            assert run.wait(deadline_s - time.monotonic()) == 0
        finally:
            run.terminate()
    result = [step.step for step in steps_done(folder)]
    assert sorted(set(result)) == list(range(1, STEPS + 1))
    assert len(result) <= STEPS + 1, "the step that was under way is done again, and others are proven only"
    assert any(step.metrics["grad_norm"] > 0 for step in steps_done(folder))
    assert open_log(folder).read(STEPS) is not None
    assert all(step.metrics["k3"] < 1e-4 for step in steps_done(folder))
