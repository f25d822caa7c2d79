"""Triton's kernels on the pretended device: they run in Triton's interpreter, on the tensors below."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pretended_cuda.device import PretendedDevice
from pretended_cuda.tensors import PretendedTensor, inner, is_pretended
from triton_interpreter import interpreted, kernels

NAMES = ("fused", "paged_attention", "vocabulary")
"""Modules of :mod:`etude.models.kernels.gpu`."""


@contextmanager
def launched_on(device: PretendedDevice) -> Iterator[None]:
    """Inside, the kernels take pretended tensors. To be entered before there seems to be a device."""
    with interpreted():
        kernels(*NAMES)
        from triton.runtime import interpreter  # the one that the kernels were just defined with

        run = interpreter.InterpretedFunction.run

        def launch(function: Any, *args: Any, **kwargs: Any) -> Any:
            operands = [operand for operand in (*args, *kwargs.values()) if isinstance(operand, torch.Tensor)]
            for operand in operands:
                assert is_pretended(operand), f"{function.__name__}: an operand lies on the {operand.device}"
            lower = [inner(argument) for argument in args]
            return device.launch(
                function.__name__,
                lambda: run(function, *lower, **{name: inner(value) for name, value in kwargs.items()}),
                reads=[],
                writes=_written(operands),
            )

        interpreter.InterpretedFunction.run = launch
        try:
            yield
        finally:
            interpreter.InterpretedFunction.run = run


def _written(operands: list[PretendedTensor]) -> list[torch.Tensor]:
    """All of them: a kernel does not say which it writes. Stricter than need be where streams share what they read."""
    return list({id(operand.inner): operand.inner for operand in operands}.values())
