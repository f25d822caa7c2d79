"""Allowed and refused options of hints."""

import tomllib

import pytest

from etude.config.loading import default_recipe, dump_toml, parse_config
from etude.errors import ConfigError

RULE = '{name = "style", where = "said", pattern = "^edit [^ ]+:[0-9]", text = "edit FILE N"}'


def test_rules_are_read_and_written_back() -> None:
    config = default_recipe(["hints.weight=0.5", "hints.tools=false", f"hints.rules=[{RULE}]"])
    (rule,) = config.hints.rules
    assert (rule.name, rule.where, rule.text) == ("style", "said", "edit FILE N")
    assert parse_config(tomllib.loads(dump_toml(config)), source="again") == config


def test_by_default_no_one_looks_for_hints() -> None:
    assert default_recipe().hints.weight == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hints.judge=true"], r"hints.judge would have no effect with hints.weight = 0"),
        (["hints.weight=1.0", "hints.judge=true"], r"hints.judge = true needs a model that can be asked"),
        (["hints.weight=1.0", "hints.tools=false"], r"neither rules nor a judge"),
        (["hints.weight=1.0", f"hints.rules=[{RULE}, {RULE}]"], r"two rules have one name"),
        (["hints.weight=1.0", f"hints.rules=[{RULE.replace('said', 'thought')}]"], r"hints.rules.0.where"),
        (["hints.weight=1.0", f"hints.rules=[{RULE.replace('name', 'nmae')}]"], r"did you mean 'hints.rules.0.name'"),
        (["hints.weight=1.0", "hints.max_per_rollout=0"], r"hints.max_per_rollout"),
    ],
)
def test_what_would_have_no_effect_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        default_recipe(overrides)
