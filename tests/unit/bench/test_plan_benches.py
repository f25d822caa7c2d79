"""Benches of plans: the formula of memory is what torch holds, and predictions come with their assumptions."""

import argparse

import pytest

from bench.memory import bench as memory
from bench.roofline import bench as roofline


@pytest.mark.timeout(900)  # a minute on free cores, several on busy ones
def test_the_memory_of_a_step_is_what_the_plan_says() -> None:
    result = memory.run(argparse.Namespace(case=["dense, recomputed"], quick=True))
    goals = result["goals"]
    assert isinstance(goals, dict) and isinstance(goals["formula_error"], dict)
    assert goals["formula_error"]["met"], result
    assert "dense, recomputed" in memory.table(result)


def test_predicted_shares_meet_their_goals_and_say_what_they_assume() -> None:
    result = roofline.run(argparse.Namespace(pretend="h100x8", quick=True))
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert all(isinstance(goal, dict) and goal["met"] for goal in goals.values()), goals
    assert "an H200 reached" in roofline.table(result)
