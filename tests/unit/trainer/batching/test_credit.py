"""Credit of turns: sums over every possible group, compared with the expected gradient.

Claims of docs/credit.md about expectations are checked here without any noise; faults are planted, to see that the sums
would show them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.credit import CreditConfig, DiscountedOptions, ShapedOptions, SharedPrefixOptions
from etude.config.training import Baseline
from etude.trainer.batching.advantage import group_advantages, group_weight
from etude.trainer.batching.credit import Credit, less_the_others, returns_to_go, turn_credits
from etude.types import Branch, Floats, Rollout, TurnKind
from turn_games import STOP_OR_GO, TURN, Advantages, Game, Moves, Vector, credit, off, rewards_of

DISCOUNT, SHAPING = 0.7, 0.5
DISCOUNTED = CreditConfig(kind="discounted", options=DiscountedOptions(discount=DISCOUNT))
SHAPED = CreditConfig(kind="shaped", options=ShapedOptions(shaping=SHAPING))
SHAPED_DISCOUNTED = CreditConfig(kind="shaped", options=ShapedOptions(shaping=SHAPING, discount=DISCOUNT))
SHARED = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=2))
ONE_GROUP: Sequence[Baseline] = ("mean", "leave_one_out")


def true_gradient(config: CreditConfig) -> Vector:
    """E[Σ_t V_t ∇ log π_t], by the definition of V."""

    def values(play: Moves) -> list[float]:
        turns = len(play)
        rewards = [
            SHAPING * STOP_OR_GO.turn_reward(play[: turn + 1]) * (config.kind == "shaped") for turn in range(turns)
        ]
        rewards[-1] += STOP_OR_GO.rewards[play]
        discount = config.options.model_dump().get("discount", 1.0)
        return [sum(discount ** (k - turn) * rewards[k] for k in range(turn, turns)) for turn in range(turns)]

    return STOP_OR_GO.gradient(values)


def expected(size: int, advantages: Advantages) -> Vector:
    """E of the estimate from ``size`` rollouts that have nothing to do with each other."""
    total = np.zeros(7)
    for parts in itertools.product(STOP_OR_GO.plays, repeat=size):
        plays = [play for play, _ in parts]
        rollouts = [STOP_OR_GO.rollout(play, slot) for slot, play in enumerate(plays)]
        chance = math.prod(chance for _, chance in parts)
        total += chance * STOP_OR_GO.estimate(plays, advantages(rollouts, rewards_of(rollouts)))
    return total


def untied(function: Callable[[Sequence[Rollout], Floats], Sequence[Vector]]) -> Advantages:
    """Advantages of a fault, every turn of every rollout being trained on."""

    def credits_of(rollouts: Sequence[Rollout], rewards_G: Floats) -> list[Credit]:
        return [
            Credit(advantages_T=values.astype(np.float32), trained_T=np.ones(len(values), bool))
            for values in function(rollouts, rewards_G)
        ]

    return credits_of


def test_the_games_gradient_is_that_of_its_expected_reward() -> None:
    """The score-function form agrees with differences of J."""
    slope, step = true_gradient(CreditConfig()), 1e-5
    logits = [(at, move) for at in STOP_OR_GO.policy for move in range(len(STOP_OR_GO.policy[at]))]
    for column, (at, move) in enumerate(logits):
        ends = []
        for sign in (1, -1):
            weights = np.array(STOP_OR_GO.policy[at])
            weights[move] *= math.exp(sign * step)
            tilted = replace(STOP_OR_GO, policy={**STOP_OR_GO.policy, at: (weights / weights.sum()).tolist()})
            ends.append(sum(chance * STOP_OR_GO.rewards[play] for play, chance in tilted.plays))
        assert slope[column] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-9)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("config", [DISCOUNTED, SHAPED, SHAPED_DISCOUNTED], ids=lambda config: config.kind)
def test_a_turns_value_less_the_others_is_unbiased(config: CreditConfig, size: int) -> None:
    expecteds = true_gradient(config)
    np.testing.assert_allclose(expected(size, credit(config)), size * expecteds, atol=1e-6)
    np.testing.assert_allclose(expected(size, credit(config, "mean")), (size - 1) * expecteds, atol=1e-6)


@pytest.mark.parametrize("config", [DISCOUNTED, SHAPED], ids=lambda config: config.kind)
@pytest.mark.parametrize("baseline", ONE_GROUP)
def test_a_group_weighs_the_same_whatever_was_lost_of_it(config: CreditConfig, baseline: Baseline) -> None:
    whole = expected(3, credit(config, baseline))
    weight = group_weight(baseline, compared=2, graded=2, lost=1)
    np.testing.assert_allclose(weight * expected(2, credit(config, baseline)), whole, atol=1e-6)


FAULTS: dict[str, tuple[CreditConfig, Advantages]] = {
    "discounted from the first turn on": (
        DISCOUNTED,
        untied(
            lambda rollouts, rewards_G: [
                a * DISCOUNT ** np.arange(len(rollout.turns))
                for a, rollout in zip(group_advantages(rewards_G, "leave_one_out"), rollouts, strict=True)
            ]
        ),
    ),
    "the discount before the baseline": (
        DISCOUNTED,
        untied(
            lambda rollouts, rewards_G: [
                a * DISCOUNT ** np.arange(len(rollout.turns))[::-1]
                for a, rollout in zip(group_advantages(rewards_G, "leave_one_out"), rollouts, strict=True)
            ]
        ),
    ),
    "a baseline with the turn's own value in it": (
        DISCOUNTED,
        untied(
            lambda rollouts, rewards_G: less_the_mean(
                [reward * DISCOUNT ** np.arange(len(rollout.turns))[::-1]
                 for reward, rollout in zip(rewards_G, rollouts, strict=True)]
            )
        ),
    ),
    "a turn's own reward left out": (
        SHAPED,
        untied(
            lambda rollouts, rewards_G: less_the_others(
                [returns_to_go(float(reward), SHAPING * np.array([*rollout.turn_rewards[1:], 0.0]), 1.0)
                 for reward, rollout in zip(rewards_G, rollouts, strict=True)]
            )
        ),
    ),
}  # fmt: skip


def less_the_mean(values: Sequence[Vector]) -> list[Vector]:
    """Each value less the mean of all at its turn, its own included."""
    reached = [[other[turn] for other in values if len(other) > turn] for turn in range(max(map(len, values)))]
    return [values_T - [np.mean(reached[turn]) for turn in range(len(values_T))] for values_T in values]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_turns_the_gradient(name: str) -> None:
    config, advantages = FAULTS[name]
    assert off(expected(3, credit(config)), true_gradient(config)) < 1e-6
    assert off(expected(3, advantages), true_gradient(config)) > 0.03


def test_potentials_change_no_gradient_and_other_rewards_do() -> None:
    """r_k = γΦ(h_{k+1}) − Φ(h_k), Φ = 0 at the end: Ng, Harada and Russell 1999, and here for every policy."""
    potentials = {(): 0.3, (1,): 0.8, (1, 1): -0.6}

    def potential_reward(moves: Moves) -> float:
        return DISCOUNT * potentials.get(moves, 0.0) - potentials[moves[:-1]]

    safe = replace(STOP_OR_GO, turn_reward=potential_reward)

    def gradient(game: Game) -> Vector:
        total = np.zeros(7)
        for parts in itertools.product(game.plays, repeat=2):
            plays = [play for play, _ in parts]
            rollouts = [game.rollout(play, slot) for slot, play in enumerate(plays)]
            credited = turn_credits(rollouts, rewards_of(rollouts), SHAPED_DISCOUNTED, "leave_one_out")
            total += math.prod(chance for _, chance in parts) * game.estimate(plays, credited)
        return total

    without = true_gradient(DISCOUNTED)
    np.testing.assert_allclose(gradient(safe), 2 * without, atol=1e-6)
    assert off(gradient(STOP_OR_GO), without) > 0.03


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "mean_std"])
@settings(deadline=None, max_examples=30)
@given(rewards=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=9), weight=st.floats(0.5, 2))
def test_by_default_every_turn_has_its_rollouts_advantage_to_the_bit(
    baseline: Baseline, rewards: list[float], weight: float
) -> None:
    rewards_G = np.array(rewards, np.float32)
    rollouts = [replace(STOP_OR_GO.rollout((1, 1, 0), slot), reward=reward) for slot, reward in enumerate(rewards)]
    credited = turn_credits(rollouts, rewards_G, CreditConfig(), baseline)
    for credit_of, advantage in zip(credited, group_advantages(rewards_G, baseline) * weight, strict=True):
        assert credit_of.trained_T.all()
        assert (credit_of.advantages_T * weight).tobytes() == np.full(3, advantage, np.float32).tobytes()


PLAYS = st.sampled_from([play for play, _ in STOP_OR_GO.plays])
BY_TURN = st.sampled_from(
    [DISCOUNTED, SHAPED, SHAPED_DISCOUNTED, CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=2))]
)


@settings(deadline=None, max_examples=50)
@given(plays=st.lists(PLAYS, min_size=1, max_size=7), config=BY_TURN, baseline=st.sampled_from(ONE_GROUP))
def test_every_kind_is_finite_and_blind_to_the_order_of_rollouts(
    plays: list[Moves], config: CreditConfig, baseline: Baseline
) -> None:
    rollouts = [STOP_OR_GO.rollout(play, slot) for slot, play in enumerate(plays)]
    credited = turn_credits(rollouts, rewards_of(rollouts), config, baseline)
    backwards = turn_credits(rollouts[::-1], rewards_of(rollouts)[::-1], config, baseline)
    for rollout, one, other in zip(rollouts, credited, reversed(backwards), strict=True):
        assert len(one.advantages_T) == len(one.trained_T) == len(rollout.turns)
        assert np.isfinite(one.advantages_T).all()
        np.testing.assert_allclose(one.advantages_T, other.advantages_T, atol=1e-6)
    if len(plays) == 1:
        assert not credited[0].has_signal


@pytest.mark.parametrize("reward", [0.1, 0.7, -1.3])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_rollouts_that_are_alike_teach_nothing(reward: float, size: int) -> None:
    """No rounding error remains: a group without a signal is left out of the batch."""
    rollouts = [replace(STOP_OR_GO.rollout((1, 1, 0), slot), reward=reward) for slot in range(size)]
    for config in (DISCOUNTED, SHAPED, SHARED):
        credited = turn_credits(rollouts, np.full(size, reward, np.float32), config)
        assert not any(credit.has_signal for credit in credited)


def test_equal_rewards_of_different_length_teach_a_discounted_group() -> None:
    rollouts = [replace(STOP_OR_GO.rollout(play, slot), reward=1.0) for slot, play in enumerate([(1, 0), (1, 1, 0)])]
    short, long = turn_credits(rollouts, np.ones(2, np.float32), DISCOUNTED, "leave_one_out")
    assert short.advantages_T == pytest.approx([0.7 - 0.49, 1 - 0.7])
    assert long.advantages_T == pytest.approx([0.49 - 0.7, 0.7 - 1, 1 - 1])


def test_a_masked_summary_is_context_and_changes_nothing_else() -> None:
    summary = replace(TURN, kind=TurnKind.SUMMARY)
    rollouts = [replace(STOP_OR_GO.rollout((1, 1, move), move), turns=(TURN, summary, TURN)) for move in (0, 1)]
    rewards_G = np.array([1, 0], np.float32)
    trained = turn_credits(rollouts, rewards_G, CreditConfig())
    masked = turn_credits(rollouts, rewards_G, CreditConfig(summaries="mask"))
    assert trained[0].advantages_T.tolist() == [0.5, 0.5, 0.5]
    assert masked[0].advantages_T.tolist() == [0.5, 0, 0.5]
    assert masked[0].trained_T.tolist() == [True, False, True]


def test_what_does_not_go_jointly_is_refused() -> None:
    rollouts = [STOP_OR_GO.rollout((1, 0), 0), STOP_OR_GO.rollout((1, 2), 1, Branch(rollout_id="0", turns=1))]
    with pytest.raises(ValueError, match=r"share turns, and credit.kind = 'rollout' would count them twice"):
        turn_credits(rollouts, rewards_of(rollouts), CreditConfig())
    with pytest.raises(ValueError, match=r"baseline 'mean_std' does not go with credit.kind = 'shared_prefix'"):
        turn_credits(rollouts, rewards_of(rollouts), SHARED, "mean_std")
