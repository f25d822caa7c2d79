"""``[reward]``: complete parts are accepted, and incomplete ones are refused."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.config.loading import dump_toml, load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.reward import PartConfig, RewardConfig
from etude.errors import ConfigError

TESTS: dict[str, Any] = {"name": "tests", "source": "grader", "version": 1, "weight": 1.0, "range": (0.0, 1.0)}
STYLE: dict[str, Any] = {**TESTS, "name": "style", "source": "judge.style", "missing": "mask", "weight": 0.25}
TODOS: dict[str, Any] = {**TESTS, "name": "todos", "source": "behaviour.open_todos", "weight": -0.5, "missing": 0.0}


def error_of(**changes: object) -> str:
    with pytest.raises(ValidationError) as caught:
        PartConfig.model_validate(TESTS | changes)
    return str(caught.value)


def test_a_recipe_without_parts_is_the_graders_word() -> None:
    assert RunConfig().reward == RewardConfig()
    assert RewardConfig().parts == ()


def test_a_recipe_reads_back_as_it_is_printed(tmp_path: Path) -> None:
    judge = {"kind": "rules", "rubrics": {"style": 'aspect = "style"'}}
    config = parse_config({"reward": {"parts": [TESTS, STYLE, TODOS]}, "judge": judge}, source="test")
    (tmp_path / "run.toml").write_text(dump_toml(config), encoding="utf-8")
    assert load_recipe(tmp_path) == config
    assert config.reward.names("judge") == ("style",)
    assert [part.missing for part in config.reward.parts] == ["error", "mask", 0.0]


def test_a_whole_number_may_stand_for_what_is_missing() -> None:
    assert PartConfig.model_validate(TESTS | {"missing": 0}).missing == 0.0


def test_the_range_of_the_sum_is_that_of_its_parts() -> None:
    config = RewardConfig.model_validate({"parts": (TESTS, STYLE, TODOS)})
    assert config.bounds == (-0.5, 1.25)


@given(
    weight=st.floats(-3, 3),
    low=st.floats(0, 2),
    width=st.floats(0.1, 5),
    free=st.floats(0, 1),
    value=st.floats(allow_nan=False),
)
def test_no_value_leaves_the_bounds(weight: float, low: float, width: float, free: float, value: float) -> None:
    part = PartConfig.model_validate(
        TESTS | {"weight": weight, "range": (low, low + width), "free": low + free * width * 0.99}
    )
    least, most = part.bounds
    assert least <= part.contribution(value) <= most
    assert math.isclose(most - least, abs(weight) * (low + width - part.free if part.free else width), abs_tol=1e-9)


def test_what_is_free_counts_nothing() -> None:
    part = PartConfig.model_validate(TESTS | {"weight": -0.1, "range": (0, 20), "free": 8})
    assert [part.contribution(value) for value in (0, 8, 9, 20, 99)] == pytest.approx([0, 0, -0.1, -1.2, -1.2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "effort.turns"}, r"set it in \[effort\]"),
        ({"source": "tests"}, "expected grader or one of"),
        ({"source": "behaviour"}, "expected grader or one of"),
        ({"source": "judge."}, "expected grader or one of"),
        ({"source": "judge.style"}, "a judge may be out of reach"),
        ({"source": "measure.summaries"}, "not every task has every measure"),
        ({"name": "cheat_canary"}, "means something else"),
        ({"name": "clipped"}, "means something else"),
        ({"name": "Tests"}, "should match pattern"),
        ({"range": (1, 1)}, "the lower one first"),
        ({"range": (0, math.inf)}, "two finite numbers"),
        ({"weight": math.nan}, "finite number"),
        ({"missing": 2.0}, r"outside of range = \[0, 1\]"),
        ({"missing": math.nan}, r"outside of range = \[0, 1\]"),
        ({"missing": "never"}, "missing"),
        ({"free": 1.0}, "ends above it"),
        ({"free": 0.5, "range": (-1, 1)}, "begins at 0 or above"),
        ({"version": 0}, "greater than or equal to 1"),
    ],
)
def test_what_says_too_little_is_refused(changes: dict[str, object], message: str) -> None:
    assert re.search(message, error_of(**changes))


@pytest.mark.parametrize("key", ["name", "source", "version", "weight", "range"])
def test_nothing_is_implicit(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.parts\.0\.{key}"):
        parse_config({"reward": {"parts": [{name: TESTS[name] for name in TESTS if name != key}]}}, source="test")


def test_a_misspelt_key_of_a_part_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"'reward\.parts\.0\.wieght': did you mean 'reward\.parts\.0\.weight'"):
        parse_config({"reward": {"parts": [TESTS | {"wieght": 1.0}]}}, source="test")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((TESTS, TESTS), "two are called 'tests'"),
        ((TESTS | {"weight": 0.0},), "every weight is 0"),
    ],
)
def test_parts_must_make_sense_jointly(parts: tuple[dict[str, Any], ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate({"parts": parts})


def test_a_judged_part_needs_its_rubric() -> None:
    with pytest.raises(ConfigError, match=r"there is no judge\.rubrics\.style"):
        parse_config({"reward": {"parts": [STYLE]}}, source="test")


def test_a_control_with_shuffled_rewards_has_no_other_teacher() -> None:
    assert parse_config({"reward": {"shuffled": True}}, source="test").reward.shuffled
    shaped = {"credit": {"kind": "shaped", "options": {"shaping": 0.5}}, "reward": {"shuffled": True}}
    with pytest.raises(ConfigError, match=r"reward\.shuffled.*credit\.kind = 'shaped' teaches"):
        parse_config(shaped, source="test")
    effort = {"effort": {"weight": 0.1, "prices": {"turns": 1.0}}, "reward": {"shuffled": True}}
    with pytest.raises(ConfigError, match=r"reward\.shuffled.*effort\.weight teaches"):
        parse_config(effort, source="test")
