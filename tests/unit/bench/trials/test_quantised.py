"""``bench quantised`` compares runs; the runs take minutes and are not made here."""

import math
from pathlib import Path

import pytest

from bench.trials.quantised import TaskRewards, Trial, bench_quantised, paired
from etude.errors import UserError


def of_tasks(rewards: list[float], templates: str = "abcdefgh") -> TaskRewards:
    return {str(number): (templates[number], reward) for number, reward in enumerate(rewards)}


def trial(experts: str, before: float, rewards: list[float]) -> Trial:
    ways = ("sampled", "greedy")
    return Trial(
        seed=0,
        experts=experts,
        before=dict.fromkeys(ways, before),
        rewards=dict.fromkeys(ways, of_tasks(rewards)),
        k3=0.0,
        seconds=1.0,
    )


def test_differences_are_taken_task_by_task() -> None:
    difference, error = paired([(of_tasks([1.0, 0.0, 1.0, 1.0]), of_tasks([1.0, 0.0, 0.0, 1.0]))])
    assert difference == 0.25
    assert error == pytest.approx(0.5 / math.sqrt(4))
    first, second = of_tasks([1.0, 1.0, 1.0, 0.0], templates="aabb"), of_tasks([0.0, 0.0, 1.0, 0.0], templates="aabb")
    assert paired([(first, second)]) == pytest.approx((0.5, 0.5))  # of two templates, of which one gains


def test_runs_of_different_tasks_are_not_compared() -> None:
    with pytest.raises(UserError, match="the runs were measured on different tasks"):
        paired([(of_tasks([1.0]), {"elsewhere": ("a", 1.0)})])


def test_the_gain_is_what_rl_brought() -> None:
    assert trial("fp8", 0.25, [1.0, 0.0]).gain("sampled") == 0.25


def test_an_unknown_format_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no format 'fp3'; there are fp8, mxfp8, nvfp4"):
        bench_quantised(tmp_path, tmp_path, seeds=[0], formats=["fp3"])
