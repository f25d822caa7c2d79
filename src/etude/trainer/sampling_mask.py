"""Distributions that tokens were actually drawn from: temperatures and sampling masks, for the trainer's loss.

A policy is not the softmax of its logits but the distribution that its engine samples from: softmax(logits /
temperature), truncated to the set that top-k and top-p select, renormalised. Ratio, gradient and entropy have to be
those of that distribution. The set is constant: it is replayed as recorded, as in DeepSeek-V3.2's "keep sampling mask"
(arXiv 2512.02556, section 3.1), so that old and new policy are compared on one action space.

Owns gathering the sets of a micro-batch and the entropy over them, not the loss. The log-probability is in the
arithmetic, because the engine calls it, too.

Shape legend: N scored tokens of a micro-batch, V vocabulary, L tokens of a trajectory, M ids of all sets.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.models.arithmetic import MaskTensors
from etude.types import Ids, Mask, Trajectory


def gather_masks(trajectories: Sequence[Trajectory], masks: Sequence[Mask], device: torch.device) -> MaskTensors | None:
    """Gather the sampling masks of the tokens [N] that are true in ``masks`` ([L] each), trajectory by trajectory.

    The first token of a trajectory is never predicted and left out. ``None`` if no token's distribution was truncated.
    """
    sizes: list[npt.NDArray[np.int64]] = []
    ids: list[Ids] = []
    for trajectory, mask in zip(trajectories, masks, strict=True):
        chosen = np.flatnonzero(mask[1:]) + 1
        if trajectory.sampling_mask is None:
            sizes.append(np.zeros(len(chosen), np.int64))
            continue
        sizes.append(trajectory.sampling_mask.sizes[chosen])
        is_chosen = np.zeros(len(mask), bool)
        is_chosen[chosen] = True
        ids.append(trajectory.sampling_mask.token_ids[np.repeat(is_chosen, trajectory.sampling_mask.sizes)])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.zeros(0, np.int64), *sizes]))])
    if offsets[-1] == 0:
        return None
    return MaskTensors(
        offsets_N1=torch.from_numpy(offsets).to(device),
        token_ids=torch.from_numpy(np.concatenate(ids)).to(device).long(),
    )


def chosen_mask(mask: MaskTensors | None, chosen_N: Tensor) -> MaskTensors | None:
    """Select the sampling masks of the tokens that are true in ``chosen_N``."""
    if mask is None:
        return None
    sizes_N = mask.offsets_N1.diff()
    ends_n = sizes_N[chosen_N].cumsum(0)
    token_ids = mask.token_ids[chosen_N.repeat_interleave(sizes_N)]
    return MaskTensors(offsets_N1=torch.cat((ends_n.new_zeros(1), ends_n)), token_ids=token_ids)


def entropies(logits_NV: Tensor, temperatures_N: Tensor, mask: MaskTensors | None) -> Tensor:
    """[N] −Σ p ln p in nats, p = softmax(logits / temperature) over the mask if there is one; 0 for greedy tokens."""
    greedy_N = temperatures_N == 0
    heat_N = torch.where(greedy_N, 1.0, temperatures_N)
    if logits_NV.is_cuda and mask is None:
        from etude.models.kernels.gpu import vocabulary

        _, whole_N = vocabulary.logprobs_and_entropies(logits_NV, torch.zeros_like(greedy_N, dtype=torch.int64), heat_N)
        return torch.where(greedy_N, torch.zeros_like(whole_N), whole_N)
    scales_N1 = heat_N.unsqueeze(1)
    scaled_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / scales_N1
    logs_NV = scaled_NV.log_softmax(-1)
    shares_NV = logs_NV.exp()
    # not torch.special.entr: its gradient at 0 is infinite, and a product with that is NaN
    entropies_N = -(shares_NV * logs_NV.masked_fill(shares_NV == 0, 0.0)).sum(-1)
    if mask is not None:
        sizes_N = mask.offsets_N1.diff()
        entropies_N = torch.where(sizes_N > 0, _entropies_of_sets(logs_NV, sizes_N, mask.token_ids), entropies_N)
    return torch.where(greedy_N, 0.0, entropies_N)


def _entropies_of_sets(logs_NV: Tensor, sizes_N: Tensor, token_ids_M: Tensor) -> Tensor:
    """[N] entropies of the distributions truncated to their sets; meaningless for empty sets."""
    rows_M = torch.arange(len(sizes_N), device=sizes_N.device).repeat_interleave(sizes_N)
    logs_M = logs_NV[rows_M, token_ids_M]
    peaks_N = logs_NV.new_full((len(sizes_N),), -torch.inf).scatter_reduce(0, rows_M, logs_M, "amax")
    logs_M = logs_M - peaks_N[rows_M]
    masses_N = torch.zeros_like(peaks_N).index_add(0, rows_M, logs_M.exp())
    slopes_N = torch.zeros_like(peaks_N).index_add(0, rows_M, logs_M.exp() * logs_M)
    return masses_N.log() - slopes_N / masses_N
