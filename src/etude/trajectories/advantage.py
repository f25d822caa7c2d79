"""How good a rollout was, compared with the others of its group.

Owns the baselines, one function each, and what a group weighs that lost rollouts. Which baseline a loss goes with is
:data:`etude.config.BASELINES`'s to say. Pure.

Array legend: G rollouts of a group.
"""

from collections.abc import Callable

import numpy as np

from etude.config.training import Baseline
from etude.types import Floats

FEWEST_COMPARED = 2
"""Rollouts of a group, below which none has another to be compared with."""


def group_advantages(rewards_G: Floats, baseline: Baseline = "mean") -> Floats:
    """[G] float32 advantages by the baseline of that name; 0 everywhere where all rewards are equal."""
    if bool((rewards_G == rewards_G[:1]).all()):
        return np.zeros(len(rewards_G), np.float32)  # the mean of equal numbers may not be that number
    return ADVANTAGES[baseline](rewards_G)


def around_mean(rewards_G: Floats) -> Floats:
    """A_i = R_i − mean(R).

    Not divided by the group's standard deviation: where nearly all rollouts do equally well, that would blow tiny
    differences of behaviour up to the size of real ones (Dr. GRPO, arXiv 2503.20783, and the Composer 2 report). As a
    baseline the mean is not independent of R_i, which makes the estimate too small by (G − 1)/G, the same for all.
    """
    advantages_G: Floats = (rewards_G - rewards_G.mean(dtype=np.float64)).astype(np.float32)
    return advantages_G


def standardised(rewards_G: Floats) -> Floats:
    """A_i = (R_i − mean(R)) / std(R): GRPO (arXiv 2402.03300, section 4.1.2), std over the G rewards themselves."""
    rewards_G64 = rewards_G.astype(np.float64)
    advantages_G: Floats = ((rewards_G64 - rewards_G64.mean()) / rewards_G64.std()).astype(np.float32)
    return advantages_G


def leave_one_out(rewards_G: Floats) -> Floats:
    """A_i = R_i − mean of the others' R = G/(G − 1) · (R_i − mean(R)): RLOO (arXiv 2402.14740), unbiased."""
    rewards_G64 = rewards_G.astype(np.float64)
    advantages_G: Floats = ((rewards_G64 - rewards_G64.mean()) * (len(rewards_G) / (len(rewards_G) - 1))).astype(
        np.float32
    )
    return advantages_G


ADVANTAGES: dict[Baseline, Callable[[Floats], Floats]] = {
    "mean": around_mean,
    "mean_std": standardised,
    "leave_one_out": leave_one_out,
}
"""Name → the function, of rewards that are not all equal."""


def survivor_weight(baseline: Baseline, *, present: int, lost: int) -> float:
    """What the advantages of a group are multiplied by, of whose planned rollouts ``lost`` never came to an end.

    Rollouts that a machine lost say nothing about the policy, so a group without them must weigh what it would have
    weighed with them. E[Σ A ∇ log π] of K rollouts is (K − 1) · g with the mean as baseline and K · g with the others'
    mean; hence of G planned (G − 1)/(K − 1) and G/K, and docs/control.md has the proof. What the loss is divided by is
    that of a whole group likewise (``Batch.num_lost_tokens``). With the standard deviation it
    is the mean's, as far as that is estimated as well from fewer. 1 where too few are left to be compared.
    """
    if present < FEWEST_COMPARED:
        return 1.0
    planned = present + lost
    return planned / present if baseline == "leave_one_out" else (planned - 1) / (present - 1)
