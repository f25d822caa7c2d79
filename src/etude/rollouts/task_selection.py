"""Selection of training tasks: tasks with a current training signal are drawn more often.

    outcomes of each task ──▶ probability of each ──▶ one draw ──▶ task, importance weight

    pools      easy · normal · hard, by the mean reward when last tried; a share of draws each, solved and hopeless
               tasks rest for some epochs (shares and thresholds of prime-rl's buffer; the rest is our addition)
    thompson   p_i ~ Beta(½ + passes, ½ + failures), with less weight for old results; q_i ∝ p_i (1 − p_i), the
               variance of a reward of 0 or 1 and so the expected square of an advantage, mixed with a uniform draw

Draws are separate: the probabilities of each depend only on earlier facts, and are known. So the weight 1 / (N q_i)
makes the mean over draws equal to the mean over all N tasks: E[w g] = Σ_i q_i g_i / (N q_i). In Thompson sampling q is
taken after the p_i are drawn, so it is exact, and the share of the uniform draw bounds the weight. A task that rests
has q = 0: it counts as a task without a gradient, which it was when all its rewards were equal.

Owns the decision. Pure: a task from facts, a seed and a position. The facts come from the ledger
(:mod:`etude.rollouts.task_history`), so a restarted process, or another one, draws the same task.

Array legend: N tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from etude.config.section import Section
from etude.config.tasks import PoolsOptions, SelectionConfig, ThompsonOptions

Values: TypeAlias = npt.NDArray[np.float64]
PRIOR = 0.5
"""Initial passes and failures of a task: Jeffreys' prior, with which a few equal outcomes already have much weight."""
NEVER = -1
"""Position for a task that was never drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """The outcomes of each task so far."""

    drawn_N: npt.NDArray[np.int64]
    """[N] position of the last completed draw of each task; ``NEVER``."""
    rate_N: Values
    """[N] mean of the rewards of that draw, between 0 and 1; NaN if there are none."""
    passes_N: Values
    failures_N: Values
    """[N] sums of rewards, and of their differences to 1, as of ``drawn_N``; older observations have less weight."""

    @classmethod
    def none(cls, size: int) -> "TaskFacts":
        """Facts of ``size`` tasks that were never drawn."""
        zeros = np.zeros(size)
        return cls(
            drawn_N=np.full(size, NEVER),
            rate_N=np.full(size, np.nan),
            passes_N=zeros,
            failures_N=zeros.copy(),
        )

    def copy(self) -> "TaskFacts":
        """An independent copy of the facts."""
        return TaskFacts(
            drawn_N=self.drawn_N.copy(),
            rate_N=self.rate_N.copy(),
            passes_N=self.passes_N.copy(),
            failures_N=self.failures_N.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """The task of one draw."""

    index: int
    weight: float
    """1 / (N q): the probability in a uniform draw divided by the actual one."""


class TaskSelection:
    """The draws of one run over N tasks."""

    def __init__(self, config: SelectionConfig, *, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._probabilities = _kind(config.options)
        options = config.options
        self.half_life = size * options.half_life_epochs if isinstance(options, ThompsonOptions) else np.inf
        """Number of draws after which an observation of a task has half its weight."""

    def observe(self, facts: TaskFacts, task: int, position: int, *, graded: int, passed: float) -> None:
        """Add a completed draw to ``facts``: the number of ``graded`` rewards and their sum, ``passed``."""
        before = facts.drawn_N[task]
        newest = max(int(before), position)
        if position >= before:
            facts.rate_N[task] = passed / graded if graded else facts.rate_N[task]
        for counts_N, seen in ((facts.passes_N, passed), (facts.failures_N, graded - passed)):
            old, new = (0.5 ** ((newest - at) / self.half_life) for at in (int(before), position))
            counts_N[task] = counts_N[task] * old + seen * new
        facts.drawn_N[task] = newest

    def choose(self, facts: TaskFacts, position: int) -> TaskChoice:
        """The task at a position of the training data."""
        chance = np.random.default_rng((self._seed, position))
        probabilities_N = self._probabilities(facts, position, self, chance)
        index = int(np.searchsorted(np.cumsum(probabilities_N), chance.random() * probabilities_N.sum(), side="right"))
        index = min(index, int(np.flatnonzero(probabilities_N)[-1]))  # the sum may differ from 1 by a rounding error
        return TaskChoice(index=index, weight=float(1 / (self._size * probabilities_N[index])))

    @property
    def size(self) -> int:
        """N."""
        return self._size


Probabilities: TypeAlias = Callable[[TaskFacts, int, TaskSelection, np.random.Generator], Values]
"""[N] probabilities of the tasks at a position; their sum is 1."""


def _kind(options: Section) -> Probabilities:
    """The selection rule for some options."""
    match options:
        case PoolsOptions():
            return lambda facts, position, selection, chance: pools(options, facts, position)
        case ThompsonOptions():
            return lambda facts, position, selection, chance: thompson(
                options, facts, position / selection.half_life, selection.half_life, chance
            )
        case _:
            raise ValueError(f"tasks are not chosen by {type(options).__name__}")


def pools(options: PoolsOptions, facts: TaskFacts, position: int) -> Values:
    """[N] the share of each pool, divided evenly over its tasks; uniform over all tasks if every one of them rests."""
    size = len(facts.rate_N)
    is_alike_N = (facts.rate_N == 0) | (facts.rate_N == 1)
    rests_N = is_alike_N & (position - facts.drawn_N < options.rest_epochs * size)
    if rests_N.all():
        return np.full(size, 1 / size)
    easy_N = (facts.rate_N >= options.easy_from) & ~rests_N
    hard_N = (facts.rate_N <= options.hard_to) & ~rests_N
    normal_N = ~easy_N & ~hard_N & ~rests_N
    normal_share = 1 - options.easy_share - options.hard_share
    probabilities_N = np.zeros(size)
    for pool_N, share in ((easy_N, options.easy_share), (hard_N, options.hard_share), (normal_N, normal_share)):
        if pool_N.any():
            probabilities_N[pool_N] = share / pool_N.sum()
    total = probabilities_N.sum()
    if not total:  # all tasks that do not rest are in a pool without a share
        probabilities_N[~rests_N] = 1.0
        total = probabilities_N.sum()
    shares_N: Values = probabilities_N / total
    return shares_N


def thompson(
    options: ThompsonOptions, facts: TaskFacts, age: float, half_life: float, chance: np.random.Generator
) -> Values:
    """[N] p (1 − p) of a drawn pass rate p of each task, normalised, mixed with the uniform distribution.

    ``age`` is the position in half-lives.
    """
    size = len(facts.rate_N)
    kept_N = 0.5 ** np.maximum(0.0, age - facts.drawn_N / half_life)
    rates_N = chance.beta(PRIOR + facts.passes_N * kept_N, PRIOR + facts.failures_N * kept_N)
    signals_N = rates_N * (1 - rates_N)
    total = signals_N.sum()
    by_signal_N = signals_N / total if total else np.full(size, 1 / size)
    mixed_N: Values = options.uniform_share / size + (1 - options.uniform_share) * by_signal_N
    return mixed_N
