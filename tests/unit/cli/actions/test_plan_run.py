"""``etude plan run``: predicts a recipe from a run's events, and names mistakes before it simulates."""

import json
from pathlib import Path

import pytest

from etude.cli.actions.plan_run import parse_link, regions_of
from etude.cli.main import main
from etude.config.loading import default_recipe, parse_config
from etude.errors import ConfigError
from etude.run.folder import RunFolder
from etude.simulation.calibration import RunCalibration, TrainerTimes
from etude.simulation.engine import EngineRates
from etude.simulation.run import RegionModel, simulate
from etude.simulation.workload import RolloutWork, Workload
from etude.telemetry.log import EventLog

WORK = RolloutWork(turns=2, sampled_tokens=80, prompt_tokens=100, sandbox_s=0.05, tools_s=0.2, grading_s=0.3)
RECORDED = RunCalibration(
    engine=EngineRates(step_s=0.002, sequence_s=0.0005, prompt_s=0.0001, max_running=64),
    trainer=TrainerTimes(fixed_s=0.2, token_s=1e-4, save_s=0.1, publish_s=0.3),
    swap_s=0.2,
    call_s=0.05,
    workload=Workload(((WORK,),)),
)
FLEET = """
home = "home"
[[regions]]
name = "home"
store = "s3://a/r"
engines = 1
[[regions]]
name = "eu"
store = "s3://b/r"
engines = 2
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run's folder with the events of a simulated one."""
    sections = {"groups_per_step": 4, "group_size": 4, "max_staleness": 1, "concurrency": 16}
    config = parse_config({"rollouts": sections, "trainer": {"steps": 12}}, source="t")
    folder = RunFolder.create(tmp_path_factory.mktemp("planning") / "run", config)
    events = simulate(config, RECORDED, [RegionModel(name="here", engines=1)])
    for logged in sorted([*events.logged, *events.rollouts], key=lambda each: each.at_s):
        with EventLog(folder.events, logged.process, now=lambda at_s=logged.at_s: at_s) as log:  # type: ignore[misc]
            log.write(logged.event)
    return folder


def test_a_recipe_is_predicted_as_a_table_as_json_and_as_a_page(
    run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, recipe = tmp_path / "plan.html", str(run.config_file)
    assert main(["plan", "run", recipe, "--from", str(run.path), "--page", str(page)]) == 0
    assert "trainer busy" in capsys.readouterr().out
    assert "Seconds of a step" in page.read_text()
    predicted = {}
    for staleness in (0, 1):
        key = f"rollouts.max_staleness={staleness}"
        assert main(["plan", "run", recipe, "--from", str(run.path), "--set", key, "--json"]) == 0
        predicted[staleness] = json.loads(capsys.readouterr().out)
    assert predicted[0]["staleness"]["mean"] == 0.0
    assert predicted[0]["step_s"] > 1.1 * predicted[1]["step_s"]
    assert predicted[1]["assumptions"] and predicted[1]["change"]


def test_a_fleet_gives_its_regions_with_engines(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    config = default_recipe()
    assert regions_of(config, fleet, ["eu=80,12"]) == [
        RegionModel(name="home", engines=1),
        RegionModel(name="eu", engines=2, rtt_s=0.08, arrival_s=12.0),
    ]
    with pytest.raises(ConfigError, match="no region of that name has engines; there are home, eu"):
        regions_of(config, fleet, ["us=80"])
    with pytest.raises(ConfigError, match="name a fleet with --fleet"):
        regions_of(config, None, ["us=80"])


@pytest.mark.parametrize("text", ["eu", "eu=far", "eu=-1", "eu=80,-2"])
def test_a_link_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as eu=80,12"):
        parse_link(text)


SHORT = ("prompt_tokens=200", "sampled_tokens=100", "tools_s=1", "grading_s=1")
PRICED = [f"--assume=workload.{each}" for each in SHORT]


def test_a_plan_without_a_run_counts_money(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["plan", "run", str(run.config_file), "--hardware", "h100", *PRICED, "--assume", "workload.turns=2"]
    assert main([*recipe, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["usd"]["hour"] == pytest.approx(plan["usd"]["engines_hour"] + plan["usd"]["trainer_hour"], abs=0.02)
    assert plan["usd"]["step"] == pytest.approx(plan["usd"]["hour"] * plan["step_s"] / 3600, rel=0.05, abs=0.01)
    assert plan["step_s"] >= max(plan["by_arithmetic_s"].values())
    assert plan["gpus"] == {"trainer": 1, "engines": 1} and plan["delta"]["wan_bytes_per_step"] == 0
    assert main(recipe) == 0
    shown = capsys.readouterr().out
    assert "money" in shown and "https://www.coreweave.com/pricing" in shown
    assert "training_share = 0." in shown and "= None" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name one of them"),
        (("--from", "runs/x", "--hardware", "h100"), "name one of them"),
        (("--hardware", "h100", "--link", "eu=80"), "--link would have no effect"),
        (("--hardware", "h100", "--search", "steps=none"), "expected steps=N or usd=N"),
        (("--hardware", "h100", "--precision", "0.05"), "needs --hours"),
        (("--from", "runs/x", "--precision", "0.05"), "--precision would have no effect"),
        (("--from", "runs/x", "--search", "steps=3"), "--search would have no effect"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    options: tuple[str, ...], message: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "run", str(run.config_file), *options]) == 2
    assert message in capsys.readouterr().err
