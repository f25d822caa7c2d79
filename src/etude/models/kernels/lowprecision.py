"""Rounding to formats of eight and four bits on the CPU: :mod:`etude.models.formats` as compiled loops, same bits.

A chain of torch operators costs about 20 µs a link however few rows there are; an engine rounds activations twice per
layer and step. Owns no format: what is computed, and why so, is written there.

Rounding without a branch: for |y| in [2^e, 2^(e+1)) the sum |y| + 2^(e+23−m) has its last bit where a number with m
bits of mantissa has it, so adding and subtracting that power rounds to the nearest, of two to the even one. A lowest
e gives the subnormal numbers of the format. Magnitudes are compared as integers: their order is that of the numbers,
with infinity and NaN on top.

Shape legend: M matrices (of activations: tokens, as matrices of one row), O rows, I columns.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from etude.jit import borrowing, inlined

Floats: TypeAlias = npt.NDArray[np.float32]

MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(-(2**31))
EXPONENT = np.int32(0x7F800000)
NAN = np.float32(np.nan)
LEAST_SCALE = np.float32(2.0**-100)
FP8_SCALE_MASK = np.int32(-1 << 4)
"""Leaves 20 significant bits."""
NVFP4_SCALE_MASK = np.int32(-1 << 6)
"""Leaves 18."""
E4M3_LARGEST = np.float32(448.0)
E4M3_LEAST_NORMAL = np.float32(2.0**-6)
E2M1_LARGEST = np.float32(6.0)
NVFP4_LARGEST = np.float32(6.0 * 448.0)
E8M0_LOWERED = np.int32(8 << 23)
"""From a block's largest exponent down to that of its scale."""
E8M0_LEAST = np.int32((127 - 100) << 23)

SQUARE = 128
MX_RUN = 32
NV_RUN = 16
LANES = 16
"""Length of the inner loops: a loop of known length becomes vector code, one of unknown length does not."""

Element: TypeAlias = tuple[np.int32, np.int32, np.float32]
"""(least exponent, 23 − mantissa bits, both where float32 has its exponent; largest number)."""
E4M3: Element = (np.int32((127 - 6) << 23), np.int32((23 - 3) << 23), E4M3_LARGEST)
E2M1: Element = (np.int32(127 << 23), np.int32((23 - 1) << 23), E2M1_LARGEST)


@borrowing
def fp8(x_MOI: Floats, out_MOI: Floats) -> None:
    """Round to FP8: E4M3 with a float32 scale per square of 128."""
    matrices, height, width = x_MOI.shape
    x, out = x_MOI.reshape(-1), out_MOI.reshape(-1)
    for m in range(matrices):
        for top in range(0, height, SQUARE):
            first, last = m * height + top, m * height + min(top + SQUARE, height)
            for left in range(0, width, SQUARE):
                count = min(SQUARE, width - left)
                largest = np.int32(0)
                for row in range(first, last):
                    largest = max(largest, largest_bits(x, row * width + left, count))
                scale = short(number(largest) / E4M3_LARGEST, FP8_SCALE_MASK)
                for row in range(first, last):
                    round_run(x, out, row * width + left, count, scale, E4M3)


@borrowing
def mxfp8(x_MOI: Floats, out_MOI: Floats) -> None:
    """Round to MXFP8: E4M3 with a power of two per run of 32."""
    matrices, height, width = x_MOI.shape
    x, out = x_MOI.reshape(-1), out_MOI.reshape(-1)
    for row in range(matrices * height):
        for left in range(0, width, MX_RUN):
            start, count = row * width + left, min(MX_RUN, width - left)
            exponent = largest_bits(x, start, count) & EXPONENT
            scale = NAN if exponent == EXPONENT else number(max(exponent - E8M0_LOWERED, E8M0_LEAST))
            round_run(x, out, start, count, scale, E4M3)


@borrowing
def nvfp4(x_MOI: Floats, out_MOI: Floats) -> None:
    """Round to NVFP4: E2M1 with an E4M3 scale per run of 16 and a float32 per matrix."""
    matrices, height, width = x_MOI.shape
    x, out = x_MOI.reshape(-1), out_MOI.reshape(-1)
    for m in range(matrices):
        largest = largest_bits(x, m * height * width, height * width)
        outer = short(number(largest) / NVFP4_LARGEST, NVFP4_SCALE_MASK)
        for row in range(m * height, (m + 1) * height):
            for left in range(0, width, NV_RUN):
                start, count = row * width + left, min(NV_RUN, width - left)
                ideal = number(largest_bits(x, start, count)) / E2M1_LARGEST / outer
                scale = rounded(E4M3_LEAST_NORMAL if ideal < E4M3_LEAST_NORMAL else ideal, E4M3)
                round_run(x, out, start, count, scale * outer, E2M1)


@inlined
def largest_bits(x: Floats, start: int, count: int) -> np.int32:
    """The bits of the largest magnitude in a run."""
    largest, whole = np.int32(0), count // LANES * LANES
    for left in range(start, start + whole, LANES):
        for i in range(LANES):
            # An unsigned index: numba lets a signed one count from the end, which is a branch.
            largest = max(largest, np.int32(bits(x[np.uint64(left) + np.uint64(i)]) & MAGNITUDE))
    for i in range(start + whole, start + count):
        largest = max(largest, np.int32(bits(x[i]) & MAGNITUDE))
    return largest


@inlined
def round_run(x: Floats, out: Floats, start: int, count: int, scale: np.float32, element: Element) -> None:
    """Round a run to multiples of a scale."""
    whole = count // LANES * LANES
    for left in range(start, start + whole, LANES):
        for i in range(LANES):
            place = np.uint64(left) + np.uint64(i)
            out[place] = rounded(x[place] / scale, element) * scale
    for i in range(start + whole, start + count):
        out[i] = rounded(x[i] / scale, element) * scale


@inlined
def short(scale: np.float32, mask: np.int32) -> np.float32:
    """A scale, raised to its least value and cut to the significant bits of a mask; NaN stays."""
    return number(bits(LEAST_SCALE if scale < LEAST_SCALE else scale) & mask)


@inlined
def rounded(y: np.float32, element: Element) -> np.float32:
    """Round a number to a type, see the top of this file. NaN stays NaN; zero keeps its sign."""
    least, shift, largest = element
    magnitude = np.int32(bits(y) & MAGNITUDE)
    power = number(max(np.int32(magnitude & EXPONENT), least) + shift)
    nearest = (number(magnitude) + power) - power
    return number(bits(largest if nearest > largest else nearest) | (bits(y) & SIGN))


@inlined
def bits(x: np.float32) -> np.int32:
    """The bits of a float32 number."""
    return np.float32(x).view(np.int32)


@inlined
def number(pattern: np.int32) -> np.float32:
    """The float32 number with these bits."""
    return np.int32(pattern).view(np.float32)
