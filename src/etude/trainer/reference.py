"""The reference policy's scores, and the k1 KL penalty against it.

    R' = R − β · Σ_t (log μ(y_t) − log π_ref(y_t))

The sum is k1 of a whole rollout (J. Schulman, "Approximating KL divergence", 2020): over rollouts of μ its mean *is*
KL(μ ‖ π_ref), of whole rollouts. It is part of the *reward*, taken off before rewards are compared. In the loss it
would do nothing: the gradient of a mean of log π is 0. k3 there has the gradient of another divergence, and a
variance that explodes once the policies differ (Composer 2 report, arXiv 2603.24477, section 4.1). And it is of the
whole rollout, not of each token by itself: what a token makes likely later counts, too, so that the estimate has no
bias; a token's own term alone would be quieter and pull towards another optimum.

π_ref is scored as the policy is: at each token's temperature, over the set that it was drawn from. It goes its own
routes, since it is another model; μ is what the engine reported. Owns the reference's weights and its scores, not β
and not rewards.

Shape legend: N scored tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from etude.models.checkpoint import load_state
from etude.models.hf import CausalModel
from etude.trainer.scores import by_trajectory, sampled_logprobs, sampled_tokens
from etude.types import Floats, Trajectory


class Reference:
    """A frozen reference policy that scores sampled tokens."""

    def __init__(self, scorer: CausalModel, state: Mapping[str, Tensor]) -> None:
        """``scorer`` computes as the trainer does and gets the weights ``state``; no other part may use it."""
        self._scorer = scorer.eval().requires_grad_(False)
        load_state(self._scorer, state)

    @torch.inference_mode()
    def logprobs(self, microbatch: Sequence[Trajectory]) -> list[Floats]:
        """[L] of each trajectory: log π_ref of its sampled tokens, 0 elsewhere. They go through the model together."""
        masks = [trajectory.loss_mask for trajectory in microbatch]
        tokens = sampled_tokens(microbatch, masks, self._scorer.embedding.device)
        return by_trajectory(sampled_logprobs(self._scorer, tokens), masks)

    def divergences(self, microbatch: Sequence[Trajectory]) -> list[float]:
        """Σ_t (log μ(y_t) − log π_ref(y_t)) over the sampled tokens of each trajectory, in nats.

        A rollout with several branches has one such sum for each, and all count.
        """
        rows = zip(microbatch, self.logprobs(microbatch), strict=True)
        return [float((t.logprobs - row)[1:][t.loss_mask[1:]].sum(dtype=np.float64)) for t, row in rows]
