"""`bench loop --busy`: shares of the steps that count, and prepared starts."""

from pathlib import Path

import pytest

from bench.loop.busy import SKIPPED, busy_options, busy_shares, figures
from bench.loop.contestants import ASYNCHRONOUS, SYNCHRONOUS, recipe
from bench.starts import digest_of, starting_from
from etude.config.loading import default_recipe
from etude.telemetry.events import EngineStats, Logged, StepDone


def step(number: int, busy_s: float) -> Logged:
    metrics = {"busy_s": busy_s, "wait_s": 10.0 - busy_s}
    return Logged(at_s=10.0 * number, process="train", event=StepDone(step=number, metrics=metrics))


def stats(seconds: float, busy_s: float) -> Logged:
    event = EngineStats(
        busy_s=busy_s, window_s=10.0, generated_tokens=1, prefill_tokens=0, reused_tokens=0, running=1, waiting=0
    )
    return Logged(at_s=seconds, process="serve", event=event)


def test_busy_shares_leave_out_the_steps_in_which_the_pipeline_fills_and_runs_dry() -> None:
    steps = 2 * SKIPPED + 2
    counted = {SKIPPED + 1: 9.0, SKIPPED + 2: 10.0}
    events = [step(number, counted.get(number, 1.0)) for number in range(1, steps + 1)]
    events += [stats(10.0 * number, 8.0 if number in counted else 0.0) for number in range(1, steps + 1)]
    assert busy_shares(events) == {"busy_trainer": 0.95, "busy_engine": 0.8, "waits_trainer": 0.05, "step_s": 10.0}
    assert busy_shares(events[: 2 * SKIPPED]) == {}


def test_what_was_not_measured_has_a_reason() -> None:
    goals = figures([], {}, {})["goals"]
    assert isinstance(goals, dict)
    assert all(isinstance(goal, dict) and goal["value"] is None and goal["reason"] for goal in goals.values())


def test_both_ways_begin_with_one_prepared_model() -> None:
    options = busy_options(steps=None, marks=None, quick=False)
    digests = {digest_of(recipe(contestant, options)) for contestant in options.chosen}
    assert [contestant.name for contestant in options.chosen] == [ASYNCHRONOUS, SYNCHRONOUS] and len(digests) == 1
    assert digest_of(default_recipe(("trainer.steps=3", "rollouts.group_size=4"))) == digest_of(default_recipe())
    assert digest_of(default_recipe(("seed=1",))) != digest_of(default_recipe())
    assert digest_of(default_recipe(starting_from(Path("model")))) != digest_of(default_recipe())


@pytest.mark.parametrize("quick", [True, False])
def test_a_call_has_steps_that_count(quick: bool) -> None:
    assert busy_options(steps=None, marks=None, quick=quick).steps > 2 * SKIPPED
