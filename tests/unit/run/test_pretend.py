"""Recipes are checked for other machines, and the recipes for GPUs fit their machines."""

import json
import re
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config.loading import load_recipe
from etude.errors import ConfigError, UserError
from etude.run.gpu_machine import GpuMachine, parse_size
from etude.run.pretend import check_pretended

RECIPES = Path(__file__).parents[3] / "recipes"
FLEET = str(RECIPES / "gpu-1t" / "fleet.toml")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their models from there."""
    monkeypatch.chdir(RECIPES.parent)


@pytest.mark.parametrize(
    "arguments",
    [("gpu-8b",), ("gpu-30b-a3b",), ("gpu-1t", "--fleet", FLEET)],
    ids=["8b", "30b-a3b", "1t"],
)
def test_recipes_for_gpus_are_accepted_on_machines_of_eight_times_80_gb(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, *more = arguments
    assert main(["check", str(RECIPES / recipe), "--pretend", "h100x8", *more]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16" in shown
    assert "of 80 GB a GPU: trainer" in shown


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("gpu-8b", "engine.replicas=3", r"this machine has 8: lower engine\.replicas"),
        ("gpu-8b", "trainer.microbatch_tokens=200000", r"for the trainer: change .*trainer\.microbatch_tokens"),
        ("gpu-8b", "engine.options.cache_tokens=524288", r"for the engine: change engine\.options\.cache_tokens"),
        ("gpu-30b-a3b", "optimiser.state=8bit", r"optimiser\.state"),
        ("gpu-30b-a3b", "numerics.arithmetic=invariant", r"numerics\.arithmetic"),
    ],
)
def test_what_would_not_run_there_is_refused_with_its_key(recipe: str, override: str, message: str) -> None:
    config = load_recipe(RECIPES / recipe, [override])
    with pytest.raises(UserError, match=message):
        list(check_pretended(config, GpuMachine.parse("h100x8")))


def test_the_plan_of_a_shape_is_one_json_object_with_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "gpu-30b-a3b")
    assert main(["plan", "memory", recipe, "--gpus", "8", "--gpu-memory", "80GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert [side["name"] for side in plan["processes"]] == ["trainer", "engine"]
    assert sum(part["bytes"] for part in plan["processes"][0]["parts"]) == plan["processes"][0]["total_bytes"]
    assert main(["plan", "memory", recipe, "--set", "optimiser.state=fp32", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize("shape", ["gpu-8b", "gpu-30b-a3b", "gpu-1t", "gpu-1t/deepseek-v3"])
def test_any_shape_can_be_planned_by_its_config_alone(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--pretend", "h200x8", "--fleet", FLEET]
    model = f"model.checkpoint={RECIPES / shape}"
    assert main(["plan", "memory", str(RECIPES / "gpu-1t"), "--set", model, "--set", "parallel.ep=64", *where]) == 0
    assert "512 × rank of the trainer" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["h100", "x8", "h100x0", "l4x8"])
def test_an_unknown_machine_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a machine"):
        GpuMachine.parse(name)


def test_sizes_are_gigabytes() -> None:
    assert parse_size("80GB") == parse_size("80") == 80_000_000_000
    with pytest.raises(ConfigError, match="write gigabytes"):
        parse_size("80MB")


def test_the_tables_of_the_docs_are_what_the_commands_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    blocks = re.findall(r"```\n\$ etude (plan .*)\n([^`]*)```", Path("docs/gpu.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 5
    for command, table in blocks:
        assert main(command.split()) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == table.splitlines(), command
