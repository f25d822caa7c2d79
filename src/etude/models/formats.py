"""Block-scaled formats of eight and four bits: rounding, encoding and decoding of matrices.

Owns the formats themselves. :mod:`etude.models.lowprecision` owns their use: which tensors of a model have them, their
names and their gradients; the same rounding as compiled loops is in
:mod:`etude.models.kernels.lowprecision`.

Every device must produce the same bits, so only comparisons, maxima and single IEEE operations occur, and

* a divisor is always a tensor: for a Python number torch's GPU kernels multiply by the reciprocal, which rounds
  twice (an approximate division diverged after about 100 RL steps: Cursor, Composer 2 report). Nor may any of it go
  through ``torch.compile``, whose float32 division is approximate;
* scales have so few significant bits that element times scale fits into float32's 24: decoding does not round, which
  makes encoding a fixed point (what was published, loaded and encoded again has the same codes);
* no scale is below 2⁻¹⁰⁰, so no result is subnormal, and flushing subnormals to 0 makes no difference.

Sources: OCP Microscaling Formats v1.0 §5.3–5.4 (E4M3, E2M1, E8M0) and §6.3 (MXFP8); DeepSeek-V3 §3.3 (fp8 in blocks);
NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149) for nvfp4.

Shape legend: M matrices, each on its own (an activation is a matrix of one row), O rows, I columns, o and i blocks
along them, r and c rows and columns of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0
E4M3_LEAST_NORMAL = 2.0**-6
"""Scales of four-bit blocks do not get smaller, like torchao's: below, their rounding would reach the elements."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By code; bit 3 is the sign (OCP MX v1.0 §5.3)."""

LEAST_EXPONENT = -100
LEAST_SCALE = 2.0**LEAST_EXPONENT
"""Lower bound of scales: see above."""
E4M3_TOP_EXPONENT = 8
"""2⁸ is E4M3's largest power of two."""
FLOAT_BIAS = 127
FLOAT_MANTISSA_BITS = 23
FP8_SCALE_BITS = 20
"""Significant bits of an fp8 scale: 24 less the four of an element."""
NVFP4_SCALE_BITS = 18
"""Significant bits of the second scale of nvfp4: 24 less two of an element and four of its block's scale."""


class Quantised(NamedTuple):
    """Block-scaled matrices, as float32 values or as codes in their storage type."""

    elements_MOI: Tensor
    """Encode as four-bit codes [M, O, ⌈I/2⌉]: an even column is the low half of its byte."""
    scales_Moi: Tensor
    outer_M: Tensor | None
    """The second scale, of a whole matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFormat:
    """A type of number: value = sign · mantissa · 2^exponent, no infinities."""

    round: Callable[[Tensor], Tensor]
    """float32 → float32: the nearest value, ties to even, limited to the largest; preserves NaN and the sign of 0."""
    pack: Callable[[Tensor], Tensor]
    """Values → codes, in the type they are stored in."""
    unpack: Callable[[Tensor], Tensor]
    """Codes → values; with two codes per byte the last axis becomes twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Elements of one type in blocks of ``rows`` × ``columns`` that share a scale; the last blocks may be smaller."""

    element: ElementFormat
    rows: int
    columns: int
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    """[M,o,i] largest magnitude of each block → its scale, and [M] of each matrix if there is a second one."""
    scale_dtype: torch.dtype
    """The stored type of block scales."""
    has_outer: bool = False
    """True if a matrix has a second scale, a float32."""


def quantise(x_MOI: Tensor, form: BlockFormat) -> Quantised:
    """Round float32 matrices to values of a format.

    A block with a number that is not finite becomes NaN, with a second scale its whole matrix does.
    """
    tiles_Moric = _tiled(x_MOI, form)
    scales_Moi, outer_M = form.scales(tiles_Moric.abs().amax((2, 4)))
    quotients = tiles_Moric / _spread(scales_Moi, outer_M)
    return Quantised(_untiled(form.element.round(quotients), x_MOI), scales_Moi, outer_M)


def dequantise(values: Quantised, form: BlockFormat) -> Tensor:
    """[M,O,I] float32: element × scale (× the second scale); exact for what :func:`quantise` returns."""
    tiles_Moric = _tiled(values.elements_MOI, form)
    return _untiled(tiles_Moric * _spread(values.scales_Moi, values.outer_M), values.elements_MOI)


def to_codes(values: Quantised, form: BlockFormat) -> Quantised:
    """Encode the values of a format in their storage type; exact."""
    return Quantised(form.element.pack(values.elements_MOI), values.scales_Moi.to(form.scale_dtype), values.outer_M)


def from_codes(codes: Quantised, form: BlockFormat) -> Quantised:
    """Decode stored codes; exact."""
    return Quantised(form.element.unpack(codes.elements_MOI), codes.scales_Moi.float(), codes.outer_M)


# ── elements ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def _pack_e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn)


def _unpack_e4m3(codes: Tensor) -> Tensor:
    return codes.float()


def _round_e2m1(x: Tensor) -> Tensor:
    """Steps of ½ below 2, of 1 below 4, of 2 up to 6; ``torch.round`` resolves ties to even."""
    size = x.abs().clamp(max=E2M1_LARGEST)
    coarse = torch.where(size < 4, size.round(), (size * 0.5).round() * 2)
    return torch.where(size < 2, (size * 2).round() * 0.5, coarse).copysign(x)


def _pack_e2m1(values: Tensor) -> Tensor:
    """[..., I] values → [..., I/2] bytes; the first of two columns is in the low half, as ModelOpt stores them."""
    size = values.abs()
    indices = torch.where(size <= 2, size * 2, (size + 2).clamp(max=7))
    codes = indices.to(torch.uint8) | values.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _unpack_e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=codes.device)
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


# ── scales ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _float_scales(largest_Moi: Tensor) -> tuple[Tensor, None]:
    """The largest number of a block becomes 448."""
    return _short(_quotient(largest_Moi, E4M3_LARGEST).clamp(min=LEAST_SCALE), FP8_SCALE_BITS), None


def _power_scales(largest_Moi: Tensor) -> tuple[Tensor, None]:
    """2^(⌊log₂ largest⌋ − 8), as in OCP MX §6.3: numbers in (464, 512) scales are clipped to 448."""
    exponents = largest_Moi.view(torch.int32) >> FLOAT_MANTISSA_BITS
    lowered = (exponents - E4M3_TOP_EXPONENT).clamp(min=FLOAT_BIAS + LEAST_EXPONENT)
    scales_Moi = (lowered << FLOAT_MANTISSA_BITS).view(torch.float32)
    return torch.where(largest_Moi.isfinite(), scales_Moi, torch.nan), None


def _nested_scales(largest_Moi: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of a matrix becomes 6 · 448, the largest of a block 6 as nearly as E4M3 allows."""
    whole_M = largest_Moi.amax((1, 2))
    outer_M = _short(_quotient(whole_M, E2M1_LARGEST * E4M3_LARGEST).clamp(min=LEAST_SCALE), NVFP4_SCALE_BITS)
    scales_Moi = _quotient(largest_Moi, E2M1_LARGEST) / outer_M[:, None, None]
    return _round_e4m3(scales_Moi.clamp(min=E4M3_LEAST_NORMAL)), outer_M


def _quotient(x: Tensor, divisor: float) -> Tensor:
    return x / x.new_full((), divisor)


def _short(scales: Tensor, bits: int) -> Tensor:
    """Truncate to some significant bits, towards 0, so that the largest number does not overflow."""
    return (scales.view(torch.int32) & (-1 << (FLOAT_MANTISSA_BITS + 1 - bits))).view(torch.float32)


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tiled(x_MOI: Tensor, form: BlockFormat) -> Tensor:
    """[M,o,r,i,c], padded with zeros, which no largest magnitude notices."""
    matrices, height, width = x_MOI.shape
    rows, columns = min(form.rows, height), min(form.columns, width)
    padded = functional.pad(x_MOI, (0, -width % columns, 0, -height % rows))
    return padded.view(matrices, padded.shape[1] // rows, rows, padded.shape[2] // columns, columns)


def _untiled(tiles: Tensor, like_MOI: Tensor) -> Tensor:
    """[M,O,I]: the inverse of :func:`_tiled`."""
    _, height, width = like_MOI.shape
    return tiles.flatten(3).flatten(1, 2)[:, :height, :width].contiguous()


def _spread(scales_Moi: Tensor, outer_M: Tensor | None) -> Tensor:
    """[M,o,1,i,1]: what each element is a multiple of."""
    whole_Moi = scales_Moi if outer_M is None else scales_Moi * outer_M[:, None, None]
    return whole_Moi[:, :, None, :, None]


E4M3 = ElementFormat(round=_round_e4m3, pack=_pack_e4m3, unpack=_unpack_e4m3)
"""Four bits of exponent, three of mantissa: ±2⁻⁹ … ±448."""
E2M1 = ElementFormat(round=_round_e2m1, pack=_pack_e2m1, unpack=_unpack_e2m1)
"""Two bits of exponent, one of mantissa: ±½ … ±6."""

FP8 = BlockFormat(element=E4M3, rows=128, columns=128, scales=_float_scales, scale_dtype=torch.float32)
"""Weights in squares of 128, activations in runs of 128 of a token (DeepSeek-V3 §3.3.2)."""
MXFP8 = BlockFormat(element=E4M3, rows=1, columns=32, scales=_power_scales, scale_dtype=torch.float8_e8m0fnu)
"""Runs of 32 with a power of two."""
NVFP4 = BlockFormat(
    element=E2M1, rows=1, columns=16, scales=_nested_scales, scale_dtype=torch.float8_e4m3fn, has_outer=True
)
"""Runs of 16 with an E4M3 scale, matrices (of activations: tokens) with a float32."""
