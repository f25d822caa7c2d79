"""Log-probabilities of a prompt's own tokens, gathered while the prompt is read.

    hidden states of a step ──▶ those before a scored token ──▶ logits, some rows at a time ──▶ its index in [P]

Owns the scores from hidden states. The scheduler ensures that the tokens before scored ones are computed even if they
are in the cache.

Shape legend: P tokens of a prompt, N of them read in a step, K likeliest ones of a place, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from etude.models.decoder import Decoder
from etude.types import Floats, Ids

SCORED_ROWS = 256
"""Rows of logits at a time: those of a whole step are gigabytes for a large vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, each given all before it, at temperature 1."""

    logprobs_P: Floats
    """NaN for the first token, which is not predicted, and for tokens that were not requested."""
    top_ids_PK: Ids
    """The likeliest tokens at each position, best first; 0 where ``logprobs_P`` is NaN."""
    top_logprobs_PK: Floats
    """Log-probabilities of these; NaN where ``logprobs_P`` is."""


@final
class PromptScorer:
    """Scores one prompt chunk by chunk. Tokens that are read again, perhaps with other weights, are scored again."""

    def __init__(self, prompt_ids: Sequence[int], *, first: int, top_k: int) -> None:
        """Score the tokens from index ``first`` on, with the ``top_k`` likeliest ones at each position."""
        self._prompt_ids = torch.tensor(prompt_ids)
        self.first = first
        self._top_k = top_k
        shape = (len(prompt_ids), top_k)
        self.scores = PromptScores(
            logprobs_P=np.full(len(prompt_ids), np.nan, np.float32),
            top_ids_PK=np.zeros(shape, np.int32),
            top_logprobs_PK=np.full(shape, np.nan, np.float32),
        )

    def add(self, model: Decoder, hidden_NH: Tensor, start: int) -> None:
        """Score the tokens predicted from the hidden states of the prompt's tokens from index ``start`` on."""
        end = min(start + len(hidden_NH), len(self._prompt_ids) - 1)
        for row in range(max(start, self.first - 1), end, SCORED_ROWS):
            stop = min(row + SCORED_ROWS, end)
            logits_NV = model.logits(hidden_NH[row - start : stop - start])
            places = slice(row + 1, stop + 1)
            ids_N = self._prompt_ids[places].to(logits_NV.device)
            self.scores.logprobs_P[places] = _logprobs(model, logits_NV, ids_N)
            if self._top_k:
                top_NK = logits_NV.topk(self._top_k).indices
                self.scores.top_ids_PK[places] = top_NK.cpu().numpy()
                columns = [_logprobs(model, logits_NV, ids) for ids in top_NK.unbind(1)]
                self.scores.top_logprobs_PK[places] = np.stack(columns, 1)


def _logprobs(model: Decoder, logits_NV: Tensor, ids_N: Tensor) -> Floats:
    """[N] by the function that also samples and trains."""
    ones_N = torch.ones(len(ids_N), device=ids_N.device)
    logprobs: Floats = model.arithmetic.logprobs(logits_NV, ids_N.contiguous(), ones_N, None).cpu().numpy()
    return logprobs
