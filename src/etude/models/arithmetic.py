"""The protocol of a decoder's arithmetic: it separates a model's structure from how its numbers are computed.

Two implementations. :class:`~etude.models.fast.FastArithmetic` uses torch on any device, as fast as its libraries: a
row's last bits depend on the rest of the batch. :class:`~etude.models.invariant.InvariantArithmetic` computes every sum
in one fixed order: a token's bits depend only on its own past, whether it is sampled alone, in a batch, after a reused
prefix or in the trainer's forward pass.

Shape legend: N tokens, R rows (a token once per expert it is sent to), I inputs, O outputs, H hidden, E experts, k
experts per token, B sequences, Q query heads, K key/value heads, h heads of either kind, D width of a key,
W width of a value, P pages, S positions per page, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from etude.models.spec import SILU, GateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Rows sorted by expert."""

    order_R: Tensor
    """int64: sorted row r is pair ``order[r]``: slot ``order[r] % k`` of token ``order[r] // k``."""
    tokens_R: Tensor
    """int64: each sorted row's token."""
    ends_E: Tensor
    """int32: expert e's rows end before this."""


def inverse_of(order_R: Tensor) -> Tensor:
    """[R]: the sorted row of each pair of token and slot."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The packed sequences of one forward pass of the trainer: concatenated, without padding."""

    lengths: tuple[int, ...]
    """[B] tokens of each sequence, at least 1, on the host."""
    starts_B1: Tensor
    """int32 [B + 1]: sequence b has the rows ``starts[b]`` … ``starts[b + 1] − 1``."""
    positions_N: Tensor
    """int64: each token's position in its own sequence; it attends to everything up to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """The places of one step's tokens in a paged cache. Rows of one sequence are adjacent and ascend."""

    tables_BP: Tensor
    """int32: the pages of each sequence in this step, in order; entries beyond its length are arbitrary but valid."""
    sequences_N: Tensor
    """int32: each token's row of ``tables_BP``."""
    positions_N: Tensor
    """int64: each token's position; it sees all positions up to its own."""
    counts: tuple[int, ...]
    """[B] number of tokens of each sequence, on the host; ignored if there are tiles."""
    tiles_2T: Tensor | None = None
    """int32, for a CUDA graph, whose shapes are the same for all steps: each tile's first row and its number of rows,
    which are adjacent and at most those of a kernel's tile.
    """

    @property
    def singles(self) -> int:
        """Count of the sequences, from the first on, with one token in this step."""
        return next((index for index, count in enumerate(self.counts) if count != 1), len(self.counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTensors:
    """A sampling mask, on the device: row n drew from ``token_ids[offsets[n]:offsets[n + 1]]``, all if empty."""

    offsets_N1: Tensor
    """int64 [N + 1]."""
    token_ids: Tensor
    """int64, ascending in each set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """A layer's scores: their factor, their reach, and sinks that take a share of the softmax."""

    scale: float
    window: int | None = None
    """Positions that a token sees, its own among them; ``None`` is all up to it."""
    sinks_Q: Tensor | None = None
    """[Q] a score of each head that has no value (gpt-oss; after arXiv 2309.17453); not scaled."""


class Arithmetic(Protocol):
    """All computation of a decoder except indexing and addition. Tensors in, new tensors out.

    All methods except the paged ones are differentiable. An arithmetic may have a *type*: then parameters of another
    type are rounded to it at each use, and so are keys and values, so that a trainer with float32 parameters computes
    the same as an engine with bfloat16 ones.
    """

    def embed(self, token_ids_N: Tensor, weight_VH: Tensor, scale: float = 1.0) -> Tensor:
        """[N,H]: rows of the embedding, as activations, times ``scale`` in the embedding's type."""
        ...

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[N,O]: a matrix product, its sums in float32 or finer; the weight may have a narrower type than ``x``."""
        ...

    def norm(self, x: Tensor, gain: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Root-mean-square normalisation of the last axis, times ``gain`` plus ``offset``."""
        ...

    def gated(self, gate_up_NI: Tensor, gate: GateSpec = SILU) -> Tensor:
        """[N,I/2]: the gate applied to the two parts of the last axis."""
        ...

    def rotate(self, x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
        """Rotary positions by halves: x·cos + [−x₂, x₁]·sin."""
        ...

    def best(self, scores_NE: Tensor, k: int) -> Tensor:
        """[N,k] int64: the columns of the k largest scores, best first."""
        ...

    def softmax(self, scores_NE: Tensor) -> Tensor:
        """[N,E] float32."""
        ...

    def dispatch(self, experts_Nk: Tensor, experts: int) -> Dispatch:
        """Sort the pairs of token and expert by expert, stably, without waiting for the device."""
        ...

    def spread(self, x_NH: Tensor, dispatch: Dispatch) -> Tensor:
        """[R,H]: each token once per expert that it is sent to, sorted."""
        ...

    def grouped(self, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """[R,O]: each expert's rows times that expert's matrix, plus its bias."""
        ...

    def combine(self, y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
        """[N,H]: the outputs of a token's experts, weighted and summed in the order of its slots."""
        ...

    def attend_packed(
        self, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rows: PackedRows, rule: AttentionRule
    ) -> Tensor:
        """[N,Q,W]: causal attention inside each sequence. Query head i reads key head i // (Q/K)."""
        ...

    def write_pages(self, k_NKD: Tensor, v_NKW: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows) -> None:
        """Store this step's keys and values in the cache, keys [P,K,D,S] and values [P,K,S,W], rounded to its type."""
        ...

    def attend_pages(self, q_NQD: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows, rule: AttentionRule) -> Tensor:
        """[N,Q,W]: each token attends to its own sequence up to itself; this step's keys are in the cache."""
        ...

    def logprobs(
        self, logits_NV: Tensor, token_ids_N: Tensor, temperatures_N: Tensor, mask: MaskTensors | None
    ) -> Tensor:
        """[N] float32: log-probability of each token under softmax(logits / temperature), within the mask if given.

        A temperature of 0 means greedy: the logprob is 0, and so is its gradient. Differentiable.
        """
        ...


def expert_of_rows(rows: int, ends_E: Tensor) -> Tensor:
    """int64 [R]: the expert of each of ``rows`` sorted rows, without waiting for the device."""
    rows_R = torch.arange(rows, dtype=ends_E.dtype, device=ends_E.device)
    return torch.searchsorted(ends_E, rows_R, right=True).clamp(max=len(ends_E) - 1)


def packed_rows(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """The layout of packed sequences of these lengths.

    Raises ``ValueError`` without sequences or for an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)} of packed sequences: there must be some, each of at least 1 token")
    starts_B1 = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    tokens = int(starts_B1[-1])
    firsts_N = starts_B1[:-1].long().repeat_interleave(torch.tensor(lengths), output_size=tokens)
    return PackedRows(
        lengths=tuple(lengths),
        starts_B1=starts_B1.to(device),
        positions_N=(torch.arange(tokens) - firsts_N).to(device),
    )
