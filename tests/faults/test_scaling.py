"""A run whose number of rollouts processes follows the trainer, with real processes on this machine."""

import sys
from pathlib import Path

import pytest
import tomli_w

from bench.tiny_recipe import GROUP_SIZE, tiny_recipe
from etude.run.folder import RunFolder
from etude.telemetry.events import ProcessStarted, RolloutClosed
from etude.telemetry.log import EventReader
from etude.types import RolloutStatus
from tiny_runs import DEADLINE_S, FINISHED, run_etude

STEPS, GROUPS = 16, 4
RECIPE = tiny_recipe(
    "scaling",
    rollouts={"groups_per_step": GROUPS, "max_staleness": 2, "concurrency": GROUP_SIZE},
    harness={"kind": "patient_harness:PatientHarness", "options": {"max_turns": 2}},
    trainer={"steps": STEPS},
    effort={"weight": 1.0, "prices": {"call_tokens": 0.01, "final_tokens": 0.01}},
)
FLEET = {"home": "home", "regions": [{"name": "home", "engines": 1}], "scaling": {"rollouts": {"most": 3}}}


@pytest.mark.heavy("a minute")
@pytest.mark.timeout(DEADLINE_S * 1.2)
def test_rollouts_processes_are_added_while_the_trainer_waits_for_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    for name, tree in (("recipe", RECIPE), ("fleet", FLEET)):
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    folder = RunFolder(tmp_path / "run")
    command = ["run", tmp_path / "recipe.toml", "--fleet", tmp_path / "fleet.toml", "--out", folder.path]
    printed = run_etude(*command, statuses=FINISHED)
    assert "rollouts processes: 1 → 2" in printed
    started = {logged.event.process for logged in EventReader(folder.events, "supervisor").new()
               if isinstance(logged.event, ProcessStarted)}  # fmt: skip
    assert "rollouts-1" in started and "serve-1" not in started
    graded = [logged.process for logged in EventReader(folder.events).new()
              if isinstance(logged.event, RolloutClosed) and logged.event.status == RolloutStatus.GRADED]  # fmt: skip
    assert len(graded) >= STEPS * GROUPS * GROUP_SIZE
    assert {"rollouts", "rollouts-1"} <= set(graded)
