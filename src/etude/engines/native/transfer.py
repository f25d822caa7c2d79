"""Transfer of several arrays to or from the device in one copy: each copy costs a call, and one to the host waits.

arrays ──join──▶ bytes, pinned ──▶ bytes on the device ──split──▶ tensors
tensors ──join──▶ bytes on the device ──(wait)──▶ bytes ──split──▶ arrays
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment of parts, in bytes: kernels would be compiled again for a smaller alignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """The type and shape of one tensor among bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The span of a tensor."""
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        """Size without padding for alignment."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def join(tensors: Sequence[Tensor], *, pinned: bool = False) -> Tensor:
    """The concatenated bytes of some tensors, uint8; ``pinned`` ones are in memory from which a device can copy."""
    parts = [ByteSpan.of(tensor) for tensor in tensors]
    joined = torch.empty(sum(map(_room, parts)), dtype=torch.uint8, device=tensors[0].device, pin_memory=pinned)
    for tensor, view in zip(tensors, split(joined, parts), strict=True):
        view.copy_(tensor)
    return joined


def split(joined: Tensor, parts: Sequence[ByteSpan]) -> list[Tensor]:
    """The tensors in bytes from :func:`join`, as views."""
    views, start = list[Tensor](), 0
    for part in parts:
        views.append(joined[start : start + part.size_bytes].view(part.dtype).view(part.shape))
        start += _room(part)
    return views


def place(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to a device, by one asynchronous copy."""
    if device.type == "cpu":
        return list(tensors)
    joined = join(tensors, pinned=device.type == "cuda").to(device, non_blocking=True)
    return split(joined, [ByteSpan.of(tensor) for tensor in tensors])


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy device tensors to the host, by one copy, which waits for the device once."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    return split(join(tensors).cpu(), [ByteSpan.of(tensor) for tensor in tensors])


def _room(part: ByteSpan) -> int:
    return -(-part.size_bytes // ALIGNMENT) * ALIGNMENT
