"""Off-policy corrections of sampled tokens: importance weights and masks, constants of the gradient.

The ratio ρ_t = π_prox(y_t) / μ(y_t) compares the trainer's probability of a token with that of the engine that sampled
it. They differ because weights have changed since, or because the two compute differently. π_prox is the trainer's
policy or, in the decoupled form, one between it and the engine's. If ``loss.options.old_policy`` is recomputed, π_prox
is the trainer's policy with the weights that sampled, and only the second reason remains. If both are equal, every
weight here is 1 and no mask excludes anything.

A *weight* makes the estimate less biased, a *mask* excludes tokens that no weight can correct; ``loss.correction``
selects the weight, ``loss.sequence_mask`` may add a mask. Owns these; the losses that use them are in
:mod:`etude.trainer.losses`.

Shape legend: N loss tokens of a micro-batch, S its trajectories.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.config.training import (
    CapOptions,
    DecoupledOptions,
    GeometricMaskOptions,
    IcepopOptions,
    LossConfig,
    OffPolicyMaskOptions,
    RatioMaskOptions,
)


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weight of each token."""

    weights_N: Tensor
    """Never below 0, without gradient."""
    truncated_N: Tensor
    """True where a weight was reduced to its cap."""
    masked_N: Tensor
    """True where the weight was set to 0."""


def correct(
    log_ratios_N: Tensor, gaps_N: Tensor, advantages_N: Tensor, trajectories_N: Tensor, config: LossConfig
) -> Correction:
    """Compute the correction that ``config`` selects.

    ``log_ratios_N`` = log ρ, ``gaps_N`` = log π_θ − log μ; ``trajectories_N`` int64, ascending from 0.
    """
    with torch.no_grad():
        correction = _weigh(log_ratios_N, trajectories_N, config)
        kept_N = _keep(log_ratios_N, gaps_N, advantages_N, trajectories_N, config)
        if kept_N is None:
            return correction
        return Correction(
            torch.where(kept_N, correction.weights_N, 0.0),
            correction.truncated_N,
            correction.masked_N | ~kept_N,
        )


def _weigh(log_ratios_N: Tensor, trajectories_N: Tensor, config: LossConfig) -> Correction:
    """[N] weights of tokens: each uses its own ratio or, with the kinds ``sequence_…``, its trajectory's."""
    options = config.correction_options
    of_sequences = config.correction in ("sequence_tis", "sequence_mis")
    of_N = trajectory_sums(log_ratios_N, trajectories_N) if of_sequences else log_ratios_N
    match options:
        case IcepopOptions():
            return masked(of_N, options.floor, options.cap)
        case DecoupledOptions():
            return masked(of_N, 0.0, options.cap)
        case CapOptions() if config.correction in ("tis", "sequence_tis"):
            return truncated(of_N, options.cap)
        case CapOptions():
            return masked(of_N, 0.0, options.cap)
        case _:
            return uncorrected(of_N)


def _keep(
    log_ratios_N: Tensor, gaps_N: Tensor, advantages_N: Tensor, trajectories_N: Tensor, config: LossConfig
) -> Tensor | None:
    """[N] mask of tokens that the sequence mask keeps; ``None`` without one."""
    match config.mask_options:
        case RatioMaskOptions(floor=floor, cap=cap):
            return within(trajectory_sums(log_ratios_N, trajectories_N), floor, cap)
        case GeometricMaskOptions(floor=floor, cap=cap):
            return within(trajectory_means(log_ratios_N, trajectories_N), floor, cap)
        case OffPolicyMaskOptions(divergence=divergence):
            return on_policy_or_good(gaps_N, advantages_N, trajectories_N, divergence)
        case _:
            return None


def uncorrected(log_ratios_N: Tensor) -> Correction:
    """No correction: W = 1."""
    none_N = torch.zeros_like(log_ratios_N, dtype=torch.bool)
    return Correction(torch.ones_like(log_ratios_N), none_N, none_N)


def truncated(log_ratios_N: Tensor, cap: float) -> Correction:
    """TIS: w_t = min(ρ_t, cap).

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl): the variance is bounded, at the cost of a
    downward bias where ρ is large, and no token is lost. Applied to a trajectory's product of ratios, it is verl's and
    TRL's sequence form.
    """
    ratios_N = log_ratios_N.exp()
    return Correction(ratios_N.clamp(max=cap), ratios_N > cap, torch.zeros_like(ratios_N, dtype=torch.bool))


def masked(log_ratios_N: Tensor, floor: float, cap: float) -> Correction:
    """MIS and IcePop: w_t = ρ_t if floor ≤ ρ_t ≤ cap, else 0.

    With ``floor`` = 0 it is masked importance sampling (https://richardli.xyz/rl-collapse): tokens that TIS would
    truncate are excluded. Applied to a trajectory's product of ratios, it is that essay's sequence form; to π_prox/μ,
    the decoupled form of AReaL (arXiv 2505.24298), whose code masks in the same way. With both bounds it is IcePop
    (Ring-1T, arXiv 2510.18855): if engine and trainer disagree that much, in either direction, a computation went
    wrong.
    """
    inside_N = within(log_ratios_N, floor, cap)
    return Correction(torch.where(inside_N, log_ratios_N.exp(), 0.0), torch.zeros_like(inside_N), ~inside_N)


def within(log_ratios_N: Tensor, floor: float, cap: float) -> Tensor:
    """[N] mask of floor ≤ ρ ≤ cap.

    Applied to a trajectory's product of ratios, it is a sequence mask (https://richardli.xyz/rl-collapse). Applied to
    their geometric mean, it does not penalise length: a thousand tokens that are each 1 % off are together only 1 %
    off.
    """
    ratios_N = log_ratios_N.exp()
    return (ratios_N >= floor) & (ratios_N <= cap)


def on_policy_or_good(gaps_N: Tensor, advantages_N: Tensor, trajectories_N: Tensor, divergence: float) -> Tensor:
    """[N] DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556, section 3.1); 1 is included.

        0 if A_i < 0 and (1/|y_i|) Σ_t log(μ(y_t) / π(y_t)) > δ, else 1

    A bad trajectory that the policy no longer produces is excluded; a good one is still useful.
    """
    return (advantages_N >= 0) | (-trajectory_means(gaps_N, trajectories_N) <= divergence)


def proximal_logprobs(logprobs_N: Tensor, engine_logprobs_N: Tensor, staleness_N: Tensor) -> Tensor:
    """[N] log π_prox, without gradient: A-3PO's approximation of the policy one weight version before the trainer's.

        log π_prox = log μ + (1 − 1/d) · (log π_θ − log μ),  d = max(staleness, 1) versions

    It interpolates from the engine's policy to the trainer's in d equal steps, so it needs no forward pass (arXiv
    2512.06547). ``staleness_N``: number of versions by which the trainer is ahead of the one that sampled the token.
    """
    share_N = 1 - 1 / staleness_N.clamp(min=1).to(logprobs_N.dtype)
    return engine_logprobs_N + share_N * (logprobs_N.detach() - engine_logprobs_N)


def trajectory_sums(values_N: Tensor, trajectories_N: Tensor) -> Tensor:
    """[N] the sum over each token's own trajectory; differentiable."""
    return _sums(values_N, torch.bincount(trajectories_N))[trajectories_N]


def trajectory_means(values_N: Tensor, trajectories_N: Tensor) -> Tensor:
    """[N] the mean over each token's own trajectory; differentiable."""
    lengths_S = torch.bincount(trajectories_N)
    return (_sums(values_N, lengths_S) / lengths_S.clamp(min=1))[trajectories_N]


def _sums(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """[S] sums without a scatter, whose results on a device may differ between runs in their last bits."""
    return torch.segment_reduce(values_N, "sum", lengths=lengths_S)
