"""The steady state of a simulated run: means over many steps, each with its 95 % confidence interval.

    steps ──▶ without the first ──▶ batches ──▶ figures of each ──▶ mean ± interval, at the expected tokens of a step

Batch means: consecutive steps depend on each other, batches of many steps hardly do. Their number stays below twice
the least, so that batches grow with the run. Where the fleet changes with the hour, a batch is a day.

Control variate: a small fleet draws few rollouts a step, and most of the noise is that of their tokens, whose
expectation is given. So figures are regressed on the tokens of their batch, and are those of the regression at the
expectation; the interval is that of the regression (two degrees of freedom fewer). Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Self

import numpy as np

from etude.dashboard.statistics import student
from etude.simulation.figures import RunFigures, StepRecords

BATCHES = 10
"""Minimum number of batches; with twice as many, batches are longer instead."""
LEAST_STEPS = 8
"""Minimum number of steps of a batch."""
LEAST_DAYS = 6
"""Minimum number of days, where a batch is a day."""


@dataclass(frozen=True, slots=True)
class SteadyMean:
    """A mean and half the width of its confidence interval."""

    mean: float
    half: float

    @property
    def relative(self) -> float:
        """Half the width as a share of the mean."""
        return self.half / abs(self.mean) if self.half else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """The figures of a run that continues for ever."""

    steps: int
    """Number of steps in all batches."""
    step_s: SteadyMean
    trainer_busy: SteadyMean
    engine_busy: SteadyMean
    staleness: SteadyMean

    @classmethod
    def of_batches(cls, batches: Sequence[RunFigures], tokens_per_step: float) -> Self:
        """The means of at least four batches at the expected number of tokens per step."""
        tokens = [batch.tokens_per_step for batch in batches]

        def estimated(values: Sequence[float]) -> SteadyMean:
            return regressed(values, tokens, tokens_per_step)

        return cls(
            steps=sum(batch.steps for batch in batches),
            step_s=estimated([batch.step_s for batch in batches]),
            trainer_busy=estimated([batch.trainer_busy for batch in batches]),
            engine_busy=estimated([batch.engine_busy for batch in batches]),
            staleness=estimated([batch.staleness for batch in batches]),
        )

    @property
    def precision(self) -> float:
        """Half the width of the widest interval, as a share of its mean."""
        return max(each.relative for each in (self.step_s, self.trainer_busy, self.engine_busy, self.staleness))


def batch_steps(round_steps: int) -> int:
    """Number of steps of the shortest batch: whole rounds of the workload, of ``round_steps`` steps each."""
    return -(-LEAST_STEPS // round_steps) * round_steps


def batches_of(
    records: StepRecords, *, skipped: int, round_steps: int = 1, least: int = BATCHES, day_s: float | None = None
) -> list[RunFigures]:
    """Batches of a run without ``skipped`` steps at either end and without the first batch, in which it settles.

    A batch has whole rounds of the workload, and there are ``least`` to twice as many. With ``day_s`` the batches are
    whole days. Empty while there are too few.
    """
    ends_s = records.ends_s
    counted = sorted(ends_s)[skipped : len(ends_s) - skipped]
    if day_s is None:
        unit = batch_steps(round_steps)
        last = counted[-1] // unit * unit if counted else 0
        units = (last - skipped) // unit - 1
        size = units // least * unit
        edges = list(range(last - units * unit // size * size, last + 1, size)) if size > 0 else []
    else:
        edges = [end for end, first in pairwise(counted) if ends_s[end] // day_s < ends_s[first] // day_s]
        edges = edges if len(edges) > LEAST_DAYS else []
    return [records.figures(before, last) for before, last in pairwise(edges)]


def regressed(values: Sequence[float], controls: Sequence[float], expected: float) -> SteadyMean:
    """The least-squares line of values over controls, at the ``expected`` control."""
    count, centre = len(values), fmean(controls)
    away, deviations = np.array(controls) - centre, np.array(values) - fmean(values)
    spread = float(away @ away)
    slope = float(away @ deviations) / spread if spread else 0.0
    residuals = deviations - slope * away
    variance = float(residuals @ residuals) / (count - 2)
    leverage = 1 / count + ((expected - centre) ** 2 / spread if spread else 0.0)
    half = student(count - 2) * float(variance * leverage) ** 0.5
    return SteadyMean(fmean(values) + slope * (expected - centre), half)
