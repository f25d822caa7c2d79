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
from typing import Self

import numpy as np
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.models.decoder import Decoder
from etude.trainer.version_scores import VersionScorer, WholeScorer
from etude.types import Floats, Trajectory


class Reference:
    """A frozen reference policy that scores sampled tokens."""

    def __init__(self, scorer: VersionScorer, version: int) -> None:
        """``scorer`` remembers ``version``, which is the reference, for good."""
        self._scorer = scorer
        self._version = version

    @classmethod
    def alone(cls, model: Decoder, state: Mapping[str, Tensor], config: NumericsConfig) -> Self:
        """The reference of one process: ``model`` computes as the trainer does and gets the weights ``state``."""
        return cls(WholeScorer.holding(0, state, model, config), 0)

    def logprobs(self, microbatch: Sequence[Trajectory]) -> list[Floats]:
        """[L] of each trajectory: log π_ref of its sampled tokens, 0 elsewhere. They go through the model together."""
        rows = [(trajectory, trajectory.loss_mask) for trajectory in microbatch]
        tokens = sum(len(trajectory.token_ids) for trajectory in microbatch)
        return list(self._scorer.score(self._version, rows, max_tokens=max(1, tokens), replays=False).logprobs)

    def divergences(self, microbatch: Sequence[Trajectory]) -> list[float]:
        """Σ_t (log μ(y_t) − log π_ref(y_t)) over the sampled tokens of each trajectory, in nats.

        A rollout with several branches has one such sum for each, and all count.
        """
        rows = zip(microbatch, self.logprobs(microbatch), strict=True)
        return [float((t.logprobs - row)[1:][t.loss_mask[1:]].sum(dtype=np.float64)) for t, row in rows]
