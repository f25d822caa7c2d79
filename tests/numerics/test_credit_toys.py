"""Each kind of credit on games with a known right answer, in groups of eight, enough of them to measure the noise.

``tests/unit/trainer/batching/test_credit.py`` checks the estimate of each kind without noise. Here the mean of many
groups agrees within its standard error, and the noise is measured, to show where a kind has less than ``rollout`` and
where more. The figures in docs/credit.md are these, with 2,000 groups.

Array legend: N groups, P logits.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from etude.config.credit import CreditConfig, DiscountedOptions, ShapedOptions, SharedPrefixOptions
from turn_games import Bundle, Game, Moves, Vector, credit, grouped, rewards_of

SIZE, TURNS, BRANCHES = 8, 5, 2
ROLLOUT = CreditConfig()
DISCOUNTED = CreditConfig(kind="discounted", options=DiscountedOptions(discount=0.7))
SHAPED = CreditConfig(kind="shaped", options=ShapedOptions(shaping=1.0))
SHARED = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=BRANCHES))
Estimates = npt.NDArray[np.float64]


def game(reward: Callable[[Moves], float], turn_reward: Callable[[Moves], float] = lambda moves: 0.0) -> Game:
    """``TURNS`` turns of two moves, of which the first is played six times out of ten."""
    ends = list(itertools.product((0, 1), repeat=TURNS))
    positions = [moves for turn in range(TURNS) for moves in itertools.product((0, 1), repeat=turn)]
    return Game(
        policy=dict.fromkeys(positions, (0.6, 0.4)),
        rewards={moves: reward(moves) for moves in ends},
        turn_reward=turn_reward,
    )


def potential_gain(potential: Callable[[Moves], float], moves: Moves) -> float:
    """Φ(after) − Φ(before), Φ being 0 at the end."""
    return (potential(moves) if len(moves) < TURNS else 0.0) - potential(moves[:-1])


def expected_sum(moves: Moves) -> float:
    """Expected sum of all moves, after some of them."""
    return sum(moves) + 0.4 * (TURNS - len(moves))


def whim(moves: Moves) -> float:
    """A value that depends on the order of the moves and not on their worth."""
    return 2.0 * math.sin(1 + sum((place + 2) ** 2 * move for place, move in enumerate(moves)))


EARLY, LATE = game(lambda moves: float(moves[0])), game(lambda moves: float(moves[-1]))
EACH = game(lambda moves: 0.0, lambda moves: float(moves[-1]))
"""Each turn earns its own."""
IN_SUM = game(lambda moves: float(sum(moves)))
"""The same, told at the end."""
GUIDED = game(lambda moves: float(sum(moves)), lambda moves: potential_gain(expected_sum, moves))
"""The same once more, and each turn earns what is to be expected after it less what was before."""
MISLED = game(lambda moves: float(sum(moves)), lambda moves: potential_gain(whim, moves))
"""Each turn earns a difference of something that has nothing to do with it."""
DECIDED_EARLY = game(lambda moves: 3.0 * moves[0] + 0.25 * sum(moves[1:]))
"""The first move is worth three, each later one a quarter."""
ALIKE = game(lambda moves: 0.25 * sum(moves))
"""Every move is worth a quarter."""


class Table:
    """Plays a game by its policy, with dice of its own."""

    def __init__(self, game: Game, seed: int = 0) -> None:
        self._game = game
        self._dice = np.random.default_rng(seed)

    def estimates(self, config: CreditConfig, groups: int, shared: int = 1) -> Estimates:
        """[N, P] each from one group, per rollout."""
        return np.array([self._estimate(config, shared) for _ in range(groups)]) / SIZE

    def _estimate(self, config: CreditConfig, shared: int) -> Vector:
        parts = [self._bundle(config.branches, shared) for _ in range(SIZE // config.branches)]
        plays, rollouts = grouped(self._game, parts)
        return self._game.estimate(plays, credit(config)(rollouts, rewards_of(rollouts)))

    def _bundle(self, size: int, shared: int) -> Bundle:
        """Plays that part behind ``shared`` turns."""
        parent = self._play()
        return Bundle((parent, *(self._play(parent[:shared]) for _ in range(size - 1))), shared)

    def _play(self, moves: Moves = ()) -> Moves:
        while moves in self._game.policy:
            moves = (*moves, int(self._dice.random() >= self._game.policy[moves][0]))
        return moves


def noise(estimates: Estimates) -> float:
    """E ‖ĝ − E ĝ‖² / ‖E ĝ‖²: the number of groups to average until noise and signal are equal."""
    mean_P = estimates.mean(0)
    spread = estimates.var(0, ddof=1).sum()
    return float(spread / (mean_P @ mean_P - spread / len(estimates)))


@pytest.mark.parametrize(
    ("game", "config", "expected"),
    [
        (LATE, ROLLOUT, LATE.gradient(lambda play: [play[-1]] * TURNS)),
        (LATE, DISCOUNTED, LATE.gradient(lambda play: [play[-1] * 0.7**left for left in range(TURNS)][::-1])),
        (EACH, SHAPED, IN_SUM.gradient(lambda play: [sum(play)] * TURNS)),
        (DECIDED_EARLY, SHARED, DECIDED_EARLY.gradient(lambda play: [DECIDED_EARLY.rewards[play]] * TURNS)),
    ],
    ids=["rollout", "discounted", "shaped", "shared_prefix"],
)
def test_the_mean_of_many_groups_is_the_gradient_within_its_error(
    game: Game, config: CreditConfig, expected: Vector
) -> None:
    estimates = Table(game, seed=2).estimates(config, 400)
    errors_P = np.sqrt(estimates.var(0, ddof=1) / len(estimates))
    reached_P = errors_P > 0
    assert (np.abs(estimates.mean(0) - expected)[reached_P] <= 4.5 * errors_P[reached_P]).all()
    assert np.abs(expected[~reached_P]).max(initial=0) < 1e-12


@dataclass(frozen=True)
class Match:
    """A kind on a game, against ``rollout`` on a game with the same gradient."""

    game: Game
    config: CreditConfig
    rollout_game: Game
    low: float
    high: float
    """Between which the ratio of their noises is."""
    shared: int = 1

    def ratio(self, groups: int = 250) -> float:
        """Below 1: the kind has less noise."""
        ours = Table(self.game).estimates(self.config, groups, self.shared)
        return noise(ours) / rollout_noise(self.rollout_game, groups)


@cache
def rollout_noise(game: Game, groups: int) -> float:
    """The noise if every turn has its rollout's advantage."""
    return noise(Table(game, seed=1).estimates(ROLLOUT, groups))


MATCHES = {
    "discounted, the last turn decides": Match(LATE, DISCOUNTED, LATE, 0, 0.7),
    "discounted, the first turn decides": Match(EARLY, DISCOUNTED, EARLY, 4, 20),
    "shaped, each turn earns its own": Match(EACH, SHAPED, IN_SUM, 0, 0.8),
    "shaped, by a potential that is the value": Match(GUIDED, SHAPED, IN_SUM, 0, 0.6),
    "shaped, by a potential that is anything": Match(MISLED, SHAPED, IN_SUM, 1.3, 9),
    "shared prefix, decided before the fork": Match(DECIDED_EARLY, SHARED, DECIDED_EARLY, 0, 0.6),
    "shared prefix, all turns alike": Match(ALIKE, SHARED, ALIKE, 1.1, 3),
    "shared prefix, decided and forked late": Match(LATE, SHARED, LATE, 0, 9, shared=4),
    "shared prefix, decided early and forked late": Match(DECIDED_EARLY, SHARED, DECIDED_EARLY, 1.2, 4, shared=4),
}


@pytest.mark.parametrize("name", MATCHES)
def test_where_a_kind_has_less_noise_and_where_more(name: str) -> None:
    match = MATCHES[name]
    assert match.low < match.ratio() < match.high
