"""Rewards dealt out at random: the control of a learning claim.

A policy that improves under shuffled rewards was improved by something else than its rewards: by the data of its
batches, a leak, the weight decay of an optimiser. Pure.
"""

from dataclasses import replace

import numpy as np

from etude.types import Group


def shuffle_rewards(group: Group, *, seed: int) -> Group:
    """The group with the same rewards, each given to a rollout drawn at random; quarantined rollouts keep theirs.

    Advantages keep their distribution and lose their relation to what was done: each rollout's expected advantage is 0.
    The same seed and group give the same order, in every process.
    """
    places = [place for place, rollout in enumerate(group.rollouts) if not rollout.is_quarantined]
    drawn = np.random.default_rng((seed, group.index)).permutation(places)
    rollouts = list(group.rollouts)
    for place, source in zip(places, drawn.tolist(), strict=True):
        rollouts[place] = replace(rollouts[place], reward=group.rollouts[source].reward)
    return replace(group, rollouts=tuple(rollouts))
