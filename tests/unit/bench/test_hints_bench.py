"""Counts of ``bench hints``, from rollouts to the goal."""

from pathlib import Path

import numpy as np
import pytest

from bench.trials.hints import HABIT, RULE, StepFigures, Trial, bench_hints, gone_after, judged, step_figures
from etude.config.loading import default_recipe
from etude.errors import UserError
from etude.rewards.shaping.hints import Rule
from etude.tasks.corpora.transcripts import REMINDER
from etude.types import Finish, Group, Rollout, RolloutStatus, Turn
from records import TASK

NOTHING = np.zeros(1, np.int32)
TURN = Turn(
    prompt_ids=NOTHING,
    completion_ids=NOTHING,
    logprobs=np.zeros(1, np.float32),
    versions=NOTHING,
    finish=Finish.STOP,
)


def make_group(*rollouts: tuple[float, int, int]) -> Group:
    """Reward, malformed calls and all calls of each."""
    made = tuple(
        Rollout(
            rollout_id=f"r{slot}",
            group_index=0,
            slot=slot,
            attempt=0,
            status=RolloutStatus.GRADED,
            reward=reward,
            counts={"malformed": malformed, "edit": calls - malformed},
            turns=(TURN,),
        )
        for slot, (reward, malformed, calls) in enumerate(rollouts)
    )
    return Group(index=0, task=TASK, admitted_version=0, rollouts=made)


def make_trial(seed: int, weight: float, *shares: float) -> Trial:
    steps = tuple(StepFigures(malformed=x, malformed_stderr=0, passed=0.5, passed_stderr=0) for x in shares)
    return Trial(seed=seed, weight=weight, steps=steps, before=0.1, after=0.5, seconds=1.0)


def test_shares_are_of_calls_and_errors_over_groups() -> None:
    result = step_figures([make_group((1.0, 1, 4), (0.0, 1, 4)), make_group((1.0, 0, 2), (1.0, 0, 6))])
    assert result.malformed == pytest.approx(0.125)
    assert result.passed == pytest.approx(0.75)
    assert result.malformed_stderr == pytest.approx(0.125)
    assert result.passed_stderr == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ([0.4, 0.04, 0.04, 0.04], 1),
        ([0.4, 0.04, 0.4, 0.04, 0.04, 0.04], 3),
        ([0.04, 0.04], None),
        ([0.4] * 9, None),
        ([0.01] * 9, 0),
    ],
)
def test_a_habit_is_gone_when_it_stays_away(shares: list[float], steps: int | None) -> None:
    assert gone_after(shares) == steps


def test_the_goal_compares_steps_of_the_same_seeds() -> None:
    fast, slow = (0.4, 0.02, 0.02, 0.02, 0.02, 0.02), (0.4, 0.4, 0.02, 0.02, 0.02, 0.02)
    result = judged([make_trial(0, 0.0, *slow), make_trial(0, 1.0, *fast)])
    assert (result["value"], result["met"]) == (0.5, True)
    result = judged([make_trial(0, 0.0, *fast), make_trial(0, 1.0, *fast)])
    assert (result["value"], result["met"]) == (1.0, False)


def test_a_habit_that_stays_counts_all_steps_and_never_as_better() -> None:
    slow, fast = (0.4,) * 8, (0.4, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02)
    assert judged([make_trial(0, 0.0, *slow), make_trial(0, 1.0, *fast)])["value"] == pytest.approx(1 / 8)
    stored = judged([make_trial(0, 0.0, *fast), make_trial(0, 1.0, *slow)])
    assert (stored["value"], stored["met"]) == (None, False)


def test_the_rule_finds_the_habit_and_nothing_else() -> None:
    config = default_recipe(["hints.weight=1.0", "hints.tools=false", f"hints.rules=[{RULE}]", *HABIT])
    rule = Rule.of(config.hints.rules[0])
    assert rule.text == REMINDER
    assert rule.pattern.search("edit app.py:3\n    return x")
    assert not rule.pattern.search("edit app.py 3\n    return x[a:3]")
    assert not rule.pattern.search("read app.py:3")


def test_a_weight_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a weight of 0 teaches nothing"):
        bench_hints(Path("recipes/quickstart"), tmp_path, seeds=[0], weight=0.0)
