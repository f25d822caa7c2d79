"""Groups to the batch of one optimiser step.

Owns which rollouts and groups carry a signal and what is counted about the others. Does not own which groups belong to
the step (:mod:`etude.ledger`) or how a batch is cut to fit into memory (:mod:`etude.trajectories.microbatches`). Pure.
Array legend: G rollouts of a group.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from etude.trajectories.advantage import group_advantages
from etude.trajectories.build import build_trajectories
from etude.types import Batch, Floats, Group, Ids, Rollout, Trajectory


def build_batch(step: int, groups: Sequence[Group]) -> Batch:
    """The batch that turns weight version ``step - 1`` into ``step``.

    A group whose rewards are all equal has advantage 0 everywhere: its rollouts are counted, in rewards and staleness,
    but not trained on. A quarantined rollout is in none of these: its group is compared without it. ``trajectories`` is
    empty when nothing is left of any group. Raises ``ValueError`` without groups.
    """
    if not groups:
        raise ValueError(f"step {step} has no groups: a batch needs at least one")
    groups = [replace(group, rollouts=_trusted(group)) for group in groups]
    rewards = [_rewards(group) for group in groups]
    trajectories = tuple(
        trajectory
        for group, rewards_G in zip(groups, rewards, strict=True)
        if not _is_degenerate(rewards_G)
        for trajectory in _trajectories(group, rewards_G)
    )
    return Batch(
        step=step,
        trajectories=trajectories,
        num_loss_tokens=sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories),
        num_groups=len(groups),
        num_degenerate_groups=sum(_is_degenerate(rewards_G) for rewards_G in rewards),
        rewards=np.concatenate(rewards),
        staleness=_staleness(groups, trained_version=step - 1),
    )


def _trusted(group: Group) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout in group.rollouts if not rollout.is_quarantined)


def _rewards(group: Group) -> Floats:
    """[G]"""
    return np.array([rollout.reward for rollout in group.rollouts], np.float32)


def _is_degenerate(rewards_G: Floats) -> bool:
    return bool((rewards_G == rewards_G[:1]).all())  # also of none at all


def _trajectories(group: Group, rewards_G: Floats) -> list[Trajectory]:
    return [
        trajectory
        for rollout, advantage in zip(group.rollouts, group_advantages(rewards_G).tolist(), strict=True)
        for trajectory in build_trajectories(rollout, advantage)
    ]


def _staleness(groups: Sequence[Group], *, trained_version: int) -> Ids:
    """[sampled tokens of all groups] how many versions the trainer was ahead of the one that sampled the token."""
    versions = [turn.versions for group in groups for rollout in group.rollouts for turn in rollout.turns]
    return (trained_version - np.concatenate([np.empty(0, np.int32), *versions])).astype(np.int32)
