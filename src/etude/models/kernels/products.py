"""Batch-invariant matrix products, with a fixed order of sums: one row does not depend on the rows beside it.

Owns tiling: which tile of :mod:`etude.models.kernels.lanes` computes what. The order of a sum is that module's; ragged
ends are added one by one after the folded lanes, ascending.

Shape legend: N rows, I inputs, O outputs, R rows sorted by expert, E experts.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from etude.jit import borrowing, inlined
from etude.models.kernels.lanes import LANES, Matrix, dots, fma, number

Array: TypeAlias = npt.NDArray[Any]
"""float32, or int16 holding bfloat16 where weights or a cache are meant; C-contiguous."""
Floats: TypeAlias = npt.NDArray[np.float32]

ZERO = np.float32(0.0)
ROW_BLOCK = 64
"""Rows that stay in a core's cache while the weights stream past them."""

AHEAD = 32
"""Rows of weights that are asked for before they are needed: a matrix that lies in memory is then read at its speed."""

_FIRST_4_4, _DOTS_4_4 = dots(4, 4, ahead=AHEAD), dots(4, 4)
_DOTS_2_8, _DOTS_1_16 = dots(2, 8, ahead=AHEAD), dots(1, 16, ahead=AHEAD)
_DOTS_1_4, _DOTS_1_1 = dots(1, 4), dots(1, 1)


@inlined
def tiles(x: Matrix, w: Matrix, shape: tuple[int, int, int], out: Matrix) -> None:
    """Matrix product in tiles: ``out[m, n] = Σ_i x[m, i] · w[n, i]``; ``shape`` is (rows, columns, sum length)."""
    rows, columns, length = shape
    whole = length // LANES * LANES
    wide, narrow = columns // 16 * 16, columns // 4 * 4
    if whole:
        for n in range(0, wide, 16):
            _sixteen(x, below(w, n), (rows, whole), beside(out, n))
        for n in range(wide, narrow, 4):
            for m in range(rows):
                _DOTS_1_4(below(x, m), below(w, n), whole, beside(below(out, m), n))
        for n in range(narrow, columns):
            for m in range(rows):
                _DOTS_1_1(below(x, m), below(w, n), whole, beside(below(out, m), n))
    if whole < length:
        _add_rest(x, w, shape, out)


@inlined
def below(matrix: Matrix, rows: int) -> Matrix:
    """View of a matrix from a later row on."""
    array, offset, stride = matrix
    return array, offset + rows * stride, stride


@inlined
def beside(matrix: Matrix, columns: int) -> Matrix:
    """View of a matrix from a later column on."""
    array, offset, stride = matrix
    return array, offset + columns, stride


@inlined
def _sixteen(x: Matrix, w: Matrix, shape: tuple[int, int], out: Matrix) -> None:
    """Sixteen columns: four rows at a time, then two, then one."""
    rows, length = shape
    m = 0
    if rows >= 4:
        for n in range(0, 16, 4):
            _FIRST_4_4(x, below(w, n), length, beside(out, n))
        m = 4
    while m + 4 <= rows:
        for n in range(0, 16, 4):
            _DOTS_4_4(below(x, m), below(w, n), length, beside(below(out, m), n))
        m += 4
    if m + 2 <= rows:
        for n in range(0, 16, 8):
            _DOTS_2_8(below(x, m), below(w, n), length, beside(below(out, m), n))
        m += 2
    if m < rows:
        _DOTS_1_16(below(x, m), w, length, below(out, m))


@inlined
def _add_rest(x: Matrix, w: Matrix, shape: tuple[int, int, int], out: Matrix) -> None:
    """The rest of a sum beyond its last sixteen, one by one."""
    rows, columns, length = shape
    whole = length // LANES * LANES
    target = out[0]
    for m in range(rows):
        for n in range(columns):
            place = out[1] + m * out[2] + n
            total = target[place] if whole else ZERO
            for i in range(whole, length):
                total = fma(x[0][x[1] + m * x[2] + i], number(w[0], w[1] + n * w[2] + i), total)
            target[place] = total


@borrowing
def linear(x_NI: Floats, weight_OI: Array, bias_O: Floats, out_NO: Floats) -> None:
    """Linear layer: ``out = x · weightᵀ + bias``; an empty bias is none."""
    rows, inputs = x_NI.shape
    outputs = weight_OI.shape[0]
    x, w, out = (x_NI.reshape(-1), 0, inputs), (weight_OI.reshape(-1), 0, inputs), (out_NO.reshape(-1), 0, outputs)
    _product(x, w, (rows, outputs, inputs), out)
    if len(bias_O):
        for m in range(rows):
            for n in range(outputs):
                out_NO[m, n] += bias_O[n]


@borrowing
def grouped(x_RI: Floats, ends_E: npt.NDArray[np.int32], weight_EOI: Array, out_RO: Floats) -> None:
    """Grouped product of experts: expert e multiplies the rows before ``ends[e]`` and after e − 1's."""
    inputs, outputs = x_RI.shape[1], weight_EOI.shape[1]
    x, w, out = (x_RI.reshape(-1), 0, inputs), (weight_EOI.reshape(-1), 0, inputs), (out_RO.reshape(-1), 0, outputs)
    start = 0
    for expert in range(len(ends_E)):
        rows = ends_E[expert] - start
        if rows > 0:
            _product(below(x, start), below(w, expert * outputs), (rows, outputs, inputs), below(out, start))
        start += rows


@inlined
def _product(x: Matrix, w: Matrix, shape: tuple[int, int, int], out: Matrix) -> None:
    """All rows and columns: a block of rows at a time, sixteen columns of it at a time."""
    rows, outputs, inputs = shape
    for m in range(0, rows, ROW_BLOCK):
        for n in range(0, outputs, LANES):
            part = (min(ROW_BLOCK, rows - m), min(LANES, outputs - n), inputs)
            tiles(below(x, m), below(w, n), part, beside(below(out, m), n))
