"""Compilation of loops with numba: at memory speed, on any processor, without a C compiler.

Owns how kernels are compiled, where the machine code is kept between processes, and that processes store it one at a
time. What is computed is written where it belongs: ``weights/`` for deltas, ``models/kernels/`` for arithmetic.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    return cast("Callable[P, R]", _stored_alone(jitted))


def borrowing(function: Callable[P, R]) -> Callable[P, R]:
    """Compile like :func:`kernel`, but without counting references to arrays, so that nothing can be allocated.

    Counting is atomic, and numba leaves some of it in loops that hand arrays to inlined functions: it cost the range
    coder more than half of its time.
    """
    # The stubs of numba do not know its private options.
    jitted: Any = partial(njit, nogil=True, cache=True, boundscheck=False, error_model="numpy")
    return cast("Callable[P, R]", _stored_alone(jitted(_nrt=False)(function)))


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile with numba for inlining into kernels."""
    jitted = njit(nogil=True, inline="always", boundscheck=False, error_model="numpy")(function)
    return cast("Callable[P, R]", jitted)


def vector(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an LLVM code generator callable from kernels; numba resolves its context, callers pass the rest."""
    return cast("Callable[..., Any]", intrinsic(function))


def _stored_alone(jitted: Any) -> Any:
    """A kernel that only one process at a time adds to its cache.

    numba reads the index of a kernel's types, adds one and writes it, without a lock: of two processes that compile it
    for different types, one would leave an entry that names the other's machine code, for good. A version of numba
    whose cache has another shape stores as it does.
    """
    cache = getattr(jitted, "_cache", None)
    store, folder = getattr(cache, "save_overload", None), getattr(cache, "cache_path", None)
    if cache is None or store is None or folder is None:
        return jitted

    def store_alone(*args: Any) -> None:
        with _locked(Path(folder)):
            store(*args)

    cache.save_overload = store_alone
    return jitted


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as long as another process writes two small files
        yield
    finally:
        os.close(lock)
