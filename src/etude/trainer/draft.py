"""The draft head's own loss: distillation of the policy's next-token distributions, beside the policy's loss.

    hidden states of a pass ──▶ shifted by one ─────▶ draft head ──▶ its distribution of each sampled token ─┐
              └───────────────▶ the policy's own distribution of it ─────────────────────────────────────────┴─▶ KL

The head's row of a token reads the hidden state of the previous token and predicts the policy's output one token later,
as in DeepSeek-V3's multi-token prediction (arXiv 2412.19437 section 2.2, eq. 21–24). Only the target differs: not the
next token, but the policy's whole distribution, KL(policy ‖ head) at temperature 1, since that decides whether a draft
is accepted. Only sampled tokens count, because no others are drafted. No gradient reaches the policy.

Shape legend: T tokens of a micro-batch, N of them scored, H hidden, n those of a chunk.
"""

import torch
from torch import Tensor

from etude.models.arithmetic import AttentionRule, packed_rows
from etude.models.decoder import Decoder
from etude.trainer.distillation import divergences
from etude.trainer.readout import in_chunks
from etude.trainer.scores import SampledTokens


def draft_divergences(model: Decoder, tokens: SampledTokens, hidden_TH: Tensor) -> Tensor:
    """[N] nats: KL(policy ‖ draft head) at each scored token, with a gradient for the head only.

    ``hidden_TH`` are the policy's hidden states of all tokens.
    """
    hidden_TH = hidden_TH.detach()
    rows = packed_rows(tokens.lengths, hidden_TH.device)
    before_TH = hidden_TH.roll(1, 0).masked_fill((rows.positions_N == 0).unsqueeze(1), 0)

    def attend(_layer: int, q_TQD: Tensor, k_TKD: Tensor, v_TKW: Tensor, rule: AttentionRule) -> Tensor:
        return model.arithmetic.attend_packed(q_TQD, k_TKD, v_TKW, rows, rule)

    _, guessed_TH = model.guess(before_TH, tokens.token_ids_T, rows.positions_N, attend)
    places_N = tokens.places_N - 1
    (nats_N,) = in_chunks(_divergences, model, guessed_TH[places_N], hidden_TH[places_N], tokens.scored_ids_N)
    return nats_N


def _divergences(model: Decoder, guessed_nH: Tensor, hidden_nH: Tensor, ids_n: Tensor) -> tuple[Tensor]:
    with torch.no_grad():
        policy_nV = model.logits(hidden_nH)
    output_VH = model.embedding if model.head is None else model.head
    head_nV = model.arithmetic.linear(guessed_nH, output_VH.detach())
    ones_n = torch.ones(len(ids_n), device=ids_n.device)
    return (divergences(policy_nV, head_nV, ones_n, ids_n)[:, 0],)
