"""Groups of the ledger to the batch of a step, by a run's recipe: the trainer trains on it, readers show it.

Owns the keys of the recipe that decide which rewards and weights are compared;
:mod:`etude.trainer.batching.batch` owns the comparison. Pure, and without torch, which readers do not need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from etude.config.recipe import RunConfig
from etude.trainer.batching.baselines import LiveComparison
from etude.trainer.batching.batch import build_batch, shuffle_rewards
from etude.types import Batch, Group, ObservedSession


def batch_of(
    step: int,
    groups: Sequence[Group],
    penalties: Mapping[str, float],
    config: RunConfig,
    earlier: Sequence[ObservedSession] = (),
) -> Batch:
    """Build the batch of a step with the recipe's advantages; those of live sessions also use ``earlier`` sessions."""
    groups = [compared_group(group, config) for group in groups]
    live = LiveComparison(baseline=config.live.baseline, earlier=earlier)
    return build_batch(step, groups, config.loss.baseline, penalties, config.credit, live)


def compared_group(group: Group, config: RunConfig) -> Group:
    """The group as its rollouts are compared: without an importance weight if the recipe has none, and with its rewards
    shuffled in a control run.
    """
    if not (config.tasks.selection.importance_weights or group.is_live):
        group = replace(group, weight=1.0)
    return shuffle_rewards(group, seed=config.seed) if config.reward.shuffled else group
