"""Rates, means and differences with confidence intervals, from repeated attempts at tasks.

    tasks ──▶ attempts at each ──▶ one value per task ──▶ mean and interval       two versions ──▶ differences ──▶ …

Attempts at one task are correlated, and so are tasks of one template. So templates are the sampling unit of every error
and interval, independently of the number of tasks and attempts of each. A task without others of its template is a
cluster of its own. Owns the arithmetic. Pure.
Array legend: N tasks, C clusters.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
"""Confidence level of every interval."""
NORMAL = 1.96
"""Half width of a normal interval of ``LEVEL`` in standard errors."""
NO_SPREAD = 1e-12
"""Threshold below which a standard error is only rounding."""
HALVINGS = 60
"""Steps of a bisection, more than the precision of a float64 needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks, with its confidence interval."""

    value: float
    low: float
    high: float
    stderr: float
    """The standard error of ``value``. Without an observed spread: that of a normal interval as wide as this one."""
    method: str
    """Name of the interval's method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignTest:
    """Sign test: the number of tasks that each of two versions does better, and the probability of such a difference if
    both were equal.
    """

    wins: int
    losses: int
    ties: int
    p: float
    """Two-sided, exact. For pass or fail it is McNemar's exact test."""


def pass_at_k(tries: int, passed: int, k: int) -> float:
    """Unbiased pass@k: the probability that one of ``k`` attempts passes, if ``passed`` of ``tries`` ≥ ``k`` did.

    1 − C(n − c, k) / C(n, k): arXiv 2107.03374, equation 1. Raises ``ValueError`` for fewer attempts than ``k``.
    """
    if not 1 <= k <= tries:
        raise ValueError(f"pass@{k} cannot be told from {tries} tries: try each task at least {k} times")
    return 1.0 - math.comb(tries - passed, k) / math.comb(tries, k)


def mean_of(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """The mean of one value per task; ``clusters`` names the template of each.

    Clustered standard errors and Student's t. Rates stay within [0, 1]. Rates that are all equal have no observed
    spread, which does not make them certain: the share of different ones is at most s, and the interval extends as far
    as that allows. Raises ``ValueError`` without any task.
    """
    return _estimated(values, clusters, (0.0, 1.0) if _are_rates(values) else None)


def mean_amount(values: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """The mean of one amount per task (tokens, seconds): never treated as a rate."""
    return _estimated(values, clusters, None)


def difference_of(before: Sequence[float], after: Sequence[float], clusters: Sequence[str]) -> Estimate:
    """The mean of ``after`` − ``before``, values of the same tasks in the same order: paired, errors as in
    :func:`mean_of`.

    If every task changes by the same d, and values are in [0, 1], d is not certain: different templates were not
    observed, so their share is at most s, and the mean is between (1 − s)·d − s and (1 − s)·d + s. Raises
    ``ValueError`` without any task.
    """
    if not len(before):
        raise ValueError("the two have no task in common: there is nothing to compare")
    differences = [second - first for first, second in zip(before, after, strict=True)]
    return _estimated(differences, clusters, (-1.0, 1.0) if _are_rates(before) and _are_rates(after) else None)


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed: Student's t. Raises ``ValueError`` for fewer than two.

    All seeds are measured on the same held-out tasks, whose contribution to the error no number of seeds averages out:
    the interval is for other seeds on these tasks.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} seeds have no spread: an interval needs two at least")
    error = statistics.stdev(values) / math.sqrt(len(values))
    value, half = statistics.fmean(values), student(len(values) - 1) * error
    method = "Student's t over seeds, on the same held-out tasks"
    return Estimate(value=value, low=value - half, high=value + half, stderr=error, method=method)


def sign_test(before: Sequence[float], after: Sequence[float]) -> SignTest:
    """Count the tasks that ``after`` does better than ``before``, and those it does worse; tasks with equal values do
    not count.
    """
    differences_N = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    wins, losses = int((differences_N > 0).sum()), int((differences_N < 0).sum())
    unlike = wins + losses
    tail = sum(math.comb(unlike, count) for count in range(min(wins, losses) + 1))
    return SignTest(wins=wins, losses=losses, ties=len(differences_N) - unlike, p=min(1.0, 2 * tail / 2**unlike))


def exact_interval(passed: int, tasks: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of a rate (Biometrika 26, 1934): it covers any rate with a probability of at least
    ``LEVEL``.
    """
    tail = (1 - LEVEL) / 2
    low = 0.0 if passed == 0 else _crossing(lambda rate: _at_least(passed, tasks, rate), 1.0, tail)
    high = 1.0 if passed == tasks else 1.0 - _crossing(lambda rate: _at_least(tasks - passed, tasks, rate), 1.0, tail)
    return low, high


@cache
def student(freedom: int) -> float:
    """Half width of Student's interval of ``LEVEL``, in standard errors, by degrees of freedom from 1."""
    return _crossing(lambda width: _within(width, freedom), 13.0, LEVEL)


def _estimated(values: Sequence[float], clusters: Sequence[str], bounds: tuple[float, float] | None) -> Estimate:
    """Estimate a mean; ``bounds`` are the limits of every value, if it has any."""
    if not len(values):
        raise ValueError("no task has a value: there is nothing to take the mean of")
    values_N, (names, of_N) = np.asarray(values, np.float64), np.unique(np.asarray(clusters), return_inverse=True)
    over = "templates"
    if len(names) in (1, len(values_N)):  # tasks of one template do not represent others
        names, of_N, over = values_N, np.arange(len(values_N)), "tasks"
    value = float(values_N.mean())
    error = _clustered_error(values_N - value, of_N, len(names))
    if error < NO_SPREAD:
        return _of_alike(value, len(names), bounds, over)
    half = student(len(names) - 1) * error
    low, high = bounds or (-math.inf, math.inf)
    method = f"Student's t over {over}"
    return Estimate(value=value, low=max(low, value - half), high=min(high, value + half), stderr=error, method=method)


def _clustered_error(deviations_N: npt.NDArray[np.float64], of_N: npt.NDArray[np.intp], clusters: int) -> float:
    """The error from the sums of each cluster's deviations, which are added up before they are squared (arXiv
    2411.00640), times C / (C − 1) for few clusters: CR1. With one task per cluster it is the usual standard error.
    """
    deviations_C = np.bincount(of_N, weights=deviations_N)
    return math.sqrt(clusters / max(1, clusters - 1) * float((deviations_C**2).sum())) / len(deviations_N)


def _of_alike(value: float, clusters: int, bounds: tuple[float, float] | None, over: str) -> Estimate:
    """The mean if all clusters have one ``value``; the share of others is bounded by that of an unobserved event."""
    if bounds is None:
        return Estimate(value=value, low=value, high=value, stderr=0.0, method="all alike")
    _, others = exact_interval(0, clusters)
    low, high = ((1 - others) * value + others * bound for bound in bounds)
    error = max(high - value, value - low) / NORMAL
    return Estimate(value=value, low=low, high=high, stderr=error, method=f"Clopper-Pearson, of unlike {over}")


def _are_rates(values: Sequence[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


def _within(width: float, freedom: int) -> float:
    """The probability that Student's t with ``freedom`` is within ± ``width``: Abramowitz and Stegun, 26.7.3 and 4."""
    angle = math.atan(width / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for index in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (index - 1) / index
        total += term
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series


def _at_least(passed: int, tasks: int, rate: float) -> float:
    """The probability of ``passed`` or more of ``tasks`` at a rate in (0, 1)."""
    log_odds = [
        _log_choices(tasks, count) + count * math.log(rate) + (tasks - count) * math.log1p(-rate)
        for count in range(passed, tasks + 1)
    ]
    return math.fsum(math.exp(log) for log in log_odds)


def _log_choices(tasks: int, count: int) -> float:
    return math.lgamma(tasks + 1) - math.lgamma(count + 1) - math.lgamma(tasks - count + 1)


def _crossing(rising: Callable[[float], float], high: float, target: float) -> float:
    """The point between 0 and ``high`` at which an increasing function equals ``target``."""
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2
