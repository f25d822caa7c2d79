"""The policy-gradient loss: one function, its equation, its measurements.

Shape legend: N loss tokens of a micro-batch, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A micro-batch's share of the step's loss, and sums for its statistics."""

    loss: Tensor
    """Scalar with gradient; summed over micro-batches it is the loss of the step."""
    entropy_sum: float
    """Σ of the policy's entropy at each loss token, in nats."""
    truncated: int
    """Loss tokens whose importance weight hit the cap."""


def policy_loss(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    engine_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    cap: float,
    normaliser: int,
) -> PolicyLoss:
    """Policy gradient with a truncated importance weight against the engine that sampled the tokens.

        L = −(1/Z) Σ_t min(π_θ(y_t) / μ(y_t), cap) · A_t · log π_θ(y_t)

    The weight is a constant of the gradient (stop-gradient), μ is the engine's distribution at the version that sampled
    the token, Z is the number of loss tokens of the whole batch: no length term, no division by a standard
    deviation. Truncated importance sampling: https://fengyao.notion.site/off-policy-rl; weight on log π as in CISPO,
    arXiv 2506.13585, without its lower bound; token mean over the batch instead of 1/|o_i|: Dr. GRPO, arXiv 2503.20783.
    """
    distribution_NV = logits_NV.log_softmax(-1)
    logprobs_N = distribution_NV.gather(1, token_ids_N.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        ratios_N = (logprobs_N - engine_logprobs_N).exp()
        weights_N = ratios_N.clamp(max=cap)
        entropy_sum = float(-(distribution_NV.exp() * distribution_NV).sum())
        truncated = int((ratios_N > cap).sum())
    loss = -(weights_N * advantages_N * logprobs_N).sum() / normaliser
    return PolicyLoss(loss, entropy_sum, truncated)
