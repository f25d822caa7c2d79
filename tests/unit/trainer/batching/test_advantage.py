"""Baselines compared with their formulas, and their exact effect on the gradient, summed over all possible draws.

The policy of these tests is a softmax over three arms with a reward each; J is its expected reward.
"""

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.training import ADVANTAGES, Baseline
from etude.trainer.batching.advantage import group_advantages, group_weight

Vector = npt.NDArray[np.float64]
BASELINES = tuple(ADVANTAGES.builtins)
POLICY = np.array([0.2, 0.5, 0.3])
REWARDS = np.array([1.0, 0.25, 0.0], np.float32)
SLOPE = POLICY * (REWARDS - POLICY @ REWARDS)
"""∇J by the logits."""
GROUPS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=128).map(lambda r: np.array(r, np.float32))


def expected_gradient(size: int, advantages: Callable[[npt.NDArray[np.float32]], Vector]) -> Vector:
    """E[Σ_i A_i ∇ log π(arm_i)] over all groups of ``size`` draws."""
    total = np.zeros(3)
    for arms in itertools.product(range(3), repeat=size):
        scores = np.eye(3)[list(arms)] - POLICY
        total += math.prod(POLICY[list(arms)]) * (advantages(REWARDS[list(arms)]) @ scores)
    return total


@pytest.mark.parametrize("size", [2, 3, 5])
def test_leave_one_out_is_unbiased_and_the_mean_short_by_one_in_g(size: int) -> None:
    loo = expected_gradient(size, lambda rewards: group_advantages(rewards, "leave_one_out").astype(np.float64))
    mean = expected_gradient(size, lambda rewards: group_advantages(rewards).astype(np.float64))
    np.testing.assert_allclose(loo / size, SLOPE, rtol=1e-6)
    np.testing.assert_allclose(mean / size, SLOPE * (size - 1) / size, rtol=1e-6)


def test_division_by_the_deviation_may_point_the_other_way() -> None:
    """An arm that is worse than the mean becomes more likely: one reason why this is not the default."""
    result = expected_gradient(3, lambda rewards: group_advantages(rewards, "mean_std").astype(np.float64))
    assert (np.sign(result) != np.sign(SLOPE)).tolist() == [False, True, False]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("present", [2, 3, 4])
def test_a_group_weighs_the_same_whatever_was_lost_of_it(baseline: Baseline, present: int) -> None:
    weight = group_weight(baseline, compared=present, graded=present, lost=4 - present)

    def advantages(rewards: npt.NDArray[np.float32]) -> Vector:
        return group_advantages(rewards, baseline).astype(np.float64)

    np.testing.assert_allclose(weight * expected_gradient(present, advantages), expected_gradient(4, advantages))


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_whole_group_keeps_its_bits_and_a_lone_rollout_has_nothing_to_weigh(baseline: Baseline) -> None:
    assert group_weight(baseline, compared=8, graded=8, lost=0) == 1.0
    assert group_weight(baseline, compared=1, graded=1, lost=7) == 1.0
    assert group_weight(baseline, compared=1, graded=8, lost=0) == 1.0


@settings(deadline=None, max_examples=50)
@given(GROUPS)
def test_the_mean_and_the_others_mean_differ_by_a_factor(rewards_G: npt.NDArray[np.float32]) -> None:
    size = len(rewards_G)
    mean, loo = group_advantages(rewards_G), group_advantages(rewards_G, "leave_one_out")
    np.testing.assert_allclose(loo, mean * (size / (size - 1)), rtol=1e-5, atol=1e-5)
    others = [np.delete(rewards_G.astype(np.float64), index).mean() for index in range(size)]
    np.testing.assert_allclose(loo, rewards_G - np.array(others), rtol=1e-5, atol=1e-4)


@settings(deadline=None, max_examples=50)
@given(GROUPS)
def test_advantages_are_rewards_around_their_mean(rewards_G: npt.NDArray[np.float32]) -> None:
    advantages_G = group_advantages(rewards_G)
    assert advantages_G.dtype == np.float32
    assert abs(advantages_G.sum(dtype=np.float64)) < 1e-3
    np.testing.assert_allclose(advantages_G[0] - advantages_G, rewards_G[0] - rewards_G, atol=1e-4)


@settings(deadline=None, max_examples=50)
@given(GROUPS.filter(lambda rewards_G: np.ptp(rewards_G) > 1e-3))
def test_standardised_advantages_have_the_formulas_size(rewards_G: npt.NDArray[np.float32]) -> None:
    values = [float(reward) for reward in rewards_G]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    expected = [(value - mean) / (deviation + 1e-4) for value in values]
    np.testing.assert_allclose(group_advantages(rewards_G, "mean_std"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("baseline", BASELINES)
@settings(deadline=None, max_examples=50)
@given(st.floats(-100, 100, width=32), st.integers(1, 128))
def test_equal_rewards_have_no_advantage(baseline: Baseline, reward: float, size: int) -> None:
    assert group_advantages(np.full(size, reward, np.float32), baseline).tolist() == [0.0] * size


def test_advantages_keep_the_size_of_the_difference() -> None:
    assert group_advantages(np.array([1, 1, 1, 0], np.float32)).tolist() == [0.25, 0.25, 0.25, -0.75]
    assert group_advantages(np.array([0.04, 0.0], np.float32)).tolist() == pytest.approx([0.02, -0.02])


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("weight", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_penalty_keeps_its_size_where_rewards_are_equal(baseline: Baseline, weight: float, size: int) -> None:
    """A penalty is compared like a reward but never divided: a millionth of it has a millionth of the effect."""
    costs_G = np.linspace(0, 1, size)
    result = group_advantages(np.ones(size, np.float32), baseline, weight * costs_G)
    share = size / (size - 1) if baseline == "leave_one_out" else 1.0
    np.testing.assert_allclose(result, -share * weight * (costs_G - costs_G.mean()), rtol=1e-6, atol=1.2e-7)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_penalty_is_the_same_whatever_the_rewards(baseline: Baseline) -> None:
    rewards_G, costs_G = np.array([1, 0, 0, 1], np.float32), np.array([0.0, 0.01, 0.02, 0.05])
    plain, penalised = group_advantages(rewards_G, baseline), group_advantages(rewards_G, baseline, costs_G)
    alone = group_advantages(np.zeros(4, np.float32), baseline, costs_G)
    np.testing.assert_allclose(penalised, plain + alone, atol=1e-6)


def test_a_rounding_error_is_no_signal_to_divide_by() -> None:
    """One of eight rewards is the next float32 number: −2.65 deviations without a floor."""
    rewards_G = np.ones(8, np.float32)
    rewards_G[0] = np.nextafter(rewards_G[0], np.float32(0))
    assert np.abs(group_advantages(rewards_G, "mean_std")).max() < 1e-3


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_quarantined_draw_teaches_nothing_and_makes_the_others_count_no_more(baseline: Baseline, lost: int) -> None:
    """Over all groups of 5 that can be drawn, ``lost`` slots taken out blindly, the last arm being quarantined.

    E[Σ w A ∇ log π] = (G − 1) · c · p ∇m with the mean and G · c · p ∇m with the others', m being the mean reward of
    what is not quarantined, p its share and c = 1 − (1 − p)^(N − 1) the chance that a second one of N is there.
    """
    size, remaining = 5, np.array([True, True, False])
    share = float(POLICY[remaining].sum())
    inside = np.where(remaining, POLICY, 0) / share
    slope = inside * (REWARDS - inside @ REWARDS)  # ∇m: an arm that is quarantined takes nothing from it
    graded, total = size - lost, np.zeros(3)
    for arms in itertools.product(range(3), repeat=graded):
        trusted = [arm for arm in arms if remaining[arm]]
        weight = group_weight(baseline, compared=len(trusted), graded=graded, lost=lost)
        scores = np.eye(3)[trusted] - POLICY
        advantages = group_advantages(REWARDS[trusted], baseline).astype(np.float64)
        total += math.prod(POLICY[list(arms)]) * weight * (advantages @ scores)
    planned = size if baseline == "leave_one_out" else size - 1
    np.testing.assert_allclose(total, planned * (1 - (1 - share) ** (graded - 1)) * share * slope, rtol=1e-6, atol=1e-9)


def test_what_a_quarantined_rollout_is_taken_to_be_worth_bounds_the_bias() -> None:
    """Were it worth r, the gradient would have (r − m) ∇q more, q being its chance; along any direction that is at most
    |r − m| √(q(1 − q)) standard deviations of the score. The arm itself attains it.
    """
    remaining, worth = np.array([True, True, False]), 0.0
    share = float(POLICY[remaining].sum())
    inside = np.where(remaining, POLICY, 0) / share
    mean = float(inside @ REWARDS)
    rewards = np.where(remaining, REWARDS, worth)
    expected = POLICY * (rewards - POLICY @ rewards)
    result = share * inside * (REWARDS - mean)
    rise = POLICY * (~remaining - (1 - share))  # ∇q
    np.testing.assert_allclose(expected - result, (worth - mean) * rise, atol=1e-7)
    for direction in (*np.eye(3), *np.random.default_rng(0).standard_normal((20, 3))):
        scores = (np.eye(3) - POLICY) @ direction
        deviation = math.sqrt(POLICY @ scores**2)
        bound = abs(worth - mean) * math.sqrt(share * (1 - share)) * deviation
        assert abs(direction @ (expected - result)) <= bound * (1 + 1e-9)
    assert abs(np.eye(3)[2] @ (expected - result)) == pytest.approx(
        abs(worth - mean) * math.sqrt(share * (1 - share)) * math.sqrt(POLICY[2] * (1 - POLICY[2]))
    )
