"""The page of recipe keys has every key, with its true type and default."""

from pathlib import Path

import pytest

from etude.cli.actions.explain_keys import markdown
from etude.config.keys import RecipeKey, count_keys, find, tables
from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig

PAGE = Path(__file__).parents[3] / "docs" / "recipe-keys.md"


def key_of(path: str) -> RecipeKey:
    (result,) = [key for table in tables() for key in table.keys if key.path == path]
    return result


def test_the_page_is_of_these_keys() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(tables()), "etude config --markdown > docs/recipe-keys.md"


def test_every_key_of_every_section_is_there_and_is_explained() -> None:
    message = {key.path: key for table in tables() for key in table.keys}
    resolved = default_recipe().model_dump()
    for name, value in resolved.items():
        paths = {f"{name}.{key}" for key in value} if isinstance(value, dict) else {name}
        inner = {path for path in paths if any(other.startswith((f"{path}[]", f"{path}.")) for other in message)}
        assert paths - inner <= message.keys()
    assert all(key.meaning and key.takes for key in message.values())
    assert [table.title for table in tables() if not table.meaning] == []
    assert len(message) > len(RunConfig.model_fields)


def test_a_recipe_has_few_keys() -> None:
    """Options of single families and kinds are counted apart: a recipe has those of one choice."""
    assert count_keys()[0] <= 226


@pytest.mark.parametrize(
    ("path", "takes", "default"),
    [
        ("seed", "a whole number, ≥ 0", "0"),
        ("engine.kind", '"native", "vllm", "sglang" or another\'s name', '"native"'),
        ("rollouts.group_size", "a whole number, ≥ 2, ≤ 128", "8"),
        ("trainer.betas", "[a number, a number]", "[0.9, 0.95]"),
        ("harness.options.command", "a list, each a text", "[]"),
        ("harness.options.environment", "a table, each entry a text", "{}"),
        ("engine.options.spare_weights", "true or false", "true"),
        ("reward.parts[].name", "a text, at most 60 long", ""),
        ("reward.parts[].missing", '"error", "wait" or "mask" or a number', '"error"'),
    ],
)
def test_a_key_says_what_it_takes_and_what_it_is_by_default(path: str, takes: str, default: str) -> None:
    key = key_of(path)
    assert (key.takes, key.default) == (takes, default)


def test_docstrings_are_told_without_the_marks_of_their_source() -> None:
    assert "`etude.rewards.shaping.effort` has" in next(table.meaning for table in find("effort"))
    assert not any("``" in key.meaning or ":class:" in key.meaning for table in tables() for key in table.keys)


@pytest.mark.parametrize(
    ("word", "paths"),
    [
        ("ledger", {"ledger.url", "ledger.retry_timeout_s", "ledger.lease_s"}),
        ("[ledger]", {"ledger.url", "ledger.retry_timeout_s", "ledger.lease_s"}),
        ("engine.port", {"engine.port"}),
        ("group_size", {"rollouts.group_size"}),
        ("honeypots", {"cheating.honeypots"}),
        ("~/.pgpass", {"ledger.url"}),
        ("no such thing", set()),
        ("", {key.path for table in tables() for key in table.keys}),
    ],
)
def test_a_word_finds_a_section_a_key_or_what_speaks_of_it(word: str, paths: set[str]) -> None:
    assert {key.path for table in find(word) for key in table.keys} == paths
