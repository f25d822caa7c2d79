"""Has training made the model worse? The newest steps' mean reward beside that of the best steps before them.

    rewards of steps ──▶ means over 10 steps ──▶ is the newest below the best before it, by 15 % and beyond chance?

A policy that collapses may go on with a signal in some groups, so nothing else says so. Of 403 healthy runs of
``bench/science/results`` the rule finds one: with thresholds of 3 errors, or over 5 steps, it finds more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WINDOW = 10
"""Steps whose mean reward is compared."""
ERRORS = 4.0
"""Standard errors of the difference that chance may explain: every step is looked at, and compared with the best."""
SHARE = 0.15
"""Smallest decline worth a warning, as a share of the best mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """Two windows of steps, the later of which is worse; steps are counted from 0, ends are exclusive."""

    best: float
    """Mean reward of the best window."""
    best_end: int
    now: float
    """Mean reward of the first window that was worse; all since then are, too."""
    now_end: int

    @property
    def share(self) -> float:
        """The decline as a share of the best mean; 1 if that is 0."""
        return (self.best - self.now) / abs(self.best) if self.best else 1.0


def is_graded(metrics: Mapping[str, float]) -> bool:
    """True if a step with these metrics has a graded rollout; else its mean reward says nothing."""
    return "reward_low" in metrics


def decline_of(rewards_N: Sequence[float]) -> Decline | None:
    """The decline that lasts up to the newest of some steps, whose mean rewards are [N]; ``None`` if there is none.

    Two windows of :data:`WINDOW` steps differ beyond chance if their means do by :data:`ERRORS` standard errors,
    √(s₁²/n + s₂²/n) as in Welch's test, over the steps' means.
    """
    if len(rewards_N) < 2 * WINDOW:
        return None
    windows_WS = np.lib.stride_tricks.sliding_window_view(np.asarray(rewards_N, np.float64), WINDOW)
    averages_W, errors_W = windows_WS.mean(1), windows_WS.var(1, ddof=1) / WINDOW
    best_L = _first_of_highest(averages_W[:-WINDOW])  # of later window l, the best that has no step in common with it
    now_L, of_best_L = averages_W[WINDOW:], averages_W[best_L]
    chance_L = ERRORS * np.sqrt(errors_W[WINDOW:] + errors_W[best_L])
    is_worse_L = of_best_L - now_L > np.maximum(chance_L, SHARE * np.abs(of_best_L))
    if not is_worse_L[-1]:
        return None
    first = int(np.flatnonzero(~is_worse_L)[-1]) + 1 if not is_worse_L.all() else 0
    best = int(best_L[first])
    return Decline(
        best=float(averages_W[best]), best_end=best + WINDOW, now=float(now_L[first]), now_end=first + 2 * WINDOW
    )


def _first_of_highest(averages_W: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """[W] index of the highest of the first w + 1 means."""
    highest_W = np.maximum.accumulate(averages_W)
    is_new_W = np.append(True, highest_W[1:] > highest_W[:-1])
    return np.maximum.accumulate(np.where(is_new_W, np.arange(len(averages_W)), 0))
