"""Mid-training and SFT as processes that are killed at random points: the weights are those of a run that was not."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.run.folder import RunFolder
from etude.run.launchers.fork_server import THREADING
from etude.run.phase_folders import Phase, PhaseFolders
from etude.run.weight_log import open_log
from etude.types import Json
from etude.weights.repair import verify
from waiting import wait_until

KILLS = 2
LONG_KILLS = 40
"""With ``ETUDE_LONG=1``."""
DEADLINE_S = 120.0

pytestmark = pytest.mark.timeout(600)


def config_of(chats: Path, parallel: dict[str, Json]) -> RunConfig:
    return parse_config(
        {
            "name": "killed",
            "seed": 7,
            "tasks": {"options": {"kinds": ["arith"]}},
            "model": {"shape": {"vocab_size": 400, "hidden_size": 32, "layers": 1, "experts": 2, "expert_size": 16}},
            "midtrain": {"tokens": 256 * 40, "batch_tokens": 256, "checkpoint_steps": 7, "threads": 1},
            "sft": {"file": str(chats), "batch_tokens": 256, "checkpoint_steps": 7, "epochs": 6, "threads": 1},
            "eval": {"loss_every_steps": 25},
            "trainer": {"device": "cpu"},
            "parallel": parallel,
        },
        source="test",
    )


def start(folder: RunFolder, phase: Phase) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "etude", phase, "--run", str(folder.path)]
    return subprocess.Popen(command, env={**os.environ, **THREADING}, stdout=subprocess.DEVNULL)


def finish(folder: RunFolder, phase: Phase) -> None:
    assert start(folder, phase).wait(DEADLINE_S) == 0


def wait_for_work(folder: RunFolder, phase: Phase, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has done work that a kill could lose."""
    events = folder.events / f"{phase}.jsonl"
    size = events.stat().st_size if events.exists() else 0
    wait_until(
        lambda: process.poll() is not None or (events.exists() and events.stat().st_size > size),
        fault=lambda: f"{phase} did not begin",
        timeout_s=DEADLINE_S,
    )


@pytest.mark.parametrize("parallel", [{}, {"dp": 2, "ep": 2}])
def test_killed_phases_end_with_the_same_bits(parallel: dict[str, Json], tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"fix f{n}"}, {"role": "assistant", "content": f"read a{n}.py"}]}
        for n in range(60)
    ]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = config_of(chats, parallel)
    whole, killed = (RunFolder.create(tmp_path / name, config) for name in ("whole", "killed"))
    phases: tuple[Phase, ...] = ("midtrain", "sft")
    for phase in phases:
        finish(whole, phase)

    chance = random.Random(3)
    kills = LONG_KILLS if os.environ.get("ETUDE_LONG") else KILLS
    for phase in phases:
        for _ in range(kills // len(phases)):
            process = start(killed, phase)
            wait_for_work(killed, phase, process)
            time.sleep(chance.uniform(0, 0.5))
            process.kill()
            process.wait()
        finish(killed, phase)
    for phase in phases:
        assert PhaseFolders(killed).record(phase) == PhaseFolders(whole).record(phase)
    assert (killed.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    assert {check.fault for check in verify(open_log(killed))} == {None}
