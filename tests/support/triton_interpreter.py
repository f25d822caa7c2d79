"""Imports the Triton kernels in Triton's interpreter, where there is no CUDA device: they then run on CPU tensors.

Triton looks at ``TRITON_INTERPRET`` when a kernel is defined, its own library included, so an import that came first
does not do. The variable is set for the import and for calls only: programs that tests start would inherit it.

The interpreter keeps bfloat16 as whole numbers, multiplies matrices of them as such and rounds towards zero. Both are
fixed here: they are numbers, and rounded to the nearest as a device does. It also patches Triton's language anew for
each launch and each call between kernels, which takes most of its time: here it does so once.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VARIABLE = "TRITON_INTERPRET"
OURS = "etude.models.kernels.gpu"


@contextmanager
def interpreted() -> Iterator[None]:
    """Calls of kernels are interpreted, unless there is a device to run them."""
    if torch.cuda.is_available():
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def kernels(*names: str) -> list[ModuleType]:
    """The modules of :mod:`etude.models.kernels.gpu` of these names."""
    with interpreted():
        if not torch.cuda.is_available():
            for name in [name for name in sys.modules if _is_python_of_triton(name) or name.startswith(OURS)]:
                del sys.modules[name]
            interpreter = import_module("triton.runtime.interpreter")
            _fix_bfloat16(interpreter)
            _patch_once(interpreter)
        return [import_module(f"{OURS}.{name}") for name in names]


def _is_python_of_triton(module: str) -> bool:
    """Compiled extensions of it cannot be imported twice, and need not be."""
    return module.partition(".")[0] == "triton" and not module.startswith("triton._C")


def _fix_bfloat16(interpreter: Any) -> None:
    """Give a fresh module of the interpreter the arithmetic of bfloat16."""
    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    cast, dot = builder.cast_impl, builder.create_dot

    def widened(number: Any) -> Any:
        return handle(_wide(number.data), tl.float32) if number.dtype.scalar == tl.bfloat16 else number

    def cast_rounding(self: Any, number: Any, kind: Any) -> Any:
        if kind.scalar == tl.bfloat16 and number.dtype.scalar == tl.float32:
            return handle(_nearest(number.data), tl.bfloat16)
        return cast(self, widened(number), kind)

    def dot_of_numbers(self: Any, one: Any, other: Any, *rest: Any) -> Any:
        return dot(self, widened(one), widened(other), *rest)

    builder.cast_impl, builder.create_dot = cast_rounding, dot_of_numbers


def _patch_once(interpreter: Any) -> None:
    """Leave the language patched after the first call of a function of each module: nothing else uses this import."""
    patch, patched = interpreter._patch_lang, set[str]()

    def patch_new(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = patch_new


def _wide(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _nearest(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, of two as near to the even one."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), halves)
