"""The parts of a reward: errors of sources, and changes that a run may not make."""

from pathlib import Path
from typing import Any

import pytest

from etude.config.reward import RewardConfig
from etude.errors import ConfigError
from etude.rewards.shaping.parts import (
    check_behaviours,
    describe,
    differences,
    digest_of,
    mean_parts,
    reward_spec,
)
from etude.types import Disposition, Group, Rollout, RolloutStatus, Verdict
from ledgers import TURN, task

TESTS: dict[str, Any] = {"name": "tests", "source": "grader", "version": 1, "weight": 1.0, "range": (0.0, 1.0)}
SHARE: dict[str, Any] = {**TESTS, "name": "share", "source": "grader.hidden_passed", "weight": 0.5}
ASKING: dict[str, Any] = {**TESTS, "name": "asking", "source": "behaviour.asking", "weight": -0.25}
STYLE: dict[str, Any] = {**TESTS, "name": "style", "source": "judge.style", "weight": 0.125, "missing": "wait"}


def reward(*parts: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"parts": parts})


def test_behaviours_are_checked_by_name_version_and_range() -> None:
    check_behaviours(reward(TESTS, ASKING))
    for change, text in (
        ({"source": "behaviour.rudeness"}, "there is no 'behaviour.rudeness': expected one of asking, "),
        ({"source": "behaviour.asking.twice"}, r"there is no 'behaviour\.asking\.twice'"),
        ({"version": 2}, "was written for version 2 of 'behaviour.asking', which is 1 here"),
        ({"range": (0.0, 2.0)}, "promises what never happens"),
        ({"source": "behaviour.open_todos"}, "is missing where a harness has no word on it"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_behaviours(reward(TESTS, ASKING | change))


def test_a_digest_is_of_all_that_decides_and_nothing_else() -> None:
    rubrics = {"style": "abc"}
    one = reward_spec(reward(TESTS, STYLE), rubrics)
    assert digest_of(one) == digest_of(reward_spec(reward(STYLE, TESTS), rubrics))
    others = [
        reward_spec(reward(TESTS), rubrics),
        reward_spec(reward(TESTS, STYLE), {"style": "abd"}),
        *(
            reward_spec(reward(TESTS | change, STYLE), rubrics)
            for change in ({"weight": 0.9}, {"version": 2}, {"range": (0.0, 2.0)}, {"missing": 0.0}, {"free": 0.1})
        ),
    ]
    assert len({digest_of(made) for made in (one, *others)}) == len(others) + 1


def test_a_specification_has_everything_but_the_name_and_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def length(work):\n    return 0.0\n", encoding="utf-8")
    spec = reward_spec(reward(STYLE, TESTS | {"source": f"@{tmp_path}/mine.py:length"}), {"style": "abc"})
    rest = {"version": 1, "range": [0.0, 1.0], "free": 0.0}
    assert spec == {
        "style": rest | {"source": "judge.style", "weight": 0.125, "missing": "wait", "rubric": "abc"},
        "tests": rest | {"source": "@mine.py:length", "weight": 1.0, "missing": "error"},
    }


def test_differences_are_named() -> None:
    before = reward_spec(reward(TESTS, SHARE), {})
    now = reward_spec(reward(TESTS | {"weight": 2.0}, ASKING), {})
    assert differences(before, now) == ["'share' is gone", "'asking' is new", "'tests' has weight = 2.0 instead of 1.0"]
    assert differences(before, before) == []
    gone, new = (reward_spec(reward(*(TESTS | {"name": name} for name in names)), {}) for names in ("dbca", "hfge"))
    assert differences(gone, new) == [
        *(f"{name!r} is gone" for name in "abcd"),
        *(f"{name!r} is new" for name in "efgh"),
    ]
    newer = reward_spec(reward(*(TESTS | {"name": name, "version": 2} for name in "dbca")), {})
    assert differences(gone, newer) == [f"{name!r} has version = 2 instead of 1" for name in "abcd"]
    style = TESTS | {"name": "style", "version": 2}
    assert differences(reward_spec(reward(STYLE), {"style": "abc"}), reward_spec(reward(style), {})) == [
        "'style' has missing = 'error' instead of 'wait'",
        "'style' has rubric = None instead of 'abc'",
        "'style' has source = 'grader' instead of 'judge.style'",
        "'style' has version = 2 instead of 1",
        "'style' has weight = 1.0 instead of 0.125",
    ]


def test_a_recipe_says_what_its_reward_can_be() -> None:
    assert describe(RewardConfig()) == []
    assert describe(reward(TESTS, ASKING)) == [
        "reward: from -0.25 to 1",
        "  tests: 0 to 1, 1 × grader, version 1",
        "  asking: -0.25 to 0, -0.25 × behaviour.asking, version 1",
    ]
    with pytest.raises(ConfigError, match=r"there is no 'behaviour\.manners'"):
        describe(reward(TESTS | {"source": "behaviour.manners"}))


def test_averages_are_over_the_rollouts_that_have_a_part() -> None:
    def rollout(name: str, disposition: Disposition, **parts: float) -> Rollout:
        verdict = Verdict(disposition=disposition, reason="", flags=(), hacked=False, graded=0.0)
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

    stored = (rollout("a", Disposition.KEEP, tests=1.0, style=0.5), rollout("b", Disposition.ZERO, tests=0.0))
    spied = rollout("c", Disposition.QUARANTINE, tests=9.0, other=9.0)
    groups = [Group(index=0, task=task("t"), admitted_version=0, rollouts=(*stored, spied))]
    assert list(mean_parts(groups).items()) == [("style", 0.5), ("tests", 0.5)]
    assert mean_parts([]) == {}
