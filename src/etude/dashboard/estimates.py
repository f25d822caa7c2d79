"""Rates, means and differences with intervals, from tries of tasks.

    tasks ──▶ tries of each ──▶ one value per task ──▶ mean and interval          two versions ──▶ differences ──▶ …

Tries of one task are alike, so tasks are what is drawn: every interval is over tasks, however many tries each had.
Tasks of one template may be alike, too (:func:`mean_over_templates`). Owns the arithmetic and which method fits. Pure,
and the same numbers for the same values: resampling is seeded.

Array legend: N tasks, B resamples.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
"""Of every interval."""
RESAMPLES = 10_000
"""B of a bootstrap: its ends are then good to about a hundredth of the interval's width."""
RESAMPLES_AT_ONCE = 500
"""Bounds the memory of it: 8 bytes for each of them and task."""
SEED = 2107
"""Of every bootstrap, so that who reads figures again reads the same ones."""
NORMAL = 1.96
"""Half width of a normal interval of ``LEVEL`` in standard errors."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Half width of Student's interval of ``LEVEL`` in standard errors, by degrees of freedom from 1; beyond, the last one
is wider than need be.
"""
HALVINGS = 60
"""Of a bisection: beyond the precision of a float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks, with its interval."""

    value: float
    low: float
    high: float
    method: str
    """How the interval was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignTest:
    """How many tasks one of two does better and how many the other; and how likely that were if both were alike."""

    wins: int
    losses: int
    ties: int
    p: float
    """Two-sided, exact. Of pass or fail it is McNemar's exact test."""


def pass_at_k(tries: int, passed: int, k: int) -> float:
    """The chance that one of ``k`` tries passes, without bias from ``tries`` ≥ ``k`` of which ``passed`` did.

    1 − C(n − c, k) / C(n, k): arXiv 2107.03374, equation 1. Raises ``ValueError`` for fewer tries than ``k``.
    """
    if not 1 <= k <= tries:
        raise ValueError(f"pass@{k} cannot be told from {tries} tries: try each task at least {k} times")
    return 1.0 - math.comb(tries - passed, k) / math.comb(tries, k)


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of one value per task. Raises ``ValueError`` without any.

    Where every value is 0 or 1, Clopper and Pearson's interval is exact. Elsewhere tasks are drawn again: a bootstrap
    of clusters, percentiles. Where all values are one and the same no resample would differ: other ones, of which none
    was seen, are at most a share s, and the mean is as far from theirs as that allows.
    """
    if not len(values):
        raise ValueError("no task has a value: there is nothing to take the mean of")
    values_N = np.asarray(values, np.float64)
    if bool(np.isin(values_N, (0.0, 1.0)).all()):
        low, high = exact_interval(int(values_N.sum()), len(values_N))
        return Estimate(value=float(values_N.mean()), low=low, high=high, method="Clopper-Pearson")
    if _are_alike(values_N) and _are_rates(values_N):
        return _of_alike(float(values_N[0]), len(values_N), least=0.0)
    return _bootstrapped(values_N)


def mean_effort(values: Sequence[float]) -> Estimate:
    """The mean of one amount per task, which is no rate whatever its values: tasks are drawn again."""
    return _bootstrapped(np.asarray(values, np.float64))


def standard_error(values: Sequence[float]) -> float:
    """That of the mean of one value per task.

    Where all values are one and the same none is to be seen, which does not make it 0: it is then that of a normal
    interval that goes as far as :func:`mean_of`'s, 0.37 points where 512 of 512 tasks passed. Raises ``ValueError``
    without any.
    """
    if len(values) and min(values) < max(values):
        return statistics.stdev(values) / math.sqrt(len(values))
    found = mean_of(values)
    return max(found.high - found.value, found.value - found.low) / NORMAL


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, which are few: Student's t. Raises ``ValueError`` for fewer than two."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} seeds have no spread: an interval needs two at least")
    half = _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    value = statistics.fmean(values)
    return Estimate(value=value, low=value - half, high=value + half, method="Student's t over seeds")


def mean_over_templates(values: Sequence[float], templates: Sequence[str], *, least: float = 0.0) -> Estimate | None:
    """The mean of one value per task, of [``least``, 1], where tasks of one template are alike and templates are drawn.

    What a template's tasks deviate is added up before it is squared: clustered standard errors (arXiv 2411.00640),
    times C / (C − 1) for C templates; and Student's t, as few of them make a normal interval too narrow. ``None``
    where no other template can be told from these: of a single one, and where all tasks have one value.
    """
    values_N, (names, of_N) = np.asarray(values, np.float64), np.unique(np.asarray(templates), return_inverse=True)
    if len(names) < 2 or _are_alike(values_N):
        return None
    value = float(values_N.mean())
    deviations_C = np.bincount(of_N, weights=values_N - value)
    variance = len(names) / (len(names) - 1) * float((deviations_C**2).sum()) / len(values_N) ** 2
    half = _student(len(names) - 1) * math.sqrt(variance)
    low, high = max(least, value - half), min(1.0, value + half)
    return Estimate(value=value, low=low, high=high, method="Student's t over templates")


def difference_of(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """The mean of ``after`` − ``before``, values of the same tasks in the same order: paired, tasks drawn again.

    Where every task changes by the same, and values are in [0, 1], the difference d is not known to be that: of other
    tasks none was seen, so they are at most a share s, and the mean is between (1 − s)·d − s and (1 − s)·d + s. Raises
    ``ValueError`` without any task.
    """
    before_N, after_N = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if not len(before_N):
        raise ValueError("the two have no task in common: there is nothing to compare")
    differences_N = after_N - before_N
    if _are_alike(differences_N) and _are_rates(before_N) and _are_rates(after_N):
        return _of_alike(float(differences_N[0]), len(differences_N), least=-1.0)
    return _bootstrapped(differences_N)


def sign_test(before: Sequence[float], after: Sequence[float]) -> SignTest:
    """How many tasks ``after`` does better than ``before``, and how many worse; tasks alike in both say nothing."""
    differences_N = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    wins, losses = int((differences_N > 0).sum()), int((differences_N < 0).sum())
    unlike = wins + losses
    tail = sum(math.comb(unlike, count) for count in range(min(wins, losses) + 1))
    return SignTest(wins=wins, losses=losses, ties=len(differences_N) - unlike, p=min(1.0, 2 * tail / 2**unlike))


def exact_interval(passed: int, tasks: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of a rate (Biometrika 26, 1934): it covers the rate in ``LEVEL`` of all cases or
    more, whatever the rate.
    """
    tail = (1 - LEVEL) / 2
    low = 0.0 if passed == 0 else _crossing(lambda rate: _at_least(passed, tasks, rate), tail)
    high = 1.0 if passed == tasks else 1.0 - _crossing(lambda rate: _at_least(tasks - passed, tasks, rate), tail)
    return low, high


def _student(freedom: int) -> float:
    return STUDENT[min(freedom, len(STUDENT)) - 1]


def _are_rates(values_N: npt.NDArray[np.float64]) -> bool:
    return bool(((values_N >= 0) & (values_N <= 1)).all())


def _are_alike(values_N: npt.NDArray[np.float64]) -> bool:
    return bool((values_N == values_N[0]).all())


def _of_alike(value: float, tasks: int, *, least: float) -> Estimate:
    """The mean where that many tasks have one ``value``, of [``least``, 1]: others are at most the share of a kind of
    which none was seen.
    """
    _, others = exact_interval(0, tasks)
    known = (1 - others) * value
    return Estimate(
        value=value, low=known + others * least, high=known + others, method="Clopper-Pearson, of unlike tasks"
    )


def _bootstrapped(values_N: npt.NDArray[np.float64]) -> Estimate:
    generator = np.random.default_rng(SEED)
    means_B = np.empty(RESAMPLES, np.float64)
    for start in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        drawn_BN = generator.integers(len(values_N), size=(RESAMPLES_AT_ONCE, len(values_N)))
        means_B[start : start + RESAMPLES_AT_ONCE] = values_N[drawn_BN].mean(axis=1)
    low, high = np.percentile(means_B, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]).tolist()
    return Estimate(value=float(values_N.mean()), low=low, high=high, method="bootstrap over tasks")


def _at_least(passed: int, tasks: int, rate: float) -> float:
    """The chance of ``passed`` or more of ``tasks`` at a rate in (0, 1)."""
    log_odds = [
        _log_choices(tasks, count) + count * math.log(rate) + (tasks - count) * math.log1p(-rate)
        for count in range(passed, tasks + 1)
    ]
    return math.fsum(math.exp(log) for log in log_odds)


def _log_choices(tasks: int, count: int) -> float:
    return math.lgamma(tasks + 1) - math.lgamma(count + 1) - math.lgamma(tasks - count + 1)


def _crossing(rising: Callable[[float], float], target: float) -> float:
    """Where a function that rises on (0, 1) is at ``target``."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
