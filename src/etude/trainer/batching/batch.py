"""Rollout groups to the batch of one optimiser step.

Owns the choice of rollouts and groups with a signal, and the statistics of the others. Does not own the groups of a
step (:mod:`etude.ledger`), the credit of turns (:mod:`etude.trainer.batching.credit`) or the division of a batch into
micro-batches (:mod:`etude.trainer.batching.packing`). Pure.

Array legend: G rollouts of a group.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from etude.config.credit import CreditConfig
from etude.config.training import Baseline
from etude.trainer.batching.advantage import Values, group_weight
from etude.trainer.batching.baselines import LiveComparison, live_credits
from etude.trainer.batching.build import build_trajectories, count_trajectories
from etude.trainer.batching.credit import Credit, own_turns, turn_credits
from etude.types import Batch, Group, Ids, Rollout, Trajectory

NO_PENALTIES: Mapping[str, float] = MappingProxyType({})
ALIKE_IN_ALL_TURNS = CreditConfig()
"""Credit of a recipe without ``[credit]``."""
NOT_LIVE = LiveComparison()


def build_batch(
    step: int,
    groups: Sequence[Group],
    baseline: Baseline = "mean",
    penalties: Mapping[str, float] = NO_PENALTIES,
    credit: CreditConfig = ALIKE_IN_ALL_TURNS,
    live: LiveComparison = NOT_LIVE,
) -> Batch:
    """The batch that turns weight version ``step - 1`` into ``step``.

    ``penalties`` (rollout → deduction from its reward) apply only where ``baseline`` compares rewards; the batch's
    statistics have the original rewards. A group in which every advantage is 0, for example because all rewards are
    equal, has no signal: its rollouts count in rewards and staleness but are not trained on. A quarantined rollout is
    excluded from all of these: the others are compared without it, and their weight does not grow. A group that lost
    rollouts to infrastructure has the same weight as with them, in advantages and in their divisors; a group of
    importance weight w counts w times in both. A live session is a group of one and is compared with other sessions, as
    ``live`` says. ``trajectories`` is empty if no group has anything to train on. Raises ``ValueError`` without groups,
    and as :func:`~etude.trainer.batching.credit.turn_credits` does.
    """
    if not groups:
        raise ValueError(f"step {step} has no groups: a batch needs at least one")
    weights = [
        group.weight
        * group_weight(baseline, compared=len(_trusted(group)), graded=len(group.rollouts), lost=group.lost)
        for group in groups
    ]
    planned = [
        group.weight * (1 + group.lost / max(1, len(group.rollouts))) for group in groups
    ]  # planned rollouts per graded one
    groups = [replace(group, rollouts=_trusted(group)) for group in groups]
    of_sessions = iter(_live_credits(groups, penalties, credit, live))
    credited = [
        (next(of_sessions),) if group.is_live else _credits(group, penalties, credit, baseline) for group in groups
    ]
    learnt = [
        _trajectories(group, of_group, weight) if _has_signal(of_group) else []
        for group, weight, of_group in zip(groups, weights, credited, strict=True)
    ]
    tokens = [sum(int(trajectory.loss_mask.sum()) for trajectory in group) for group in learnt]
    return Batch(
        step=step,
        trajectories=tuple(itertools.chain.from_iterable(learnt)),
        num_loss_tokens=sum(tokens),
        num_lost_tokens=sum((share - 1) * count for share, count in zip(planned, tokens, strict=True)),
        num_lost_trajectories=sum((share - 1) * len(group) for share, group in zip(planned, learnt, strict=True)),
        num_sampled_trajectories=sum(
            count_trajectories(rollout, credit.trained_T)
            for group, of_group in zip(groups, credited, strict=True)
            for rollout, credit in zip(group.rollouts, of_group, strict=True)
        ),
        num_groups=len(groups),
        num_degenerate_groups=sum(not _has_signal(of_group) for of_group in credited),
        rewards=np.concatenate([_rewards(group) for group in groups]).astype(np.float32),
        staleness=_staleness(groups, trained_version=step - 1),
    )


def _trusted(group: Group) -> tuple[Rollout, ...]:
    return tuple(rollout for rollout in group.rollouts if not rollout.is_quarantined)


def _rewards(group: Group) -> Values:
    """[G]"""
    return np.array([rollout.reward for rollout in group.rollouts], np.float64)


def _credits(
    group: Group, penalties: Mapping[str, float], credit: CreditConfig, baseline: Baseline
) -> tuple[Credit, ...]:
    return turn_credits(group.rollouts, _rewards(group), credit, baseline, _penalties(group.rollouts, penalties))


def _live_credits(
    groups: Sequence[Group], penalties: Mapping[str, float], credit: CreditConfig, live: LiveComparison
) -> tuple[Credit, ...]:
    """The credit of each live session, in the order of ``groups``."""
    sessions = [group.rollouts[0] for group in groups if group.is_live]
    return live_credits(sessions, credit, live, _penalties(sessions, penalties))


def _penalties(rollouts: Sequence[Rollout], penalties: Mapping[str, float]) -> Values:
    """[G]"""
    return np.array([penalties.get(rollout.rollout_id, 0.0) for rollout in rollouts], np.float64)


def _has_signal(credited: Sequence[Credit]) -> bool:
    return any(credit.has_signal for credit in credited)


def _trajectories(group: Group, credited: Sequence[Credit], weight: float) -> list[Trajectory]:
    return [
        trajectory
        for rollout, credit in zip(group.rollouts, credited, strict=True)
        for trajectory in build_trajectories(rollout, credit.advantages_T * weight, credit.trained_T)
    ]


def _staleness(groups: Sequence[Group], *, trained_version: int) -> Ids:
    """[sampled tokens of all groups] number of versions by which the trainer is ahead of the one that sampled the
    token.
    """
    versions = [
        turn.versions
        for group in groups
        for rollout, own_T in zip(group.rollouts, own_turns(group.rollouts), strict=True)
        for turn, own in zip(rollout.turns, own_T.tolist(), strict=True)
        if own
    ]
    return (trained_version - np.concatenate([np.empty(0, np.int32), *versions])).astype(np.int32)


def shuffle_rewards(group: Group, *, seed: int) -> Group:
    """The group with the same rewards, each given to a rollout drawn at random; quarantined rollouts keep theirs.

    Advantages keep their distribution but no longer depend on the rollout's actions: each rollout's expected advantage
    is 0. The same seed and group give the same order in every process.
    """
    places = [place for place, rollout in enumerate(group.rollouts) if not rollout.is_quarantined]
    drawn = np.random.default_rng((seed, group.index)).permutation(places)
    rollouts = list(group.rollouts)
    for place, source in zip(places, drawn.tolist(), strict=True):
        rollouts[place] = replace(rollouts[place], reward=group.rollouts[source].reward)
    return replace(group, rollouts=tuple(rollouts))
