"""Flash attention over packed sequences, written out: torch has none for CPUs.

Shape legend: N tokens, Q query heads, K key heads, D width of a head, T tokens of one sequence.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor


def attend(q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor, starts: Tensor, scale: float) -> Tensor:
    """[N,Q,D]: causal attention inside each sequence, computed in float32 and rounded once."""
    parts = [_weights(q, k, scale) @ v for q, k, v in _sequences((q_NQD, k_NKD, v_NKD), starts)]
    return torch.cat(parts, 1).transpose(0, 1).to(q_NQD.dtype)


def gradients(out_NQD: Tensor, heads: Sequence[Tensor], starts: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given that of the attended values."""
    groups, parts = heads[0].shape[1] // heads[1].shape[1], list[tuple[Tensor, Tensor, Tensor]]()
    for slope, q, k, v in _sequences((out_NQD, *heads), starts):
        weights = _weights(q, k, scale)
        inner = slope @ v.mT
        scores = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
        shared = [x.unflatten(0, (-1, groups)).sum(1) for x in (scores.mT @ q, weights.mT @ slope)]
        parts.append((scores @ k, shared[0], shared[1]))
    of_q, of_k, of_v = (torch.cat(part, 1).transpose(0, 1).to(heads[0].dtype) for part in zip(*parts, strict=True))
    return of_q, of_k, of_v


def _sequences(tensors: Sequence[Tensor], starts: Tensor) -> Iterator[list[Tensor]]:
    """The heads of each sequence [Q,T,D] in float32, key heads once per query head."""
    heads = max(tensor.shape[1] for tensor in tensors)
    wide = [tensor.float().repeat_interleave(heads // tensor.shape[1], 1).transpose(0, 1) for tensor in tensors]
    for start, end in pairwise(starts.tolist()):
        yield [tensor[:, start:end] for tensor in wide]


def _weights(q_QTD: Tensor, k_QTD: Tensor, scale: float) -> Tensor:
    """[Q,T,T]."""
    scores = q_QTD @ k_QTD.mT * scale
    return scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf).softmax(-1)
