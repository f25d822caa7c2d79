"""Batch-invariant arithmetic, with one fixed order of sums: engine and trainer agree to the last bit.

Forward passes are the numba kernels of ``models/kernels/``; backward passes are torch's, because gradients are not
compared bit by bit. Activations are float32 throughout: a bfloat16 model has its weights and its cache in bfloat16, and
every product of two of them is exact in float32. Runs on CPUs.

    weights, cache ── float32 or bfloat16 ──▶ kernel ──▶ float32 ──▶ the next kernel
    gradients      ◀── torch, from the same inputs ──

Shape legend: see :mod:`etude.models.arithmetic`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from etude.models.arithmetic import AttentionRule, Dispatch, MaskTensors, PackedRows, PagedRows, expert_of_rows
from etude.models.fast import FastArithmetic, rounded_to
from etude.models.kernels import pages, products
from etude.models.kernels import rows as rowwise
from etude.models.spec import SILU, GateSpec

Forward: TypeAlias = Callable[..., Tensor]

TORCH = FastArithmetic()
"""The arithmetic of gradients."""
ROWS_PER_TASK = 256
"""Minimum number of rows for which another thread of a product is worthwhile."""


@final
class InvariantArithmetic:
    """Implements :class:`~etude.models.arithmetic.Arithmetic` on CPUs; ``dtype`` is that of weights and cache."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def embed(self, token_ids_N: Tensor, weight_VH: Tensor, scale: float = 1.0) -> Tensor:
        """[N,H]."""
        x_NH = _stored(self._dtype, functional.embedding(token_ids_N, weight_VH))
        return x_NH.float() if scale == 1.0 else x_NH.float() * rounded_to(scale, x_NH.dtype)

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """[N,O]."""
        weight_OI, bias_O = _stored(self._dtype, weight_OI), None if bias_O is None else _stored(self._dtype, bias_O)
        if _tracked(x_NI, weight_OI, bias_O):
            out_NO: Tensor = _Linear.apply(x_NI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
            return out_NO
        return _linear(x_NI, weight_OI, bias_O)

    def norm(self, x: Tensor, gain: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Over the last axis."""
        gain = _stored(self._dtype, gain)
        if _tracked(x, gain):
            return _Twofold.run(_norm, TORCH.norm, x, gain, eps, offset)
        return _norm(x, gain, eps, offset)

    def gated(self, gate_up_NI: Tensor, gate: GateSpec = SILU) -> Tensor:
        """[N,I/2]."""
        if _tracked(gate_up_NI):
            return _Twofold.run(_gated, TORCH.gated, gate_up_NI, gate)
        return _gated(gate_up_NI, gate)

    def rotate(self, x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
        """[N,h,D]."""
        if _tracked(x_NhD):
            return _Twofold.run(_rotate, TORCH.rotate, x_NhD, cosines_ND, sines_ND)
        return _rotate(x_NhD, cosines_ND, sines_ND)

    def best(self, scores_NE: Tensor, k: int) -> Tensor:
        """[N,k]."""
        out_Nk = torch.empty(len(scores_NE), k, dtype=torch.int64)
        rowwise.best(_floats(scores_NE), out_Nk.numpy())
        return out_Nk

    def softmax(self, scores_NE: Tensor) -> Tensor:
        """[N,E] float32."""
        if _tracked(scores_NE):
            return _Twofold.run(_softmax, TORCH.softmax, scores_NE)
        return _softmax(scores_NE)

    def dispatch(self, experts_Nk: Tensor, experts: int) -> Dispatch:
        """A stable counting sort."""
        order_R = torch.empty(experts_Nk.numel(), dtype=torch.int64)
        ends_E = torch.empty(experts, dtype=torch.int32)
        rowwise.dispatch(experts_Nk.reshape(-1).numpy(), order_R.numpy(), ends_E.numpy())
        return Dispatch(order_R=order_R, tokens_R=order_R // experts_Nk.shape[1], ends_E=ends_E)

    def spread(self, x_NH: Tensor, dispatch: Dispatch) -> Tensor:
        """[R,H]."""
        return TORCH.spread(x_NH, dispatch) if _tracked(x_NH) else x_NH.index_select(0, dispatch.tokens_R)

    def grouped(self, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        """[R,O]."""
        weight_EOI = _stored(self._dtype, weight_EOI)
        y_RO: Tensor
        if _tracked(x_RI, weight_EOI):
            y_RO = _Grouped.apply(x_RI, ends_E, weight_EOI)  # type: ignore[no-untyped-call]
        else:
            y_RO = _grouped(x_RI, ends_E, weight_EOI)
        if bias_EO is None:
            return y_RO
        return y_RO + _stored(self._dtype, bias_EO).float()[expert_of_rows(len(y_RO), ends_E)]

    def combine(self, y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
        """[N,H]."""
        if _tracked(y_RH, gates_Nk):
            return _Twofold.run(_combine, TORCH.combine, y_RH, order_R, gates_Nk)
        return _combine(y_RH, order_R, gates_Nk)

    def attend_packed(
        self, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rows: PackedRows, rule: AttentionRule
    ) -> Tensor:
        """[N,Q,W]."""
        k_NKD, v_NKW = _stored(self._dtype, k_NKD).float(), _stored(self._dtype, v_NKW).float()
        sinks_Q = None if rule.sinks_Q is None else _stored(self._dtype, rule.sinks_Q).float()
        if not _tracked(q_NQD, k_NKD, v_NKW, sinks_Q):
            return self._attend_packed(q_NQD, k_NKD, v_NKW, rows, rule)

        def kernel(q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, sinks_Q: Tensor | None) -> Tensor:
            return self._attend_packed(q_NQD, k_NKD, v_NKW, rows, replace(rule, sinks_Q=sinks_Q))

        def twin(q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, sinks_Q: Tensor | None) -> Tensor:
            return TORCH.attend_packed(q_NQD, k_NKD, v_NKW, rows, replace(rule, sinks_Q=sinks_Q))

        return _Twofold.run(kernel, twin, q_NQD, k_NKD, v_NKW, sinks_Q)

    def _attend_packed(
        self, q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, rows: PackedRows, rule: AttentionRule
    ) -> Tensor:
        """Paged attention over temporary pages."""
        (_, key_heads, width), value_width = k_NKD.shape, v_NKW.shape[-1]
        paged = _paged(rows)
        pages_in_all = int(paged.tables_BP.max()) + 1
        keys_PKDS = torch.zeros(pages_in_all, key_heads, width, pages.PAGE)
        values_PKSW = torch.zeros(pages_in_all, key_heads, pages.PAGE, value_width)
        self.write_pages(k_NKD, v_NKW, (keys_PKDS, values_PKSW), paged)
        return self.attend_pages(q_NQD, (keys_PKDS, values_PKSW), paged, rule)

    def write_pages(self, k_NKD: Tensor, v_NKW: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows) -> None:
        """Copy keys and values to their places."""
        keys, values = cache
        pages.write(_numbers(k_NKD.to(keys.dtype)), _numbers(v_NKW.to(values.dtype)), _pair(cache), _places(rows))

    def attend_pages(self, q_NQD: Tensor, cache: tuple[Tensor, Tensor], rows: PagedRows, rule: AttentionRule) -> Tensor:
        """[N,Q,W]."""
        keys_PKDS, values_PKSW = cache
        tokens, heads = q_NQD.shape[:2]
        out = np.empty((tokens, heads, values_PKSW.shape[-1]), np.float32)
        q, both, (tables, sequences, positions) = _floats(q_NQD), _pair(cache), _places(rows)
        shape = (heads // keys_PKDS.shape[1], tables.shape[1] * pages.PAGE + 1)
        sinks = NO_SINKS if rule.sinks_Q is None else _floats(_stored(self._dtype, rule.sinks_Q))
        reach = (rule.scale, rule.window or int(positions.max()) + 1, sinks)

        def part(start: int, end: int) -> None:
            places = (tables, sequences[start:end], positions[start:end])
            pages.attend(q[start:end], both, places, reach, np.empty(shape, np.float32), out[start:end])

        _in_parts(part, tokens)
        return torch.from_numpy(out)

    def logprobs(
        self, logits_NV: Tensor, token_ids_N: Tensor, temperatures_N: Tensor, mask: MaskTensors | None
    ) -> Tensor:
        """[N] float32."""
        if _tracked(logits_NV):
            return _Twofold.run(_logprobs, TORCH.logprobs, logits_NV, token_ids_N, temperatures_N, mask)
        return _logprobs(logits_NV, token_ids_N, temperatures_N, mask)


class _Twofold(torch.autograd.Function):
    """A function computed by a kernel and differentiated by torch: the backward pass runs torch's version of it."""

    @staticmethod
    def run(kernel: Forward, twin: Forward, *inputs: Any) -> Tensor:
        """``kernel(*inputs)`` with the gradient of ``twin(*inputs)``."""
        out: Tensor = _Twofold.apply(kernel, twin, *inputs)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(ctx: Any, kernel: Forward, twin: Forward, *inputs: Any) -> Tensor:
        """Run the kernel and save its inputs."""
        ctx.twin = twin
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))
        return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate the twin at the saved inputs."""
        needed = ctx.needs_input_grad[2:]
        inputs = [
            other if saved is None else saved.detach().requires_grad_(need)
            for saved, other, need in zip(ctx.saved_tensors, ctx.others, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.twin(*inputs)
        leaves = [value for value, need in zip(inputs, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(out, leaves, grad))
        return (None, None, *(next(grads) if need else None for need in needed))


class _Linear(torch.autograd.Function):
    """The product of :func:`_linear`: most of the work, so it has an explicit backward pass instead of a second
    computation.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """[N,O]."""
        ctx.save_for_backward(x_NI, weight_OI)
        return _linear(x_NI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias, except for frozen ones."""
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_NI = grad_NO @ weight_OI.to(grad_NO.dtype) if of_x else None
        return grad_NI, grad_NO.t() @ x_NI if of_weight else None, grad_NO.sum(0) if of_bias else None


class _Grouped(torch.autograd.Function):
    """The products of :func:`_grouped`, with an explicit backward pass, one expert after the other."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """[R,O]."""
        ctx.save_for_backward(x_RI, ends_E, weight_EOI)
        return _grouped(x_RI, ends_E, weight_EOI)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        """Gradients of x and the weights, as far as they are needed."""
        x_RI, ends_E, weight_EOI = ctx.saved_tensors
        of_x, _, of_weight = ctx.needs_input_grad
        grad_RI = torch.empty_like(x_RI) if of_x else None
        grad_EOI = torch.empty(weight_EOI.shape, dtype=grad_RO.dtype) if of_weight else None
        for expert, (start, end) in enumerate(pairwise([0, *ends_E.tolist()])):
            own = grad_RO[start:end]
            if grad_RI is not None:
                torch.mm(own, weight_EOI[expert].to(own.dtype), out=grad_RI[start:end])
            if grad_EOI is not None:
                torch.mm(own.t(), x_RI[start:end], out=grad_EOI[expert])
        return grad_RI, None, grad_EOI


def _linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    x, weight = _floats(x_NI), _numbers(weight_OI)
    bias = NO_BIAS if bias_O is None else _floats(bias_O)
    out = np.empty((len(x), len(weight)), np.float32)
    _in_parts(lambda start, end: products.linear(x[start:end], weight, bias, out[start:end]), len(x))
    return torch.from_numpy(out)


def _norm(x: Tensor, gain: Tensor, eps: float, offset: float) -> Tensor:
    values, width = _floats(x), x.shape[-1]
    out = np.empty_like(values)
    rowwise.norm(values.reshape(-1, width), _numbers(gain), eps, offset, out.reshape(-1, width))
    return torch.from_numpy(out)


def _gated(gate_up_NI: Tensor, gate: GateSpec) -> Tensor:
    out = np.empty((len(gate_up_NI), gate_up_NI.shape[1] // 2), np.float32)
    if gate == SILU:
        rowwise.gated(_floats(gate_up_NI), out)
    else:
        limit = np.inf if gate.limit is None else gate.limit
        numbers = (gate.slope, gate.cubic, gate.shift, limit)
        rowwise.gated_by(_floats(gate_up_NI), numbers, gate.interleaved, out)
    return torch.from_numpy(out)


def _rotate(x_NhD: Tensor, cosines_ND: Tensor, sines_ND: Tensor) -> Tensor:
    x = _floats(x_NhD)
    out = np.empty_like(x)
    rowwise.rotate(x, _floats(cosines_ND), _floats(sines_ND), out)
    return torch.from_numpy(out)


def _softmax(scores_NE: Tensor) -> Tensor:
    scores = _floats(scores_NE)
    out = np.empty_like(scores)
    rowwise.softmax(scores, out)
    return torch.from_numpy(out)


def _grouped(x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
    x, ends, weight = _floats(x_RI), ends_E.numpy(), _numbers(weight_EOI)
    out = np.empty((len(x), weight.shape[1]), np.float32)

    def part(start: int, end: int) -> None:
        own = ends if end - start == len(x) else np.clip(ends - start, 0, end - start)
        products.grouped(x[start:end], own, weight, out[start:end])

    _in_parts(part, len(x))
    return torch.from_numpy(out)


def _combine(y_RH: Tensor, order_R: Tensor, gates_Nk: Tensor) -> Tensor:
    y, order = _floats(y_RH), order_R.numpy()
    out = np.empty((len(gates_Nk), y.shape[1]), np.float32)
    rowwise.combine(y, order, _floats(gates_Nk), np.empty_like(order), out)
    return torch.from_numpy(out)


def _logprobs(logits_NV: Tensor, token_ids_N: Tensor, temperatures_N: Tensor, mask: MaskTensors | None) -> Tensor:
    logits = _floats(logits_NV)
    sets = (NO_IDS, NO_IDS) if mask is None else (mask.offsets_N1.numpy(), mask.token_ids.numpy())
    out = np.empty(len(logits), np.float32)
    scratch = np.empty(logits.shape[1], np.float32)
    rowwise.logprobs(logits, token_ids_N.numpy(), _floats(temperatures_N), sets, scratch, out)
    return torch.from_numpy(out)


NO_BIAS = NO_SINKS = np.zeros(0, np.float32)
NO_IDS = np.zeros(0, np.int64)


def _stored(dtype: torch.dtype | None, weight: Tensor) -> Tensor:
    """A parameter, key or value as an engine of this type stores it."""
    return weight if dtype in (None, weight.dtype) else weight.to(dtype)


def _tracked(*tensors: Tensor | None) -> bool:
    """Report whether a gradient is needed."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _floats(x: Tensor) -> npt.NDArray[np.float32]:
    """A float32 array of a tensor's values; activations are shared, anything else is copied."""
    if x.requires_grad or x.dtype is not torch.float32 or not x.is_contiguous():
        x = x.detach().float().contiguous()
    values: npt.NDArray[np.float32] = x.numpy()
    return values


def _numbers(x: Tensor) -> npt.NDArray[Any]:
    """The array of a weight or a cache, shared: float32, or the bits of bfloat16."""
    stored = (x.detach() if x.requires_grad else x).contiguous()
    values: npt.NDArray[Any] = (stored.view(torch.int16) if stored.dtype is torch.bfloat16 else stored).numpy()
    assert values.dtype in (np.float32, np.int16), values.dtype
    return values


def _pair(cache: tuple[Tensor, Tensor]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return _numbers(cache[0]), _numbers(cache[1])


def _paged(rows: PackedRows) -> PagedRows:
    """The same sequences in pages, each in its own pages."""
    lengths_B = torch.tensor(rows.lengths)
    pages_B = -(-lengths_B // pages.PAGE)
    firsts_B, last = pages_B.cumsum(0) - pages_B, int(pages_B.sum()) - 1
    tables_BP = (firsts_B[:, None] + torch.arange(int(pages_B.max()))).clamp(max=last)
    return PagedRows(
        tables_BP=tables_BP.to(torch.int32),
        sequences_N=torch.arange(len(lengths_B), dtype=torch.int32).repeat_interleave(lengths_B),
        positions_N=rows.positions_N,
        counts=rows.lengths,
    )


def _places(rows: PagedRows) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    return rows.tables_BP.numpy(), rows.sequences_N.numpy(), rows.positions_N.numpy()


def _in_parts(part: Callable[[int, int], None], rows: int) -> None:
    """Call ``part(start, end)`` over all rows, on as many threads as torch may use; rows are independent."""
    threads = rows // ROWS_PER_TASK
    if threads > 1:
        threads = min(torch.get_num_threads(), threads)
    if threads <= 1:
        part(0, rows)
        return
    ends = [rows * index // threads for index in range(threads + 1)]
    for done in [_pool().submit(part, start, end) for start, end in pairwise(ends)]:
        done.result()


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads of this process for kernels, which release the interpreter's lock."""
    return ThreadPoolExecutor(thread_name_prefix="kernel")
