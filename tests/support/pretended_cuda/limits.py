"""Operands that a real device refuses, checked before an operation is computed on the CPU.

torch checks shapes. These are the rules that its CPU kernels do not have: alignment, types, and the devices of the
operands.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment of the strides and starts of a grouped product's operands, in bytes, for the hardware's copy unit (TMA)."""


class RefusedByDevice(RuntimeError):
    """A real device would refuse this operation, or compute something else."""


def check_grouped_product(factors: Sequence[Tensor], *, where: str) -> None:
    """Refuse factors of a bfloat16 grouped product that the copy unit cannot read."""
    for name, factor in zip(("first", "second"), factors, strict=True):
        strides, size = factor.stride(), factor.element_size()
        if 1 not in strides[-2:]:
            raise RefusedByDevice(f"grouped product: the {name} factor's strides are {strides}: no axis is contiguous")
        widest = strides[-2] if strides[-1] == 1 else strides[-1]
        if widest * size % ALIGNMENT or factor.storage_offset() * size % ALIGNMENT:
            raise RefusedByDevice(
                f"grouped product: the {name} factor, strides {strides}, offset {factor.storage_offset()}, "
                f"{size} bytes a number, is not aligned to {ALIGNMENT} bytes ({where})"
            )


def check_flash_attention(heads: Sequence[Tensor], starts: Sequence[Tensor | None], *, where: str) -> None:
    """Refuse queries, keys and values, or starts of sequences, that flash attention does not take."""
    for tensor in heads:
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            raise RefusedByDevice(f"flash attention takes bfloat16 and float16, not {tensor.dtype} ({where})")
        if tensor.stride(-1) != 1:
            raise RefusedByDevice(f"flash attention: the last axis has stride {tensor.stride(-1)}, not 1 ({where})")
    for start in starts:
        if start is not None and start.dtype != torch.int32:
            raise RefusedByDevice(f"flash attention takes starts of sequences in int32, not {start.dtype} ({where})")
