"""Drawing tokens with torch operations, on any device, without waiting for it.

Owns the twin of :func:`etude.models.kernels.draws.draw` for logits that live on an accelerator: the same weights in
whole numbers, the same order of ties, the same random numbers, so that a request samples the same tokens on either. The
definition is in that module. Where it selects by radix, here the limit is found by bisection over the 32 bits of a key:
as many passes over the logits for any content, and nothing to be asked of the device in between.

Shape legend: R rows, V vocabulary, 1 an axis kept for broadcasting.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.models.kernels.draws import FASTEST_FALL, NO_TOKEN, UNIT_BITS

_KEY_BITS = 32
_LOWEST = -(1 << 31)
_NOTHING = -52.0
"""Exponent from which on a weight is 0 for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How each row is to be drawn, [R, 1] float64 on the device of the logits."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    uniforms: Tensor
    cuts: bool
    """Whether top-k or top-p may cut any row; known on the host."""


def draw_tensors(logits_RV: Tensor, chances: Chances) -> tuple[Tensor, Tensor | None]:
    """Draw one token per row: ids [R] int64, and what was kept [R, V] bool, all false where nothing was cut.

    The id is ``NO_TOKEN`` where nothing can be drawn. The set is ``None`` where no row may be cut.
    """
    logits_RV = logits_RV.float()
    peaks_R1 = logits_RV.amax(-1, keepdim=True)
    fit_R1 = peaks_R1.isfinite() & chances.temperatures.isfinite() & (chances.temperatures >= 0)
    logits_RV = torch.where(fit_R1, logits_RV, 0.0)
    keys_RV = _keys(logits_RV)
    weights_RV = _weights(logits_RV, torch.where(fit_R1, peaks_R1, 0.0), chances.temperatures)
    kept_RV = None
    if chances.cuts:
        kept_RV = _kept(keys_RV, weights_RV, chances)
        weights_RV = weights_RV * kept_RV
        kept_RV &= ~kept_RV.all(-1, keepdim=True)
    sums_RV = weights_RV.cumsum(-1)
    totals_R1 = sums_RV[:, -1:]
    targets_R1 = torch.minimum((chances.uniforms * totals_R1).long(), totals_R1 - 1)
    drawn_R = (sums_RV <= targets_R1).sum(-1)
    drawn_R = torch.where(chances.temperatures.squeeze(1) == 0, _first_largest(keys_RV), drawn_R)
    return torch.where(fit_R1.squeeze(1), drawn_R, NO_TOKEN), kept_RV


def _keys(logits_RV: Tensor) -> Tensor:
    """[R, V] int32 in the order of the logits; −0 and 0 have one key."""
    bits_RV = logits_RV.contiguous().view(torch.int32)
    return torch.where(bits_RV >= 0, bits_RV, _LOWEST - bits_RV)


def _weights(logits_RV: Tensor, peaks_R1: Tensor, temperatures_R1: Tensor) -> Tensor:
    """[R, V] int64: ⌊2⁴⁰ · exp((logit − peak) / temperature)⌋."""
    rises_R1 = (1.0 / (temperatures_R1 * math.log(2.0))).clamp(max=FASTEST_FALL)
    exponents_RV = ((logits_RV.double() - peaks_R1) * rises_R1).clamp(min=_NOTHING)
    return (exponents_RV.exp2() * 2.0**UNIT_BITS).long()


def _kept(keys_RV: Tensor, weights_RV: Tensor, chances: Chances) -> Tensor:
    """[R, V] bool: what top-k and then top-p keep; all of a greedy row."""
    vocabulary = keys_RV.shape[1]
    limits_R1 = chances.top_ks.long().clamp(max=vocabulary)
    limits_R1 = torch.where((limits_R1 == 0) | (chances.temperatures == 0), vocabulary, limits_R1)
    kept_RV = _leading(keys_RV, torch.ones_like(weights_RV), limits_R1)
    weights_RV = weights_RV * kept_RV
    totals_R1 = weights_RV.sum(-1, keepdim=True)
    needed_R1 = torch.minimum((totals_R1 * chances.top_ps).ceil().long(), totals_R1).clamp(min=1)
    whole_R1 = (chances.top_ps >= 1) | (chances.temperatures == 0)
    return kept_RV & (whole_R1 | _leading(keys_RV, weights_RV, needed_R1))


def _leading(keys_RV: Tensor, amounts_RV: Tensor, needed_R1: Tensor) -> Tensor:
    """[R, V] bool: the fewest with the largest keys whose amounts add up to what is needed; of equals, the first."""
    limits_R1 = torch.full_like(needed_R1, _LOWEST)
    for bit in reversed(range(_KEY_BITS)):
        trials_R1 = limits_R1 + (1 << bit)
        enough_R1 = (amounts_RV * (keys_RV >= trials_R1)).sum(-1, keepdim=True) >= needed_R1
        limits_R1 = torch.where(enough_R1, trials_R1, limits_R1)
    above_RV = keys_RV > limits_R1
    missing_R1 = needed_R1 - (amounts_RV * above_RV).sum(-1, keepdim=True)
    ties_RV = amounts_RV * (keys_RV == limits_R1)
    return above_RV | ((ties_RV > 0) & (ties_RV.cumsum(-1) - ties_RV < missing_R1))


def _first_largest(keys_RV: Tensor) -> Tensor:
    """[R] int64: the column of the largest key, of equals the lowest; ``argmax`` promises no order."""
    vocabulary = keys_RV.shape[1]
    columns_V = torch.arange(vocabulary, device=keys_RV.device)
    return torch.where(keys_RV == keys_RV.amax(-1, keepdim=True), columns_V, vocabulary).amin(-1)
