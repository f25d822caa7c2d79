"""Noise of the policy gradient with baselines for single rollouts, on synthetic live sessions with a known gradient.

    population ──▶ earlier sessions ─┐
               └─▶ a batch ──────────┴─▶ each baseline ──▶ Σ (R − b) ∇ log π / N ──▶ against the true gradient

The policy is a table: in each of 12 templates it chooses one of 4 ways to answer, each with its own logit and known
worth, so the gradient of the expected reward is an exact sum. Everything else that changes a reward is independent of
the choice: the template's difficulty, the user's taste, the day, the length of the prompt, chance. All contestants see
the same sessions, batch by batch. Two cases:

- *steady*: earlier sessions have the same policy and the same mood;
- *moving*: earlier steps' policies were worse, for some templates more than for others, and every day has a mood of its
  own.

Noise is E‖ĝ − g‖² / ‖g‖²: the batches that must be averaged for noise and signal to be equal. Its ratio to the noise
without a baseline is the ratio of sessions needed for an equally good gradient. Bias is ‖mean ĝ − g‖ in units of its
standard deviation by chance.
"""

import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from etude.config.live import LIVE_BASELINES
from etude.trainer.batching.baselines import LiveBaseline, ValuedSession
from etude.types import Json, Observation

Array = npt.NDArray[np.float64]
Rng = np.random.Generator

TEMPLATES, ACTIONS, USERS = 12, 4, 150
BATCH, EARLIER = 64, 512
"""Sessions of a step, and of the steps before it."""
BATCHES = 200
CASES = ("steady", "moving")
NOISE = 0.25
"""Standard deviation of a reward's random part."""
PER_DAY = 64
"""Sessions of a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Users, templates and a policy, with all that a reward is made of."""

    shares_T: Array
    """Frequency of each template; a few make up most."""
    hardness_T: Array
    worth_TA: Array
    """Reward that each way to answer adds."""
    policy_TA: Array
    taste_U: Array
    frequency_U: Array
    """Frequency of each user."""
    decline_T: Array
    """Reward by which the oldest policy was worse."""

    @classmethod
    def draw(cls, rng: Rng, *, moving: bool) -> "Population":
        """One population of a case."""
        logits_TA = rng.normal(0, 0.7, (TEMPLATES, ACTIONS))
        frequency_U = rng.pareto(1.5, USERS) + 0.1
        shares_T = 1 / np.arange(1, TEMPLATES + 1)
        return cls(
            shares_T=shares_T / shares_T.sum(),
            hardness_T=rng.normal(0, 0.4, TEMPLATES),
            worth_TA=rng.normal(0, 0.25, (TEMPLATES, ACTIONS)),
            policy_TA=np.exp(logits_TA) / np.exp(logits_TA).sum(axis=1, keepdims=True),
            taste_U=rng.normal(0, 0.25, USERS),
            frequency_U=frequency_U / frequency_U.sum(),
            decline_T=(0.3 + rng.normal(0, 0.2, TEMPLATES)) * moving,
        )

    def gradient(self) -> Array:
        """[T, A] of the expected reward, by the logits: share · π · (worth − mean worth)."""
        mean_T = (self.policy_TA * self.worth_TA).sum(axis=1, keepdims=True)
        gradient_TA: Array = self.shares_T[:, None] * self.policy_TA * (self.worth_TA - mean_T)
        return gradient_TA

    def sessions(self, count: int, rng: Rng, *, moods: Array, age: Array) -> tuple[list[ValuedSession], Array]:
        """Some sessions, and the score [T, A] of each; ``age`` [count] from 1, the oldest, to 0, the present."""
        templates = rng.choice(TEMPLATES, count, p=self.shares_T)
        users = rng.choice(USERS, count, p=self.frequency_U)
        draws = [rng.choice(ACTIONS, p=self.policy_TA[template]) for template in templates]
        actions = np.array(draws, np.int64)
        lengths = rng.lognormal(5 + 0.3 * self.hardness_T[templates], 0.6)
        days = np.arange(count) // PER_DAY
        rewards = (
            1.0 - self.hardness_T[templates] + self.worth_TA[templates, actions] + self.taste_U[users]
            - 0.1 * (np.log(lengths) - 5) + moods[days % len(moods)] - age * self.decline_T[templates]
            + rng.normal(0, NOISE, count)
        )  # fmt: skip
        scores = np.zeros((count, TEMPLATES, ACTIONS))
        rows = np.arange(count)
        scores[rows, templates] = -self.policy_TA[templates]
        scores[rows, templates, actions] += 1.0
        valued = [
            ValuedSession(
                Observation(user=f"u{user}", day=int(day), template=f"t{template}", arm="live",
                            prompt_tokens=int(length)),
                float(reward),
            )
            for user, day, template, length, reward in zip(users, days, templates, lengths, rewards, strict=True)
        ]  # fmt: skip
        return valued, scores


def measure_baselines(batches: int = BATCHES, seed: int = 0) -> dict[str, Json]:
    """Noise and bias of the gradient by every built-in baseline, in both cases; the fewest sessions first."""
    started_s = time.perf_counter()
    rows: list[Json] = []
    for case in CASES:
        estimates, truth = _estimates(case, batches, seed)
        plain = _noise(estimates["none"], truth)
        measured = [(name, _noise(gradients, truth), _bias(gradients, truth)) for name, gradients in estimates.items()]
        rows += [
            {
                "contestant": name,
                "case": case,
                "noise": round(noise, 2),
                "ratio": round(noise / plain, 3),
                "bias": round(bias, 2),
            }
            for name, noise, bias in sorted(measured, key=lambda one: one[1])
        ]
    return {
        "results": rows,
        "batches": batches,
        "sessions_per_batch": BATCH,
        "earlier_sessions": EARLIER,
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def _estimates(case: str, batches: int, seed: int) -> tuple[dict[str, Array], Array]:
    """Baseline → [batches, T · A] estimates, and the truth [T · A]: one population, another batch each time."""
    moving = case == "moving"
    population = Population.draw(np.random.default_rng((seed, 0)), moving=moving)
    estimates: dict[str, list[Array]] = {name: [] for name in LIVE_BASELINES.builtins}
    for batch in range(batches):
        rng = np.random.default_rng((seed, 1, batch))
        moods = rng.normal(0, 0.2, EARLIER // PER_DAY) * moving
        earlier, _ = population.sessions(EARLIER, rng, moods=moods, age=np.linspace(1, 0.2, EARLIER))
        today = rng.normal(0, 0.2, 1) * moving
        present, scores_N = population.sessions(BATCH, rng, moods=today, age=np.zeros(BATCH))
        rewards_N = np.array([one.value for one in present])
        for name, gradients in estimates.items():
            baseline = cast("LiveBaseline", LIVE_BASELINES.find(name))
            advantages_N = rewards_N - baseline(present, earlier)
            gradients.append((advantages_N[:, None, None] * scores_N).mean(axis=0).ravel())
    return {name: np.array(gradients) for name, gradients in estimates.items()}, population.gradient().ravel()


def _noise(estimates: Array, truth: Array) -> float:
    return float(((estimates - truth) ** 2).sum(axis=1).mean() / (truth**2).sum())


def _bias(estimates: Array, truth: Array) -> float:
    """‖mean ĝ − g‖ over its standard deviation by chance."""
    by_chance = estimates.var(axis=0, ddof=1).sum() / len(estimates)
    return float(np.sqrt(((estimates.mean(axis=0) - truth) ** 2).sum() / by_chance))
