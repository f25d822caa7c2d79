"""Means of a long simulation, and how wide their intervals are."""

from random import Random

import pytest

from etude.dashboard.statistics import student
from etude.simulation.figures import RunFigures, StepRecords
from etude.simulation.steady import BATCHES, LEAST_DAYS, LEAST_STEPS, SteadyState, batches_of, regressed
from etude.telemetry.events import Logged, StepDone

MEAN, SEEDS = 10.0, 300


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (5, 2.571), (14, 2.145), (30, 2.042)])
def test_the_quantiles_are_students(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=0.01)


def drawn(seed: int) -> tuple[list[float], list[float]]:
    """Values that follow a control of mean 1, beside noise of their own."""
    random = Random(seed)
    controls = [random.gauss(1.0, 0.3) for _ in range(BATCHES)]
    return [MEAN * control + random.gauss(0.0, 0.2) for control in controls], controls


def test_intervals_cover_the_mean_as_often_as_they_claim_and_the_control_makes_them_narrow() -> None:
    intervals = [regressed(*drawn(seed), 1.0) for seed in range(SEEDS)]
    covered = sum(abs(each.mean - MEAN) <= each.half for each in intervals) / SEEDS
    assert 0.91 <= covered <= 0.98
    blind = [regressed(drawn(seed)[0], [1.0] * BATCHES, 1.0) for seed in range(SEEDS)]
    assert sum(each.half for each in intervals) < 0.1 * sum(each.half for each in blind)


def steps(count: int, step_s: float = 2.0) -> StepRecords:
    metrics = {"busy_s": 1.0, "staleness_tokens": 4.0}
    records = StepRecords()
    records.follow([
        Logged(at_s=step * step_s, process="train",
               event=StepDone(step=step, metrics=metrics, token_ages=[2, 2], groups=[]))
        for step in range(1, count + 1)
    ])  # fmt: skip
    return records


def test_batches_are_equal_and_leave_the_first_steps_out() -> None:
    skipped, needed = 3, LEAST_STEPS * (BATCHES + 2)
    assert not batches_of(steps(needed + skipped - 1), skipped=skipped)
    batches = batches_of(steps(needed + skipped), skipped=skipped)
    assert [batch.steps for batch in batches] == [LEAST_STEPS] * BATCHES
    longer = batches_of(steps(2 * needed + skipped), skipped=skipped)
    assert [batch.steps for batch in longer] == [2 * LEAST_STEPS] * (BATCHES + 1)
    in_rounds = batches_of(steps(5 * needed + skipped), skipped=skipped, round_steps=5 * LEAST_STEPS)
    assert [batch.steps for batch in in_rounds] == [5 * LEAST_STEPS] * BATCHES
    steady = SteadyState.of_batches(batches, 4.0)
    assert (steady.step_s.mean, steady.trainer_busy.mean, steady.staleness.mean) == (2.0, 0.5, 0.5)
    assert steady.steps == LEAST_STEPS * BATCHES and steady.precision == 0.0


def test_where_the_hour_matters_a_batch_is_a_whole_day() -> None:
    a_day = 10
    few = steps(a_day * (LEAST_DAYS + 1))
    assert not batches_of(few, skipped=1, day_s=a_day * 2.0)
    batches = batches_of(steps(a_day * (LEAST_DAYS + 2)), skipped=1, day_s=a_day * 2.0)
    assert [batch.steps for batch in batches] == [a_day] * LEAST_DAYS
    assert all(isinstance(batch, RunFigures) and batch.step_s == 2.0 for batch in batches)
