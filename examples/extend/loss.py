"""A loss: REINFORCE in which what went badly counts less. ``loss.kind = "@loss.py:Lenient"``."""

import torch
from pydantic import Field

from etude.config.section import Section
from etude.trainer.losses import LossInput, Surrogate


class LenientOptions(Section):
    """REINFORCE, lenient with what went badly."""

    negative: float = Field(default=0.5, ge=0)
    """Weight of tokens whose advantage is negative."""


class Lenient:
    Options = LenientOptions

    def __init__(self, options: LenientOptions) -> None:
        self._negative = options.negative

    def __call__(self, x: LossInput) -> Surrogate:
        advantages_N = x.tokens.advantages_N * torch.where(x.tokens.advantages_N < 0, self._negative, 1.0)
        none_N = torch.zeros_like(x.correction.masked_N)
        terms_N = x.correction.weights_N * advantages_N * x.tokens.logprobs_N
        return Surrogate(terms_N, capped_N=none_N, clipped_N=none_N)
