"""The content of a step's batch, and its counts of everything else."""

from dataclasses import replace

import numpy as np
import pytest

from etude.config.credit import CreditConfig, DiscountedOptions, ShapedOptions, SharedPrefixOptions
from etude.config.training import ADVANTAGES, Baseline
from etude.trainer.batching.batch import build_batch
from etude.types import (
    Branch,
    Disposition,
    Group,
    Rollout,
    Turn,
    TurnKind,
    Verdict,
)
from records import TASK, make_rollout, make_turn


def rollout(group: int, slot: int, reward: float, versions: list[int]) -> Rollout:
    turn = make_turn([9], range(len(versions)), versions)
    return make_rollout(f"{group}.{slot}", turn, group=group, slot=slot, reward=reward)


def group(index: int, *rollouts: Rollout) -> Group:
    return Group(index=index, task=TASK, admitted_version=0, rollouts=rollouts)


MIXED = group(0, rollout(0, 0, 1.0, [3, 3, 4]), rollout(0, 1, 0.0, [2]))
ALIKE = group(1, rollout(1, 0, 0.1, [4, 4]), rollout(1, 1, 0.1, [1]))


def test_a_batch_trains_on_groups_with_a_signal_and_counts_all() -> None:
    batch = build_batch(5, [MIXED, ALIKE])
    assert [trajectory.rollout_id for trajectory in batch.trajectories] == ["0.0", "0.1"]
    assert [trajectory.advantages.max() for trajectory in batch.trajectories] == [0.5, 0.0]
    assert batch.trajectories[1].advantages.tolist() == [0.0, -0.5]
    assert (batch.step, batch.num_loss_tokens, batch.num_groups, batch.num_degenerate_groups) == (5, 4, 2, 1)
    assert batch.rewards.tolist() == pytest.approx([1.0, 0.0, 0.1, 0.1])
    assert batch.staleness.tolist() == [1, 1, 0, 2, 0, 0, 3]
    assert batch.num_sampled_trajectories == 4


def test_a_batch_without_any_signal_is_empty_but_counted() -> None:
    batch = build_batch(5, [ALIKE])
    assert (batch.trajectories, batch.num_loss_tokens, batch.num_degenerate_groups) == ((), 0, 1)


def quarantined(rollout: Rollout) -> Rollout:
    verdict = Verdict(disposition=Disposition.QUARANTINE, reason="spy", flags=("spy",), hacked=True, graded=1.0)
    return replace(rollout, verdict=verdict)


def test_a_quarantined_rollout_is_neither_trained_on_nor_compared_with() -> None:
    """Its slot was a draw like the others: with two of three compared, advantages are 2/3 of leave-one-out's ±1."""
    suspect = quarantined(rollout(0, 2, 0.0, [4, 4, 4]))
    batch = build_batch(5, [replace(MIXED, rollouts=(*MIXED.rollouts, suspect)), ALIKE])
    plain = build_batch(5, [MIXED, ALIKE])
    assert [trajectory.rollout_id for trajectory in batch.trajectories] == ["0.0", "0.1"]
    assert batch.trajectories[0].advantages.max() == pytest.approx(2 / 3)
    assert batch.rewards.tolist() == plain.rewards.tolist()
    assert batch.staleness.tolist() == plain.staleness.tolist()


def test_groups_of_quarantined_rollouts_alone_leave_an_empty_batch() -> None:
    batch = build_batch(5, [replace(MIXED, rollouts=tuple(map(quarantined, MIXED.rollouts)))])
    assert (batch.trajectories, batch.num_degenerate_groups, batch.rewards.tolist()) == ((), 1, [])


def test_a_step_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="step 5 has no groups"):
        build_batch(5, [])


def test_penalties_count_where_rewards_are_compared_and_nowhere_else() -> None:
    penalised = build_batch(5, [MIXED, ALIKE], penalties={"0.0": 0.5, "1.1": 0.25})
    plain = build_batch(5, [MIXED, ALIKE])
    advantages = {t.rollout_id: float(t.advantages[t.loss_mask][0]) for t in penalised.trajectories}
    assert advantages == pytest.approx({"0.0": 0.25, "0.1": -0.25, "1.0": 0.125, "1.1": -0.125})
    assert penalised.num_degenerate_groups == 0
    assert penalised.rewards.tolist() == plain.rewards.tolist()


def test_a_penalty_may_make_rollouts_equal() -> None:
    batch = build_batch(5, [MIXED], penalties={"0.0": 1.0})
    assert (batch.trajectories, batch.num_degenerate_groups, batch.rewards.tolist()) == ((), 1, [1.0, 0.0])


def test_the_baseline_is_chosen_by_name() -> None:
    batch = build_batch(5, [MIXED], "leave_one_out")
    assert [trajectory.advantages[1] for trajectory in batch.trajectories] == [1.0, -1.0]


def test_a_group_that_lost_rollouts_weighs_what_it_was_planned_to() -> None:
    """Two of four are there, and one is quarantined: 3/4 of the leave-one-out advantages, times 4/3."""
    rollouts = (*MIXED.rollouts, quarantined(rollout(0, 2, 0.0, [4])))
    batch = build_batch(5, [replace(MIXED, rollouts=rollouts, lost=1)])
    assert [float(t.advantages[1]) for t in batch.trajectories] == [1.0, -1.0]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_was_lost_counts_in_the_normaliser_like_what_is_there(lost: int) -> None:
    """Only groups with a signal count: MIXED has 4 tokens in 2 rollouts."""
    batch = build_batch(5, [replace(MIXED, lost=lost), replace(ALIKE, lost=1), MIXED])
    assert (batch.num_loss_tokens, len(batch.trajectories)) == (8, 4)
    assert (batch.num_lost_tokens, batch.num_lost_trajectories) == (2.0 * lost, lost)


@pytest.mark.parametrize("weight", [0.25, 1.0, 3.0])
def test_a_group_counts_by_its_importance_weight_in_advantages_and_in_the_normaliser(weight: float) -> None:
    """Σ w A / Σ w: if all groups have the same weight, the step is the one without weights."""
    plain, batch = build_batch(5, [MIXED, ALIKE]), build_batch(5, [replace(MIXED, weight=weight), ALIKE])
    for one, other in zip(plain.trajectories, batch.trajectories, strict=True):
        assert (one.advantages * weight).tolist() == other.advantages.tolist()
    assert batch.num_loss_tokens + batch.num_lost_tokens == weight * plain.num_loss_tokens
    assert len(batch.trajectories) + batch.num_lost_trajectories == weight * len(plain.trajectories)
    with pytest.raises(ValueError, match="importance weight 0"):
        replace(MIXED, weight=0.0)


def later(first: Rollout, *versions: int) -> Turn:
    """A turn that continues a rollout's last one."""
    before = first.turns[-1]
    prompt_ids = np.concatenate([before.prompt_ids, before.completion_ids, np.array([8], np.int32)])
    return replace(rollout(0, 0, 0.0, list(versions)).turns[0], prompt_ids=prompt_ids)


def test_a_masked_summary_counts_in_no_total() -> None:
    """It is the last turn of its context, so no trained turn reads it."""
    good, bad = MIXED.rollouts
    summary = replace(later(good, 4, 4), kind=TurnKind.SUMMARY)
    groups = [replace(MIXED, rollouts=(replace(good, turns=(*good.turns, summary)), bad))]
    trained, masked = (build_batch(5, groups, credit=CreditConfig(summaries=how)) for how in ("train", "mask"))
    assert (trained.num_loss_tokens, masked.num_loss_tokens) == (6, 4)
    assert [len(trajectory.token_ids) for trajectory in masked.trajectories] == [4, 2]
    assert len(trained.staleness) == len(masked.staleness) == 6


def test_what_rollouts_share_is_trained_and_counted_once() -> None:
    parent, other = MIXED.rollouts
    branch = Branch(rollout_id=parent.rollout_id, turns=1)
    one = replace(parent, turns=(*parent.turns, later(parent, 4)))
    two = replace(
        parent, rollout_id="0.2", slot=2, reward=0.0, turns=(*parent.turns, later(parent, 4, 4)), branch=branch
    )
    credit = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=2))
    batch = build_batch(5, [replace(MIXED, rollouts=(one, other, two))], "leave_one_out", credit=credit)
    assert [trajectory.loss_mask.sum() for trajectory in batch.trajectories] == [4, 1, 2]
    assert (batch.num_loss_tokens, len(batch.staleness)) == (7, 7)
    assert [trajectory.advantages[trajectory.loss_mask].tolist() for trajectory in batch.trajectories] == [
        [1, 1, 1, 1],
        [-0.5],
        [-1, -1],
    ]


def test_turns_may_teach_where_rewards_do_not() -> None:
    one, two = ALIKE.rollouts
    groups = [replace(ALIKE, rollouts=(replace(one, turn_rewards=(1.0,)), replace(two, turn_rewards=(0.0,))))]
    shaped = build_batch(
        5, groups, "leave_one_out", credit=CreditConfig(kind="shaped", options=ShapedOptions(shaping=0.5))
    )
    assert shaped.num_degenerate_groups == 0
    assert [float(trajectory.advantages[-1]) for trajectory in shaped.trajectories] == pytest.approx([0.5, -0.5])
    assert build_batch(5, groups).num_degenerate_groups == 1


def test_a_group_that_lost_rollouts_weighs_the_same_whatever_the_kind() -> None:
    groups = [replace(MIXED, lost=2)]
    plain = build_batch(5, groups)
    discounted = build_batch(5, groups, credit=CreditConfig(kind="discounted", options=DiscountedOptions(discount=0.5)))
    for one, other in zip(plain.trajectories, discounted.trajectories, strict=True):
        assert one.advantages.tolist() == other.advantages.tolist()  # of one turn each


def test_a_penalty_is_not_divided_by_a_deviation_of_rewards() -> None:
    """All rewards of ALIKE are equal: its advantages have the penalty's own size, however small."""
    for size in (1e-1, 1e-6):
        batch = build_batch(5, [ALIKE], "mean_std", penalties={"1.0": size})
        assert [float(t.advantages[1]) for t in batch.trajectories] == pytest.approx([-size / 2, size / 2])


@pytest.mark.parametrize("baseline", ADVANTAGES.builtins)
def test_rewards_that_differ_by_a_rounding_error_are_no_signal(baseline: Baseline) -> None:
    """0.1 + 0.2 is not 0.3 in float64: such a group would add its tokens to the divisor and nothing to the sum."""
    sums = group(0, rollout(0, 0, 0.1 + 0.2, [4, 4]), rollout(0, 1, 0.3, [4]))
    batch = build_batch(5, [sums], baseline)
    assert (batch.num_degenerate_groups, batch.num_loss_tokens) == (1, 0)
