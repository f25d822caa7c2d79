"""Changes and digests of weights where torch has them, without bringing the weights to the host.

What ``frames.py`` and ``digest.py`` do with numba on arrays, with torch operations on tensors of any device: the same
changes, the same bytes, the same digests. Only the streams of a frame, some two bytes per changed number, cross to the
host. The only file of the store that knows torch; it owns no format.

torch has no unsigned arithmetic: numbers are viewed as signed integers of their width, which wrap, and 64-bit words as
int64, whose logical shift is an arithmetic one with the upper bits cleared. Legend: n numbers, k changed ones.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from etude.weights import kernels
from etude.weights.digest import Digest
from etude.weights.elements import ELEMENTS, Element
from etude.weights.frames import pack_gaps
from etude.weights.kernels import EXCEPTION_LIMIT, GAP_LIMIT, SMALLEST_EXCEPTION, fold_of
from etude.weights.state import Bytes1d, Region

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
"""What safetensors calls torch's types."""

_SIGNED: Mapping[int, torch.dtype] = MappingProxyType({1: torch.int8, 2: torch.int16, 4: torch.int32})
_DIGEST_BLOCK = 1 << 22
"""Numbers digested at a time: the int64 words of a block take 32 MB each, of which five live at once."""


def extract(old: Tensor, new: Tensor, element: Element | None = None) -> tuple[Tensor, Tensor]:
    """The exact difference of two tensors: (positions int64 [k] ascending, steps int32 [k] never 0).

    Positions count numbers in row-major order. ``element`` says how the bits are to be read, by default as the tensors'
    type has it. Raises ``ValueError`` for tensors that are not contiguous or not alike.
    """
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"cannot compare {old.dtype} {list(old.shape)} with {new.dtype} {list(new.shape)}")
    element = element or _element_of(new)
    before, after = _signed(old, element), _signed(new, element)
    positions = (before != after).nonzero().view(-1)
    fold = fold_of(element)
    return positions, (_ordinal(after[positions], fold) - _ordinal(before[positions], fold)).int()


def encode_changes_on_device(old: Tensor, new: Tensor, element: Element, *, before: Digest, after: Digest) -> bytes:
    """The GAPS frame that turns ``old`` into ``new``: the bytes that :func:`etude.weights.frames.encode` would give."""
    positions, steps = extract(old, new, element)
    elements = new.numel() * new.element_size() // element.size_bytes
    return encode_extracted(positions, steps, element, elements, (before, after))


def encode_extracted(
    positions: Tensor, steps: Tensor, element: Element, elements: int, digests: tuple[Digest, Digest]
) -> bytes:
    """The GAPS frame of changes that are on a device: positions int64 [k] and steps int32 [k] as of :func:`extract`.

    For a chunk of several pieces, concatenate what each yields, with the positions counted from the chunk's start.
    """
    coded = _step_planes(steps) if element.size_bytes == max(_SIGNED) else _step_codes(steps)
    contents = [_on_host(stream) for stream in (_gap_bytes(positions), *coded)]
    return pack_gaps(contents, element, (elements, len(positions)), digests)


def apply_changes_(tensor: Tensor, positions: Tensor, steps: Tensor, element: Element | None = None) -> None:
    """Move the numbers at ``positions`` int64 [k] by ``steps`` int32 [k], in place; no position may occur twice.

    Raises ``ValueError`` for a tensor that is not contiguous.
    """
    element = element or _element_of(tensor)
    fold = fold_of(element)
    numbers = _signed(tensor, element)
    moved = _ordinal(numbers[positions], fold) + steps.to(numbers.dtype)
    numbers[positions] = _ordinal(moved, fold)


def digest_tensor(tensor: Tensor, key: int, region: Region, element: Element | None = None) -> Digest:
    """What a tensor that holds ``region`` adds to the state digest; see :func:`etude.weights.digest.digest_numbers`.

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


def _ordinal(signed: Tensor, fold: int) -> Tensor:
    """Bits → ordinals, and ordinals → bits."""
    return signed ^ ((signed >> (8 * signed.element_size() - 1)) & fold)


def _gap_bytes(positions: Tensor) -> Tensor:
    """The bytes of :func:`etude.weights.kernels.write_gaps`."""
    if len(positions) == 0:
        return positions.to(torch.uint8)
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    ends = (gaps // GAP_LIMIT + 1).cumsum(0) - 1
    stream = torch.full((int(ends[-1]) + 1,), GAP_LIMIT, dtype=torch.uint8, device=positions.device)
    stream[ends] = (gaps % GAP_LIMIT).to(torch.uint8)
    return stream


def _step_codes(steps: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and exceptions of :func:`etude.weights.kernels.write_steps`."""
    magnitudes = steps.abs()
    is_exception = magnitudes != 1
    codes = (steps < 0).to(torch.uint8) | (is_exception.to(torch.uint8) << 1)
    fours = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    packed = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    sizes = magnitudes[is_exception]
    is_long = sizes >= EXCEPTION_LIMIT + SMALLEST_EXCEPTION
    lengths = torch.where(is_long, 3, 1)
    starts = lengths.cumsum(0) - lengths
    exceptions = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=steps.device)
    exceptions[starts] = torch.where(is_long, EXCEPTION_LIMIT, sizes - SMALLEST_EXCEPTION).to(torch.uint8)
    exceptions[starts[is_long] + 1] = (sizes[is_long] & 0xFF).to(torch.uint8)
    exceptions[starts[is_long] + 2] = (sizes[is_long] >> 8).to(torch.uint8)
    return packed, exceptions


def _step_planes(steps: Tensor) -> tuple[Tensor, ...]:
    """The byte planes of zigzagged 4-byte steps."""
    zigzags = (steps << 1) ^ (steps >> 31)
    return tuple(((zigzags >> (8 * plane)) & 0xFF).to(torch.uint8) for plane in range(4))


def _on_host(stream: Tensor) -> Bytes1d:
    array: Bytes1d = stream.cpu().numpy()
    return array


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
