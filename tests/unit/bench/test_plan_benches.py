"""Benches of plans: the memory formula agrees with torch, and predictions are printed with their assumptions."""

import argparse

import pytest

from bench.memory import bench as memory
from bench.plan import bench as plan
from bench.plan.comparison import Comparison
from bench.roofline import bench as roofline
from etude.errors import UserError
from etude.simulation.figures import RunFigures


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


def test_a_prediction_is_held_against_what_happened() -> None:
    def figures(step_s: float, trainer: float, engine: float) -> RunFigures:
        return RunFigures(steps=5, step_s=step_s, trainer_busy=trainer, engine_busy=engine, engine_s=1.0,
                          tokens_per_step=1.0, token_ages=(1,))  # fmt: skip

    compared = Comparison(case="x", measured=figures(4.0, 0.5, 0.6), predicted=figures(5.0, 0.45, 0.8))
    assert compared.step_time_error == pytest.approx(0.25)
    assert compared.busy_error == pytest.approx(0.2)
    assert compared.row()["engines_predicted"] == 0.8


def test_a_case_that_there_is_not_is_refused_before_anything_runs() -> None:
    options = argparse.Namespace(cases="as calibrated,moonlight", set=[], steps=16)
    with pytest.raises(UserError, match="moonlight"):
        plan.run(options)
