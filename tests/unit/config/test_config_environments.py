"""Recipes of third-party environments: the family chooses its harness; options without effect are refused."""

import tomllib
from pathlib import Path

import pytest

from etude.config.loading import default_recipe, dump_run, dump_toml, load_recipe, parse_config
from etude.config.rollouts import OpenEnvHarnessOptions, VerifiersHarnessOptions
from etude.errors import ConfigError

VERIFIERS = ("tasks.family=verifiers", "tasks.options.env=sums")
OPENENV = ("tasks.family=openenv", "tasks.options.url=http://127.0.0.1:8000")


def test_the_harness_is_that_of_the_family_with_its_own_options() -> None:
    verifiers = default_recipe([*VERIFIERS, "harness.options.timeout_s=9.0"]).harness
    assert (verifiers.kind, verifiers.options) == ("verifiers", VerifiersHarnessOptions(timeout_s=9.0))
    openenv = default_recipe([*OPENENV, "harness.options.max_steps=3"]).harness
    assert (openenv.kind, openenv.options) == ("openenv", OpenEnvHarnessOptions(max_steps=3))


def test_tables_for_the_environment_come_back_as_they_were_written() -> None:
    config = default_recipe([*VERIFIERS, "tasks.options.args={sizes=[1,2], task={judge={model='m'}}}"])
    assert config.tasks.options.model_dump()["args"] == {"sizes": [1, 2], "task": {"judge": {"model": "m"}}}
    assert parse_config(tomllib.loads(dump_toml(config)), source="here") == config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (VERIFIERS[:1], "tasks.options.env = ''"),
        (("tasks.family=openenv", "tasks.options.url=localhost:8000"), "tasks.options.url = 'localhost:8000'"),
        ((*VERIFIERS, "harness.kind=coding"), "harness.kind = 'coding' does not go with tasks.family = 'verifiers'"),
        (("harness.kind=openenv",), "harness.kind = 'openenv' does not go with tasks.family = 'bugfix'"),
        ((*OPENENV, "tasks.epochs=2"), "tasks.epochs would have no effect"),
        ((*OPENENV, "cheating.honeypots=true"), "cheating.honeypots would have no effect"),
        ((*OPENENV, "tasks.folder=here"), "has no tasks.folder"),
        ((*VERIFIERS, "tasks.options.arg=1"), "did you mean 'tasks.options.args'?"),
    ],
)
def test_what_does_not_fit_is_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        default_recipe(settings)
    assert words in str(refused.value)


def test_a_run_keeps_a_copy_of_the_graders_that_its_recipe_names(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe", tmp_path / "run"
    recipe.mkdir()
    run.mkdir()
    (recipe / "grader.py").write_text("class Mine: ...\n", encoding="utf-8")
    (recipe / "run.toml").write_text("[tasks]\ngraders = {a = '@grader.py:Mine', b = 'outcome'}\n", encoding="utf-8")
    (run / "run.toml").write_text(dump_run(load_recipe(recipe), run), encoding="utf-8")
    (recipe / "grader.py").unlink()
    graders = load_recipe(run).tasks.graders
    assert graders["a"].startswith(f"@{run}/plugins/grader.") and graders["b"] == "outcome"
