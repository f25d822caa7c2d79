"""Weights as bytes: named tensors and the digest that identifies them.

This file owns what a state is. It knows neither models nor torch: a tensor here is a name, a type, a shape and raw
little-endian bytes, spelled as in safetensors. Turning a model into a state and back is the trainer's and the
engine's work.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from etude.types import TensorSpec

Bytes1d: TypeAlias = npt.NDArray[np.uint8]
"""[n] contiguous raw bytes."""

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
        "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
        "U32": 4, "I32": 4, "F32": 4,
        "U64": 8, "I64": 8, "F64": 8, "C64": 8,
    }
)  # fmt: skip
"""Bytes per element of every type we store; types narrower than a byte must be published as ``U8``."""

MAX_DIMENSION = 2**63 - 1
"""Largest extent of one axis: what a signed 64-bit integer, and hence every tensor library, can express."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor's description and its bytes; nobody writes to ``data`` once it is here, it may be shared.

    Raises ``ValueError`` for an unknown type, an impossible shape, or bytes that do not fill the shape exactly.
    """

    spec: TensorSpec
    data: Bytes1d
    """[n] raw little-endian bytes in row-major order."""

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


State: TypeAlias = Mapping[str, StoredTensor]
"""All tensors of a model by name; each key equals its tensor's ``spec.name``."""


def spec_bytes(spec: TensorSpec) -> int:
    """Size in bytes of a tensor. Raises ``ValueError`` for an unknown type or an impossible shape."""
    if spec.dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise ValueError(f"tensor {spec.name!r} has unknown dtype {spec.dtype!r}; known are {known}")
    if not all(0 <= extent <= MAX_DIMENSION for extent in spec.shape):
        raise ValueError(f"tensor {spec.name!r} has an impossible shape {list(spec.shape)}")
    return math.prod(spec.shape) * ELEMENT_BYTES[spec.dtype]


def ordered(state: State) -> list[StoredTensor]:
    """The tensors by ascending name. Raises ``ValueError`` if one is filed under a name that is not its own."""
    for name, tensor in state.items():
        if tensor.spec.name != name:
            raise ValueError(f"tensor {tensor.spec.name!r} is filed under {name!r}; the two must be equal")
    return [state[name] for name in sorted(state)]


def state_bytes(state: State) -> int:
    """Size in bytes of all tensors, uncompressed and without names."""
    return sum(len(tensor.data) for tensor in state.values())


def state_digest(state: State) -> str:
    """SHA-256, in hex, over names, types, shapes and bytes: equal digests mean bit-equal weights.

    What is hashed, per tensor by ascending name: the length of its JSON line as an unsigned 64-bit little-endian
    number, the line ``["name","DTYPE",[shape]]``, the raw bytes. The line fixes the number of bytes, so two different
    states never hash the same input.
    """
    digest = hashlib.sha256()
    for tensor in ordered(state):
        digest.update(_spec_line(tensor.spec))
        digest.update(tensor.data.data)
    return digest.hexdigest()


def layout_digest(state: State) -> str:
    """SHA-256, in hex, over names, types and shapes alone, hashed as in :func:`state_digest`."""
    digest = hashlib.sha256()
    for tensor in ordered(state):
        digest.update(_spec_line(tensor.spec))
    return digest.hexdigest()


def snapshot(state: State) -> State:
    """A copy whose bytes stay what they are when the owner of ``state`` goes on training in place."""
    return {name: StoredTensor(spec=tensor.spec, data=tensor.data.copy()) for name, tensor in state.items()}


def _spec_line(spec: TensorSpec) -> bytes:
    line = orjson.dumps([spec.name, spec.dtype, list(spec.shape)])
    return len(line).to_bytes(8, "little") + line
