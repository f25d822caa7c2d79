"""Groups to the batch of one optimiser step.

Owns which rollouts and groups carry a signal and what is counted about the others. Does not own which groups belong to
the step (:mod:`etude.ledger`) or how a batch is cut to fit into memory (:mod:`etude.trajectories.packing`). Pure.
Array legend: G rollouts of a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from etude.config.training import Baseline
from etude.trajectories.advantage import group_advantages, survivor_weight
from etude.trajectories.build import build_trajectories
from etude.types import Batch, Floats, Group, Ids, Rollout, Trajectory

NO_PENALTIES: Mapping[str, float] = MappingProxyType({})


def build_batch(
    step: int,
    groups: Sequence[Group],
    baseline: Baseline = "mean",
    penalties: Mapping[str, float] = NO_PENALTIES,
) -> Batch:
    """The batch that turns weight version ``step - 1`` into ``step``.

    ``penalties`` (rollout → what is taken off its reward) count where rewards are compared by ``baseline``; the batch's
    statistics keep the rewards as they were given. A group in which all are equal then has advantage 0 everywhere: its
    rollouts are counted, in rewards and staleness, but not trained on. A quarantined rollout is in none of these: its
    group is compared without it. One that lost rollouts to infrastructure weighs what it would have weighed with them.
    ``trajectories`` is empty when nothing is left of any group. Raises ``ValueError`` without groups.
    """
    if not groups:
        raise ValueError(f"step {step} has no groups: a batch needs at least one")
    weights = [survivor_weight(baseline, present=len(group.rollouts), lost=group.lost) for group in groups]
    groups = [replace(group, rollouts=_trusted(group)) for group in groups]
    compared = [_rewards(group, penalties) for group in groups]
    trajectories = tuple(
        trajectory
        for group, weight, rewards_G in zip(groups, weights, compared, strict=True)
        if not _is_degenerate(rewards_G)
        for trajectory in _trajectories(group, group_advantages(rewards_G, baseline) * weight)
    )
    return Batch(
        step=step,
        trajectories=trajectories,
        num_loss_tokens=sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories),
        num_groups=len(groups),
        num_degenerate_groups=sum(_is_degenerate(rewards_G) for rewards_G in compared),
        rewards=np.concatenate([_rewards(group, NO_PENALTIES) for group in groups]),
        staleness=_staleness(groups, trained_version=step - 1),
    )


def _trusted(group: Group) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout in group.rollouts if not rollout.is_quarantined)


def _rewards(group: Group, penalties: Mapping[str, float]) -> Floats:
    """[G]"""
    given_G = np.array([rollout.reward for rollout in group.rollouts], np.float64)
    taken_G = np.array([penalties.get(rollout.rollout_id, 0.0) for rollout in group.rollouts], np.float64)
    rewards_G: Floats = (given_G - taken_G).astype(np.float32)
    return rewards_G


def _is_degenerate(rewards_G: Floats) -> bool:
    return bool((rewards_G == rewards_G[:1]).all())  # also of none at all


def _trajectories(group: Group, advantages_G: Floats) -> list[Trajectory]:
    return [
        trajectory
        for rollout, advantage in zip(group.rollouts, advantages_G.tolist(), strict=True)
        for trajectory in build_trajectories(rollout, advantage)
    ]


def _staleness(groups: Sequence[Group], *, trained_version: int) -> Ids:
    """[sampled tokens of all groups] how many versions the trainer was ahead of the one that sampled the token."""
    versions = [turn.versions for group in groups for rollout in group.rollouts for turn in rollout.turns]
    return (trained_version - np.concatenate([np.empty(0, np.int32), *versions])).astype(np.int32)
