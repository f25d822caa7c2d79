"""Advantages: rewards of rollouts compared with the others of their group.

    reward, penalty ──▶ less what the group has of each, the reward's part over its deviation where asked ──▶ advantage

Owns the baselines, one function each, and what a group weighs of which rollouts are missing. Which baseline a loss goes
with unless a recipe says otherwise is :data:`etude.config.training.BASELINES`'s to say. Pure.

Array legend: G rollouts of a group.
"""

from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from etude.config.training import ADVANTAGES, Baseline
from etude.types import Floats

Values: TypeAlias = npt.NDArray[np.float64]
Advantage: TypeAlias = Callable[[Floats | Values, Values], Values]
"""A baseline: a function of rewards and penalties that gives advantages, [G] each."""

FEWEST_COMPARED = 2
"""Rollouts of a group, below which none has another to be compared with."""
DEVIATION_FLOOR = 1e-4
"""Added to a deviation before it divides, as TRL does (``GRPOTrainer``; verl adds 1e-6): rewards that differ by a
rounding error stay next to nothing.
"""


def group_advantages(
    rewards_G: Floats | Values, baseline: Baseline = "mean", penalties_G: Values | None = None
) -> Floats:
    """[G] float32 advantages by the baseline of that name; 0 everywhere where all rewards, less penalties, are equal.

    ``penalties_G`` is what is taken off each reward; none without it.
    """
    taken_G = np.zeros(len(rewards_G)) if penalties_G is None else penalties_G
    advantages_of = cast("Advantage", ADVANTAGES.find(baseline))
    advantages_G: Floats = advantages_of(rewards_G, taken_G).astype(np.float32)
    return advantages_G


def around_mean(rewards_G: Floats | Values, penalties_G: Values) -> Values:
    """A_i = R_i − mean(R), R the reward less its penalty.

    Not divided by the group's standard deviation: where nearly all rollouts do equally well, that would blow tiny
    differences of behaviour up to the size of real ones (Dr. GRPO, arXiv 2503.20783, and the Composer 2 report). As a
    baseline the mean is not independent of R_i, which makes the estimate too small by (G − 1)/G, the same for all.
    """
    return _centred(net_rewards(rewards_G, penalties_G))


def standardised(rewards_G: Floats | Values, penalties_G: Values) -> Values:
    """A_i = (R_i − mean(R)) / (std(R) + ε) − (C_i − mean(C)), R the reward and C its penalty.

    GRPO (arXiv 2402.03300, section 4.1.2), with the sample deviation (division by G − 1) and the ε of TRL, verl having
    the same but for ε. The penalty comes behind the division, so it is one in units of the advantage: before it, the
    deviation of a group of equal rewards would be the penalties' own, and the smallest would weigh like the largest.
    """
    gains_G = _centred(rewards_G)
    deviation = np.sqrt((gains_G**2).sum() / max(1, len(gains_G) - 1))
    advantages_G: Values = gains_G / (deviation + DEVIATION_FLOOR) - _centred(penalties_G)
    return advantages_G


def leave_one_out(rewards_G: Floats | Values, penalties_G: Values) -> Values:
    """A_i = R_i − mean of the others' R = G/(G − 1) · (R_i − mean(R)): RLOO (arXiv 2402.14740), unbiased.

    R is the reward less its penalty.
    """
    size = len(rewards_G)
    return _centred(net_rewards(rewards_G, penalties_G)) * (size / max(1, size - 1))


def net_rewards(rewards_G: Floats | Values, penalties_G: Values) -> Floats:
    """[G] float32 rewards less penalties: what is equal stays so, whatever float64 has behind the last digit."""
    net_G: Floats = (rewards_G.astype(np.float64) - penalties_G).astype(np.float32)
    return net_G


def _centred(values_G: Floats | Values) -> Values:
    """[G] float64: each less their mean, 0 where all are equal: the mean of equal numbers may not be that number."""
    if bool((values_G == values_G[:1]).all()):
        return np.zeros(len(values_G))
    values_G64 = values_G.astype(np.float64)
    centred_G: Values = values_G64 - values_G64.mean()
    return centred_G


def group_weight(baseline: Baseline, *, compared: int, graded: int, lost: int) -> float:
    """The factor of the advantages of a group of whose planned rollouts ``lost`` never came to an end and of
    whose ``graded`` only ``compared`` are compared and trained on.

    Rollouts that a machine lost say nothing about the policy, so a group without them must weigh what it would have
    weighed with them. Those that are quarantined do, so a group weighs by how many are not: each slot is a draw, and
    one that is quarantined adds nothing. The sum of A ∇ log π over K compared ones is K · g on average with the others'
    mean as baseline and (K − 1) · g with the mean; of N graded and G planned ones it shall be G · K/N · g, and with the
    mean (G − 1)/G of that, the factor of a whole group. docs/control.md has the proof, and what g is. What the loss is
    divided by is that of a whole group likewise (``Batch.num_lost_tokens``). With the standard deviation it is the
    mean's, as far as a deviation is estimated as well from fewer, and that is assumed of a baseline of one's own. 1
    where too few are left to be compared.
    """
    if compared < FEWEST_COMPARED:
        return 1.0
    planned = graded + lost
    if baseline == "leave_one_out":
        return planned / graded
    return (planned - 1) * compared / (graded * (compared - 1))
