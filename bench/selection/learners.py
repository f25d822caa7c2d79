"""Simulated learners: the selection of a run, and a policy of a dozen numbers in place of a model.

    TaskSelection ──▶ tasks of a batch ──▶ rewards: Bernoulli(p) ──▶ one step on Σ w A s / Σ w ──▶ other p
          ▲                                        │
          └──── facts, a batch late ◀──────────────┘

A task needs one skill and has a difficulty: p = 1 / (1 + exp(difficulty − skill)). The gradient is REINFORCE's with the
group's mean as baseline, divided as a run divides it: by the weights of the groups that have a signal. The selection,
its facts, its weights and the bound of resampling are the product's own; the learner, its tasks and its optimiser are
made up, so what comes out says how selection and weights work, and nothing of what a model gains.

Array legend: N tasks, K skills, G rollouts of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.config.tasks import SelectionConfig
from etude.rollouts.task_selection import TaskFacts, TaskSelection

SKILLS, TASKS, HELDOUT = 12, 480, 1_200
GROUPS, ROLLOUTS = 16, 8
"""Groups of a step, and rollouts of a group."""
LEARNING_RATE = 0.1
SOLVED, HOPELESS = 0.4, 0.4
"""Shares of tasks that are nearly always, and nearly never, solved at the start; the others are in between."""
MOST_STEPS = 1_500

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to choose tasks."""

    name: str
    selection: SelectionConfig
    max_resamples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What it took to reach a held-out pass rate."""

    steps: int | None
    """Optimiser steps; ``None``: it was not reached."""
    rollouts: int
    """All that were sampled until then, those of groups left out included."""
    signal: float
    """Share of the groups of batches that had a signal."""


class Learner:
    """Skills, and the tasks that need them."""

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng((seed, 1))
        tasks = np.random.default_rng((seed, 0))
        self.skills_K = np.zeros(SKILLS)
        self.of_N, self.difficulty_N = _draw_tasks(tasks, TASKS)
        self._heldout = _draw_tasks(tasks, HELDOUT)

    def rewards(self, task: int) -> Values:
        """[G] of one group."""
        rewards_G: Values = (self.chance.random(ROLLOUTS) < self._pass(task)).astype(np.float64)
        return rewards_G

    def gradient(self, task: int, rewards_G: Values) -> Values:
        """[K] the mean of advantage times score."""
        gradient_K = np.zeros(SKILLS)
        gradient_K[self.of_N[task]] = ((rewards_G - rewards_G.mean()) * (rewards_G - self._pass(task))).mean()
        return gradient_K

    def step(self, gradient_K: Values) -> None:
        """A step of one length, as of Muon and nearly of Adam: how far it leads depends on the gradient's noise."""
        length = float(np.linalg.norm(gradient_K))
        self.skills_K += LEARNING_RATE * gradient_K / length if length else 0.0

    def heldout_pass(self) -> float:
        """Mean pass rate on tasks that are never trained on."""
        of_N, difficulty_N = self._heldout
        return float(_sigmoid(self.skills_K[of_N] - difficulty_N).mean())

    def _pass(self, task: int) -> float:
        return float(_sigmoid(self.skills_K[self.of_N[task]] - self.difficulty_N[task]))


def learn(arm: Arm, *, seed: int, target: float) -> Outcome:
    """Train a learner until its held-out pass rate is ``target``."""
    learner, draws = Learner(seed), TaskDraws(arm.selection, seed)
    waiting: list[tuple[int, int, float]] = []  # facts of the last batch: known when the next one was drawn already
    sampled = with_signal = 0
    facts = TaskFacts.none(TASKS)
    for step in range(1, MOST_STEPS + 1):
        gradient_K, divisor, left_out, groups = np.zeros(SKILLS), 0.0, 0, 0
        heard, waiting = waiting, []
        while groups < GROUPS:
            position, index, weight = draws(facts)
            rewards_G = learner.rewards(index)
            sampled += ROLLOUTS
            waiting.append((index, position, float(rewards_G.sum())))
            is_alike = bool((rewards_G == rewards_G[0]).all())
            if is_alike and left_out < arm.max_resamples:
                left_out += 1
                continue
            groups += 1
            if not is_alike:
                with_signal += 1
                gradient_K += weight * learner.gradient(index, rewards_G)
                divisor += weight
        if divisor:
            learner.step(gradient_K / divisor)
        for index, position, passed in heard:
            draws.selection.observe(facts, index, position, graded=ROLLOUTS, passed=passed)
        if learner.heldout_pass() >= target:
            return Outcome(steps=step, rollouts=sampled, signal=with_signal / (step * GROUPS))
    return Outcome(steps=None, rollouts=sampled, signal=with_signal / (MOST_STEPS * GROUPS))


class TaskDraws:
    """Draws of tasks: position, task and weight of each."""

    def __init__(self, config: SelectionConfig, seed: int) -> None:
        self._config = config
        self._in_order = _shuffled(seed)
        self._position = -1
        kind = config if config.kind != "in_order" else None
        self.selection = TaskSelection(kind or SelectionConfig.model_validate({"kind": "pools"}), size=TASKS, seed=seed)

    def __call__(self, facts: TaskFacts) -> tuple[int, int, float]:
        """The next one, by what became of those before."""
        self._position += 1
        if self._config.kind == "in_order":
            return self._position, next(self._in_order), 1.0
        choice = self.selection.choose(facts, self._position)
        return self._position, choice.index, choice.weight if self._config.importance_weights else 1.0


def _shuffled(seed: int) -> Iterator[int]:
    """All tasks, epoch after epoch, in an order of its own each time."""
    chance = np.random.default_rng((seed, 2))
    while True:
        yield from chance.permutation(TASKS).tolist()


def _draw_tasks(chance: np.random.Generator, count: int) -> tuple[npt.NDArray[np.int64], Values]:
    """[count] skills and difficulties."""
    kind_N, spread_N = chance.random(count), chance.random(count)
    between = SOLVED + HOPELESS
    difficulty_N = np.select(
        [kind_N < SOLVED, kind_N < between], [-7 + 3 * spread_N, 4 + 3 * spread_N], -2 + 4 * spread_N
    )
    return chance.integers(0, SKILLS, count), difficulty_N


def _sigmoid(values: Values) -> Values:
    passes: Values = 1 / (1 + np.exp(-values))
    return passes
