"""Games of a few turns and a few moves, small enough that every way to play them can be summed over.

A policy is a softmax over the moves of each position; a position is what was played so far. The gradient of anything
expected is then known exactly, by the logits of all positions, one after the other.

Array legend: T turns of a play, P logits of all positions together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from etude.config.credit import CreditConfig
from etude.config.training import Baseline
from etude.trainer.batching.credit import Credit, turn_credits
from etude.types import Branch, Finish, Floats, Rollout, RolloutStatus, Turn

Moves: TypeAlias = tuple[int, ...]
"""The moves so far, turn by turn."""
Vector: TypeAlias = npt.NDArray[np.float64]
Advantages: TypeAlias = Callable[[Sequence[Rollout], Floats], Sequence[Credit]]
"""A function from the rollouts of a group and their rewards to credit."""
TURN = Turn(
    prompt_ids=np.array([1], np.int32),
    completion_ids=np.array([2], np.int32),
    logprobs=np.array([-1.0], np.float32),
    versions=np.array([0], np.int32),
    finish=Finish.STOP,
)


@dataclass(frozen=True, eq=False)
class Game:
    """A game, and a policy that plays it."""

    policy: Mapping[Moves, Sequence[float]]
    """Position → probability of each move. Positions that are missing here are ends."""
    rewards: Mapping[Moves, float]
    """End → its reward."""
    turn_reward: Callable[[Moves], float] = lambda moves: 0.0
    """Turn reward of the last of some moves."""

    @cached_property
    def plays(self) -> tuple[tuple[Moves, float], ...]:
        """Every way to play, and its chance."""
        return tuple(self.continued(()))

    def continued(self, moves: Moves) -> Iterator[tuple[Moves, float]]:
        """Every continuation of a position to the end, with its probability."""
        if moves not in self.policy:
            yield moves, 1.0
            return
        for move, chance in enumerate(self.policy[moves]):
            for end, rest in self.continued((*moves, move)):
                yield end, chance * rest

    @cached_property
    def logits(self) -> int:
        """P"""
        return sum(map(len, self.policy.values()))

    @cached_property
    def scores(self) -> Mapping[Moves, Vector]:
        """Play → [T, P] ∇ log π of each of its moves."""
        ends = np.cumsum([len(chances) for chances in self.policy.values()]).tolist()
        first = {at: end - len(self.policy[at]) for at, end in zip(self.policy, ends, strict=True)}
        return {play: np.array([self._score(play[:turn], move, first[play[:turn]]) for turn, move in enumerate(play)])
                for play, _ in self.plays}  # fmt: skip

    def _score(self, at: Moves, move: int, first: int) -> Vector:
        score_P = np.zeros(self.logits)
        score_P[first : first + len(self.policy[at])] = -np.array(self.policy[at])
        score_P[first + move] += 1
        return score_P

    def gradient(self, values: Callable[[Moves], Sequence[float]]) -> Vector:
        """E[Σ_t V_t ∇ log π_t], ``values`` being the V_t of a play."""
        terms = (chance * (np.array(values(play), np.float64) @ self.scores[play]) for play, chance in self.plays)
        return sum(terms, np.zeros(self.logits))

    def rollout(self, play: Moves, slot: int, branch: Branch | None = None) -> Rollout:
        """A play as the record of a slot, by whose number it goes."""
        return Rollout(
            rollout_id=str(slot),
            group_index=0,
            slot=slot,
            attempt=0,
            status=RolloutStatus.GRADED,
            reward=self.rewards[play],
            turns=(TURN,) * len(play),
            turn_rewards=tuple(self.turn_reward(play[: turn + 1]) for turn in range(len(play))),
            branch=branch,
        )

    def estimate(self, plays: Sequence[Moves], credited: Sequence[Credit]) -> Vector:
        """Σ A ∇ log π over all trained turns."""
        terms = ((one.advantages_T * one.trained_T).astype(np.float64) @ self.scores[play]
                 for play, one in zip(plays, credited, strict=True))  # fmt: skip
        return sum(terms, np.zeros(self.logits))


class Bundle(NamedTuple):
    """Plays that begin as one."""

    plays: tuple[Moves, ...]
    shared: int
    """Turns."""
    chance: float = 1.0


def bundles(game: Game, size: int, fork: Callable[[Moves], bool]) -> Iterator[Bundle]:
    """Every bundle of ``size`` plays.

    They fork at the first position that is not an end and for which ``fork`` is true; without one, all of them are
    copies.
    """

    def grown(moves: Moves, chance: float) -> Iterator[Bundle]:
        if moves not in game.policy:
            yield Bundle((moves,) * size, len(moves), chance)
        elif moves and fork(moves):
            yield from parted(moves, size, (), chance)
        else:
            for move, likelihood in enumerate(game.policy[moves]):
                yield from grown((*moves, move), chance * likelihood)

    def parted(moves: Moves, left: int, plays: tuple[Moves, ...], chance: float) -> Iterator[Bundle]:
        if not left:
            yield Bundle(plays, len(moves), chance)
            return
        for play, likelihood in game.continued(moves):
            yield from parted(moves, left - 1, (*plays, play), chance * likelihood)

    yield from grown((), 1.0)


def grouped(game: Game, parts: Sequence[Bundle]) -> tuple[list[Moves], list[Rollout]]:
    """The plays of a group of bundles, and their rollouts; the first of each bundle is the trunk."""
    rollouts: list[Rollout] = []
    for plays, shared, _ in parts:
        parent = str(len(rollouts))
        for place, play in enumerate(plays):
            branch = Branch(rollout_id=parent, turns=shared) if place else None
            rollouts.append(game.rollout(play, len(rollouts), branch))
    return [play for part in parts for play in part.plays], rollouts


STOP_OR_GO = Game(
    policy={(): (0.35, 0.65), (1,): (0.3, 0.5, 0.2), (1, 1): (0.6, 0.4)},
    rewards={(0,): 0.3, (1, 0): 1.0, (1, 2): 0.1, (1, 1, 0): 0.9, (1, 1, 1): 0.0},
    turn_reward=lambda moves: {(1,): 0.4, (1, 1): -1.0, (1, 1, 1): 0.5}.get(moves, 0.0),
)
"""A game in which stopping immediately is safe; continuing may be better, and takes longer."""


def rewards_of(rollouts: Sequence[Rollout]) -> Floats:
    """[G]"""
    return np.array([rollout.reward for rollout in rollouts], np.float32)


def credit(config: CreditConfig, baseline: Baseline = "leave_one_out") -> Advantages:
    """The same as a recipe with that section."""
    return lambda rollouts, rewards_G: turn_credits(rollouts, rewards_G, config, baseline)


def off(result: Vector, expected: Vector) -> float:
    """Distance of ``result`` from the nearest positive multiple of ``expected``, as a share of its length."""
    along = max(0.0, float(result @ expected)) / float(expected @ expected) * expected
    return float(np.linalg.norm(result - along) / np.linalg.norm(result))
