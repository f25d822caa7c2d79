"""The draft head: one more block after a decoder, which predicts the token after the next from the decoder's state.

    hidden state of token i − 1 ──▶ norm ─┐
                                          ├──▶ join ──▶ one transformer block ──▶ norm ──▶ the decoder's output matrix
    embedding of token i ─────────▶ norm ─┘                    │
                                                               └──▶ as the hidden state of token i: drafts one more
                                                               token

DeepSeek-V3's module for multi-token prediction (arXiv 2412.19437 section 2.2, eq. 21–23), which shares its embedding
and its output matrix with the decoder. A row has the position of its token: it depends on that token and earlier ones,
so its keys are one more layer in the pages of the decoder's cache, and a shared prefix includes them. A sequence's
first token has no previous hidden state; zeros replace it.

Owns the head's own weights and its computation; :mod:`etude.engines.native.drafting` owns its use for sampling,
:mod:`etude.trainer.draft` its training.

Shape legend: N tokens, H hidden.
"""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from etude.models.arithmetic import Arithmetic
from etude.models.attention import Attend, Rotation, gains
from etude.models.spec import ModelSpec


def block_spec(spec: ModelSpec) -> ModelSpec:
    """The spec whose last block is the draft head's: sparse, or with a window, if the decoder's last block is."""
    last = spec.layers - 1
    sparse = (*spec.sparse_layers, spec.layers) if last in spec.sparse_layers else spec.sparse_layers
    window = spec.window
    if window is not None and last in window.layers:
        window = replace(window, layers=(*window.layers, spec.layers))
    return replace(spec, layers=spec.layers + 1, sparse_layers=sparse, window=window, draft=False)


@final
class DraftHead(nn.Module):
    """The weights of a draft head around a block with the spec of :func:`block_spec`."""

    def __init__(self, spec: ModelSpec, block: nn.Module) -> None:
        super().__init__()
        self._eps, self._offset = spec.norm_eps, spec.gain_offset
        self.token_gain = nn.Parameter(gains(spec, spec.hidden_size))
        self.hidden_gain = nn.Parameter(gains(spec, spec.hidden_size))
        self.join = nn.Parameter(torch.empty(spec.hidden_size, 2 * spec.hidden_size))
        self.block = block
        self.gain = nn.Parameter(gains(spec, spec.hidden_size))

    def forward(
        self, hidden_NH: Tensor, embedded_NH: Tensor, arithmetic: Arithmetic, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(hidden states [N,H] for the next draft, the same normalised for the output matrix) of N rows.

        ``hidden_NH`` are the previous tokens' hidden states, the decoder's or this head's; ``embedded_NH`` the
        embeddings.
        """
        both_NI = torch.cat(
            (
                arithmetic.norm(embedded_NH, self.token_gain, self._eps, self._offset),
                arithmetic.norm(hidden_NH, self.hidden_gain, self._eps, self._offset),
            ),
            dim=-1,
        )
        # The engine's routes are those of the decoder: a sparse block of a head chooses for itself.
        x_NH: Tensor = self.block(arithmetic.linear(both_NI, self.join), arithmetic, rotation, attend, None)
        return x_NH, arithmetic.norm(x_NH, self.gain, self._eps, self._offset)
