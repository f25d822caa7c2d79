"""Rollouts with a shared beginning: what they share and are compared with, summed over all possible games.

As in ``test_credit.py``, without any noise, and with every fault planted that docs/credit.md warns of.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import numpy as np
import pytest

from etude.config.credit import CreditConfig, SharedPrefixOptions
from etude.trainer.batching.advantage import group_advantages
from etude.trainer.batching.credit import Credit, TurnKey, own_turns, turn_credits, turn_keys
from etude.types import Branch, Floats, Rollout
from turn_games import STOP_OR_GO, Advantages, Bundle, Moves, Vector, bundles, credit, grouped, off, rewards_of

SHARED = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=2))
TRUTH = STOP_OR_GO.gradient(lambda play: [STOP_OR_GO.rewards[play]] * len(play))


def expected(fork: Callable[[Moves], bool], advantages: Advantages, *, size: int = 2, parents: int = 2) -> Vector:
    """E of the estimate from ``trunks`` bundles of ``size``."""
    return summed(itertools.product(list(bundles(STOP_OR_GO, size, fork)), repeat=parents), advantages)


def summed(groups: Iterable[Sequence[Bundle]], advantages: Advantages) -> Vector:
    """The estimates of some groups, each times its chance."""
    total = np.zeros(7)
    for parts in groups:
        plays, rollouts = grouped(STOP_OR_GO, parts)
        chance = math.prod(part.chance for part in parts)
        total += chance * STOP_OR_GO.estimate(plays, advantages(rollouts, rewards_of(rollouts)))
    return total


FORKS: dict[str, Callable[[Moves], bool]] = {
    "after the first turn": lambda moves: len(moves) == 1,
    "after the second turn": lambda moves: len(moves) == 2,
    "after a certain move": lambda moves: moves == (1, 1),
}


@pytest.mark.parametrize("name", FORKS)
def test_what_begins_as_one_is_trained_as_if_it_had_not(name: str) -> None:
    """Four rollouts count as four, however much they share, and independent of the rule that chooses the fork."""
    expecteds = TRUTH
    np.testing.assert_allclose(expected(FORKS[name], credit(SHARED)), 4 * expecteds, atol=1e-6)
    np.testing.assert_allclose(expected(FORKS[name], credit(SHARED, "mean")), 3 * expecteds, atol=1e-6)


def test_three_branches_are_worth_three() -> None:
    result = expected(FORKS["after a certain move"], credit(SHARED), size=3)
    np.testing.assert_allclose(result, 6 * TRUTH, atol=1e-6)


Path = Sequence[TurnKey]


def valued(
    rollouts: Sequence[Rollout], value: Callable[[Path, int], float], *, everywhere: bool = False
) -> list[Credit]:
    """Advantages by turn, trained in the first rollout that has the turn, or everywhere."""
    paths = turn_keys(rollouts)
    return [
        Credit(
            advantages_T=np.array([value(path, turn) for turn in range(len(path))], np.float32),
            trained_T=own_T | everywhere,
        )
        for path, own_T in zip(paths, own_turns(rollouts), strict=True)
    ]


def as_it_should_be(rollouts: Sequence[Rollout], rewards_G: Floats) -> dict[TurnKey, float]:
    """Turn → its advantage."""
    credited = turn_credits(rollouts, rewards_G, SHARED, "leave_one_out")
    turns = zip(
        itertools.chain(*turn_keys(rollouts)),
        np.concatenate([credit.advantages_T for credit in credited]).tolist(),
        np.concatenate([credit.trained_T for credit in credited]).tolist(),
        strict=True,
    )
    return {key: advantage for key, advantage, trained in turns if trained}


def shared_turns_in_every_rollout(rollouts: Sequence[Rollout], rewards_G: Floats) -> list[Credit]:
    seen = as_it_should_be(rollouts, rewards_G)
    return valued(rollouts, lambda path, turn: seen[path[turn]], everywhere=True)


def shared_turns_count_as_one(rollouts: Sequence[Rollout], rewards_G: Floats) -> list[Credit]:
    seen, through = as_it_should_be(rollouts, rewards_G), list(itertools.chain(*turn_keys(rollouts)))
    return valued(rollouts, lambda path, turn: seen[path[turn]] / through.count(path[turn]))


def value_after_less_value_before(rollouts: Sequence[Rollout], rewards_G: Floats) -> list[Credit]:
    """Both of all rollouts through a prefix: where nothing branches, a turn is compared with nothing but itself."""
    paths = turn_keys(rollouts)

    def gain(path: Path, turn: int) -> float:
        after = [r for other, r in zip(paths, rewards_G.tolist(), strict=True) if path[turn] in other]
        before = [r for other, r in zip(paths, rewards_G.tolist(), strict=True) if not turn or path[turn - 1] in other]
        return len(after) * (fmean(after) - fmean(before))

    return valued(rollouts, gain)


def group_mean_for_all(rollouts: Sequence[Rollout], rewards_G: Floats) -> list[Credit]:
    """A shared turn is compared with rollouts that it led to itself."""
    advantages, paths = group_advantages(rewards_G, "leave_one_out").tolist(), turn_keys(rollouts)
    return valued(
        rollouts,
        lambda path, turn: sum(a for other, a in zip(paths, advantages, strict=True) if path[turn] in other),
    )


@pytest.mark.parametrize(
    "fault",
    [shared_turns_in_every_rollout, shared_turns_count_as_one, value_after_less_value_before, group_mean_for_all],
)
def test_a_planted_fault_in_branching_turns_the_gradient(fault: Advantages) -> None:
    result = expected(FORKS["after the first turn"], fault)
    assert off(result, TRUTH) > 0.03


def test_others_in_place_of_copies_would_prefer_long_rollouts() -> None:
    """A trunk that ended before its fork, its other slot filled with a rollout of its own."""
    halves: list[tuple[Bundle, ...]] = []
    for bundle in bundles(STOP_OR_GO, 2, FORKS["after the first turn"]):
        if len(bundle.plays[0]) > bundle.shared:
            halves.append((bundle,))
        else:
            alone = Bundle(bundle.plays[:1], 0, bundle.chance)
            halves += [(alone, Bundle((other,), 0, chance)) for other, chance in STOP_OR_GO.plays]
    groups = ((*one, *other) for one, other in itertools.product(halves, repeat=2))
    assert off(summed(groups, credit(SHARED)), TRUTH) > 0.03


def test_branches_are_compared_with_each_other_and_parents_with_other_parents() -> None:
    one, branch = Branch(rollout_id="2", turns=1), STOP_OR_GO.rollout((1, 1, 0), 1, Branch(rollout_id="0", turns=2))
    rollouts = [STOP_OR_GO.rollout((1, 1, 1), 0), branch, STOP_OR_GO.rollout((0,), 2), STOP_OR_GO.rollout((0,), 3, one)]
    credited = turn_credits(rollouts, np.array([0, 1, 0.5, 0.5], np.float32), SHARED, "leave_one_out")
    assert credited[0].advantages_T == pytest.approx([0 + 1 - 2 * 0.5, 0, -1])
    assert credited[0].trained_T.tolist() == [True, True, True]
    assert credited[1].advantages_T == pytest.approx([0, 0, 1])
    assert credited[1].trained_T.tolist() == [False, False, True]
    assert credited[2].advantages_T == pytest.approx([2 * 0.5 - 2 * 0.5])
    assert credited[3].trained_T.tolist() == [False]


def test_branches_of_a_parent_that_is_gone_share_its_turns_all_the_same() -> None:
    gone = Branch(rollout_id="gone", turns=1)
    rollouts = [STOP_OR_GO.rollout((1, 0), 0, gone), STOP_OR_GO.rollout((1, 2), 1, gone), STOP_OR_GO.rollout((0,), 2)]
    assert turn_keys(rollouts) == ((("gone", 0), ("0", 1)), (("gone", 0), ("1", 1)), (("2", 0),))
    assert [own.tolist() for own in own_turns(rollouts)] == [[True, True], [False, True], [True]]
    credited = turn_credits(rollouts, np.array([1, 0, 0], np.float32), SHARED, "leave_one_out")
    assert [credit.advantages_T.tolist() for credit in credited] == [[1, 1], [0, -1], [-0.5]]


def test_a_branch_of_a_branch_shares_what_that_one_shared() -> None:
    one, two = Branch(rollout_id="0", turns=1), Branch(rollout_id="1", turns=2)
    rollouts = [
        STOP_OR_GO.rollout((1, 1, 0), 0),
        STOP_OR_GO.rollout((1, 1, 1), 1, one),
        STOP_OR_GO.rollout((1, 1, 0), 2, two),
    ]
    assert turn_keys(rollouts)[2] == (("0", 0), ("1", 1), ("2", 2))


def test_rollouts_that_branch_off_each_other_are_refused() -> None:
    rollouts = [STOP_OR_GO.rollout((1, 0), slot, Branch(rollout_id=str(1 - slot), turns=1)) for slot in (0, 1)]
    with pytest.raises(ValueError, match="in a circle"):
        turn_keys(rollouts)
