"""Triton's kernels on the pretended device: they run in Triton's interpreter, on the tensors below."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pretended_cuda.device import PretendedDevice
from pretended_cuda.limits import RefusedByDevice
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
            tensors = [operand for operand in (*args, *kwargs.values()) if isinstance(operand, torch.Tensor)]
            operands = [tensor for tensor in tensors if is_pretended(tensor)]
            if len(operands) < len(tensors):
                raise RefusedByDevice(f"{function.__name__}: an operand of the kernel lies on the host")
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
    """All of them, since a kernel does not declare its outputs. This is too strict if streams share their inputs."""
    return list({id(operand.below): operand.below for operand in operands}.values())
