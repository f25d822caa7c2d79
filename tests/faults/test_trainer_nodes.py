"""A trainer on two nodes with a rank each: one is killed, both start again as a group, and training continues."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from etude.run.folder import RunFolder
from etude.telemetry.events import ProcessStarted, StepDone
from etude.telemetry.log import EventReader
from tiny_runs import FINISHED

STEPS = 4
DEADLINE_S = 1_200.0
RECIPE = {
    "name": "nodes",
    "tasks": {"options": {"kinds": ["arith"]}},
    "midtrain": {"tokens": 60_000, "batch_tokens": 2_000},
    "rollouts": {"groups_per_step": 4, "group_size": 4, "max_staleness": 1, "concurrency": 16, "max_attempts": 8},
    "trainer": {"steps": STEPS, "mismatch_share": 1.0},
    "eval": {"enabled": False},
    "optimiser": {"kind": "adamw"},
    "parallel": {"dp": 2},
}
FLEET = {"home": "here", "trainer": {"nodes": 2, "port": 29_431}, "regions": [{"name": "here", "engines": 1}]}

pytestmark = pytest.mark.timeout(DEADLINE_S * 1.2)


def events(folder: RunFolder) -> list[object]:
    return [logged.event for logged in EventReader(folder.events).new()] if folder.events.is_dir() else []


@pytest.mark.heavy("minutes")
def test_a_killed_node_restarts_the_trainer_as_a_group(tmp_path: Path) -> None:
    for name, tree in (("recipe", RECIPE), ("fleet", FLEET)):
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(tree))
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "etude", "run", str(tmp_path / "recipe.toml")]
    command += ["--fleet", str(tmp_path / "fleet.toml"), "--out", str(folder.path)]
    deadline_s = time.monotonic() + DEADLINE_S
    with (tmp_path / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
        try:
            while sum(isinstance(event, StepDone) for event in events(folder)) < 2:
                assert time.monotonic() < deadline_s
                assert run.poll() is None, (tmp_path / "out").read_text()
                time.sleep(0.5)
            node = next(
                each for each in events(folder) if isinstance(each, ProcessStarted) and each.process == "train-1"
            )
            os.kill(node.pid, signal.SIGKILL)
            assert run.wait(deadline_s - time.monotonic()) in FINISHED, (tmp_path / "out").read_text()
        finally:
            run.terminate()
    seen = events(folder)
    starts = [(event.process, event.restarts) for event in seen if isinstance(event, ProcessStarted)]
    assert [start for start in starts if start[0].startswith("train")] == [
        ("train", 0), ("train-1", 0), ("train", 1), ("train-1", 1),
    ]  # fmt: skip
    assert {process for process, _ in starts if process in ("serve", "gateway", "rollouts")} == {
        "serve", "gateway", "rollouts",
    }  # fmt: skip
    steps = [event for event in seen if isinstance(event, StepDone)]
    assert sorted({step.step for step in steps}) == list(range(1, STEPS + 1))
    assert len(steps) <= STEPS + 1, "the step that was under way is computed again, no other"
    assert all(step.metrics["k3"] < 1e-4 for step in steps)
