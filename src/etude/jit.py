"""Compilation of loops with numba: at memory speed, on any processor, without a C compiler.

Owns how kernels are compiled and where the machine code is kept between processes. What is computed is written where it
belongs: ``weights/`` for deltas, ``models/kernels/`` for arithmetic.
"""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba import njit
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")

KERNEL_FOLDERS = ("weights", "models/kernels")
"""Folders with kernels, below this file's folder."""


def _cache_folder() -> str:
    """Folder of compiled kernels: one folder per state of the source.

    Left to itself numba looks at the file of a kernel only and would go on using it after an edit of another file that
    it inlined.
    """
    here = Path(__file__)
    sources = [here, *(file for folder in KERNEL_FOLDERS for file in sorted((here.parent / folder).glob("*.py")))]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(root) / "etude" / "kernels" / digest[:16])


_SETTINGS: Any = numba.config
if not _SETTINGS.CACHE_DIR:
    _SETTINGS.CACHE_DIR = _cache_folder()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba: no GIL, no bounds checks, cached on disk between processes."""
    jitted = njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")(function)
    return cast("Callable[P, R]", jitted)


def borrowing(function: Callable[P, R]) -> Callable[P, R]:
    """Compile like :func:`kernel`, but without counting references to arrays, so that nothing can be allocated.

    Counting is atomic, and numba leaves some of it in loops that hand arrays to inlined functions: it cost the range
    coder more than half of its time.
    """
    # The stubs of numba do not know its private options.
    jitted: Any = partial(njit, nogil=True, cache=True, boundscheck=False, error_model="numpy")
    return cast("Callable[P, R]", jitted(_nrt=False)(function))


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba for inlining into kernels."""
    jitted = njit(nogil=True, inline="always", boundscheck=False, error_model="numpy")(function)
    return cast("Callable[P, R]", jitted)


def vector(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an LLVM code generator callable from kernels; numba resolves its context, callers pass the rest."""
    return cast("Callable[..., Any]", intrinsic(function))
