"""Comparing 64 numbers at once from numba, on any processor, without a C compiler.

Each intrinsic is a few lines of LLVM vector code, which LLVM lowers to whatever the machine has (AVX-512, AVX2, SSE2,
NEON). What comes back is a 64-bit mask: bit j speaks of element ``offset + j``. The arrays must hold 64 elements from
``offset`` on; nothing checks that here.
"""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 64
"""Elements per mask."""

P = ParamSpec("P")
R = TypeVar("R")


def _cache_folder() -> str:
    """Where compiled kernels are kept: one folder per state of the source.

    Left to itself numba looks at the file of a kernel only and would go on using it after an edit of another file that
    it inlined.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(root) / "etude" / "kernels" / digest[:16])


_SETTINGS: Any = numba.config
if not _SETTINGS.CACHE_DIR:
    _SETTINGS.CACHE_DIR = _cache_folder()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba: no GIL, no bounds checks, kept on disk between processes."""
    compiled = njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    return cast("Callable[P, R]", compiled)


def borrowing(function: Callable[P, R]) -> Callable[P, R]:
    """Compile like :func:`kernel`, but without counting references to arrays, so that nothing can be allocated.

    Counting is atomic, and numba leaves some of it in loops that hand arrays to inlined functions: it cost the range
    coder more than half of its time.
    """
    # The stubs of numba do not know its private options.
    compiled: Any = partial(njit, nogil=True, cache=True, boundscheck=False, error_model="numpy")
    return cast("Callable[P, R]", compiled(_nrt=False)(function))


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba, to be called from kernels."""
    compiled = njit(nogil=True, inline="always", boundscheck=False, error_model="numpy")(function)
    return cast("Callable[P, R]", compiled)


def vector(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make generated LLVM code callable from kernels; numba resolves its context, callers pass the rest."""
    return cast("Callable[..., Any]", intrinsic(function))


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

    def generate(_ctx: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@vector
def popcount(_context: Any, mask: Any) -> Any:
    """Number of set bits."""

    def generate(_ctx: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    vector = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), LANES)
    loaded = builder.load(builder.bitcast(builder.gep(data, [offset]), vector.as_pointer()))
    loaded.align = array_type.dtype.bitwidth // 8
    return loaded
