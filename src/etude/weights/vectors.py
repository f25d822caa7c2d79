"""Comparing 64 numbers at once from numba, on any processor, without a C compiler.

Each intrinsic is a few lines of LLVM vector code, which LLVM lowers to whatever the machine has (AVX-512, AVX2, SSE2,
NEON). What comes back is a 64-bit mask: bit j speaks of element ``offset + j``. The arrays must hold 64 elements from
``offset`` on; nothing checks that here.
"""

from typing import Any

from llvmlite import ir
from numba import types

from etude.jit import vector

LANES = 64
"""Elements per mask."""


@vector
def unequal(_context: Any, first: Any, second: Any, offset: Any) -> Any:
    """Bit j: ``first[offset + j] != second[offset + j]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = _load(context, builder, signature.args[0], arguments[0], arguments[2])
        y = _load(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", x, y), ir.IntType(64))

    return types.uint64(first, second, types.int64), generate


@vector
def trailing_zeros(_context: Any, mask: Any) -> Any:
    """Index of the lowest set bit; undefined for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@vector
def popcount(_context: Any, mask: Any) -> Any:
    """Number of set bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    lanes = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), LANES)
    loaded = builder.load(builder.bitcast(builder.gep(data, [offset]), lanes.as_pointer()))
    loaded.align = array_type.dtype.bitwidth // 8
    return loaded
