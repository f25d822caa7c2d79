"""Small steps of a decoder on a CPU, with explicit gradients: as few passes over memory as torch's kernels allow.

The same functions as in :mod:`etude.models.kernels.gpu.fused`. What autograd derives by itself takes two to three times
as long: it scatters gradients row by row where they can be gathered, joins halves that were never apart, and writes
each product to memory before the next one reads it.

Shape legend: N tokens, H hidden, h heads, D width of a head, I inner width, k experts per token, R rows (a token once
per expert it is sent to), O width of the last axis.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from etude.models.arithmetic import Dispatch, inverse_of

BLOCK_ROWS = 1024
"""Rows of a block: a megabyte where a row has 256 numbers."""


def norm(x: Tensor, gain_O: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation of the last axis times ``gain``, in float32. Differentiable."""
    scaled: Tensor = _NormStep.apply(x, gain_O, eps)  # type: ignore[no-untyped-call]
    return scaled


def rotate(x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
    """[N,h,D] rotary positions by halves: x·cos + [−x₂, x₁]·sin, both tables rounded to the type of ``x``.

    Differentiable in ``x``. The second halves of the tables are their first.
    """
    rotated_NhD: Tensor = _RotateStep.apply(x_NhD, cosines_ND, sines_ND)  # type: ignore[no-untyped-call]
    return rotated_NhD


def gated(gate_up_NI: Tensor) -> Tensor:
    """[N,I/2]: silu of the first half times the second half of the last axis. Differentiable."""
    product_NI: Tensor = _GateStep.apply(gate_up_NI)  # type: ignore[no-untyped-call]
    return product_NI


def spread(x_NH: Tensor, dispatch: Dispatch) -> Tensor:
    """[R,H]: each row's token. Differentiable: each token's rows are added up in the order of its slots."""
    rows_RH: Tensor = _SpreadStep.apply(x_NH, dispatch.tokens_R, dispatch.order_R)  # type: ignore[no-untyped-call]
    return rows_RH


def combine(y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
    """[N,H]: the rows of each token times its gates, added up in float32 slot by slot. Differentiable."""
    out_NH: Tensor = _CombineStep.apply(y_RH, order_R, gates_Nk)  # type: ignore[no-untyped-call]
    return out_NH


class _NormStep(Function):
    """With n = x / rms(x), the gradient of x is (g·gain − n · mean(g·gain·n)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_O: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        normed: Tensor = x * inverse
        ctx.save_for_backward(normed, gain_O, inverse)
        return normed * gain_O

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normed, gain_O, inverse = ctx.saved_tensors
        products = gradient * normed
        of_gain_O = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_gain_O, None
        averages = (products @ gain_O).div_(len(gain_O)).unsqueeze(-1)
        of_x = (gradient * gain_O).addcmul_(normed, averages, value=-1).mul_(inverse)
        return of_x, of_gain_O, None


class _RotateStep(Function):
    @staticmethod
    def forward(ctx: Any, x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cosines_ND, sines_ND)
        return _turned(x_NhD, cosines_ND, sines_ND)

    @staticmethod
    def backward(ctx: Any, gradient_NhD: Tensor) -> tuple[Tensor, None, None]:
        cosines_ND, sines_ND = ctx.saved_tensors
        return _turned(gradient_NhD, cosines_ND, -sines_ND), None, None


class _GateStep(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_NI)
        gate_NI, up_NI = gate_up_NI.chunk(2, -1)
        out_NI = torch.empty_like(gate_NI, memory_format=torch.contiguous_format)
        for rows in _blocks(len(out_NI)):
            torch.mul(functional.silu(gate_NI[rows]), up_NI[rows], out=out_NI[rows])
        return out_NI

    @staticmethod
    def backward(ctx: Any, gradient_NI: Tensor) -> Tensor:
        (gate_up_NI,) = ctx.saved_tensors
        gate_NI, up_NI = gate_up_NI.chunk(2, -1)
        out_NI = torch.empty_like(gate_up_NI, memory_format=torch.contiguous_format)
        of_gate_NI, of_up_NI = out_NI.chunk(2, -1)
        for rows in _blocks(len(out_NI)):
            gate, gradient = gate_NI[rows], gradient_NI[rows]
            torch.mul(gradient, functional.silu(gate), out=of_up_NI[rows])
            torch.ops.aten.silu_backward.grad_input(gradient * up_NI[rows], gate, grad_input=of_gate_NI[rows])
        return out_NI


class _SpreadStep(Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, tokens_R: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.places = len(x_NH), max(1, len(order_R)) // max(1, len(x_NH))
        return x_NH.index_select(0, tokens_R)

    @staticmethod
    def backward(ctx: Any, gradient_RH: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        return _added(gradient_RH, inverse_of(order_R).view(ctx.places), None), None, None


class _CombineStep(Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
        rows_Nk = inverse_of(order_R).view(gates_Nk.shape)
        ctx.save_for_backward(y_RH, order_R, rows_Nk, gates_Nk)
        return _added(y_RH, rows_Nk, gates_Nk)

    @staticmethod
    def backward(ctx: Any, gradient_NH: Tensor) -> tuple[Tensor, None, Tensor]:
        y_RH, order_R, rows_Nk, gates_Nk = ctx.saved_tensors
        tokens_R, gates_R1 = order_R // gates_Nk.shape[1], gates_Nk.flatten()[order_R].unsqueeze(1)
        of_rows_RH, of_gates_R = torch.empty_like(y_RH), torch.empty(len(y_RH), dtype=gates_Nk.dtype)
        for rows in _blocks(len(y_RH)):
            gradient = gradient_NH.index_select(0, tokens_R[rows])
            of_gates_R[rows] = (gradient.float() * y_RH[rows]).sum(-1)
            torch.mul(gradient, gates_R1[rows], out=of_rows_RH[rows])
        return of_rows_RH, None, of_gates_R[rows_Nk]


def _blocks(rows: int) -> Iterator[slice]:
    """Rows that stay in a processor's cache from one step to the next."""
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, start + BLOCK_ROWS)


def _added(y_RH: Tensor, rows_Nk: Tensor, gates_Nk: Tensor | None) -> Tensor:
    """[N,H]: the sum of each token's rows, weighted if there are gates."""
    weights_Nk = None if gates_Nk is None else gates_Nk.float()
    sums_NH = functional.embedding_bag(rows_Nk, y_RH.float(), mode="sum", per_sample_weights=weights_Nk)
    return sums_NH.to(y_RH.dtype)


def _turned(x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
    """Each product is rounded before the sum, as on a GPU."""
    cosines_N1D, sines_N1D = (table_ND.unsqueeze(1).to(x_NhD.dtype) for table_ND in (cosines_ND, sines_ND))
    (low, high), (low_sines, high_sines) = x_NhD.chunk(2, -1), sines_N1D.chunk(2, -1)
    out_NhD = x_NhD * cosines_N1D
    out_low, out_high = out_NhD.chunk(2, -1)
    out_low.sub_(high * low_sines)
    out_high.add_(low * high_sines)
    return out_NhD
