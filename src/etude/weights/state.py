"""Weights as bytes: named tensors, whole or a rank's share of them.

This file owns what a state is. It knows neither models nor torch: a tensor here is a name, a type, a shape and raw
little-endian bytes, spelled as in safetensors. Turning a model into a state and back is the trainer's and the
engine's work; hashing a state is ``digest.py``'s.

*Numbers* are what codecs and digests count: the elements of 1, 2 or 4 bytes that ``elements.py`` cuts a type into. The
*canonical index* of a number is its place in the whole tensor in row-major order, whoever holds it.
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
from etude.weights.elements import ELEMENTS, Element

Bytes1d: TypeAlias = npt.NDArray[np.uint8]
"""[n] contiguous raw bytes."""
Numbers: TypeAlias = "npt.NDArray[np.unsignedinteger[Any]]"
"""[n] the bits of n numbers, contiguous uint8, uint16 or uint32."""

NUMBER_TYPES: Mapping[int, type[np.unsignedinteger[Any]]] = MappingProxyType({1: np.uint8, 2: np.uint16, 4: np.uint32})
"""Bytes of a number → the array type that holds its bits."""

MAX_DIMENSION = 2**63 - 1
"""Largest extent of one axis: what a signed 64-bit integer, and hence every tensor library, can express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A rectangle of a tensor: ``rows`` runs of ``width`` numbers, ``stride`` apart, from ``offset`` on.

    Covers what sharded frameworks hold: slices of the first axis and flat ranges (one run), slices of an inner axis
    (many runs). Number ``j`` of the region has the canonical index ``offset + (j // width) * stride + j % width``.

    Example: columns 2–3 of an [8, 10] tensor of numbers → ``Region(offset=2, width=2, stride=10, rows=8)``.
    """

    offset: int
    width: int
    stride: int
    rows: int

    def __post_init__(self) -> None:
        if min(self.offset, self.width, self.stride, self.rows) < 0 or (self.rows > 1 and self.stride < self.width):
            raise ValueError(f"{self} is no region: all four count from 0 and runs must not overlap")

    @property
    def count(self) -> int:
        """How many numbers it holds."""
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
    """One tensor's description and its bytes, or those of one region of it.

    Nobody writes to ``data`` once it is here, unless the state's owner says so: it may be shared. Raises ``ValueError``
    for an unknown type, an impossible shape, a region outside of it, or bytes that do not fill it exactly.
    """

    spec: TensorSpec
    """Of the whole tensor, whatever part is held."""
    data: Bytes1d
    """[n] raw little-endian bytes, in row-major order of what is held."""
    region: Region | None = None
    """The part that is held; ``None`` for all of it."""

    def __post_init__(self) -> None:
        whole = spec_bytes(self.spec)
        element = ELEMENTS[self.spec.dtype]
        size = whole if self.region is None else self.region.count * element.size_bytes
        if self.region is not None and self.region.end * element.size_bytes > whole:
            raise ValueError(f"tensor {self.spec.name!r}: {self.region} reaches beyond its {whole} bytes")
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise ValueError(
                f"tensor {self.spec.name!r}: data must be contiguous one-dimensional uint8, "
                f"got {self.data.dtype} {list(self.data.shape)}; pass its raw bytes"
            )
        if len(self.data) != size:
            held = "" if self.region is None else f", of which {self.region} is held,"
            raise ValueError(
                f"tensor {self.spec.name!r}: {self.spec.dtype} {list(self.spec.shape)}{held} is {size} bytes, "
                f"got {len(self.data)}"
            )

    @property
    def element(self) -> Element:
        """How its bytes are cut into numbers."""
        return ELEMENTS[self.spec.dtype]

    @property
    def numbers(self) -> Numbers:
        """[n] a view of the bytes as numbers."""
        return self.data.view(NUMBER_TYPES[self.element.size_bytes])

    @property
    def held(self) -> Region:
        """The region it holds, also when that is everything."""
        return self.region or Region.run(0, len(self.data) // self.element.size_bytes)


State: TypeAlias = Mapping[str, StoredTensor]
"""All tensors of a model, or one rank's part of each, by name; each key equals its tensor's ``spec.name``."""


def spec_bytes(spec: TensorSpec) -> int:
    """Size in bytes of a tensor. Raises ``ValueError`` for an unknown type or an impossible shape."""
    if spec.dtype not in ELEMENTS:
        raise ValueError(f"tensor {spec.name!r} has unknown dtype {spec.dtype!r}; known are {', '.join(ELEMENTS)}")
    if not all(0 <= extent <= MAX_DIMENSION for extent in spec.shape):
        raise ValueError(f"tensor {spec.name!r} has an impossible shape {list(spec.shape)}")
    element = ELEMENTS[spec.dtype]
    return math.prod(spec.shape) * element.per_value * element.size_bytes


def ordered(state: State) -> list[StoredTensor]:
    """The tensors by ascending name. Raises ``ValueError`` if one is filed under a name that is not its own."""
    for name, tensor in state.items():
        if tensor.spec.name != name:
            raise ValueError(f"tensor {tensor.spec.name!r} is filed under {name!r}; the two must be equal")
    return [state[name] for name in sorted(state)]


def state_bytes(state: State) -> int:
    """Size in bytes of all tensors, uncompressed and without names."""
    return sum(len(tensor.data) for tensor in state.values())


def snapshot(state: State) -> dict[str, StoredTensor]:
    """A copy whose bytes stay what they are when the owner of ``state`` goes on training in place."""
    return {
        name: StoredTensor(spec=tensor.spec, data=tensor.data.copy(), region=tensor.region)
        for name, tensor in state.items()
    }


def spec_key(spec: TensorSpec) -> int:
    """A 64-bit number for a tensor's name, type and shape: the first bytes of their SHA-256, little-endian."""
    line = orjson.dumps([spec.name, spec.dtype, list(spec.shape)])
    return int.from_bytes(hashlib.sha256(line).digest()[:8], "little")
