"""Advantages: rewards of rollouts compared with the others of their group.

    reward, penalty ──▶ minus the group's mean of each, the reward optionally over its deviation ──▶ advantage

Owns the baselines, one function each, and the weight of a group with missing rollouts. The default baseline of each
loss is in :data:`etude.config.training.BASELINES`. Pure.

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
"""Fewest rollouts of a group: a single one has nothing to be compared with."""
DEVIATION_FLOOR = 1e-4
"""Added to a deviation before it divides, as TRL does (``GRPOTrainer``; verl adds 1e-6): rewards that differ by a
rounding error stay close to 0.
"""


def group_advantages(
    rewards_G: Floats | Values, baseline: Baseline = "mean", penalties_G: Values | None = None
) -> Floats:
    """[G] float32 advantages by the baseline of that name; 0 everywhere where all rewards, less penalties, are equal.

    ``penalties_G`` are subtracted from the rewards; default: none.
    """
    taken_G = np.zeros(len(rewards_G)) if penalties_G is None else penalties_G
    advantages_of = cast("Advantage", ADVANTAGES.find(baseline))
    advantages_G: Floats = advantages_of(rewards_G, taken_G).astype(np.float32)
    return advantages_G


def around_mean(rewards_G: Floats | Values, penalties_G: Values) -> Values:
    """A_i = R_i − mean(R), where R is the reward minus its penalty.

    Not divided by the group's standard deviation: if nearly all rollouts do equally well, that would amplify tiny
    differences of behaviour to the size of real ones (Dr. GRPO, arXiv 2503.20783, and the Composer 2 report). As a
    baseline the mean is not independent of R_i, which scales all advantages by (G − 1)/G.
    """
    return _centred(net_rewards(rewards_G, penalties_G))


def standardised(rewards_G: Floats | Values, penalties_G: Values) -> Values:
    """A_i = (R_i − mean(R)) / (std(R) + ε) − (C_i − mean(C)), where R is the reward and C its penalty.

    GRPO (arXiv 2402.03300, section 4.1.2), with the sample deviation (division by G − 1) and the ε of TRL; verl differs
    only in ε. The penalty is subtracted after the division, in units of the advantage: before it, the deviation of a
    group of equal rewards would be that of the penalties, and the smallest penalties would weigh as much as the
    largest.
    """
    gains_G = _centred(rewards_G)
    deviation = np.sqrt((gains_G**2).sum() / max(1, len(gains_G) - 1))
    advantages_G: Values = gains_G / (deviation + DEVIATION_FLOOR) - _centred(penalties_G)
    return advantages_G


def leave_one_out(rewards_G: Floats | Values, penalties_G: Values) -> Values:
    """A_i = R_i − mean of the others' R = G/(G − 1) · (R_i − mean(R)): RLOO (arXiv 2402.14740), unbiased.

    R is the reward minus its penalty.
    """
    size = len(rewards_G)
    return _centred(net_rewards(rewards_G, penalties_G)) * (size / max(1, size - 1))


def net_rewards(rewards_G: Floats | Values, penalties_G: Values) -> Floats:
    """[G] float32 rewards minus penalties: equal values stay equal despite rounding errors of float64."""
    net_G: Floats = (rewards_G.astype(np.float64) - penalties_G).astype(np.float32)
    return net_G


def _centred(values_G: Floats | Values) -> Values:
    """[G] float64 values minus their mean; 0 if all are equal as float32: values that differ by a rounding error of
    float64 have no signal, and the floating-point mean of equal values may differ from them.
    """
    rounded_G = values_G.astype(np.float32)
    if bool((rounded_G == rounded_G[:1]).all()):
        return np.zeros(len(values_G))
    values_G64 = values_G.astype(np.float64)
    centred_G: Values = values_G64 - values_G64.mean()
    return centred_G


def group_weight(baseline: Baseline, *, compared: int, graded: int, lost: int) -> float:
    """The factor of a group's advantages if ``lost`` of its planned rollouts never finished, and only ``compared`` of
    its ``graded`` rollouts are compared and trained on.

    A rollout lost to a failed machine says nothing about the policy, so a group must have the weight that it would have
    with its lost rollouts. A quarantined rollout does say something: each slot is a draw, and a quarantined one adds
    nothing, so the weight of a group is proportional to the share K/N of its N graded rollouts that are compared.

    With G planned rollouts, the sum of A ∇ log π shall on average be G · K/N · g for a baseline without R_i (the mean
    of the others), and (G − 1)/G of that for the mean, as in a whole group. Over K compared rollouts it is K · g and
    (K − 1) · g; the factor is the quotient. docs/control.md defines g and has the proof. The divisor of the loss is
    also that of a whole group (``Batch.num_lost_tokens``). The standard deviation and custom baselines use the factor
    of the mean, which assumes that fewer rollouts estimate a deviation equally well. 1 if fewer than
    :data:`FEWEST_COMPARED` are compared.
    """
    if compared < FEWEST_COMPARED:
        return 1.0
    planned = graded + lost
    if baseline == "leave_one_out":
        return planned / graded
    return (planned - 1) * compared / (graded * (compared - 1))
