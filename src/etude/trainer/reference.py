"""The reference policy's scores, and the k1 KL penalty against it.

    R' = R − β · Σ_t (log μ(y_t) − log π_ref(y_t))

The sum is k1 of a whole rollout (J. Schulman, "Approximating KL divergence", 2020): over rollouts of μ its mean *is*
KL(μ ‖ π_ref) of whole rollouts. It is part of the *reward*, subtracted before rewards are compared. In the loss it
would have no effect: the mean gradient of log π is 0. k3 in the loss has the gradient of another divergence, and a
variance that explodes once the policies differ (Composer 2 report, arXiv 2603.24477, section 4.1). The penalty covers
the whole rollout, not each token by itself, because a token also influences later tokens: so the estimate has no bias.
A token's own term alone would have less variance but another optimum.

π_ref is scored as the policy is: at each token's temperature, over the set that it was drawn from. It uses its own
routes, since it is another model; μ is the probability reported by the engine. Owns the reference's weights and scores,
not β or rewards.

Shape legend: N scored tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.models.hf import CausalModel
from etude.trainer.version_scores import VersionScorer, WholeScorer
from etude.types import Floats, Trajectory


class Reference:
    """A frozen reference policy that scores sampled tokens."""

    def __init__(self, scorer: VersionScorer, version: int) -> None:
        """``scorer`` permanently stores ``version``, which is the reference."""
        self._scorer = scorer
        self._version = version

    @classmethod
    def alone(cls, model: CausalModel, state: Mapping[str, Tensor], config: NumericsConfig) -> Self:
        """The reference of one process: ``model`` computes as the trainer does and is loaded with the weights
        ``state``.
        """
        return cls(WholeScorer.holding(0, state, model, config), 0)

    def logprobs(self, microbatch: Sequence[Trajectory]) -> list[Floats]:
        """[L] of each trajectory: log π_ref of its sampled tokens, 0 elsewhere. They go through the model together."""
        rows = [(trajectory, trajectory.loss_mask) for trajectory in microbatch]
        tokens = sum(len(trajectory.token_ids) for trajectory in microbatch)
        return list(self._scorer.score(self._version, rows, max_tokens=max(1, tokens), replays=False).logprobs)

    def divergences(self, microbatch: Sequence[Trajectory]) -> list[float]:
        """Σ_t (log μ(y_t) − log π_ref(y_t)) over the sampled tokens of each trajectory, in nats.

        A rollout with several branches has one such sum per branch, and all count.
        """
        rows = zip(microbatch, self.logprobs(microbatch), strict=True)
        return [float((t.logprobs - row)[1:][t.loss_mask[1:]].sum(dtype=np.float64)) for t, row in rows]
