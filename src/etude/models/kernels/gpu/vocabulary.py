"""Kernels over rows of logits, a row per program: drawn tokens, log-probabilities and entropies.

Each kernel reads logits in the type they have, as often as it must (two or three times, mostly from cache), and writes
a few numbers; nothing else of the vocabulary's size is made but a gradient. Torch's operations make some six arrays in
float32 for a log-probability with its gradient, seventy launches for a draw.

    H = −Σ p ln p,  p = softmax(x / T)        ∂ ln p_i / ∂x_j = (1[i = j] − p_j) / T,  ∂H / ∂x_j = −p_j (ln p_j + H) / T

Shape legend: R rows, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

BLOCK = 2048
"""Logits that a program looks at together."""


def logprobs_and_entropies(logits_RV: Tensor, ids_R: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
    """[R] float32 log-probabilities of ``ids`` (int64) under softmax(logits / temperature), [R] float32 its entropies.

    Temperatures are above 0. Differentiable in the logits, whose gradient has their type.
    """
    results: tuple[Tensor, Tensor] = _Readout.apply(logits_RV, ids_R, temperatures_R)
    return results


class _Readout(Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, ids_R: Tensor, temperatures_R: Tensor) -> tuple[Tensor, Tensor]:
        logits_RV = logits_RV.contiguous()
        rows, vocabulary = logits_RV.shape
        out_3R = torch.empty((3, rows), dtype=torch.float32, device=logits_RV.device)
        if rows:
            _read[(rows,)](logits_RV, ids_R, temperatures_R, out_3R, rows, vocabulary, X=BLOCK, num_warps=8)
        logprobs_R, entropies_R, masses_R = out_3R.unbind()
        ctx.save_for_backward(logits_RV, ids_R, temperatures_R, entropies_R, masses_R)
        return logprobs_R.clone(), entropies_R.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_RV, ids_R, temperatures_R, entropies_R, masses_R = ctx.saved_tensors
        rows, vocabulary = logits_RV.shape
        out_RV = torch.empty_like(logits_RV)
        if rows:
            of_logprobs_R, of_entropies_R = (gradient.contiguous() for gradient in gradients)
            _slope[(rows, triton.cdiv(vocabulary, BLOCK))](
                logits_RV, ids_R, temperatures_R, entropies_R, masses_R, of_logprobs_R, of_entropies_R, out_RV,
                vocabulary, X=BLOCK, num_warps=8,
            )  # fmt: skip
        return out_RV, None, None


@triton.jit
def _read(logits, ids, temperatures, out, rows, vocabulary, X: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sharpness = 1.0 / tl.load(temperatures + row).to(tl.float32)
    at = logits + row * vocabulary
    column = tl.arange(0, X)
    peak = float("-inf")
    mass = 0.0
    spread = 0.0
    for start in range(0, vocabulary, X):
        inside = start + column < vocabulary
        x = tl.load(at + start + column, mask=inside, other=float("-inf")).to(tl.float32) * sharpness
        highest = tl.maximum(peak, tl.max(x, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fall = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - base))
        gap = tl.where(x == float("-inf"), 0.0, x - base)
        weight = tl.where(x == float("-inf"), 0.0, tl.exp(x - base))
        moved = tl.where(peak == float("-inf"), 0.0, mass * (peak - base))
        spread = (spread + moved) * fall + tl.sum(weight * gap, 0)
        mass = mass * fall + tl.sum(weight, 0)
        peak = highest
    total = peak + tl.log(mass)
    chosen = tl.load(at + tl.load(ids + row)).to(tl.float32) * sharpness
    tl.store(out + row, chosen - total)
    tl.store(out + rows + row, tl.log(mass) - spread / mass)
    tl.store(out + 2 * rows + row, total)


@triton.jit
def _slope(logits, ids, temperatures, entropies, masses, of_logprobs, of_entropies, out, vocabulary, X: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sharpness = 1.0 / tl.load(temperatures + row).to(tl.float32)
    column = tl.program_id(1) * X + tl.arange(0, X)
    inside = column < vocabulary
    x = tl.load(logits + row * vocabulary + column, mask=inside, other=float("-inf")).to(tl.float32) * sharpness
    log_share = x - tl.load(masses + row)
    share = tl.exp(log_share)
    first = tl.load(of_logprobs + row) * (tl.where(column == tl.load(ids + row), 1.0, 0.0) - share)
    bent = tl.where(share == 0.0, 0.0, share * (log_share + tl.load(entropies + row)))
    slope = (first - tl.load(of_entropies + row) * bent) * sharpness
    tl.store(out + row * vocabulary + column, slope.to(out.dtype.element_ty), mask=inside)


def draw(
    logits_RV: Tensor,
    temperatures_R: Tensor,
    uniforms_R: Tensor,
    *,
    unit_bits: int,
    fastest_fall: float,
    nothing: float,
) -> Tensor:
    """[R] int64: a token of each row, drawn by weights in whole numbers as :mod:`etude.models.kernels.draws` does.

    ``temperatures`` and ``uniforms`` are float64. The id is −1 where nothing can be drawn.
    """
    rows, vocabulary = logits_RV.shape
    drawn_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        _draw[(rows,)](
            logits_RV, temperatures_R, uniforms_R, drawn_R, logits_RV.stride(0), vocabulary, 2.0**unit_bits,
            fastest_fall, nothing, X=BLOCK, num_warps=8,
        )  # fmt: skip
    return drawn_R


@triton.jit
def _draw(logits, temperatures, uniforms, drawn, row_stride, vocabulary, unit, fastest_fall, nothing, X: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    column = tl.arange(0, X)
    at = logits + row * row_stride
    peak = float("-inf")
    broken = 0
    for start in range(0, vocabulary, X):
        x = tl.load(at + start + column, mask=start + column < vocabulary, other=float("-inf")).to(tl.float32)
        broken += tl.sum((x != x).to(tl.int32), 0)
        peak = tl.maximum(peak, tl.max(x, 0))
    first = vocabulary
    total = tl.zeros((), tl.int64)
    rise = tl.minimum(1.0 / (temperature * 0.6931471805599453), fastest_fall)
    for start in range(0, vocabulary, X):
        inside = start + column < vocabulary
        x = tl.load(at + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        first = tl.minimum(first, tl.min(tl.where(x == peak, start + column, vocabulary), 0))
        total += tl.sum(_weights(x, peak, rise, unit, nothing, inside), 0)
    target = tl.minimum((tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    below = tl.zeros((), tl.int64)
    token = tl.zeros((), tl.int64)
    for start in range(0, vocabulary, X):
        inside = start + column < vocabulary
        x = tl.load(at + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        weights = _weights(x, peak, rise, unit, nothing, inside)
        block = tl.sum(weights, 0)
        if below + block <= target:
            token += tl.minimum(X, vocabulary - start)
        elif below <= target:
            sums = below + tl.cumsum(weights, 0)
            token += tl.sum(((sums <= target) & inside).to(tl.int64), 0)
        below += block
    token = tl.where(temperature == 0.0, first.to(tl.int64), token)
    fit = (broken == 0) & (peak < float("inf")) & (peak > float("-inf"))
    fit = fit & (temperature >= 0.0) & (temperature < float("inf"))
    tl.store(drawn + row, tl.where(fit, token, -1))


@triton.jit
def _weights(x, peak, rise, unit, nothing, inside):
    """⌊unit · 2^((x − peak) · rise)⌋ in float64."""
    exponent = tl.maximum((x.to(tl.float64) - peak.to(tl.float64)) * rise, nothing)
    return tl.where(inside, (tl.exp2(exponent) * unit).to(tl.int64), 0)
