"""Weight digests computed in torch, on the device of the weights.

What ``digest.py`` does with numba on arrays, with torch operations on tensors of any device: the same digests. The only
file of the store that knows torch; it owns no format.

torch has no unsigned arithmetic: numbers are viewed as signed integers of their width, which wrap, and 64-bit words as
int64, whose logical shift is an arithmetic one with the upper bits cleared.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from etude.weights import kernels
from etude.weights.digest import Digest
from etude.weights.state import ELEMENTS, Element, Region

STORED_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.uint16: "U16",
        torch.int16: "I16",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.uint32: "U32",
        torch.int32: "I32",
        torch.float32: "F32",
        torch.uint64: "U64",
        torch.int64: "I64",
        torch.float64: "F64",
        torch.complex64: "C64",
    }
)
"""torch's types → their names in safetensors."""

_SIGNED: Mapping[int, torch.dtype] = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32})
_DIGEST_BLOCK = 1 << 22
"""Numbers digested at a time: the int64 words of a block take 32 MB each, of which five live at once."""


def digest_tensor(tensor: Tensor, key: int, region: Region, element: Element | None = None) -> Digest:
    """The term that a tensor holding ``region`` adds to the state digest; see
    :func:`etude.weights.digest.digest_numbers`.

    Raises ``ValueError`` when the region does not have exactly the tensor's numbers.
    """
    numbers = _signed(tensor, element or _element_of(tensor))
    if len(numbers) != region.count:
        raise ValueError(f"{region} has {region.count} numbers, the tensor {len(numbers)}")
    lanes = torch.zeros(2, dtype=torch.int64, device=numbers.device)
    for start in range(0, len(numbers), _DIGEST_BLOCK):
        block = numbers[start : start + _DIGEST_BLOCK]
        local = torch.arange(start, start + len(block), device=numbers.device)
        rows = local // region.width
        places = local.add_(rows, alpha=region.stride - region.width).add_(region.offset)
        places = places.mul_(_as_signed(kernels.INDEX_FACTOR)).add_(_as_signed(np.uint64(key)))
        lanes += _lanes(places.add_(block.long() & (1 << 8 * block.element_size()) - 1))
    first, second = lanes.tolist()
    return Digest(first % 2**64, second % 2**64)


def _element_of(tensor: Tensor) -> Element:
    name = STORED_TYPES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"{tensor.dtype} is not stored; view it as torch.uint8")
    return ELEMENTS[name]


def _signed(tensor: Tensor, element: Element) -> Tensor:
    """[n] a view of the tensor's numbers."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor.detach().view(-1).view(_SIGNED[element.size_bytes])


def _lanes(mixed: Tensor) -> Tensor:
    """The sums [2] of both lanes over sums of place and bits; overwrites its argument. See ``kernels.py``."""
    factors, shifts = kernels.MIX_FACTORS, kernels.MIX_SHIFTS
    mixed = mixed.bitwise_xor_(_shifted(mixed, shifts[0])).mul_(_as_signed(factors[0]))
    mixed = mixed.bitwise_xor_(_shifted(mixed, shifts[1]))
    first = mixed.sum()
    mixed = mixed.mul_(_as_signed(factors[1]))
    mixed = mixed.bitwise_xor_(_shifted(mixed, shifts[2]))
    return torch.stack((first, mixed.sum()))


def _shifted(words: Tensor, shift: np.uint64) -> Tensor:
    """A logical shift to the right."""
    return (words >> int(shift)).bitwise_and_((1 << 64 - int(shift)) - 1)


def _as_signed(word: np.uint64) -> int:
    return int(word.astype(np.int64))
