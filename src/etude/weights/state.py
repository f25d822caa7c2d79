"""Weight states as bytes: tensors by name.

This file owns what a state is. It knows neither models nor torch: a tensor here is a name, a type, a shape and raw
little-endian bytes, spelled as in safetensors. Turning a model into a state and back is the trainer's and the
engine's work; hashing a state is ``digest.py``'s.

*Numbers* are what codecs and digests count: each type is cut into numbers of 1, 2 or 4 bytes (:data:`ELEMENTS`). The
*canonical index* of a number is its place in the whole tensor in row-major order, whatever else holds it.

Bits are numbered so that a change is a small number. Consecutive floats differ by 1 in their *ordinal*: the involution
f(s) = s ^ ((s >> (w−1)) & max) on the signed integer with the same w bits. −0 and +0 are neighbours (−1 and 0),
infinities and NaNs are ordinary numbers at the ends. A change is the difference of ordinals modulo 2^w, its *step*,
hence lossless for every pair of bit patterns, invertible and additive: the steps form a group. Integers are their own
ordinals. The arithmetic is in ``kernels.py``.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from etude.types import TensorSpec

Bytes1d: TypeAlias = npt.NDArray[np.uint8]
"""[n] contiguous raw bytes."""
Numbers: TypeAlias = "npt.NDArray[np.unsignedinteger[Any]]"
"""[n] the bits of n numbers, contiguous uint8, uint16 or uint32."""

NUMBER_TYPES: Mapping[int, type[np.unsignedinteger[Any]]] = MappingProxyType({1: np.uint8, 2: np.uint16, 4: np.uint32})
"""Bytes of a number → the array type that holds its bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """The numbers of a stored type, of 1, 2 or 4 bytes."""

    name: str
    """The stored type, as safetensors spells it."""
    size_bytes: int
    """Bytes of one number: types of 8 bytes are read as two numbers of 4."""
    per_value: int = 1
    """Numbers per value of the stored type."""
    is_float: bool = False
    """True if the numbers are sign-magnitude floats, whose ordinal is the involution above."""
    exponent_bits: int = 0
    """Width of the exponent, 0 for integers; the sign is above it, the mantissa below."""

    @property
    def mantissa_bits(self) -> int:
        """Width of the mantissa of a float."""
        return 8 * self.size_bytes - 1 - self.exponent_bits


ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        element.name: element
        for element in (
            Element(name="BOOL", size_bytes=1),
            Element(name="U8", size_bytes=1),
            Element(name="I8", size_bytes=1),
            Element(name="F8_E4M3", size_bytes=1, is_float=True, exponent_bits=4),
            Element(name="F8_E5M2", size_bytes=1, is_float=True, exponent_bits=5),
            Element(name="F8_E8M0", size_bytes=1),
            Element(name="U16", size_bytes=2),
            Element(name="I16", size_bytes=2),
            Element(name="F16", size_bytes=2, is_float=True, exponent_bits=5),
            Element(name="BF16", size_bytes=2, is_float=True, exponent_bits=8),
            Element(name="U32", size_bytes=4),
            Element(name="I32", size_bytes=4),
            Element(name="F32", size_bytes=4, is_float=True, exponent_bits=8),
            Element(name="U64", size_bytes=4, per_value=2),
            Element(name="I64", size_bytes=4, per_value=2),
            Element(name="F64", size_bytes=4, per_value=2),
            Element(name="C64", size_bytes=4, per_value=2, is_float=True, exponent_bits=8),
        )
    }
)
"""Every type we store. Packed 4-bit formats (NVFP4, MXFP4, int4) are published as ``U8``, their block scales as the
type they have; a step of one nibble is then a step of 1 or 16.
"""

MAX_DIMENSION = 2**63 - 1
"""Largest extent of one axis: what a signed 64-bit integer, and hence every tensor library, can express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A rectangle of a tensor: ``rows`` runs of ``width`` numbers, ``stride`` apart, from ``offset`` on.

    Covers what the parameters of engines hold: slices of the first axis and flat ranges (one run), slices of an inner
    axis (many runs). Number ``j`` of the region has the canonical index ``offset + (j // width) * stride + j % width``.

    Example: columns 2–3 of an [8, 10] tensor of numbers → ``Region(offset=2, width=2, stride=10, rows=8)``.
    """

    offset: int
    width: int
    stride: int
    rows: int

    def __post_init__(self) -> None:
        if min(self.offset, self.width, self.stride, self.rows) < 0 or (self.rows > 1 and self.stride < self.width):
            raise ValueError(f"{self} is not a region: all four count from 0 and runs must not overlap")

    @property
    def count(self) -> int:
        """Numbers in it."""
        return self.width * self.rows

    @property
    def end(self) -> int:
        """One past the largest canonical index in it."""
        return self.offset + (self.rows - 1) * self.stride + self.width if self.count else self.offset

    @classmethod
    def run(cls, start: int, stop: int) -> "Region":
        """One contiguous range."""
        return cls(offset=start, width=stop - start, stride=stop - start, rows=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor's description and its bytes.

    ``data`` is never written to once it is here, unless the state's owner says so: it may be shared. Raises
    ``ValueError`` for an unknown type, an impossible shape, or bytes that do not fill it exactly.
    """

    spec: TensorSpec
    data: Bytes1d
    """[n] raw little-endian bytes, in row-major order."""

    def __post_init__(self) -> None:
        size = spec_bytes(self.spec)
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise ValueError(
                f"tensor {self.spec.name!r}: data must be contiguous one-dimensional uint8, "
                f"got {self.data.dtype} {list(self.data.shape)}; pass its raw bytes"
            )
        if len(self.data) != size:
            raise ValueError(
                f"tensor {self.spec.name!r}: {self.spec.dtype} {list(self.spec.shape)} is {size} bytes, "
                f"got {len(self.data)}"
            )

    @property
    def element(self) -> Element:
        """The way its bytes are cut into numbers."""
        return ELEMENTS[self.spec.dtype]

    @property
    def numbers(self) -> Numbers:
        """[n] a view of the bytes as numbers."""
        return self.data.view(NUMBER_TYPES[self.element.size_bytes])


State: TypeAlias = Mapping[str, StoredTensor]
"""All tensors of a model by name; each key equals its tensor's ``spec.name``."""


def spec_bytes(spec: TensorSpec) -> int:
    """Size in bytes of a tensor. Raises ``ValueError`` for an unknown type or an impossible shape."""
    if spec.dtype not in ELEMENTS:
        raise ValueError(f"tensor {spec.name!r} has unknown dtype {spec.dtype!r}; known are {', '.join(ELEMENTS)}")
    if not all(0 <= extent <= MAX_DIMENSION for extent in spec.shape):
        raise ValueError(f"tensor {spec.name!r} has an impossible shape {list(spec.shape)}")
    element = ELEMENTS[spec.dtype]
    return math.prod(spec.shape) * element.per_value * element.size_bytes


def ordered(state: State) -> list[StoredTensor]:
    """Sort tensors by name. Raises ``ValueError`` if one is filed under a name that is not its own."""
    for name, tensor in state.items():
        if tensor.spec.name != name:
            raise ValueError(f"tensor {tensor.spec.name!r} is filed under {name!r}; the two must be equal")
    return [state[name] for name in sorted(state)]


def state_bytes(state: State) -> int:
    """Size in bytes of all tensors, uncompressed and without names."""
    return sum(len(tensor.data) for tensor in state.values())


def snapshot(state: State) -> dict[str, StoredTensor]:
    """Copy a state, so that its bytes stay the same while training goes on in place."""
    return {name: StoredTensor(spec=tensor.spec, data=tensor.data.copy()) for name, tensor in state.items()}


def spec_key(spec: TensorSpec) -> int:
    """A 64-bit number for a tensor's name, type and shape: the first bytes of their SHA-256, little-endian."""
    line = orjson.dumps([spec.name, spec.dtype, list(spec.shape)])
    return int.from_bytes(hashlib.sha256(line).digest()[:8], "little")
