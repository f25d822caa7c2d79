"""The Timeline and Weights tabs' answers over a real small run: they agree with its events, its log and each other."""

import subprocess
import sys
from typing import Any

import pytest

from etude.run.folder import RunFolder
from etude.run.weight_log import open_log
from etude.telemetry.events import RolloutClosed, StepDone, WeightsSwapped
from etude.telemetry.log import EventReader
from etude.types import Json, RolloutStage
from etude.ui.routes import RunQuery
from etude.ui.runs import RunReader
from etude.ui.timeline_view import timeline
from etude.ui.weights_view import fleet_view, weight_history, weights
from tiny_runs import DEADLINE_S, make_tiny_start

STEPS = 6

pytestmark = pytest.mark.heavy
whole_run = pytest.mark.timeout(2 * DEADLINE_S)
"""For what waits for a run of its own."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    place = tmp_path_factory.mktemp("real")
    recipe = place / "run.toml"
    recipe.write_text(
        f"""
        name = "real"
        tasks.options.kinds = ["arith"]
        model.checkpoint = "{make_tiny_start(place / "start")}"
        midtrain.tokens = 0
        rollouts = {{ groups_per_step = 2, group_size = 2, max_staleness = 1, concurrency = 8 }}
        trainer.steps = {STEPS}
        eval = {{ tasks = 2 }}
        harness.options.max_turns = 2
        log.page = false
        """,
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "etude", "run", str(recipe), "--out", str(place / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    folder = RunFolder(place / "run")
    done = RunReader(folder, "real").overview()["phase"] == "done"  # a tiny model may learn nothing, which is an error
    assert done, ended.stdout + ended.stderr
    return folder


def facts(answer: Json) -> dict[str, Any]:
    assert isinstance(answer, dict)
    return answer


@whole_run
def test_the_timeline_has_the_seconds_of_the_events(run: RunFolder) -> None:
    window = {"from": "0", "to": "1e9", "bins": "300"}
    answer = facts(timeline(RunQuery(run=RunReader(run, "real"), options=window)))
    events = [logged.event for logged in EventReader(run.events).new()]
    steps = [event for event in events if isinstance(event, StepDone)]
    rollouts = [event for event in events if isinstance(event, RolloutClosed) and event.purpose == "train"]
    seconds = {
        (lane["group"], state["state"]): state["seconds"] for lane in answer["lanes"] for state in lane["states"]
    }
    assert seconds["trainer", "computing"] == pytest.approx(sum(step.metrics["busy_s"] for step in steps), abs=0.05)
    for stage in RolloutStage:
        expected = sum(rollout.stage_s.get(stage, 0.0) for rollout in rollouts)
        assert seconds.get(("rollouts", str(stage)), 0.0) == pytest.approx(expected, abs=0.05), stage
    for rollout in rollouts:
        assert sum(rollout.stage_s.values()) == pytest.approx(rollout.seconds, rel=0.2, abs=0.1), "nothing is left out"
    assert {"trainer", "engines", "gateways", "rollouts", "evaluations", "publishing"} <= {
        group for group, _ in seconds
    }
    assert "The trainer computed" in str(answer["words"])
    kinds = [mark["kind"] for mark in answer["marks"]]
    assert kinds.count("step") == len(steps) == STEPS
    assert kinds.count("swapped") == sum(isinstance(event, WeightsSwapped) for event in events) > 0


@whole_run
def test_the_weights_are_those_of_the_log_and_are_served(run: RunFolder) -> None:
    query = RunQuery(run=RunReader(run, "real"), options={"limit": "4"})
    answer, columns = facts(weights(query)), facts(weight_history(query))
    log = open_log(run)
    rows = [(row["version"], row["digest"], row["kind"]) for row in answer["versions"]]
    records = [log.read(version) for version in range(STEPS, STEPS - 4, -1)]
    assert rows == [(record.version, record.digest, record.kind) for record in records if record is not None]
    assert columns["version"] == list(range(STEPS + 1))
    lags = [lag is not None for lag in columns["lags"][""]]
    assert lags[-1] and lags == sorted(lags), "from the first version on that it was seen to swap to"
    (engine,) = answer["engines"]
    assert (engine["version"], engine["behind"]) == (STEPS, 0)
    older = facts(weights(RunQuery(run=query.run, options={"limit": "4", "before": str(STEPS - 3)})))
    assert [row["version"] for row in older["versions"]] == [2, 1, 0]


@whole_run
def test_the_processes_are_those_that_the_supervisor_started(run: RunFolder) -> None:
    (region,) = facts(fleet_view(RunQuery(run=RunReader(run, "real"))))["regions"]
    names = {process["name"] for process in region["processes"]}
    assert {"train", "serve", "gateway", "rollouts"} <= names
    assert {process["health"] for process in region["processes"]} == {"gone"}
