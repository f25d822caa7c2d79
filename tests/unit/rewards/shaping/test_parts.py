"""A sum of parts: what each adds, and what happens when one is missing or out of its range."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.reward import RewardConfig
from etude.errors import ConfigError, InfrastructureError
from etude.rewards.shaping.parts import (
    check_behaviours,
    combine,
    describe,
    differences,
    digest_of,
    make_up,
    mean_parts,
)
from etude.types import Disposition, Group, Rollout, RolloutStatus, Verdict
from ledgers import TURN, task

TESTS: dict[str, Any] = {"name": "tests", "source": "grader", "version": 1, "weight": 1.0, "range": (0.0, 1.0)}
SHARE: dict[str, Any] = {**TESTS, "name": "share", "source": "grader.hidden_passed", "weight": 0.5}
ASKING: dict[str, Any] = {**TESTS, "name": "asking", "source": "behaviour.asking", "weight": -0.25}
STYLE: dict[str, Any] = {**TESTS, "name": "style", "source": "judge.style", "weight": 0.125, "missing": "wait"}


def reward(*parts: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"parts": parts})


def test_the_reward_is_the_weighted_sum_and_every_value_is_kept() -> None:
    found = {"grader": 1.0, "grader.hidden_passed": 0.5, "behaviour.asking": 0.5, "behaviour.other": 9.0}
    combined = combine(reward(TESTS, SHARE, ASKING), found)
    assert combined.value == 1.0 + 0.25 - 0.125
    assert combined.parts == {"tests": 1.0, "share": 0.5, "asking": 0.5}
    assert (combined.clipped, combined.assumed, combined.masked) == (0, 0, "")


def test_a_value_out_of_range_is_clipped_counted_and_kept_as_it_was() -> None:
    combined = combine(reward(TESTS, SHARE), {"grader": 7.0, "grader.hidden_passed": 0.5})
    assert (combined.value, combined.clipped, combined.parts["tests"]) == (1.25, 1, 7.0)


@pytest.mark.parametrize("found", [{}, {"grader": math.nan}, {"grader": math.inf}], ids=["none", "nan", "infinite"])
def test_what_is_no_finite_number_is_missing(found: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="'tests' has no value: 'grader' says nothing"):
        combine(reward(TESTS), found)
    with pytest.raises(InfrastructureError, match="'tests' is missing"):
        combine(reward(TESTS | {"missing": "wait"}), found)
    assert combine(reward(STYLE), {}).masked == "reward part 'style' is missing"  # asked, and without a verdict
    masked = combine(reward(TESTS | {"missing": "mask"}, SHARE), found | {"grader.hidden_passed": 1.0})
    assert (masked.masked, masked.parts) == ("reward part 'tests' is missing", {"share": 1.0})
    assumed = combine(reward(TESTS | {"missing": 0.25}), found)
    assert (assumed.value, assumed.assumed, assumed.parts) == (0.25, 1, {"tests": 0.25})


@given(
    st.dictionaries(st.sampled_from(["grader", "grader.hidden_passed", "behaviour.asking"]), st.floats(), max_size=3)
)
def test_whatever_is_found_the_sum_stays_within_its_range(found: dict[str, float]) -> None:
    config = reward(*(part | {"missing": 0.5} for part in (TESTS, SHARE, ASKING)))
    low, high = config.bounds
    assert low <= combine(config, found).value <= high


def test_behaviours_are_checked_by_name_version_and_range() -> None:
    check_behaviours(reward(TESTS, ASKING))
    for change, said in (
        ({"source": "behaviour.rudeness"}, "there is no 'behaviour.rudeness': expected one of asking, "),
        ({"version": 2}, "was written for version 2 of 'behaviour.asking', which is 1 here"),
        ({"range": (0.0, 2.0)}, "promises what never happens"),
        ({"source": "behaviour.open_todos"}, "is missing where a harness has no word on it"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_behaviours(reward(ASKING | change))


def test_a_digest_is_of_all_that_decides_and_nothing_else() -> None:
    rubrics = {"style": "abc"}
    one = make_up(reward(TESTS, STYLE), rubrics)
    assert digest_of(one) == digest_of(make_up(reward(STYLE, TESTS), rubrics))
    others = [
        make_up(reward(TESTS), rubrics),
        make_up(reward(TESTS, STYLE), {"style": "abd"}),
        *(
            make_up(reward(TESTS | change, STYLE), rubrics)
            for change in ({"weight": 0.9}, {"version": 2}, {"range": (0.0, 2.0)}, {"missing": 0.0}, {"free": 0.1})
        ),
    ]
    assert len({digest_of(made) for made in (one, *others)}) == len(others) + 1


def test_differences_are_named() -> None:
    before = make_up(reward(TESTS, SHARE), {})
    now = make_up(reward(TESTS | {"weight": 2.0}, ASKING), {})
    assert differences(before, now) == ["'share' is gone", "'asking' is new", "'tests' has weight = 2.0 instead of 1.0"]
    assert differences(before, before) == []


def test_a_recipe_says_what_its_reward_can_be() -> None:
    assert describe(RewardConfig()) == []
    assert describe(reward(TESTS, ASKING)) == [
        "reward: from -0.25 to 1",
        "  tests: 0 to 1, 1 × grader, version 1",
        "  asking: -0.25 to 0, -0.25 × behaviour.asking, version 1",
    ]
    with pytest.raises(ConfigError, match=r"there is no 'behaviour\.manners'"):
        describe(reward(TESTS | {"source": "behaviour.manners"}))


def test_means_are_over_the_rollouts_that_have_a_part() -> None:
    def rollout(name: str, disposition: Disposition, **parts: float) -> Rollout:
        verdict = Verdict(disposition=disposition, reward=0.0, reason="", flags=(), hacked=False, graded=0.0)
        return Rollout(
            rollout_id=name,
            group_index=0,
            slot=0,
            attempt=0,
            status=RolloutStatus.GRADED,
            reward=0.0,
            reward_parts=parts,
            turns=(TURN,),
            verdict=verdict,
        )

    kept = (rollout("a", Disposition.KEEP, tests=1.0, style=0.5), rollout("b", Disposition.ZERO, tests=0.0))
    spied = rollout("c", Disposition.QUARANTINE, tests=9.0, other=9.0)
    groups = [Group(index=0, task=task("t"), admitted_version=0, rollouts=(*kept, spied))]
    assert mean_parts(groups) == {"style": 0.5, "tests": 0.5}
    assert mean_parts([]) == {}
