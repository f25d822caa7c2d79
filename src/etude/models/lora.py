"""Low-rank adapters (LoRA, arXiv 2106.09685): y = Wx + scale · B(Ax) with a frozen W, for experts as for any matrix.

The adapter of a product is never merged into W while a model is trained or served: both sides compute this function
with the same :class:`~etude.models.arithmetic.Arithmetic`, so that they agree as without an adapter. W may combine
several projections (``qkv``); each of them has its own A and B, as in other libraries. Owns the product and the
assignment of adapters to rows. :mod:`etude.models.adapters` has the products of a model and the names of their factors.

Shape legend: N rows, I inputs, O outputs, P projections in W, r rank, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from etude.models.arithmetic import Arithmetic

RANK_STEP = 8
"""Granularity of ranks: the minimum that grouped products of experts support in every type on a GPU."""


@final
class LowRank(nn.Module):
    """The factors of one product: A [P·r,I] and B [O,r], with a leading E for experts."""

    def __init__(self, a: Tensor, b: Tensor, parts: Sequence[int], scale: float) -> None:
        """``parts`` are the outputs of each projection, O in total."""
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.parts = tuple(parts)
        self.scale = scale

    @classmethod
    def zero(cls, weight: Tensor, parts: Sequence[int], rank: int, scale: float, dtype: torch.dtype) -> "LowRank":
        """Factors that change nothing, for a ``weight`` [O,I] or [E,O,I], on its device."""
        *experts, outputs, inputs = weight.shape
        a = torch.zeros(*experts, len(parts) * rank, inputs, dtype=dtype, device=weight.device)
        return cls(a, torch.zeros(*experts, outputs, rank, dtype=dtype, device=weight.device), parts, scale)

    @property
    def rank(self) -> int:
        """R."""
        return self.b.shape[-1]

    def initialise(self, generator: torch.Generator) -> None:
        """A is drawn uniformly from ±1/√I, as PEFT's default does; B is 0, so the model starts as its base."""
        bound = 1 / math.sqrt(self.a.shape[-1])
        with torch.no_grad():
            self.a.copy_(torch.empty(self.a.shape).uniform_(-bound, bound, generator=generator))
            self.b.zero_()

    def forward(self, x_NI: Tensor, arithmetic: Arithmetic, ends_E: Tensor | None = None) -> Tensor:
        """[N,O] scale · B(Ax); ``ends_E`` has the end of each expert's rows."""

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return arithmetic.linear(x, weight) if ends_E is None else arithmetic.grouped(x, ends_E, weight)

        low = product(x_NI, self.a).split(self.rank, dim=-1)
        ups = self.b.split(self.parts, dim=-2)
        out = [product(one.contiguous(), up) for one, up in zip(low, ups, strict=True)]
        return self.scale * (out[0] if len(out) == 1 else torch.cat(out, dim=-1))

    def merged(self) -> Tensor:
        """[O,I] or [E,O,I]: the change of W after merging, in float32."""
        a, b = self.a.detach().float().split(self.rank, dim=-2), self.b.detach().float().split(self.parts, dim=-2)
        return self.scale * torch.cat([up @ down for down, up in zip(a, b, strict=True)], dim=-2)


Factors: TypeAlias = Mapping[str, LowRank]
"""Key of a site → the adapter's factors there; other sites are absent."""


@dataclass(slots=True)
class Selection:
    """The adapters of the rows of the next pass: pairs of an adapter and a mask, bool [N], of its rows.

    An adapter of ``None`` is the model's own; a mask of ``None`` is for all rows. Rows of no pair get the bare base.
    """

    parts: tuple[tuple[Factors | None, Tensor | None], ...] = field(default=((None, None),))

    @property
    def is_own(self) -> bool:
        """True if all rows have the model's own adapter."""
        factors, mask = self.parts[0]
        return factors is None and mask is None


@final
class LoraSite(nn.Module):
    """The adapters of one frozen product: the model's own factors, and others' while they are selected."""

    def __init__(self, key: str, own: LowRank, selection: Selection) -> None:
        super().__init__()
        self.key = key
        self.own = own
        self._selection = selection

    def forward(
        self,
        y_NO: Tensor,
        x_NI: Tensor,
        arithmetic: Arithmetic,
        ends_E: Tensor | None = None,
        tokens_N: Tensor | None = None,
    ) -> Tensor:
        """[N,O]: Wx plus the output of each row's adapter. ``tokens_N`` has the token of each row of an expert. With
        several adapters, all rows go through all of them and each keeps its own result: nothing waits for the device.
        """
        for factors, mask in self._selection.parts:
            low_rank = self.own if factors is None else factors.get(self.key)
            if low_rank is None:
                continue
            adapted_NO = y_NO + low_rank(x_NI, arithmetic, ends_E)
            if mask is None:
                y_NO = adapted_NO
            else:
                rows_N = mask if tokens_N is None else mask[tokens_N]
                y_NO = torch.where(rows_N.unsqueeze(-1), adapted_NO, y_NO)
        return y_NO


def linear(
    arithmetic: Arithmetic, x_NI: Tensor, weight_OI: Tensor, site: LoraSite | None, bias_O: Tensor | None = None
) -> Tensor:
    """[N,O]: a matrix product with its adapter, if it has one."""
    y_NO = arithmetic.linear(x_NI, weight_OI, bias_O)
    if site is None:
        return y_NO
    adapted_NO: Tensor = site(y_NO, x_NI, arithmetic)
    return adapted_NO


@final
class Adapters(nn.Module):
    """The facts about a model's adapter, in addition to its factors: published with them, and never trained."""

    base: Tensor
    """uint8 [16]: the state digest of the frozen weights."""
    scale: Tensor
    """float32 [1]."""

    def __init__(self, base: bytes, scale: float, device: torch.device) -> None:
        super().__init__()
        self.selection = Selection()
        self.register_buffer("base", torch.tensor([*base], dtype=torch.uint8, device=device))
        self.register_buffer("scale", torch.tensor([scale], device=device))

    def select(self, runs: Sequence[tuple[Factors | None, int]]) -> None:
        """Set the adapters of the rows of the next pass: for each run of rows its adapter and its length.

        An empty adapter is the bare base.
        """
        chosen = {id(factors): factors for factors, _ in runs}
        if len(chosen) == 1:
            self.selection.parts = tuple((one, None) for one in chosen.values())
            return
        counts = torch.tensor([count for _, count in runs])
        self.selection.parts = tuple(
            (factors, _rows([id(one) == key for one, _ in runs], counts).to(self.base.device))
            for key, factors in chosen.items()
        )


def _rows(flags: Sequence[bool], counts: Tensor) -> Tensor:
    return torch.tensor(flags).repeat_interleave(counts)
