"""A control: the same rewards, given to rollouts that did not earn them."""

import numpy as np

from etude.trainer.batching.batch import shuffle_rewards
from etude.types import Disposition, Group, Rollout, Verdict
from records import TASK, make_rollout, make_turn


def group_of(*rollouts: Rollout, index: int = 0) -> Group:
    return Group(index=index, task=TASK, admitted_version=0, rollouts=rollouts)


def test_rewards_stay_the_same_and_say_nothing_of_their_rollouts() -> None:
    rollouts = [make_rollout(f"r{slot}", make_turn([1], [2]), slot=slot, reward=float(slot)) for slot in range(8)]
    earned = np.arange(8.0)
    products = []
    for index in range(400):
        shuffled = shuffle_rewards(group_of(*rollouts, index=index), seed=3)
        given = np.array([rollout.reward for rollout in shuffled.rollouts], np.float64)
        assert sorted(given) == sorted(earned)
        assert [rollout.turns for rollout in shuffled.rollouts] == [rollout.turns for rollout in rollouts]
        products.append(np.mean((given - given.mean()) * (earned - earned.mean())) / earned.var())
    assert abs(np.mean(products)) < 4 / np.sqrt(7 * 400), "a shuffled reward is correlated with the one that was earned"


def test_the_same_group_is_dealt_the_same_again() -> None:
    rollouts = [make_rollout(f"r{slot}", make_turn([1], [2]), slot=slot, reward=float(slot)) for slot in range(8)]
    once, again = (shuffle_rewards(group_of(*rollouts), seed=5) for _ in range(2))
    other = shuffle_rewards(group_of(*rollouts), seed=6)
    assert once == again
    assert once != other


def test_a_quarantined_rollout_takes_no_part() -> None:
    verdict = Verdict(disposition=Disposition.QUARANTINE, reason="", flags=(), hacked=True, graded=1.0)
    quarantined = make_rollout("q", make_turn([1], [2]), slot=0, reward=9.0, verdict=verdict)
    others = [make_rollout(f"r{slot}", make_turn([1], [2]), slot=slot, reward=float(slot)) for slot in range(1, 5)]
    shuffled = shuffle_rewards(group_of(quarantined, *others), seed=0)
    assert shuffled.rollouts[0] is quarantined
