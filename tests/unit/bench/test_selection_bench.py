"""``bench selection``: its learners learn, arms are compared seed by seed, and result files are complete."""

import json
from pathlib import Path

import pytest

from bench.selection.bench import (
    HELDOUT_ROWS,
    IN_ORDER,
    SIMULATED,
    TrialFigures,
    judged,
    pass_curve,
    reached,
    task_files,
)
from bench.selection.learners import GROUPS, ROLLOUTS, Arm, learn
from etude.types import Json

CLOSE = 0.53
"""A pass rate that every arm reaches within some steps."""


@pytest.mark.parametrize("arm", SIMULATED, ids=lambda arm: arm.name)
def test_a_simulated_learner_learns_and_counts_what_it_sampled(arm: Arm) -> None:
    outcome = learn(arm, seed=0, target=CLOSE)
    assert outcome.steps is not None
    least = outcome.steps * GROUPS * ROLLOUTS
    assert least <= outcome.rollouts <= least + outcome.steps * arm.max_resamples * ROLLOUTS
    assert (outcome.rollouts > least) == bool(arm.max_resamples)
    assert outcome == learn(arm, seed=0, target=CLOSE)


def trial(arm: str, seed: int, steps: int | None, rollouts: int | None) -> TrialFigures:
    return TrialFigures(arm=arm, seed=seed, simulated=False, steps=steps, rollouts=rollouts, signal=0.5, target=0.4)


def test_an_arm_is_compared_with_tasks_in_order_on_each_seed() -> None:
    trials = [trial(IN_ORDER, 0, 10, 100), trial("x", 0, 5, 80), trial(IN_ORDER, 1, 20, 100), trial("x", 1, 14, 80)]
    goal = judged(trials, "x", simulated=False)
    assert (goal["value"], goal["rollouts_vs_in_order"], goal["seeds"]) == (0.6, 0.8, 2)
    never = judged([*trials[:3], trial("x", 1, None, None)], "x", simulated=False)
    assert never["met"] is False
    assert "not reached" in str(never["reason"])


def test_a_pass_rate_is_reached_where_the_smoothed_curve_is() -> None:
    rows: list[Json] = [
        {"phase": "rl", "step": step, "sampled_pass": passed} for step, passed in ((0, 0.1), (5, 0.7), (10, 0.4))
    ]
    curve = pass_curve({"heldout_curve": [{"phase": "midtrain", "step": 9, "loss": 1.0}, *rows]})
    assert [(step, round(value, 2)) for step, value in curve] == [(0, 0.4), (5, 0.4), (10, 0.55)]
    assert (reached(curve, 0.5), reached(curve, 0.6)) == (10, None)


def test_half_of_the_training_rows_are_hopeless_and_no_held_out_one(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{row}", "answer": row}) + "\n" for row in range(300)))
    train, heldout = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in task_files(source, tmp_path / "out")
    )
    assert len(heldout) == HELDOUT_ROWS
    assert all(row["answer"] == int(row["prompt"]) for row in heldout)
    assert sum(row["answer"] == "no number" for row in train) == len(train) // 2 == 50
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in heldout)
