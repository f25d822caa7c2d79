"""Context parallelism: each rank computes some tokens of a sequence, with keys and values gathered from all.

    sequence of L tokens, 2 ranks, 4 chunks      0 1 2 3      rank 0 has chunks 0 and 3, rank 1 has 1 and 2

A token attends to its past, so late chunks cost more than early ones; paired like this (zig-zag), all ranks compute the
same number of pairs. Keys and values are gathered layer by layer, and gradients flow back by the reverse operation.
With latent attention the latent vector is gathered, one key head for all heads (Composer 2 report: all-gather the
latent keys and values, 2·C chunks, rank i gets chunks i and 2C − 1 − i).

Owns the assignment of tokens to ranks and the attention that this requires. The model is called as usual, with another
``attend``. The rest of a layer works on single tokens, so it does not change.

Shape legend: N tokens of all packed sequences, n tokens of this rank, M the most that any rank has, C ranks, H hidden,
Q query heads, K key heads, D width of a key, W width of a value, S sparse layers, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from etude.models.arithmetic import AttentionRule
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.fast import attend_last
from etude.types import NO_ROUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextChunk:
    """Consecutive tokens of one sequence; all three fields are token indices in the whole pack."""

    sequence: int
    """Start of its sequence: the first token that it attends to."""
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def zigzag(lengths: Sequence[int], ranks: int) -> list[list[ContextChunk]]:
    """For each rank its chunks of packed sequences of ``lengths``, in the order of tokens; no chunk is empty.

    Chunks of a sequence differ by at most one token, so ranks differ by at most two per sequence. Every second sequence
    is assigned in reverse, so that the remainders of many short ones do not fall to the same ranks.
    """
    shares: list[list[ContextChunk]] = [[] for _ in range(ranks)]
    for index, (first, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        edges = [first + part * length // (2 * ranks) for part in range(2 * ranks + 1)]
        for part in range(2 * ranks):
            owner = min(part, 2 * ranks - 1 - part)
            chunk = ContextChunk(sequence=first, start=edges[part], end=edges[part + 1])
            if len(chunk):
                shares[owner if index % 2 == 0 else ranks - 1 - owner].append(chunk)
    return shares


@final
class ContextParallel:
    """Splits packed sequences over the ranks of a mesh of one axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    @property
    def rank(self) -> int:
        """Index of this process among them."""
        return self._mesh.get_local_rank()

    def owners(self, lengths: Sequence[int]) -> Tensor:
        """int64 [N] on the CPU: the rank that computes each token, 0 … C − 1."""
        owners_N = torch.empty(sum(lengths), dtype=torch.int64)
        for rank, share in enumerate(zigzag(lengths, self._mesh.size())):
            owners_N[_tokens(share)] = rank
        return owners_N

    def hidden(
        self, model: Decoder, token_ids_N: Tensor, lengths: Sequence[int], routing: Routing | None = None
    ) -> tuple[Tensor, Tensor]:
        """(hidden states [n,H] of this rank's tokens, int64 [n] their indices among the N tokens, ascending).

        Computes what :meth:`Decoder.forward_packed` computes for all tokens. Every rank of the mesh calls it with the
        same pack; a ``routing`` for the pack is restricted to this rank's tokens. n may be 0; the result still has a
        gradient.
        """
        device = token_ids_N.device
        shares = zigzag(lengths, self._mesh.size())
        mine = shares[self._mesh.get_local_rank()]
        padded = max(1, *(sum(map(len, share)) for share in shares))
        own_n = _tokens(mine).to(device)
        firsts_n = torch.cat([own_n.new_zeros(0), *(own_n.new_full((len(c),), c.sequence) for c in mine)])
        ids_M = functional.pad(token_ids_N[own_n], (0, padded - len(own_n)))
        positions_M = functional.pad(own_n - firsts_n, (0, padded - len(own_n)))
        attend = _Gathered(self._mesh, model, shares, padded, device)
        if routing is not None and routing.replay_NSk is not None:
            missing = (0, 0, 0, 0, 0, padded - len(own_n))
            routing.replay_NSk = functional.pad(routing.replay_NSk[own_n], missing, value=NO_ROUTE)
        hidden_MH: Tensor = model(ids_M, positions_M, attend, routing)
        return hidden_MH[: len(own_n)], own_n

    def gathered(self, x_n: Tensor, owners_K: Tensor) -> Tensor:
        """[K,…] values on all ranks, gathered from the values ``x_n`` that each rank owns, in their order.

        The gradient flows only to this rank's own values: all ranks must compute the same from the gathered result.
        """
        counts_C = torch.bincount(owners_K, minlength=self._mesh.size())
        most = int(counts_C.max())
        if most == 0:
            return x_n
        order_K = owners_K.argsort(stable=True)
        starts_C = counts_C.cumsum(0) - counts_C
        places_K = torch.empty_like(order_K)
        ranks_K = owners_K[order_K]
        places_K[order_K] = ranks_K * most + torch.arange(len(order_K), device=x_n.device) - starts_C[ranks_K]
        padded = functional.pad(x_n, (0, 0) * (x_n.ndim - 1) + (0, most - len(x_n)))
        every: Tensor = _Shared.apply(padded, self._mesh.get_group())  # type: ignore[no-untyped-call]
        return every[places_K]


@final
class _Gathered:
    """An ``Attend`` with this rank's queries and all ranks' keys."""

    def __init__(
        self,
        mesh: DeviceMesh,
        model: Decoder,
        shares: Sequence[Sequence[ContextChunk]],
        padded: int,
        device: torch.device,
    ) -> None:
        self._mesh = mesh
        self._value_width = model.spec.attention.value_width
        self._values_in_keys = model.spec.attention.values_in_keys
        self._mine = shares[mesh.get_local_rank()]
        self._padded = padded
        # Index of each of the N tokens in the gathered tensor: rank after rank, each padded to M.
        tokens = [_tokens(share) for share in shares]
        self._places_N = torch.empty(sum(map(len, tokens)), dtype=torch.int64)
        for rank, own_n in enumerate(tokens):
            self._places_N[own_n] = rank * padded + torch.arange(len(own_n))
        self._places_N = self._places_N.to(device)

    def __call__(self, _layer: int, q_MQD: Tensor, k_MKD: Tensor, v_MKW: Tensor, rule: AttentionRule) -> Tensor:
        """[M,Q,W]: every chunk attends to its sequence up to itself; 0 for padding."""
        k_NKD = self._all(k_MKD)
        v_NKW = k_NKD[..., : self._value_width] if self._values_in_keys else self._all(v_MKW)
        parts, row = [], 0
        for chunk in self._mine:
            seen = slice(chunk.sequence, chunk.end)
            parts.append(attend_tail(q_MQD[row : row + len(chunk)], k_NKD[seen], v_NKW[seen], rule))
            row += len(chunk)
        missing = self._padded - row
        # A rank without tokens still takes part in the backward pass: other ranks wait for its gradients.
        nothing = q_MQD[:0].sum() + k_NKD[:0].sum() + v_NKW[:0].sum()
        nothing_QW = nothing.expand(missing, q_MQD.shape[1], self._value_width)
        return torch.cat([*parts, nothing_QW])

    def _all(self, x_MKD: Tensor) -> Tensor:
        """[N,K,D] of all ranks, in the order of tokens."""
        gathered: Tensor = _AllGather.apply(x_MKD, self._mesh.get_group())  # type: ignore[no-untyped-call]
        return gathered[self._places_N]


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[M,…] of every rank → [C·M,…] of all. It uses lists of views, because calls for single tensors have a different
    name in each torch version.
    """
    every = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather(list(every.chunk(group.size())), x.contiguous(), group)
    return every


class _AllGather(torch.autograd.Function):
    """[M,…] of every rank → [C·M,…] of all; gradients are summed on the rank of origin, in float32."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        wide = gradient.contiguous().to(torch.promote_types(gradient.dtype, torch.float32))
        own = wide.new_empty(len(wide) // group.size(), *wide.shape[1:])
        dist.reduce_scatter(own, list(wide.chunk(group.size())), group=group)
        return own.to(gradient.dtype), None


class _Shared(torch.autograd.Function):
    """[M,…] of every rank → [C·M,…] of all. All ranks compute the same from it, so each keeps the gradient of its own
    part.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        return gradient.chunk(group.size())[group.rank()], None


def attend_tail(q_nQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rule: AttentionRule) -> Tensor:
    """[n,Q,W]: causal attention of queries that are the last n of N tokens. Query head i reads key head i // (Q/K)."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_nQD, k_NKD, v_NKW))
    if rule.sinks_Q is not None or (rule.window is not None and rule.window < k.shape[-2]):
        return attend_last(q, k, v, rule).squeeze(0).transpose(0, 1)
    from torch.nn.attention.bias import (
        causal_lower_right,
    )  # loads torch's compiler: 0.8 s per process

    mask = causal_lower_right(q.shape[-2], k.shape[-2])
    grouped = q.shape[1] != k.shape[1]
    out_1QnW = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=grouped)
    return out_1QnW.squeeze(0).transpose(0, 1)


def _tokens(share: Sequence[ContextChunk]) -> Tensor:
    """int64 [n]: the tokens of some chunks."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(c.start, c.end) for c in share)])
