"""``[harness]``: a recipe for an external program is complete, and says nothing that would have no effect."""

from pathlib import Path
from typing import Any

import pytest

from etude.config.loading import default_recipe, dump_toml, load_recipe, parse_config
from etude.errors import ConfigError

SUMMARY: dict[str, Any] = {"context": "summary", "summary_at_tokens": 200}
COMMAND: dict[str, Any] = {"kind": "command", "command": ["agent", "{prompt}", "{temperature}"]}


def test_an_external_program_is_accepted() -> None:
    config = parse_config({"harness": COMMAND, "rollouts": {"timeout_s": 300.0}}, source="t")
    assert config.harness.command == ("agent", "{prompt}", "{temperature}")
    assert config.harness.fills("prompt")
    assert not config.harness.fills("workdir")


@pytest.mark.parametrize(
    ("harness", "fault"),
    [
        ({"command": ["agent"]}, "harness.command would have no effect"),
        ({"timeout_s": 5.0}, "harness.timeout_s would have no effect"),
        ({"mounts": ["x"]}, "harness.mounts would have no effect"),
        (COMMAND | {"max_turns": 3}, "harness.max_turns would have no effect"),
        ({"kind": "command"}, "expected a program"),
        (COMMAND | {"command": ["A=B", "{prompt}"]}, "expected a program"),
        (COMMAND | {"command": ["agent"]}, "no {prompt}"),
        (COMMAND | {"command": ["agent", "{prompt}", "{promt}"]}, "{promt}"),
        (COMMAND | {"environment": {"A-B": "x"}}, "'A-B' is no name"),
        (COMMAND | {"files": {"../x": "y"}}, "must be a plain name"),
        (COMMAND | {"command": ["agent", "{prompt}"]}, "no {temperature}"),
        (COMMAND | {"timeout_s": 300.0}, "rollouts.timeout_s=300 ends the rollout first"),
        (COMMAND | {"comand": []}, "did you mean 'harness.command'"),
        (COMMAND | SUMMARY, "harness.context would have no effect"),
        ({"context": "summary"}, "needs harness.summary_at_tokens"),
        ({"context": "truncate"}, "needs harness.summary_at_tokens"),
        ({"summary_at_tokens": 200}, "harness.summary_at_tokens would have no effect with harness.context = 'grow'"),
        ({"max_summaries": 3}, "harness.max_summaries would have no effect"),
        (
            SUMMARY | {"context": "truncate", "summary_request": "sum up"},
            "harness.summary_request would have no",
        ),
        (SUMMARY | {"context": "truncate", "max_tokens_per_summary": 9}, "with harness.context = 'truncate'"),
        (SUMMARY | {"summary_at_tokens": 384}, "do not fit into engine.max_length=640"),
        (SUMMARY | {"context": "truncate", "summary_at_tokens": 640}, "do not fit into engine.max_length=640"),
    ],
)
def test_what_would_have_no_effect_or_no_sense_is_refused(harness: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"harness": harness, "rollouts": {"timeout_s": 300.0}}, source="t")
    assert fault in str(caught.value)


def test_contexts_may_start_anew() -> None:
    assert parse_config({"harness": SUMMARY | {"summary_at_tokens": 383}}, source="t").harness.context == "summary"
    truncating = {"context": "truncate", "summary_at_tokens": 200, "max_summaries": 3}
    assert parse_config({"harness": truncating}, source="t").harness.max_summaries == 3


def test_a_mark_is_for_harnesses_that_cannot_say_it() -> None:
    tree: dict[str, Any] = {"gateway": {"summary_mark": "Summarise"}, "rollouts": {"timeout_s": 300.0}}
    assert parse_config(tree | {"harness": COMMAND}, source="t").gateway.summary_mark == "Summarise"
    with pytest.raises(ConfigError, match=r"gateway\.summary_mark would have no effect"):
        parse_config(tree, source="t")


@pytest.mark.parametrize("source", ["behaviour.malformed_calls", "behaviour.open_todos", "measure.summaries"])
def test_what_only_the_built_in_harness_counts_is_no_part_of_another(source: str) -> None:
    part = {"name": "counted", "source": source, "version": 1, "weight": -1.0, "range": [0, 1], "missing": "wait"}
    tree: dict[str, Any] = {"reward": {"parts": [part]}, "rollouts": {"timeout_s": 300.0}}
    assert parse_config(tree, source="t").reward.of_harness == (source,)
    with pytest.raises(ConfigError, match=f"source = '{source}' would always be missing.*leave the part out"):
        parse_config(tree | {"harness": COMMAND}, source="t")


def test_hints_about_the_built_in_tools_are_nothing_to_another_harness() -> None:
    tree: dict[str, Any] = {"hints": {"weight": 0.1}, "rollouts": {"timeout_s": 300.0}}
    assert parse_config(tree, source="t").hints.tools
    with pytest.raises(ConfigError, match=r"hints\.weight would have no effect.*add hints\.rules"):
        parse_config(tree | {"harness": COMMAND}, source="t")


def test_hints_of_a_recipe_s_own_rules_suit_any_harness() -> None:
    rule = {"name": "style", "where": "said", "pattern": "^x", "text": "no x"}
    hints = {"weight": 0.1, "rules": [rule]}
    tree: dict[str, Any] = {"hints": hints, "rollouts": {"timeout_s": 300.0}, "harness": COMMAND}
    assert parse_config(tree, source="t").hints.weight == 0.1


def test_without_a_measurement_no_temperature_is_needed() -> None:
    tree = {"harness": COMMAND | {"command": ["agent", "{prompt}"]}, "eval": {"enabled": False}}
    tree["rollouts"] = {"timeout_s": 300.0}
    assert parse_config(tree, source="t").harness.kind == "command"


RECIPE = """
[harness]
kind = "command"
command = ["agent", "{prompt}", "{temperature}"]
files = { "a.yaml" = "@mine.yaml", "b.txt" = "inline" }
[rollouts]
timeout_s = 300.0
"""


def test_files_beside_the_recipe_become_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "mine.yaml").write_text("text: 'é'\n")
    config = load_recipe(tmp_path)
    assert config.harness.files == {"a.yaml": "text: 'é'\n", "b.txt": "inline"}
    resolved = tmp_path / "elsewhere.toml"
    resolved.write_text(dump_toml(config))
    (tmp_path / "mine.yaml").unlink()
    assert load_recipe(resolved) == config


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"harness\.files\.a\.yaml = '@mine\.yaml'"):
        load_recipe(tmp_path)


def test_the_default_is_the_built_in_harness() -> None:
    assert default_recipe().harness.kind == "coding"


def test_the_recipe_with_mini_swe_agent_is_complete() -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "external-harness"
    harness = load_recipe(recipe).harness
    assert harness.files["mini.yaml"] == (recipe / "mini.yaml").read_text(encoding="utf-8")
    assert "/harness/mini.yaml" in harness.command
