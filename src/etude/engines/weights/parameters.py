"""An engine's parameters as the in-place update sees them: flat values and their bits, on whatever device they are.

This file owns reading and describing one parameter; what lies where in it is ``probe.py``'s to find out.
"""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.errors import UserError
from etude.types import TensorSpec
from etude.weights.device import STORED_TYPES, digest_tensor
from etude.weights.digest import Digest
from etude.weights.elements import ELEMENTS
from etude.weights.placement import Block, Rectangle
from etude.weights.state import NUMBER_TYPES, Numbers, Region, spec_bytes, spec_key

TORCH_TYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for dtype, name in STORED_TYPES.items()})
"""Stored type → torch type."""
_BITS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


@final
class Parameter:
    """A parameter that an engine computes with, flat: its values in row-major order, and their bits.

    Raises :class:`~etude.errors.UserError` for a tensor that is not contiguous or of a type that is not stored.
    """

    def __init__(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise UserError(
                f"parameter {name!r} of shape {list(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
                "pass the tensor that it is a view of"
            )
        if tensor.dtype not in STORED_TYPES:
            raise UserError(f"parameter {name!r} is {tensor.dtype}, which is not stored; view it as torch.uint8")
        self.values = tensor.detach().view(-1)
        self.bits = self.values.view(_BITS[tensor.dtype.itemsize])

    def read_bits(self) -> npt.NDArray[np.signedinteger[Any]]:
        """[n] a copy on the host."""
        return self.bits.cpu().numpy().copy()

    def read_values(self) -> npt.NDArray[np.float64]:
        """[n] what its values are: E8M0 exponents as integers, the real parts of complex ones."""
        values = self.values.cpu()
        if values.dtype is torch.float8_e8m0fnu:
            values = values.view(torch.uint8)
        elif values.is_complex():
            values = values.real
        return values.to(torch.float64).numpy()

    def cast(self, values: Tensor) -> Tensor:
        """The bits that values on the host have in this parameter."""
        return values.to(self.values.dtype).view(self.bits.dtype)

    def keeps(self, spec: TensorSpec) -> bool:
        """Whether every value of a tensor's type can be read back from it."""
        stored, kept = ELEMENTS[spec.dtype], ELEMENTS[STORED_TYPES[self.values.dtype]]
        if stored.name == kept.name:
            return True
        is_wider = kept.exponent_bits >= stored.exponent_bits and kept.mantissa_bits >= stored.mantissa_bits
        return stored.is_float and kept.is_float and is_wider

    def digest(self, block: Block, spec: TensorSpec) -> Digest:
        """What the numbers of one block of a tensor add to the digest, as they are here.

        Only for types of which it :meth:`keeps` all. Takes device memory for a copy of the block.
        """
        key = spec_key(spec)
        if isinstance(block, Rectangle):
            shape, strides = (block.region.rows, block.region.width), (block.row_step, block.column_step)
            start = self.bits.storage_offset() + block.position
            return digest_tensor(self._stored(self.bits.as_strided(shape, strides, start), spec), key, block.region)
        values = self._stored(self.bits[torch.from_numpy(block.positions).to(self.bits.device)], spec)
        ends = np.flatnonzero(np.diff(block.indices) != 1) + 1
        total = Digest.ZERO
        for start, stop in pairwise((0, *ends.tolist(), block.count)):
            first = int(block.indices[start])
            total += digest_tensor(values[start:stop], key, Region.run(first, first + stop - start))
        return total

    def _stored(self, bits: Tensor, spec: TensorSpec) -> Tensor:
        """The values of a tensor's type that some of the bits here stand for."""
        return bits.contiguous().view(self.values.dtype).to(TORCH_TYPES[spec.dtype])


def numbers_of(spec: TensorSpec) -> int:
    """How many numbers a tensor has."""
    return spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes


def as_values(bits: Numbers, spec: TensorSpec) -> Tensor:
    """[k] numbers as values of a tensor's type. Raises :class:`~etude.errors.UserError` if they have another width."""
    expected = NUMBER_TYPES[ELEMENTS[spec.dtype].size_bytes]
    if bits.dtype != expected:
        raise UserError(f"tensor {spec.name!r} is {spec.dtype}: its bits are {expected.__name__}, not {bits.dtype}")
    return torch.from_numpy(np.array(bits)).view(TORCH_TYPES[spec.dtype])
