"""``[harness]``: a recipe for an external program must be complete and have no option without effect."""

from pathlib import Path
from typing import Any

import pytest

from etude.config.loading import default_recipe, dump_toml, load_recipe, parse_config
from etude.config.rollouts import CodingOptions, CommandOptions
from etude.errors import ConfigError

SUMMARY: dict[str, Any] = {"context": "summary", "summary_at_tokens": 200}
ARGUMENTS = ["agent", "{prompt}", "{temperature}"]


def coding(**options: Any) -> dict[str, Any]:
    """``[harness]`` of the built-in agent."""
    return {"options": options}


def command(**options: Any) -> dict[str, Any]:
    """``[harness]`` of an external program."""
    return {"kind": "command", "options": {"command": ARGUMENTS} | options}


COMMAND = command()


def test_an_external_program_is_accepted() -> None:
    config = parse_config({"harness": COMMAND, "rollouts": {"timeout_s": 300.0}}, source="t")
    options = config.harness.options
    assert isinstance(options, CommandOptions)
    assert options.command == tuple(ARGUMENTS)
    assert options.fills("prompt")
    assert not options.fills("workdir")


@pytest.mark.parametrize(
    ("harness", "fault"),
    [
        (coding(command=["agent"]), "no effect with harness.kind = 'coding', it goes with 'command'"),
        (coding(timeout_s=5.0), "it goes with 'command'"),
        (command(max_turns=3), "no effect with harness.kind = 'command', it goes with 'coding'"),
        (command(**SUMMARY), "it goes with 'coding'"),
        ({"max_turns": 3}, "unknown key 'harness.max_turns': it is harness.options.max_turns now"),
        ({"kind": "command"}, "expected a program"),
        (command(command=["A=B", "{prompt}"]), "expected a program"),
        (command(command=["agent"]), "no {prompt}"),
        (command(command=["agent", "{prompt}", "{promt}"]), "{promt}"),
        (command(environment={"A-B": "x"}), "'A-B' is not a valid"),
        (command(files={"../x": "y"}), "must be a plain name"),
        (command(command=["agent", "{prompt}"]), "no {temperature}"),
        (command(timeout_s=300.0), "rollouts.timeout_s=300 ends the rollout first"),
        (command(comand=[]), "did you mean 'harness.options.command'"),
        (coding(context="summary"), "needs harness.options.summary_at_tokens"),
        (coding(context="truncate"), "needs harness.options.summary_at_tokens"),
        (coding(summary_at_tokens=200), "no effect with harness.options.context = 'grow'"),
        (coding(max_summaries=3), "harness.options.max_summaries would have no effect"),
        (
            coding(context="truncate", summary_at_tokens=200, summary_request="sum up"),
            "harness.options.summary_request would have no",
        ),
        (
            coding(context="truncate", summary_at_tokens=200, max_tokens_per_summary=9),
            "with harness.options.context = 'truncate'",
        ),
        (coding(context="summary", summary_at_tokens=384), "do not fit into engine.max_length=640"),
        (coding(context="truncate", summary_at_tokens=640), "do not fit into engine.max_length=640"),
    ],
)
def test_what_would_have_no_effect_or_no_sense_is_refused(harness: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"harness": harness, "rollouts": {"timeout_s": 300.0}}, source="t")
    assert fault in str(caught.value)


def test_contexts_may_start_anew() -> None:
    summary: dict[str, Any] = {"context": "summary", "summary_at_tokens": 383}
    truncating: dict[str, Any] = {"context": "truncate", "summary_at_tokens": 200, "max_summaries": 3}
    for options in (summary, truncating):
        read = parse_config({"harness": {"options": options}}, source="t").harness.options
        assert read == CodingOptions(**options)


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
    tree = {"harness": command(command=["agent", "{prompt}"]), "eval": {"enabled": False}}
    tree["rollouts"] = {"timeout_s": 300.0}
    assert parse_config(tree, source="t").harness.kind == "command"


RECIPE = """
[harness]
kind = "command"
[harness.options]
command = ["agent", "{prompt}", "{temperature}"]
files = { "a.yaml" = "@mine.yaml", "b.txt" = "inline" }
[rollouts]
timeout_s = 300.0
"""


def test_files_beside_the_recipe_become_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "mine.yaml").write_text("text: 'é'\n")
    config = load_recipe(tmp_path)
    assert isinstance(config.harness.options, CommandOptions)
    assert config.harness.options.files == {"a.yaml": "text: 'é'\n", "b.txt": "inline"}
    resolved = tmp_path / "elsewhere.toml"
    resolved.write_text(dump_toml(config))
    (tmp_path / "mine.yaml").unlink()
    assert load_recipe(resolved) == config


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"harness\.options\.files\.a\.yaml = '@mine\.yaml'"):
        load_recipe(tmp_path)


def test_the_default_is_the_built_in_harness() -> None:
    assert default_recipe().harness.kind == "coding"


def test_the_recipe_with_mini_swe_agent_is_complete() -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "external-harness"
    harness = load_recipe(recipe).harness.options
    assert isinstance(harness, CommandOptions)
    assert harness.files["mini.yaml"] == (recipe / "mini.yaml").read_text(encoding="utf-8")
    assert "/harness/mini.yaml" in harness.command
