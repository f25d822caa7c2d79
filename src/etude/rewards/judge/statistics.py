"""Agreement of two raters on an ordered scale, correlation, and intervals for both. Pure.

    κ_w = 1 − Σ w_ij O_ij / Σ w_ij E_ij,   w_ij = (i − j)²
    O: observed shares of (label, score), E: those of two raters who never looked, each with its own habits

(Cohen, *Weighted kappa*, Psychological Bulletin 1968; intervals by the percentile bootstrap, Efron 1979: items are
drawn again with replacement.) Legend: N items, B bootstrap draws; a function of [..., N] works on any number of draws.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]
"""Real numbers, [N] or [B, N]; statistics of them, [] or [B]."""
Indices: TypeAlias = npt.NDArray[np.int64]
"""[B, N] of items, of which some may stand twice in a row."""
Statistic: TypeAlias = Callable[[Indices], Numbers]
"""A number of the items of each draw, [B]."""
DRAWS = 2_000
"""B: the ends of an interval move by about a hundredth from one seed to another."""
TAIL = 2.5
"""Per cent outside of an interval, on each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(statistic: Statistic, items: int, *, seed: int = 0) -> Estimate:
    """``statistic`` of all items and of ``DRAWS`` resamples of them; of no item at all it is 0."""
    if not items:
        return Estimate(value=0.0, low=0.0, high=0.0)
    draws_BN = np.random.default_rng(seed).integers(0, items, (DRAWS, items))
    low, high = np.percentile(statistic(draws_BN), [TAIL, 100 - TAIL])
    (value,) = statistic(np.arange(items)[None])
    return Estimate(value=float(value), low=float(low), high=float(high))


def weighted_kappa(labels_N: Numbers, scores_N: Numbers) -> Numbers:
    """κ_w, quadratic weights: 1 is full agreement, 0 what two who never looked would reach.

    0 where chance alone leaves no room to disagree, as when all labels and scores are one and the same: such a set says
    nothing about a judge.
    """
    observed = ((labels_N - scores_N) ** 2).mean(-1)
    by_chance = labels_N.var(-1) + scores_N.var(-1) + (labels_N.mean(-1) - scores_N.mean(-1)) ** 2
    kappa: Numbers = 1 - np.divide(observed, by_chance, out=np.ones_like(observed), where=by_chance > 0)
    return kappa


def correlation(a_N: Numbers, b_N: Numbers) -> Numbers:
    """Pearson's r; of ranks it is Spearman's ρ. 0 where one of the two never varies."""
    spread = a_N.std(-1) * b_N.std(-1)
    shared = (a_N * b_N).mean(-1) - a_N.mean(-1) * b_N.mean(-1)
    found: Numbers = np.divide(shared, spread, out=np.zeros_like(spread), where=spread > 0)
    return found


def ranks(values_N: Numbers) -> Numbers:
    """[N] places from 1 in ascending order; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    shared: Numbers = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return shared
