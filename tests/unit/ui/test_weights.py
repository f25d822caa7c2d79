"""The Weights tab's figures: lags by region, and a fleet as its stores and events tell it."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from etude.config.fleet import FleetConfig
from etude.config.loading import default_recipe
from etude.fleet.specs import ProcessStatus
from etude.fleet.state import Observed
from etude.run.folder import RunFolder
from etude.run.placement import desired_of, fleet_objects, remember_fleet
from etude.telemetry.events import EngineStats, Event, ProcessStarted, RegionServed, StepDone, WeightsSwapped
from etude.types import Json
from etude.ui.fleet import fleet
from etude.ui.routes import RunQuery
from etude.ui.runs import RunReader
from etude.ui.weight_history import WeightHistory
from etude.ui.weights_view import fleet_view, weight_history, weights


def history(*events: tuple[float, str, Event]) -> WeightHistory:
    folded = WeightHistory()
    for at_s, process, event in events:
        folded.add(type(event).__name__, {"at_s": at_s, "writer": process, **asdict(event)})
    folded.settle()
    return folded


def answer(value: Json) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value


def swap(version: int) -> WeightsSwapped:
    return WeightsSwapped(version=version, stage_ms=10.0, pause_ms=0.5)


def step(number: int) -> StepDone:
    return StepDone(step=number, metrics={"busy_s": 1.0})


def test_the_lag_of_a_region_is_that_of_its_last_engine() -> None:
    folded = history(
        *((0.0, engine, swap(0)) for engine in ("serve", "serve-1@eu", "serve@eu")),
        (10.0, "train", step(1)),
        (10.1, "serve", swap(1)),
        (10.5, "serve@eu", swap(1)),
        (20.0, "train", step(2)),
        (20.2, "serve-1@eu", swap(2)),  # over version 1, which it serves by that
        (20.3, "serve@eu", swap(2)),
        (30.0, "serve-2@eu", swap(2)),  # has just started: it was late with nothing
    )
    assert folded.lags_of(1) == pytest.approx({"": 0.1, "eu": 10.2})
    assert folded.lags_of(2) == pytest.approx({"eu": 0.3})
    assert folded.engines["serve"].version == 1


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", default_recipe(["name=small"]))


def write(folder: RunFolder, process: str, *events: Event, at_s: float) -> None:
    lines = [{"at_s": at_s, "writer": process, "event": type(event).__name__, **asdict(event)} for event in events]
    (folder.events / f"{process}.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def test_one_machine_is_one_region_whose_processes_are_told_by_their_heartbeats(folder: RunFolder) -> None:
    now_s = time.time()
    started = [ProcessStarted(process=name, pid=7, restarts=name == "train") for name in ("train", "serve", "gateway")]
    write(folder, "supervisor", *started, at_s=now_s - 60)
    write(folder, "serve", swap(3), at_s=now_s - 5)
    for name in ("train", "serve"):
        (folder.path / f".{name}.beat").touch()
    (region,) = answer(fleet_view(RunQuery(run=RunReader(folder, "small"))))["regions"]
    processes = {process["name"]: process for process in region["processes"]}
    assert {name: process["health"] for name, process in processes.items()} == dict.fromkeys(processes, "well")
    assert (region["version"], processes["train"]["restarts"], processes["serve"]["version"]) == (3, 1, 3)
    late = fleet(RunReader(folder, "small"), history((0.0, "s", started[0])), now_s + 30)
    assert "silent for 30 s" in str(late)


def test_a_fleet_is_what_its_stores_say_and_what_they_do_not_is_unknown(folder: RunFolder, tmp_path: Path) -> None:
    stores = {name: tmp_path / name for name in ("eu", "us", "asia")}
    for store in stores.values():
        store.mkdir()
    places: list[Json] = [{"name": "home", "store": str(folder.path), "engines": 1}]
    places += [{"name": name, "store": str(store), "engines": 2} for name, store in stores.items()]
    config = FleetConfig.model_validate_json(orjson.dumps({"home": "home", "regions": places}))
    remember_fleet(folder, config)
    generation = fleet_objects(folder).declare(desired_of(folder, config))
    statuses = {"serve@eu": ProcessStatus(incarnation="a", host="m1", pid=3, memory_bytes=5)}
    statuses["serve-1@eu"] = ProcessStatus(incarnation="a", host="m2", is_lost=True)
    fleet_objects(folder, "eu").observe(Observed(generation=generation, host="m0", statuses=statuses))
    fleet_objects(folder, "us").drain("serve@us")
    folded = history(
        (100.0, "serve@eu", swap(1)),
        (110.0, "rollouts", served("eu", is_away=False)),
        (110.0, "rollouts", served("us", is_away=True)),
    )
    regions = answer(fleet(RunReader(folder, "small"), folded, 120.0))["regions"]
    by_name = {region["name"]: region for region in regions}
    health = {process["name"]: process["health"] for region in by_name.values() for process in region["processes"]}
    assert (health["serve@eu"], health["serve-1@eu"], health["relay@eu"]) == ("well", "ill", "waits")
    assert (health["serve@us"], health["serve-1@us"], health["serve@asia"]) == ("waits", "unknown", "unknown")
    assert (by_name["eu"]["version"], by_name["eu"]["sessions"], by_name["us"]["is_away"]) == (1, 4, True)
    assert by_name["asia"]["remark"] == "no supervisor has reported yet"
    for path in stores["eu"].rglob("*"):
        os.utime(path, (path.stat().st_mtime - 60,) * 2)
    (late,) = [
        region
        for region in answer(fleet(RunReader(folder, "small"), folded, 120.0))["regions"]
        if region["name"] == "eu"
    ]
    assert "has not reported for" in late["remark"]
    assert {process["health"] for process in late["processes"]} == {"unknown"}, "an old report is no state of now"


def served(region: str, *, is_away: bool) -> RegionServed:
    return RegionServed(region=region, version=1, open=4, sessions=9, payload_bytes=0, is_away=is_away)


def test_a_run_without_a_version_says_so(folder: RunFolder) -> None:
    stats = EngineStats(
        busy_s=0.5, window_s=1.0, generated_tokens=8, prefill_tokens=0, reused_tokens=0, running=1, waiting=0
    )
    write(folder, "serve", stats, at_s=time.time())
    query = RunQuery(run=RunReader(folder, "small"))
    facts = answer(weights(query))
    assert (facts["versions"], facts["newest"]) == ([], None)
    assert facts["engines"][0]["busy"] == 0.5
    assert answer(weight_history(query))["version"] == []
