"""Arithmetic by torch's own kernels: any device, any type, no guarantee about the last bits.

Steps for which torch has no single kernel are computed by :mod:`etude.models.kernels.gpu` on a CUDA device, and by
:mod:`etude.models.kernels.fused` elsewhere.

Shape legend: see :mod:`etude.models.arithmetic`.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from types import ModuleType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

from etude.models.arithmetic import (
    AttentionRule,
    Dispatch,
    MaskTensors,
    PackedRows,
    PagedRows,
    expert_of_rows,
)
from etude.models.kernels import fused as cpu
from etude.models.spec import GELU_TANH, SILU, GateSpec

Rounded: TypeAlias = Callable[[Tensor], Tensor]
"""Rounds a parameter to the type that it is used in."""
Product: TypeAlias = Callable[..., Tensor]
"""A grouped product: (rows, matrices, offs=ends)."""
BLACKWELL = 10
"""Compute capability of the GPUs on which torch's grouped product is guarded."""


@final
class FastArithmetic:
    """Implements :class:`~etude.models.arithmetic.Arithmetic`; nothing in it waits for the device.

    Activations have its type, or that of the model's parameters. Parameters are rounded to it at each use, and again
    for the backward pass, so that no rounded copy is stored in between. ``products`` is a narrower type, to which
    factors and results of matrix products are rounded; activations keep their type.
    """

    def __init__(self, dtype: torch.dtype | None = None, *, products: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._products = products

    @property
    def dtype(self) -> torch.dtype | None:
        """The type to which parameters are rounded; ``None``: they are not rounded."""
        return self._dtype

    def embed(self, token_ids_N: Tensor, weight_VH: Tensor, scale: float = 1.0) -> Tensor:
        """[N,H]."""
        x_NH = self._rounded(functional.embedding(token_ids_N, weight_VH))
        return x_NH if scale == 1.0 else x_NH * rounded_to(scale, x_NH.dtype)

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[N,O]."""
        kind = self._products or x_NI.dtype
        bias_O = None if bias_O is None else self._rounded(bias_O).to(kind)
        is_rounded = {kind, self._dtype or kind} != {weight_OI.dtype}
        if torch.is_grad_enabled() and is_rounded and _is_parameter(weight_OI):
            out_NO: Tensor = _RoundedLinear.apply(x_NI.to(kind), weight_OI, bias_O, self._rounded)  # type: ignore[no-untyped-call]
            return out_NO.to(x_NI.dtype)
        return functional.linear(x_NI.to(kind), self._rounded(weight_OI).to(kind), bias_O).to(x_NI.dtype)

    def norm(self, x: Tensor, gain: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Over the last axis; a gain with an offset has its sum in float32."""
        if offset:
            whole = self._rounded(gain).float() + offset
            return functional.rms_norm(x.float(), (x.shape[-1],), whole, eps).to(x.dtype)
        gain = self._rounded(gain).to(x.dtype)
        if x.is_cpu and x.dtype is torch.float32:
            return cpu.norm(x, gain, eps)
        return functional.rms_norm(x, (x.shape[-1],), gain, eps)

    def gated(self, gate_up_NI: Tensor, gate: GateSpec = SILU) -> Tensor:
        """[N,I/2]; SwiGLU is one kernel on a GPU."""
        if gate != SILU:
            return _gated(gate_up_NI, gate)
        product_NI: Tensor = _fused(gate_up_NI).gated(gate_up_NI)
        return product_NI

    def rotate(self, x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
        """[N,h,D]; the tables are rounded to the type of ``x``."""
        rotated_NhD: Tensor = _fused(x_NhD).rotate(x_NhD, cosines_ND, sines_ND)
        return rotated_NhD

    def best(self, scores_NE: Tensor, k: int) -> Tensor:
        """[N,k]; ties are broken arbitrarily."""
        return scores_NE.topk(k, -1).indices

    def softmax(self, scores_NE: Tensor) -> Tensor:
        """[N,E] float32."""
        return scores_NE.softmax(-1, dtype=torch.float32)

    def dispatch(self, experts_Nk: Tensor, experts: int) -> Dispatch:
        """Sort stably, and return the end of each expert's rows."""
        pairs = experts_Nk.reshape(-1)
        order_R = pairs.argsort(stable=True)
        counts_E = torch.zeros(experts, dtype=torch.int32, device=pairs.device)
        counts_E.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int32))
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        return Dispatch(order_R=order_R, tokens_R=order_R // experts_Nk.shape[1], ends_E=ends_E)

    def spread(self, x_NH: Tensor, dispatch: Dispatch) -> Tensor:
        """[R,H], with a gradient that adds up each token's rows in the order of its slots."""
        rows_RH: Tensor = _fused(x_NH).spread(x_NH, dispatch)
        return rows_RH

    def grouped(self, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """[R,O] by one grouped matrix product."""
        kind = self._products or x_RI.dtype
        y_RO: Tensor
        if torch.is_grad_enabled() and weight_EOI.requires_grad:
            y_RO = _RoundedGrouped.apply(x_RI.to(kind), ends_E, weight_EOI, self._rounded)  # type: ignore[no-untyped-call]
        else:
            weight_EIO = self._rounded(weight_EOI).to(kind).transpose(1, 2)
            y_RO = functional.grouped_mm(x_RI.to(kind), weight_EIO, offs=ends_E)
        y_RO = y_RO.to(x_RI.dtype)
        if bias_EO is None:
            return y_RO
        return y_RO + self._rounded(bias_EO).to(y_RO.dtype)[expert_of_rows(len(y_RO), ends_E)]

    def combine(self, y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
        """[N,H], added up in float32; one kernel on a GPU."""
        out_NH: Tensor = _fused(y_RH).combine(y_RH, order_R, gates_Nk)
        return out_NH

    def attend_packed(
        self, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rows: PackedRows, rule: AttentionRule
    ) -> Tensor:
        """[N,Q,W] in one call if flash attention supports it, otherwise in one call for each run of sequences of equal
        length.

        On a CPU rows padded to the longest take up to 2.4 times as long, one call under a mask of blocks 7 to 14 times.
        """
        rule = self._rounded_rule(rule, q_NQD)
        if rule.sinks_Q is None and _flashes(q_NQD, v_NKW):
            return _flash(q_NQD, k_NKD, v_NKW, rows, rule)
        runs = [(length, len(list(run))) for length, run in groupby(rows.lengths)]
        sizes = [length * count for length, count in runs]
        parts = zip(runs, *(x.split(sizes) for x in (q_NQD, k_NKD, v_NKW)), strict=True)
        return torch.cat([_attend_run(run, q, k, v, rule) for run, q, k, v in parts])

    def write_pages(self, k_NKD: Tensor, v_NKW: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows) -> None:
        """Scatter keys and values to their places."""
        if k_NKD.is_cuda:
            from etude.models.kernels.gpu import fused

            fused.write_pages(k_NKD, v_NKW, cache, rows)
            return
        keys_PKDS, values_PKSW = cache
        page = keys_PKDS.shape[-1]
        pages_N = rows.tables_BP[rows.sequences_N.long(), rows.positions_N // page].long()
        places_N = rows.positions_N % page
        keys_PKDS[pages_N, :, :, places_N] = k_NKD.to(keys_PKDS.dtype)
        values_PKSW[pages_N, :, places_N] = v_NKW.to(values_PKSW.dtype)

    def attend_pages(self, q_NQD: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows, rule: AttentionRule) -> Tensor:
        """[N,Q,W]: sequences with one token in one batch, every other one by itself."""
        rule = self._rounded_rule(rule, q_NQD)
        if q_NQD.is_cuda:
            from etude.models.kernels.gpu import paged_attention

            if paged_attention.attends(q_NQD.shape[-1], cache[1].shape[-1]):
                return paged_attention.attend(q_NQD, cache, rows, rule)
        singles = rows.singles
        parts = []
        if singles:
            tables = rows.tables_BP[:singles]
            parts.append(_attend(q_NQD[:singles, :, None], cache, tables, rows.positions_N[:singles, None], rule))
        start = singles
        for sequence, count in enumerate(rows.counts[singles:], singles):
            q_1QTD = q_NQD[start : start + count].transpose(0, 1)[None]
            reach_1T = rows.positions_N[None, start : start + count]
            parts.append(_attend(q_1QTD, cache, rows.tables_BP[sequence, None], reach_1T, rule))
            start += count
        return torch.cat(parts)

    def logprobs(
        self, logits_NV: Tensor, token_ids_N: Tensor, temperatures_N: Tensor, mask: MaskTensors | None
    ) -> Tensor:
        """[N] float32."""
        greedy_N = temperatures_N == 0
        heat_N = torch.where(greedy_N, 1.0, temperatures_N)
        if logits_NV.is_cuda and mask is None:
            from etude.models.kernels.gpu import vocabulary

            sampled_N, _ = vocabulary.logprobs_and_entropies(logits_NV, token_ids_N, heat_N)
            return torch.where(greedy_N, torch.zeros_like(sampled_N), sampled_N)
        scaled_NV = logits_NV.float() / heat_N.unsqueeze(1)
        if mask is not None:
            scaled_NV = scaled_NV.masked_fill(~_allowed(mask, scaled_NV), -torch.inf)
        logprobs_N = scaled_NV.log_softmax(-1).gather(1, token_ids_N.unsqueeze(1)).squeeze(1)
        return torch.where(greedy_N, torch.zeros_like(logprobs_N), logprobs_N)

    def _rounded(self, parameter: Tensor) -> Tensor:
        return parameter if self._dtype is None else parameter.to(self._dtype)

    def _rounded_rule(self, rule: AttentionRule, q_NQD: Tensor) -> AttentionRule:
        sinks_Q = rule.sinks_Q
        return rule if sinks_Q is None else replace(rule, sinks_Q=self._rounded(sinks_Q).to(q_NQD.dtype))


def _fused(x: Tensor) -> ModuleType:
    """The module with the small steps for a device."""
    if not x.is_cuda:
        return cpu
    from etude.models.kernels.gpu import fused

    return fused


def rounded_to(number: float, dtype: torch.dtype) -> float:
    """The nearest number of a type."""
    return float(torch.tensor(number, dtype=dtype))


class _RoundedLinear(torch.autograd.Function):
    """torch's linear map by a rounded parameter, which is rounded again for the backward pass instead of being
    stored.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rounded: Rounded) -> Tensor:
        """[N,O]."""
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.rounded = rounded
        return functional.linear(x_NI, rounded(weight_OI).to(x_NI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients of x, weight and bias, bit-identical to torch's own."""
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            grad_NO @ ctx.rounded(weight_OI).to(grad_NO.dtype) if of_x else None,
            ctx.rounded(grad_NO.t() @ x_NI).to(weight_OI.dtype) if of_weight else None,
            grad_NO.sum(0) if of_bias else None,
            None,
        )


class _RoundedGrouped(torch.autograd.Function):
    """torch's grouped product by a rounded weight; a parameter is rounded again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, rounded: Rounded) -> Tensor:
        """[R,O]."""
        rounded_EOI = rounded(weight_EOI).to(x_RI.dtype)
        ctx.save_for_backward(x_RI, ends_E, weight_EOI if _is_parameter(weight_EOI) else rounded_EOI)
        ctx.rounded, ctx.dtype = rounded, weight_EOI.dtype
        return functional.grouped_mm(x_RI, rounded_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Gradients of x and weight, bit-identical to torch's own."""
        x_RI, ends_E, weight_EOI = ctx.saved_tensors
        of_x, _, of_weight, _ = ctx.needs_input_grad
        grad_RO = grad_RO.contiguous()
        grad_RI = grad_EOI = None
        if of_x:
            grad_RI = functional.grouped_mm(grad_RO, ctx.rounded(weight_EOI).to(grad_RO.dtype), offs=ends_E)
        if of_weight:
            grad_EOI = weight_gradient(grad_RO, x_RI, ends_E, guard=_leaves_garbage(grad_RO.device))
            grad_EOI = ctx.rounded(grad_EOI).to(ctx.dtype)
        return grad_RI, None, grad_EOI, None


def weight_gradient(
    grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor, *, guard: bool, multiply: Product = functional.grouped_mm
) -> Tensor:
    """[E,O,I] of a grouped product; with ``guard`` the gradient of an expert without rows is set to 0.

    ``multiply`` is torch's product, which on Blackwell leaves such a gradient uninitialised (pytorch/pytorch#172439).
    """
    grad_EOI = multiply(grad_RO.t(), x_RI, offs=ends_E)
    if guard:
        empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        grad_EOI = grad_EOI.masked_fill(empty_E[:, None, None], 0.0)
    return grad_EOI


@cache
def _leaves_garbage(device: torch.device) -> bool:
    """True on GPUs of compute capability 10, data-centre Blackwells."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == BLACKWELL


def _is_parameter(weight: Tensor) -> bool:
    """True if a weight, or the base of its view, is a parameter, which stays in memory anyway."""
    whole = weight if weight._base is None else weight._base
    return whole.is_leaf and whole.requires_grad


def multiplies_bfloat16() -> bool:
    """Report whether this machine's processor has instructions for products of bfloat16: twice as fast as float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


FLASH_WIDTH, FLASH_STEP = 256, 8
"""The widest head that flash attention supports, and the granularity of widths."""
SINK_COLUMNS = 8
"""Columns that sinks add to keys. One is needed; eight keep widths at multiples that GPU kernels require."""
EVERYTHING = -1
"""Flash attention's value for an unlimited window."""
QUERIES_AT_A_TIME = 512
"""Adjacent queries whose windows are read together: fewer read fewer unneeded keys, more need fewer calls."""


def _flashes(q_NQD: Tensor, v_NKW: Tensor) -> bool:
    width = q_NQD.shape[-1]
    return (
        q_NQD.is_cuda
        and q_NQD.dtype is torch.bfloat16
        and width == v_NKW.shape[-1] <= FLASH_WIDTH
        and width % FLASH_STEP == 0
    )


def _gated(gate_up_NI: Tensor, spec: GateSpec) -> Tensor:
    gate, up = (gate_up_NI[..., ::2], gate_up_NI[..., 1::2]) if spec.interleaved else gate_up_NI.chunk(2, -1)
    if spec == SILU:
        return functional.silu(gate) * up
    if spec == GELU_TANH:
        return functional.gelu(gate, approximate="tanh") * up
    if spec.limit is not None:
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    inner = gate + spec.cubic * gate**3 if spec.cubic else gate
    return gate * (spec.slope * inner).sigmoid() * (up + spec.shift)


def _flash(q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rows: PackedRows, rule: AttentionRule) -> Tensor:
    """[N,Q,W]: sequences do not attend to each other, because the kernel gets the start of each."""
    starts, longest = rows.starts_B1, max(rows.lengths)
    bounds = (EVERYTHING if rule.window is None else rule.window - 1, 0)  # to the left and to the right
    out_NQW: Tensor = _varlen()(
        q_NQD, k_NKD, v_NKW, starts, starts, longest, longest, scale=rule.scale, window_size=bounds
    )
    return out_NQW


@cache
def _varlen() -> Callable[..., Any]:
    """Torch's flash attention over packed sequences, with query heads that share key heads.

    Torch 2.11 infers that from the numbers of heads, later versions need an argument. Imported only with a CUDA device:
    the import takes 1.5 seconds and 72 MB.
    """
    from torch.nn.attention.varlen import varlen_attn

    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn


def _attend_run(run: tuple[int, int], q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rule: AttentionRule) -> Tensor:
    """[N,Q,W]: causal attention inside each of some sequences of one length; ``run`` is (length, count)."""
    length, count = run
    q_BQTD, k_BKTD, v_BKTW = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q_NQD, k_NKD, v_NKW))
    if rule.sinks_Q is None and (rule.window is None or length <= rule.window):
        grouped = q_NQD.shape[1] != k_NKD.shape[1]
        out_BQTW = functional.scaled_dot_product_attention(
            q_BQTD, k_BKTD, v_BKTW, is_causal=True, scale=rule.scale, enable_gqa=grouped
        )
    else:
        out_BQTW = attend_last(q_BQTD, k_BKTD, v_BKTW, rule)
    return out_BQTW.transpose(1, 2).flatten(0, 1)


def attend_last(q_BQTD: Tensor, k_BKXD: Tensor, v_BKXW: Tensor, rule: AttentionRule) -> Tensor:
    """[B,Q,T,W]: causal attention of queries that are the last T of X tokens, some at a time under a mask.

    With a window, only the keys that some of them see are read.
    """
    queries, keys = q_BQTD.shape[2], k_BKXD.shape[2]
    parts = []
    for start in range(0, queries, QUERIES_AT_A_TIME):
        end = min(start + QUERIES_AT_A_TIME, queries)
        reach_1T = torch.arange(start, end, device=q_BQTD.device)[None] + (keys - queries)
        last = end + keys - queries
        first = 0 if rule.window is None else max(0, start + keys - queries - rule.window + 1)
        seen = slice(first, last)
        visible_11TX = _visible(torch.arange(first, last, device=q_BQTD.device), reach_1T, rule)
        parts.append(attend_masked(q_BQTD[:, :, start:end], k_BKXD[:, :, seen], v_BKXW[:, :, seen], visible_11TX, rule))
    return torch.cat(parts, 2)


def _attend(
    q_BQTD: Tensor, cache: tuple[Tensor, Tensor], tables_BP: Tensor, reach_BT: Tensor, rule: AttentionRule
) -> Tensor:
    """[B·T,Q,W]: attention of some sequences to their pages, each token up to its reach."""
    keys_PKDS, values_PKSW = cache
    page = keys_PKDS.shape[-1]
    positions = torch.arange(tables_BP.shape[1] * page, device=q_BQTD.device)
    if rule.window is not None and (count := pages_of(reach_BT.shape[1] + rule.window - 1, page)) < tables_BP.shape[1]:
        firsts_B1 = (reach_BT[:, :1] - rule.window + 1).clamp(min=0) // page  # neighbours: the first sees furthest back
        pages_BP = firsts_B1 + torch.arange(count, device=q_BQTD.device)
        tables_BP = tables_BP.gather(1, pages_BP.clamp(max=tables_BP.shape[1] - 1))
        positions = positions[: count * page] + firsts_B1 * page
    k_BKTD = keys_PKDS[tables_BP].permute(0, 2, 1, 4, 3).flatten(2, 3).to(q_BQTD.dtype)
    v_BKTW = values_PKSW[tables_BP].transpose(1, 2).flatten(2, 3).to(q_BQTD.dtype)
    out_BQTW = attend_masked(q_BQTD, k_BKTD, v_BKTW, _visible(positions, reach_BT, rule), rule)
    return out_BQTW.transpose(1, 2).flatten(0, 1)


def pages_of(positions: int, page: int) -> int:
    """The maximum number of pages that a run of positions can span."""
    return (positions + page - 2) // page + 1


def _visible(positions: Tensor, reach_BT: Tensor, rule: AttentionRule) -> Tensor:
    """[B,1,T,X] bool: the ``positions``, [X] or [B,X], that each token sees."""
    back_BTX = reach_BT[..., None] - (positions if positions.ndim == 1 else positions[:, None])
    visible_BTX = back_BTX >= 0
    return (visible_BTX if rule.window is None else visible_BTX & (back_BTX < rule.window))[:, None]


def attend_masked(q_BQTD: Tensor, k_BKXD: Tensor, v_BKXW: Tensor, visible_B1TX: Tensor, rule: AttentionRule) -> Tensor:
    """[B,Q,T,W]: attention to the visible keys.

    A sink is an additional key with a value of 0 that all queries see. It uses an extra column: 1 in this key, 0 in all
    other keys, and in queries the factor that gives the head's sink score.
    """
    if rule.sinks_Q is not None:
        width, sinks_Q11 = k_BKXD.shape[-1], (rule.sinks_Q / rule.scale)[:, None, None]
        q_BQTD = torch.cat((q_BQTD, sinks_Q11.expand(*q_BQTD.shape[:3], SINK_COLUMNS)), -1)
        k_BKXD = functional.pad(k_BKXD, (0, SINK_COLUMNS, 0, 1))
        k_BKXD[:, :, -1, width] = 1.0
        v_BKXW = functional.pad(v_BKXW, (0, 0, 0, 1))
        visible_B1TX = functional.pad(visible_B1TX, (0, 1), value=True)
    return functional.scaled_dot_product_attention(
        q_BQTD, k_BKXD, v_BKXW, attn_mask=visible_B1TX, scale=rule.scale, enable_gqa=q_BQTD.shape[1] != k_BKXD.shape[1]
    )


def _allowed(mask: MaskTensors, logits_NV: Tensor) -> Tensor:
    """[N,V] bool: the tokens that may be drawn."""
    counts_N = mask.offsets_N1.diff()
    rows = torch.arange(len(counts_N), device=counts_N.device)
    rows = torch.repeat_interleave(
        rows, counts_N, output_size=len(mask.token_ids)
    )  # without the size, the host waits for the GPU
    allowed_NV = (counts_N == 0).unsqueeze(1).expand(logits_NV.shape).clone()
    allowed_NV[rows, mask.token_ids] = True
    return allowed_NV
