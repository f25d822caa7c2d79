"""Small steps of a decoder on a GPU, each as one Triton kernel where torch launches several.

A decode step of an 8B model launches some 1,500 kernels that do little but start; a training step reads and writes
activations for each. These do the same arithmetic in one pass, and round where torch's separate kernels round.

Shape legend: N tokens, H hidden, h heads, D width of a head, I inner width, k experts per token, R rows (a token once
per expert it is sent to), P pages, K key heads, S positions per page, W width of a value.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from etude.models.arithmetic import Dispatch, PagedRows, inverse_of
from etude.models.kernels.pages import PAGE

BLOCK = 1024
"""Numbers that one program of an elementwise kernel computes."""


def rotate(x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
    """[N,h,D] rotary positions by halves: x·cos + [−x₂, x₁]·sin, both tables rounded to the type of ``x``.

    Differentiable in ``x``. The second halves of the tables are their first.
    """
    rotated_NhD: Tensor = _Rotated.apply(x_NhD, cosines_ND, sines_ND)
    return rotated_NhD


def gated(gate_up_NI: Tensor) -> Tensor:
    """[N,I/2]: silu of the first half times the second half of the last axis; rows are contiguous. Differentiable."""
    product_NI: Tensor = _Gated.apply(gate_up_NI)
    return product_NI


def spread(x_NH: Tensor, dispatch: Dispatch) -> Tensor:
    """[R,H]: each row's token. Differentiable; there is no sort and no atomic addition, as with torch's indexing."""
    rows_RH: Tensor = _Spread.apply(x_NH, dispatch.tokens_R, dispatch.order_R)
    return rows_RH


def combine(y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
    """[N,H]: the rows of each token times its gates, added up in float32 slot by slot. Differentiable."""
    out_NH: Tensor = _Combined.apply(y_RH, order_R, gates_Nk)
    return out_NH


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, tokens_R: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.tokens = len(x_NH)
        return x_NH[tokens_R]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        ones_Nk = gradients[0].new_ones((ctx.tokens, len(order_R) // max(1, ctx.tokens)), dtype=torch.float32)
        return _added(gradients[0].contiguous(), inverse_of(order_R), ones_Nk), None, None


class _Combined(Function):
    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
        y_RH, gates_Nk, rows_R = y_RH.contiguous(), gates_Nk.contiguous(), inverse_of(order_R)
        ctx.save_for_backward(y_RH, rows_R, gates_Nk)
        return _added(y_RH, rows_R, gates_Nk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        (y_RH, rows_R, gates_Nk), gradient_NH = ctx.saved_tensors, gradients[0].contiguous()
        of_rows_RH, of_gates_Nk = torch.empty_like(y_RH), torch.empty_like(gates_Nk)
        if len(rows_R):
            _combine_backward[(len(rows_R),)](
                y_RH, rows_R, gates_Nk, gradient_NH, of_rows_RH, of_gates_Nk, y_RH.shape[1], K=gates_Nk.shape[1],
                X=BLOCK,
            )  # fmt: skip
        return of_rows_RH, None, of_gates_Nk


def _added(y_RH: Tensor, rows_R: Tensor, gates_Nk: Tensor) -> Tensor:
    """[N,H]: without fused multiply-adds, as torch rounds each product."""
    (tokens, slots), width = gates_Nk.shape, y_RH.shape[1]
    out_NH = y_RH.new_empty((tokens, width))
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        _combine[grid](y_RH, rows_R, gates_Nk, out_NH, width, K=slots, X=BLOCK, enable_fp_fusion=False)
    return out_NH


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cosines_ND, sines_ND)
        return _turned(x_NhD, cosines_ND, sines_ND, backwards=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _turned(gradients[0], *ctx.saved_tensors, backwards=True), None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_NI)
        tokens, width = gate_up_NI.shape
        out_NI = gate_up_NI.new_empty((tokens, width // 2))
        if tokens:
            grid = (tokens, triton.cdiv(width // 2, BLOCK))
            _gate[grid](gate_up_NI, out_NI, gate_up_NI.stride(0), width // 2, X=BLOCK, enable_fp_fusion=False)
        return out_NI

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up_NI,), gradient_NI = ctx.saved_tensors, gradients[0].contiguous()
        tokens, width = gate_up_NI.shape
        out_NI = torch.empty_like(gate_up_NI, memory_format=torch.contiguous_format)
        if tokens:
            grid = (tokens, triton.cdiv(width // 2, BLOCK))
            _gate_backward[grid](gate_up_NI, gradient_NI, out_NI, gate_up_NI.stride(0), width // 2, X=BLOCK)
        return out_NI


def _turned(x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor, *, backwards: bool) -> Tensor:
    """Without fused multiply-adds: the sum of two rounded products is what torch computes."""
    tokens, heads, width = x_NhD.shape
    out_NhD = x_NhD.new_empty((tokens, heads, width))
    if tokens:
        _rotate[(tokens, heads)](
            x_NhD, cosines_ND, sines_ND, out_NhD, *x_NhD.stride(), cosines_ND.stride(0), heads, SIGN=-1 if backwards
            else 1, HALF=width // 2, X=triton.next_power_of_2(width // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out_NhD


def write_pages(k_NKD: Tensor, v_NKW: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows) -> None:
    """Put keys [N,K,D] and values [N,K,W] where their positions lie in the cache."""
    keys_PKDS, values_PKSW = cache
    tokens, heads, width = k_NKD.shape
    value_width = v_NKW.shape[2]
    _write[(tokens, heads)](
        k_NKD, v_NKW, keys_PKDS, values_PKSW, rows.tables_BP, rows.sequences_N, rows.positions_N,
        *k_NKD.stride(), *v_NKW.stride(), rows.tables_BP.stride(0), K=heads, D=width, W=value_width, S=PAGE,
        X=triton.next_power_of_2(max(width, value_width)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _rotate(
    x, cosines, sines, out, token_stride, head_stride, stride, table_stride, heads,
    SIGN: tl.constexpr, HALF: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, X)
    inside = column < HALF
    at = x + token * token_stride + head * head_stride
    low = tl.load(at + column * stride, mask=inside)
    high = tl.load(at + (column + HALF) * stride, mask=inside)
    kind = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    table = token * table_stride + column
    low_cosine = tl.load(cosines + table, mask=inside).to(kind)
    high_cosine = tl.load(cosines + table + HALF, mask=inside).to(kind)
    low_sine = tl.load(sines + table, mask=inside).to(kind)
    high_sine = tl.load(sines + table + HALF, mask=inside).to(kind)
    to = out + (token * heads + head) * (2 * HALF) + column
    tl.store(to, _sum(low, low_cosine, -SIGN * high, low_sine, kind), mask=inside)
    tl.store(to + HALF, _sum(high, high_cosine, SIGN * low, high_sine, kind), mask=inside)


@triton.jit
def _sum(a, b, c, d, kind: tl.constexpr):
    """a·b + c·d, each product rounded to ``kind`` before they are added."""
    first = (a * b.to(tl.float32)).to(kind).to(tl.float32)
    second = (c * d.to(tl.float32)).to(kind).to(tl.float32)
    return (first + second).to(kind)


@triton.jit
def _gate(gate_up, out, token_stride, half, X: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * X + tl.arange(0, X)
    inside = column < half
    gate = tl.load(gate_up + token * token_stride + column, mask=inside)
    up = tl.load(gate_up + token * token_stride + half + column, mask=inside)
    wide = gate.to(tl.float32)
    open_ = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * half + column, (open_ * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _gate_backward(gate_up, gradient, out, token_stride, half, X: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * X + tl.arange(0, X)
    inside = column < half
    gate = tl.load(gate_up + token * token_stride + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * token_stride + half + column, mask=inside).to(tl.float32)
    slope = tl.load(gradient + token * half + column, mask=inside).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    kind = out.dtype.element_ty
    to = out + token * 2 * half + column
    tl.store(to, (slope * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=inside)
    tl.store(to + half, (slope * gate * share).to(kind), mask=inside)


@triton.jit
def _combine(rows, places, gates, out, width, K: tl.constexpr, X: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * X + tl.arange(0, X)
    inside = column < width
    total = tl.zeros([X], tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(places + token * K + slot)
        gate = tl.load(gates + token * K + slot)
        total += tl.load(rows + row * width + column, mask=inside).to(tl.float32) * gate
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_backward(
    rows, places, gates, gradient, of_rows, of_gates, width, K: tl.constexpr, X: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(places + pair) * width
    slopes = gradient + (pair // K) * width
    gate = tl.load(gates + pair)
    total = tl.zeros([X], tl.float32)
    for start in range(0, width, X):
        column = start + tl.arange(0, X)
        inside = column < width
        slope = tl.load(slopes + column, mask=inside, other=0.0).to(tl.float32)
        number = tl.load(rows + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_rows + row + column, (slope * gate).to(of_rows.dtype.element_ty), mask=inside)
        total += slope * number
    tl.store(of_gates + pair, tl.sum(total))


@triton.jit(do_not_specialize=["table_stride"])
def _write(
    k, v, keys, values, tables, sequences, positions,
    k_token, k_head, k_column, v_token, v_head, v_column, table_stride,
    K: tl.constexpr, D: tl.constexpr, W: tl.constexpr, S: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    page = tl.load(tables + tl.load(sequences + token).to(tl.int64) * table_stride + position // S).to(tl.int64)
    slot = position % S
    column = tl.arange(0, X)
    key = tl.load(k + token * k_token + head * k_head + column * k_column, mask=column < D)
    tl.store(keys + ((page * K + head) * D + column) * S + slot, key.to(keys.dtype.element_ty), mask=column < D)
    value = tl.load(v + token * v_token + head * v_head + column * v_column, mask=column < W)
    at = ((page * K + head) * S + slot) * W + column
    tl.store(values + at, value.to(values.dtype.element_ty), mask=column < W)
