"""How well a contestant's weight versions do on held-out tasks, and when it got how far; evaluation takes no time.

    weight versions ──served one by one──▶ pass rates ──isotonic regression──▶ learning curve ──▶ time to a rate

All contestants' versions, TRL's too, are served by the same engine to the same harness on the same tasks, after all
runs are over. A rate of a few hundred tasks is some points off, and the first version that happens to be above the mark
would win; so a curve is the rising function that is closest to what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.loop.contestants import ContestantRun
from etude.dashboard.evaluation import Measure, figures
from etude.dashboard.formatting import number_at
from etude.run.evaluate import EvalRequest, evaluate
from etude.run.folder import RunFolder
from etude.types import Json

GAIN_SHARE = 0.8
"""The pass rate at which times are compared: the start plus this share of the asynchronous run's gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One version, measured."""

    step: int
    seconds: float
    """Seconds of training until it was available."""
    passed: float
    """Share of held-out tasks passed, sampled at temperature 1: the optimised quantity."""
    stderr: float
    """Over templates."""
    greedy: float

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        return {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "passed": round(self.passed, 4),
            "stderr": round(self.stderr, 4),
            "greedy": round(self.greedy, 4),
        }


def measure_start(folder: RunFolder, tasks: int) -> Point:
    """Version 0, from which everybody starts."""
    return _measured(folder, 0, tasks, step=0, seconds=0.0)


def measure_marks(outcome: ContestantRun, start: Point, tasks: int) -> list[Point]:
    """The start and the marked versions of a run that took place."""
    assert outcome.folder is not None, "a contestant that could not run has no versions"
    marks = (
        _measured(outcome.folder, mark.version, tasks, step=mark.step, seconds=mark.seconds) for mark in outcome.marks
    )
    return [start, *marks]


def target_rate(points: Sequence[Point]) -> float:
    """The pass rate to be reached, by the curve of the run that sets it."""
    rates = rising([point.passed for point in points])
    return rates[0] + GAIN_SHARE * (rates[-1] - rates[0])


def time_to(rate: float, points: Sequence[Point]) -> float | None:
    """Seconds of training to a pass rate, by the rising curve between points; ``None`` if it never got there.

    A curve that is at the rate for a while, as one that does not learn is at its start, got there at the first moment.
    """
    rates = rising([point.passed for point in points])
    if rates[0] >= rate:
        return points[0].seconds
    for before, after, low, high in zip(points, points[1:], rates, rates[1:], strict=False):
        if high >= rate:
            return before.seconds + (after.seconds - before.seconds) * (rate - low) / (high - low)
    return None


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence of least squared distance (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, m), (high, n) = pools.pop(), pools.pop()
            pools.append(((low * m + high * n) / (m + n), m + n))
    return [mean for mean, count in pools for _ in range(count)]


def _measured(folder: RunFolder, version: int, tasks: int, *, step: int, seconds: float) -> Point:
    evaluation = evaluate(folder, EvalRequest(version=version, tasks=tasks))
    result = figures(evaluation, Measure(pass_at=folder.config().eval.pass_at))
    return Point(
        step=step,
        seconds=seconds,
        passed=number_at(result, "sampled.pass.1.value") or 0.0,
        stderr=number_at(result, "sampled.pass.1.stderr") or 0.0,
        greedy=number_at(result, "greedy.pass.1.value") or 0.0,
    )
