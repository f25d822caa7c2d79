"""The policy-gradient loss: one function, its equation, its measurements.

Owns what is done with log-probabilities, not how they come about: of which distribution they are is
:mod:`etude.trainer.kept`'s.

Shape legend: N loss tokens of a micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A micro-batch's share of the step's loss, and sums for its statistics."""

    loss: Tensor
    """Scalar with gradient; summed over micro-batches it is the loss of the step."""
    truncated: int
    """Loss tokens whose importance weight hit the cap."""


def policy_loss(
    logprobs_N: Tensor, engine_logprobs_N: Tensor, advantages_N: Tensor, *, cap: float, normaliser: int
) -> PolicyLoss:
    """Policy gradient with a truncated importance weight against the engine that sampled the tokens.

        L = −(1/Z) Σ_t min(π_θ(y_t) / μ(y_t), cap) · A_t · log π_θ(y_t)

    ``logprobs_N`` = log π_θ(y_t) carries the gradient; π_θ is the distribution that a model with the trainer's weights
    would have sampled from: at the token's temperature, over the set that was kept for it. The weight is a constant of
    the gradient (stop-gradient), ``engine_logprobs_N`` = log μ(y_t) is the engine's at the version that sampled the
    token, Z is the number of loss tokens of the whole batch: no length term, no division by a standard deviation.
    Truncated importance sampling: https://fengyao.notion.site/off-policy-rl; weight on log π as in CISPO, arXiv
    2506.13585, without its lower bound; token mean over the batch instead of 1/|o_i|: Dr. GRPO, arXiv 2503.20783.
    """
    with torch.no_grad():
        ratios_N = (logprobs_N - engine_logprobs_N).exp()
        weights_N = ratios_N.clamp(max=cap)
        truncated = int((ratios_N > cap).sum())
    loss = -(weights_N * advantages_N * logprobs_N).sum() / normaliser
    return PolicyLoss(loss, truncated)
