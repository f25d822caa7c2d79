"""False promotions and false rollbacks of the release controller, over simulated experiments in virtual time.

    users ──bucket──▶ arm ──▶ sessions, a batch at a time ──▶ facts ──▶ ReleaseController.decide ──▶ how it ended

Two kinds of experiment, each of which can only end wrongly in either direction:

- **A/A**: both arms are one version, and a release asks for proof that it is better. A promotion is false, and so is a
  rollback because a metric became worse or because shares do not fit.
- **A/B at the margin**: the candidate is worse by exactly the margin, the hardest case of the hypothesis that it is
  worse by at least that, and of the one that it is not worse than that. Again both are false.

Users differ, and each has an own mean; a few have most of the sessions. The metric that decides is normal, a rate or
heavy-tailed (lognormal, σ = 1.5), in turn; the guardrails are a rate and a latency with a heavy tail. What becomes of
candidates that really are better or worse is measured, too: a rule that never decides makes no mistakes.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from etude.config.release import MetricConfig, ReleaseConfig
from etude.releases.controller import CanaryFacts, ReleaseController, ReleaseFacts
from etude.releases.experiment import ArmCounts, UserSums
from etude.releases.states import Release, ReleaseState

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator

USERS = 800
"""People who may come; some never do."""
BATCH = 80
"""Sessions between two looks."""
TESTS = 1000
"""Experiments whose truth forbids both decisions."""
POWER_TESTS = 100
"""Experiments of each kind whose truth asks for one."""
EFFECT = 0.5
"""Margin and true differences, in standard deviations of a user's mean."""
SHAPES = ("normal", "rate", "heavy tail")
TAIL = 1.5
"""σ of the lognormal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One simulated experiment."""

    state: ReleaseState
    reason: str
    sessions: int


def measure_ab(tests: int = TESTS, power_tests: int = POWER_TESTS, seed: int = 0) -> dict[str, object]:
    """Simulate ``tests`` experiments that should not be decided, and some that should; rates, by kind and cause."""
    started_s, half = time.perf_counter(), tests // 2
    nulls = {
        "A/A": [_simulated(seed, index, margin=0.0, effect=0.0) for index in range(half)],
        "A/B at the margin": [_simulated(seed + 1, index, margin=EFFECT, effect=-EFFECT) for index in range(half)],
    }
    better = [_simulated(seed + 2, index, margin=0.0, effect=EFFECT) for index in range(power_tests)]
    worse = [_simulated(seed + 3, index, margin=0.0, effect=-EFFECT) for index in range(power_tests)]
    endings = [ending for kind in nulls.values() for ending in kind]
    return {
        "tests": len(endings),
        "false_promotion_rate": _share(endings, is_promotion),
        "false_rollback_rate": _share(endings, is_rollback),
        "by_kind": {
            kind: {"false_promotion_rate": _share(of, is_promotion), "false_rollback_rate": _share(of, is_rollback)}
            for kind, of in nulls.items()
        },
        "causes": dict(Counter(_cause(ending) for ending in endings)),
        "better_promoted": _share(better, is_promotion),
        "better_sessions": float(np.median([ending.sessions for ending in better])),
        "worse_rolled_back": _share(worse, is_rollback),
        "worse_sessions": float(np.median([ending.sessions for ending in worse])),
        "seconds": time.perf_counter() - started_s,
    }


def is_promotion(ending: Ending) -> bool:
    """True if users would all have met the candidate."""
    return ending.state is ReleaseState.RELEASED


def is_rollback(ending: Ending) -> bool:
    """True if the candidate was taken back for a fault, and not for want of proof."""
    return ending.state is ReleaseState.ROLLED_BACK and _cause(ending) != "inconclusive"


def _share(endings: list[Ending], which: Callable[[Ending], bool]) -> float:
    return sum(map(which, endings)) / max(1, len(endings))


def _cause(ending: Ending) -> str:
    """The first words of the reason."""
    return "promoted" if is_promotion(ending) else ending.reason.partition(":")[0]


def _simulated(seed: int, index: int, *, margin: float, effect: float) -> Ending:
    """One experiment, from the first share of the canary to its end."""
    rng, shape = np.random.default_rng((seed, index)), SHAPES[index % len(SHAPES)]
    population = _Population(rng, shape)
    unit = population.spread
    config = ReleaseConfig(
        every_steps=1,
        max_sessions=4000,
        metric=MetricConfig(name="reward", margin=margin * unit),
        guardrails=(MetricConfig(name="follow_up", direction="down"), MetricConfig(name="latency", direction="down")),
    )
    controller, draw = ReleaseController(config), partial(population.sessions, effect=effect * unit)
    canary, sessions = Release(version=2, digest="b", state=ReleaseState.CANARY, replaces=1), 0
    live = Release(version=1, digest="a", state=ReleaseState.RELEASED)
    while True:
        arms = _Arms(population.buckets < config.canary_shares[canary.stage])
        decision = None
        while decision is None:
            arms.add(*draw())
            sessions += BATCH
            decision = controller.decide(ReleaseFacts(releases=(live, canary), versions={}, canary=arms.facts()))
        move = decision.moves[0]
        if move.to is not ReleaseState.CANARY:
            return Ending(state=move.to, reason=move.reason, sessions=sessions)
        canary = Release(version=2, digest="b", state=ReleaseState.CANARY, replaces=1, stage=move.stage)


class _Population:
    """Users who differ in their ratings, their waiting times and their number of sessions."""

    def __init__(self, rng: Rng, shape: str) -> None:
        self._rng, self._shape = rng, shape
        self.buckets = rng.random(USERS)
        often = rng.pareto(1.2, USERS) + 0.2
        self._often = often / often.sum()
        self._mean = rng.normal(0.0, 1.0, USERS)
        self._waits = np.exp(rng.normal(0.0, 1.0, USERS))
        self.spread = {"normal": 1.0, "rate": 0.2, "heavy tail": 2.0}[shape]

    def sessions(self, effect: float) -> tuple[npt.NDArray[np.intp], dict[str, tuple[Floats, float]]]:
        """A batch: the user of each, and metric → values in the control, and the candidate's differences."""
        users = self._rng.choice(USERS, BATCH, p=self._often)
        noise, mean = self._rng.normal(0.0, 1.0, BATCH), self._mean[users]
        follow_up = (self._rng.random(BATCH) < 0.3).astype(np.float64)
        latency = self._waits[users] * np.exp(TAIL * self._rng.normal(0.0, 1.0, BATCH))
        match self._shape:
            case "normal":
                reward = mean + noise
            case "rate":
                # What the candidate adds to a rate is a shift of its mean, as of any other metric here.
                reward = (self._rng.random(BATCH) < 1 / (1 + np.exp(-mean))).astype(np.float64)
            case _:
                reward = np.exp(0.5 * mean + TAIL * noise)
        return users, {"reward": (reward, effect), "follow_up": (follow_up, 0.0), "latency": (latency, 0.0)}


class _Arms:
    """The sums of one stage, user by user; ``treated_U`` are those who have the candidate."""

    def __init__(self, treated_U: npt.NDArray[np.bool_]) -> None:
        self._treated_U = treated_U
        self._sessions_U = np.zeros(USERS)
        self._totals_U = {name: np.zeros(USERS) for name in ("reward", "follow_up", "latency")}

    def add(self, users: npt.NDArray[np.intp], values: dict[str, tuple[Floats, float]]) -> None:
        """Take in a batch."""
        self._sessions_U += np.bincount(users, minlength=USERS)
        for name, (control, added) in values.items():
            weights = control + added * self._treated_U[users]
            self._totals_U[name] += np.bincount(users, weights=weights, minlength=USERS)

    def facts(self) -> CanaryFacts:
        """The stage as the controller receives it."""
        there_U = self._sessions_U > 0
        arms = [there_U & ~self._treated_U, there_U & self._treated_U]
        counts = [ArmCounts(users=int(arm.sum()), sessions=int(self._sessions_U[arm].sum())) for arm in arms]
        sums = {
            name: (
                UserSums(totals_U=totals[arms[0]], sessions_U=self._sessions_U[arms[0]]),
                UserSums(totals_U=totals[arms[1]], sessions_U=self._sessions_U[arms[1]]),
            )
            for name, totals in self._totals_U.items()
        }
        return CanaryFacts(control=counts[0], treatment=counts[1], sums=sums)
