"""Micro-batches as tensors, and a model's scores of their sampled tokens.

    trajectories   ▒▒▒▒███▒▒██ │ ▒▒██ │ ▒▒▒▒▒███     concatenated without padding: T tokens
    scored tokens      ███  ██ │   ██ │      ███     each from the hidden state before it: N of them

Owns the transfer of trajectories to the model's device, and the forward pass with which the loss, the mismatch probe
and a reference score tokens. Does not own the use of the scores.

Shape legend: T tokens of a micro-batch, N of them scored, H hidden, V vocabulary, L tokens of a trajectory, B
trajectories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from etude.models.arithmetic import MaskTensors
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.hf import CausalModel
from etude.trainer.parallel_context import ContextParallel
from etude.trainer.readout import in_chunks
from etude.trainer.sampling_mask import chosen_mask, entropies, gather_masks
from etude.types import Floats, Ids, Mask, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The trajectories of a micro-batch on the model's device, and the indices of the scored tokens."""

    lengths: tuple[int, ...]
    """[B] tokens of each trajectory."""
    token_ids_T: Tensor
    """int64: all tokens, including context."""
    places_N: Tensor
    """int64, ascending: indices of the scored tokens in T. A trajectory's first token is never predicted, so it is not
    scored.
    """
    scored_ids_N: Tensor
    """int64: ids of the scored tokens."""
    trajectories_N: Tensor
    """int64, ascending: index of the token's trajectory in the micro-batch, 0 … B − 1."""
    engine_logprobs_N: Tensor
    """float32: log-probabilities by the engine that sampled the tokens."""
    versions_N: Tensor
    """int32: the weight version that sampled the token."""
    advantages_N: Tensor
    """float32."""
    temperatures_N: Tensor
    """float32; 0: sampled greedily."""
    sampling_mask: MaskTensors | None
    """The sets that tokens were drawn from; ``None`` if none was truncated."""
    old_logprobs_N: Tensor | None = None
    """float32: log-probabilities by the trainer with the weights that sampled; ``None`` if not scored."""
    reference_logprobs_N: Tensor | None = None
    """float32: log-probabilities by the reference; ``None`` if not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of sampled tokens by a model, under the distribution that they were sampled from."""

    logprobs_N: Tensor
    """With gradient."""
    entropies_N: Tensor
    """Nats, with gradient if requested."""
    hidden_TH: Tensor | None = None
    """Hidden states of all tokens; ``None`` with context parallelism."""


def sampled_tokens(trajectories: Sequence[Trajectory], masks: Sequence[Mask], device: torch.device) -> SampledTokens:
    """Gather the tokens that are true in ``masks`` ([L] each), trajectory by trajectory, with their records.

    Without trajectories, the result is one token that is not scored: a rank without work still has to take part in the
    collectives.
    """
    if not trajectories:
        return _nothing(device)
    masks = [_predicted(mask) for mask in masks]

    def chosen(arrays: Sequence[Floats] | Sequence[Ids]) -> Tensor:
        return torch.from_numpy(np.concatenate([x[mask] for x, mask in zip(arrays, masks, strict=True)])).to(device)

    def scored(arrays: Sequence[Floats | None]) -> Tensor | None:
        present = [array for array in arrays if array is not None]
        return chosen(present) if len(present) == len(arrays) else None

    counts = torch.tensor([int(mask.sum()) for mask in masks])
    return SampledTokens(
        lengths=tuple(len(mask) for mask in masks),
        token_ids_T=torch.from_numpy(np.concatenate([t.token_ids for t in trajectories])).to(device).long(),
        scored_ids_N=chosen([t.token_ids for t in trajectories]).long(),
        places_N=torch.from_numpy(np.flatnonzero(np.concatenate(masks))).to(device),
        trajectories_N=torch.arange(len(masks)).repeat_interleave(counts).to(device),
        engine_logprobs_N=chosen([t.logprobs for t in trajectories]),
        versions_N=chosen([t.versions for t in trajectories]),
        advantages_N=chosen([t.advantages for t in trajectories]),
        temperatures_N=chosen([t.temperatures for t in trajectories]),
        sampling_mask=gather_masks(trajectories, masks, device),
        old_logprobs_N=scored([t.old_logprobs for t in trajectories]),
        reference_logprobs_N=scored([t.reference_logprobs for t in trajectories]),
    )


def score(
    model: CausalModel,
    tokens: SampledTokens,
    routing: Routing | None = None,
    context: ContextParallel | None = None,
    *,
    differentiate_entropies: bool = False,
) -> Scores:
    """One forward pass: log-probabilities of the scored tokens, with gradient, and the entropies of the distributions
    that they were sampled from.

    Tokens that were sampled greedily have logprob and entropy 0 and no gradient. ``routing`` covers all T tokens. With
    a ``context``, each of its ranks scores the tokens that it computes, and all of them get all scores.
    """
    if context is not None:
        return _score_in_parallel(model, tokens, routing, context, differentiate_entropies=differentiate_entropies)
    hidden_TH = model.forward_packed(tokens.token_ids_T, tokens.lengths, routing)
    read = partial(_scores, differentiate_entropies=differentiate_entropies)
    columns = (tokens.scored_ids_N, tokens.temperatures_N, tokens.sampling_mask)
    logprobs_N, entropies_N = in_chunks(read, model, hidden_TH[tokens.places_N - 1], *columns)
    return Scores(logprobs_N=logprobs_N, entropies_N=entropies_N, hidden_TH=hidden_TH)


def hidden_before(
    model: CausalModel,
    token_ids_T: Tensor,
    lengths: Sequence[int],
    places_N: Tensor,
    routing: Routing | None = None,
    context: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(hidden states [n,H] that predict the tokens at ``places_N``, int64 [N] rank that has the state of each token).
    Without a ``context`` this process has all of them, and the second result is ``None``.
    """
    if context is None:
        return model.forward_packed(token_ids_T, lengths, routing)[places_N - 1], None
    assert isinstance(model, Decoder), "parallel.cp is refused with the recipe"
    hidden_tH, own_t = context.hidden(model, token_ids_T, lengths, routing)
    owners_N = context.owners(lengths).to(own_t.device)[places_N - 1]
    mine_N = owners_N == context.rank
    return hidden_tH[torch.searchsorted(own_t, places_N[mine_N] - 1)], owners_N


def _score_in_parallel(
    model: CausalModel,
    tokens: SampledTokens,
    routing: Routing | None,
    context: ContextParallel,
    *,
    differentiate_entropies: bool,
) -> Scores:
    hidden_nH, owners_N = hidden_before(model, tokens.token_ids_T, tokens.lengths, tokens.places_N, routing, context)
    assert owners_N is not None
    mine_N = owners_N == context.rank
    read = partial(_scores, differentiate_entropies=differentiate_entropies)
    chosen = chosen_mask(tokens.sampling_mask, mine_N)
    columns = (tokens.scored_ids_N[mine_N], tokens.temperatures_N[mine_N], chosen)
    logprobs_n, entropies_n = in_chunks(read, model, hidden_nH, *columns)
    return Scores(
        logprobs_N=context.gathered(logprobs_n, owners_N), entropies_N=context.gathered(entropies_n, owners_N)
    )


def sampled_logprobs(model: CausalModel, tokens: SampledTokens, routing: Routing | None = None) -> Tensor:
    """[N] float32: only the log-probabilities of :func:`score`."""
    hidden_NH, _ = hidden_before(model, tokens.token_ids_T, tokens.lengths, tokens.places_N, routing)
    columns = (tokens.scored_ids_N, tokens.temperatures_N, tokens.sampling_mask)
    (logprobs_N,) = in_chunks(_logprobs, model, hidden_NH, *columns)
    return logprobs_N


def by_trajectory(values_N: Tensor, masks: Sequence[Mask]) -> list[Floats]:
    """[L] of each trajectory: the values of the tokens scored by these ``masks``, 0 elsewhere."""
    masks = [_predicted(mask) for mask in masks]
    ends = np.cumsum([int(mask.sum()) for mask in masks])
    scores = [np.zeros(len(mask), np.float32) for mask in masks]
    for row, mask, own in zip(scores, masks, np.split(values_N.cpu().numpy(), ends[:-1]), strict=True):
        row[mask] = own
    return scores


def _logprobs(
    model: CausalModel, hidden_nH: Tensor, ids_n: Tensor, temperatures_n: Tensor, mask: MaskTensors | None
) -> tuple[Tensor]:
    return (model.arithmetic.logprobs(model.logits(hidden_nH), ids_n, temperatures_n, mask),)


def _scores(
    model: CausalModel,
    hidden_nH: Tensor,
    ids_n: Tensor,
    temperatures_n: Tensor,
    mask: MaskTensors | None,
    *,
    differentiate_entropies: bool,
) -> tuple[Tensor, Tensor]:
    logits_nV = model.logits(hidden_nH)
    logprobs_n = model.arithmetic.logprobs(logits_nV, ids_n, temperatures_n, mask)
    entropy_logits_nV = logits_nV if differentiate_entropies else logits_nV.detach()
    return logprobs_n, entropies(entropy_logits_nV, temperatures_n, mask)


def _predicted(mask_L: Mask) -> Mask:
    """[L] the same mask with the first token excluded."""
    return np.append(np.False_, mask_L[1:])


def _nothing(device: torch.device) -> SampledTokens:
    none = torch.zeros(0, device=device)
    return SampledTokens(
        lengths=(1,),
        token_ids_T=torch.zeros(1, dtype=torch.int64, device=device),
        places_N=none.long(),
        scored_ids_N=none.long(),
        trajectories_N=none.long(),
        engine_logprobs_N=none,
        versions_N=none.int(),
        advantages_N=none,
        temperatures_N=none,
        sampling_mask=None,
    )
