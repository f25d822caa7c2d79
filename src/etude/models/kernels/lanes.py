"""Sums of products in one fixed order, sixteen at a time, on any processor.

A dot product of length k is sixteen partial sums, lane l over the elements l, l + 16, l + 32, …, each a chain of fused
multiply-adds; then the lanes are folded in halves (l with l + 8, then l + 4, l + 2, l + 1). Nothing else decides the
bits of a result: not how many rows or columns are computed together, not the vector width of the machine. So a token
has the same numbers alone and in a batch, in the engine and in the trainer, and on x86 and ARM.

Each intrinsic is LLVM vector code, which LLVM lowers to whatever the machine has; the fixed order costs nothing, for it
is also the fast one. A *matrix* here is a tuple (array, offset, stride) over a one-dimensional contiguous array: row m
begins at offset + m · stride. A 16-bit array holds bfloat16. Nothing checks bounds.
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from etude.jit import inlined, vector

LANES = 16
"""Partial sums of a dot product."""

FLOAT, INT32, INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)

Intrinsic: TypeAlias = Callable[..., Any]
Matrix: TypeAlias = tuple[npt.NDArray[Any], int, int]
"""(array, offset, stride)."""


def dots(rows: int, columns: int, *, ahead: int = 0) -> Intrinsic:
    """An intrinsic that computes ``out[m, n] = Σ_i x[m, i] · w[n, i]`` for a tile of rows and columns.

    Called as ``(x, w, length, out)``; ``length`` is a positive multiple of 16, the others are matrices. A tile has 16
    results at most; their sums stay in registers on machines with 32 vector registers. While it reads ``w`` it asks
    memory for what lies ``ahead`` rows further on: few rows of ``x`` use weights faster than a processor would guess
    them.
    """

    @vector
    def tile(_context: Any, x: Any, w: Any, _length: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_matrix, w_matrix, out_matrix = (
                _Matrix(context, builder, signature.args[place], arguments[place]) for place in (0, 1, 3)
            )
            x_rows, w_rows, out_rows = x_matrix.rows(rows), w_matrix.rows(columns), out_matrix.rows(rows)
            later_rows = w_matrix.rows(columns, first=ahead) if ahead else []
            sums = [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * columns)
            with _Counted(builder, arguments[2], sums) as loop:
                weights = [_load(builder, row, loop.index, w[0].dtype.bitwidth) for row in w_rows]
                factors = [_load(builder, row, loop.index, x[0].dtype.bitwidth) for row in x_rows]
                for row in later_rows:
                    _prefetch(builder, builder.gep(row, [loop.index]))
                for place, (factor, weight) in enumerate(product(factors, weights)):
                    loop.update(place, _fma(builder, factor, weight))
            results = _folded(builder, loop.sums)
            for m, row in enumerate(out_rows):
                _store(builder, results, row, range(m * columns, (m + 1) * columns))
            return context.get_dummy_value()

        return types.void(x, w, types.int64, out), generate

    return tile


def weighted(rows: int, vectors: int) -> Intrinsic:
    """An intrinsic that computes ``out[m, :] += Σ_i p[m, i] · v[i, :]`` over 16 · ``vectors`` columns, i ascending.

    Called as ``(p, v, length, out)``; all but ``length`` are matrices.
    """

    @vector
    def tile(_context: Any, p: Any, v: Any, _length: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            p_rows, out_rows = (
                _Matrix(context, builder, signature.args[place], arguments[place]).rows(rows) for place in (0, 3)
            )
            values = _Matrix(context, builder, signature.args[1], arguments[1])
            places = list(product(out_rows, [_constant(n * LANES) for n in range(vectors)]))
            sums = [_load(builder, row, place, 32) for row, place in places]
            with _Counted(builder, arguments[2], sums, step=1) as loop:
                row, bits = values.row(loop.index), v[0].dtype.bitwidth
                values_16 = [_load(builder, row, _constant(n * LANES), bits) for n in range(vectors)]
                factors = [_spread(builder, builder.load(builder.gep(p_row, [loop.index]))) for p_row in p_rows]
                for place, (factor, value) in enumerate(product(factors, values_16)):
                    loop.update(place, _fma(builder, factor, value))
            for total, (row, place) in zip(loop.sums, places, strict=True):
                builder.store(total, builder.bitcast(builder.gep(row, [place]), FLOATS.as_pointer())).align = 4
            return context.get_dummy_value()

        return types.void(p, v, types.int64, out), generate

    return tile


@vector
def lane_sum(_context: Any, x: Any, _offset: Any, _length: Any) -> Any:
    """Σ of ``length`` float32 numbers from ``offset`` on, in the order of a dot product; a positive multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        start = builder.gep(data, [arguments[1]])
        with _Counted(builder, arguments[2], [ir.Constant(FLOATS, [0.0] * LANES)]) as loop:
            numbers = _load(builder, start, loop.index, 32)
            loop.update(0, lambda total: builder.fadd(total, numbers))
        return builder.extract_element(_folded(builder, loop.sums), _constant(0))

    return types.float32(x, types.int64, types.int64), generate


@vector
def lane_max(_context: Any, x: Any, _offset: Any, _length: Any) -> Any:
    """The largest of ``length`` float32 numbers from ``offset`` on; a positive multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        start = builder.gep(data, [arguments[1]])

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        with _Counted(builder, arguments[2], [ir.Constant(FLOATS, [-math.inf] * LANES)]) as loop:
            numbers = _load(builder, start, loop.index, 32)
            loop.update(0, lambda highest: larger(numbers, highest))
        result = loop.sums[0]
        for width in (8, 4, 2, 1):
            moved = _shuffled(builder, result, result, [(lane + width) % LANES for lane in range(LANES)])
            result = larger(result, moved)
        return builder.extract_element(result, _constant(0))

    return types.float32(x, types.int64, types.int64), generate


@vector
def fma(_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """``a · b + c`` in float32, rounded once."""

    def generate(_ctx: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@vector
def power_of_two(_context: Any, _exponent: Any) -> Any:
    """2 to an integer in −126 … 127."""

    def generate(_ctx: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        biased = builder.add(arguments[0], ir.Constant(INT32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(INT32, 23)), FLOAT)

    return types.float32(types.int32), generate


@vector
def number(_context: Any, array: Any, _offset: Any) -> Any:
    """The float32 number at an offset."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        loaded = builder.load(builder.gep(data, [arguments[1]]))
        if array.dtype.bitwidth == 32:
            return loaded
        return builder.bitcast(builder.shl(builder.zext(loaded, INT32), ir.Constant(INT32, 16)), FLOAT)

    return types.float32(array, types.int64), generate


ONE = np.float32(1.0)
LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER = np.float32(12582912.0)
"""1.5 · 2²³: what is added to it loses its fraction, rounded to nearest even."""
EXP_LOWEST = np.float32(-87.0)
"""Below this e^x is given as 0: the next numbers are not normal."""
EXP_HIGHEST = np.float32(88.0)
"""Above this e^x is given as e^88: the next numbers are infinite."""
P0, P1, P2, P3, P4, P5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
"""Polynomial of e^r on |r| ≤ ln 2 / 2 (S. Moshier, Cephes, expf): error below 2 units in the last place."""


@inlined
def exponential(x: np.float32) -> np.float32:
    """e^x in float32: the same bits everywhere, which a machine's own library does not promise."""
    inside = min(max(x, EXP_LOWEST), EXP_HIGHEST)
    whole = fma(inside, LOG2_E, ROUNDER) - ROUNDER
    rest = fma(whole, -LN_2_LOW, fma(whole, -LN_2_HIGH, inside))
    series = fma(fma(fma(fma(fma(P0, rest, P1), rest, P2), rest, P3), rest, P4), rest, P5)
    result = fma(series, rest * rest, rest) + ONE
    return np.float32(0.0) if x < EXP_LOWEST else result * power_of_two(np.int32(whole))


class _Matrix:
    """Addresses of the rows of a matrix: a tuple (array, offset, stride)."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array, offset, self._stride = (builder.extract_value(value, place) for place in range(3))
        data = context.make_array(kind[0])(context, builder, array).data
        self._builder, self._start = builder, builder.gep(data, [offset])

    def row(self, index: Any) -> Any:
        """Address of a row."""
        return self._builder.gep(self._start, [self._builder.mul(self._stride, index)])

    def rows(self, count: int, *, first: int = 0) -> list[Any]:
        """Addresses of ``count`` rows."""
        return [self.row(_constant(first + index)) for index in range(count)]


class _Counted:
    """A loop over ``index = 0, step, … < end`` that carries vectors; a ``with`` block is its body."""

    def __init__(self, builder: Any, end: Any, sums: Sequence[Any], *, step: int = LANES) -> None:
        self._builder, self._end, self._step = builder, end, step
        entry = builder.block
        self._body = builder.append_basic_block("sum")
        self._after = builder.append_basic_block("summed")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(INT64)
        self.index.add_incoming(_constant(0), entry)
        self._phis = [builder.phi(FLOATS) for _ in sums]
        for phi, start in zip(self._phis, sums, strict=True):
            phi.add_incoming(start, entry)
        self.sums: list[Any] = list(self._phis)
        """The carried values at this place of the body; after the loop, the results."""

    def update(self, place: int, add: Callable[[Any], Any]) -> None:
        """Carry ``add(sum)`` on instead of a sum."""
        self.sums[place] = add(self.sums[place])

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, *_: object) -> None:
        builder = self._builder
        following = builder.add(self.index, _constant(self._step))
        self.index.add_incoming(following, self._body)
        for phi, total in zip(self._phis, self.sums, strict=True):
            phi.add_incoming(total, self._body)
        builder.cbranch(builder.icmp_signed("<", following, self._end), self._body, self._after)
        builder.position_at_end(self._after)


def _fma(builder: Any, a: Any, b: Any) -> Callable[[Any], Any]:
    name = f"llvm.fma.v{LANES}f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), name=name)
    return lambda c: builder.call(function, [a, b, c])


def _folded(builder: Any, sums: Sequence[Any]) -> Any:
    """Fold the lanes of up to 16 vectors in halves; result j, in lane j, is the sum over vector j."""
    vectors, width = [*sums, *[ir.Constant(FLOATS, [0.0] * LANES)] * (-len(sums) % LANES)], LANES
    while len(vectors) > 1:
        half = width // 2
        starts = [side + group for side in (0, LANES) for group in range(0, LANES, width)]
        low = [start + lane for start in starts for lane in range(half)]
        high = [lane + half for lane in low]
        vectors = [
            builder.fadd(_shuffled(builder, x, y, low), _shuffled(builder, x, y, high))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width = half
    return vectors[0]


def _shuffled(builder: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _store(builder: Any, values: Any, target: Any, lanes: Sequence[int]) -> None:
    """Store some lanes, one after the other."""
    stored = _shuffled(builder, values, values, lanes)
    builder.store(stored, builder.bitcast(target, ir.VectorType(FLOAT, len(lanes)).as_pointer())).align = 4


def _load(builder: Any, row: Any, place: Any, bits: int) -> Any:
    """Sixteen numbers as float32."""
    stored = FLOATS if bits == 32 else ir.VectorType(ir.IntType(16), LANES)
    loaded = builder.load(builder.bitcast(builder.gep(row, [place]), stored.as_pointer()))
    loaded.align = bits // 8
    if bits == 32:
        return loaded
    high = builder.shl(builder.zext(loaded, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(high, FLOATS)


def _prefetch(builder: Any, address: Any) -> None:
    """Ask memory for the cache line at an address, into the second-level cache; it need not exist."""
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name)
    if function is None:
        kinds = [address.type, INT32, INT32, INT32]
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name=name)
    reading, locality, data = 0, 2, 1
    builder.call(function, [address, *(ir.Constant(INT32, value) for value in (reading, locality, data))])


def _spread(builder: Any, value: Any) -> Any:
    """One number in all lanes."""
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, _constant(0))
    return _shuffled(builder, first, first, [0] * LANES)


def _constant(value: int) -> Any:
    return ir.Constant(INT64, value)
