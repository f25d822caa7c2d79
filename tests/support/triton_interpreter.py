"""Imports the Triton kernels in Triton's interpreter, where there is no CUDA device: they then run on CPU tensors.

Triton looks at ``TRITON_INTERPRET`` when a kernel is defined, its own library included, so an import that came first
does not do. The variable is set for the import and for calls only: programs that tests start would inherit it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

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
        return [import_module(f"{OURS}.{name}") for name in names]


def _is_python_of_triton(module: str) -> bool:
    """What is compiled of it cannot be imported twice, and need not be."""
    return module.partition(".")[0] == "triton" and not module.startswith("triton._C")
