"""States to payloads and back, bit for bit: whole ones and changes against a base.

This file owns the bytes of a payload; where payloads lie and which belongs to which version is ``log.py``'s. Every bit
pattern survives (NaN payloads, −0), because nothing here ever reads a byte as a number.

    payload   prefix │ header (JSON) │ body (one zstd frame with its size and checksum)
    prefix    magic ``ETW1`` │ u32 header length │ u32 CRC-32 of the header, little-endian
    header    {"base": layout digest of the base, or null when full, "tensors": [[name, dtype, [shape]], …]}
    body      of each tensor, in the header's order, its byte planes: all first bytes of its elements, then all
              second ones, …; in a delta, of the XOR with the base, and unchanged tensors are left out

Byte planes put the exponents of floats beside each other; XOR turns what did not change into zeros: both make plain
zstd effective. After BitX in ZipLLM (arXiv:2505.06252), which splits bf16 at its fields; we split any type at bytes.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import orjson
import zstandard

from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.state import ELEMENT_BYTES, Bytes1d, State, StoredTensor, layout_digest, ordered, spec_bytes

ZSTD_LEVEL = 1
"""The fastest regular level: higher ones gain about nothing on XOR planes."""

_MAGIC = b"ETW1"
_PREFIX = struct.Struct("<4sII")
_MAX_RATIO = 2**15
"""No zstd frame expands further: a block holds at most 128 KiB and takes at least 4 bytes (RFC 8878, 3.1.1.2)."""


def encode_full(state: State) -> bytes:
    """A payload that :func:`decode_full` turns back into ``state`` with nothing else at hand."""
    tensors = ordered(state)
    planes = [_split_planes(tensor.spec, tensor.data) for tensor in tensors]
    return _pack(None, [tensor.spec for tensor in tensors], planes)


def decode_full(payload: bytes) -> State:
    """The state that :func:`encode_full` was given. Raises :class:`~etude.errors.DamagedError`."""
    frame = _unpack(payload)
    if frame.base_layout is not None:
        raise DamagedError("the payload is a delta where a full one was expected")
    return {
        spec.name: StoredTensor(spec=spec, data=_join_planes(spec, planes))
        for spec, planes in zip(frame.specs, frame.planes, strict=True)
    }


def encode_delta(base: State, state: State) -> bytes:
    """A payload that :func:`apply_delta` turns back into ``state`` where ``base`` is at hand.

    Raises ``ValueError`` when the two differ in more than bytes: a change of names, types or shapes is not a delta.
    """
    _check_same_layout(base, state)
    changed = [tensor for name, tensor in sorted(state.items()) if not _same_bytes(tensor, base[name])]
    planes = [_split_planes(tensor.spec, tensor.data ^ base[tensor.spec.name].data) for tensor in changed]
    return _pack(layout_digest(base), [tensor.spec for tensor in changed], planes)


def apply_delta(base: State, payload: bytes) -> State:
    """The state that :func:`encode_delta` was given; unchanged tensors are shared with ``base``, which stays as it is.

    Raises :class:`~etude.errors.DamagedError` for a damaged payload and for a base with other names, types or shapes.
    A base with other *bytes* goes unnoticed here: the caller compares :func:`~etude.weights.state.state_digest`.
    """
    frame = _unpack(payload)
    if frame.base_layout is None:
        raise DamagedError("the payload is a full one where a delta was expected")
    if frame.base_layout != layout_digest(base):
        raise DamagedError("the delta was made against a base with other tensor names, types or shapes")
    state = dict(base)
    for spec, planes in zip(frame.specs, frame.planes, strict=True):
        if spec.name not in base or base[spec.name].spec != spec:
            raise DamagedError(f"the delta changes {spec}, which its base does not have")
        state[spec.name] = StoredTensor(spec=spec, data=_join_planes(spec, planes) ^ base[spec.name].data)
    return state


def _check_same_layout(base: State, state: State) -> None:
    before = {tensor.spec.name: tensor.spec for tensor in ordered(base)}
    after = {tensor.spec.name: tensor.spec for tensor in ordered(state)}
    if differing := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        name = differing[0]
        raise ValueError(
            f"tensor {name!r} ({len(differing)} such) differs from its base in more than bytes: "
            f"{before.get(name)} became {after.get(name)}; publish a full version instead"
        )


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    return one.data is other.data or np.array_equal(one.data, other.data)


def _split_planes(spec: TensorSpec, data: Bytes1d) -> Bytes1d:
    """[n] bytes of elements → [n] all their first bytes, then all their second bytes, and so on."""
    return data.reshape(-1, ELEMENT_BYTES[spec.dtype]).T.ravel()


def _join_planes(spec: TensorSpec, planes: Bytes1d) -> Bytes1d:
    """The inverse of :func:`_split_planes`, always in fresh memory."""
    return planes.reshape(ELEMENT_BYTES[spec.dtype], -1).T.flatten()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Frame:
    """A payload taken apart."""

    base_layout: str | None
    specs: Sequence[TensorSpec]
    planes: Sequence[Bytes1d]


def _pack(base_layout: str | None, specs: Sequence[TensorSpec], planes: Sequence[Bytes1d]) -> bytes:
    tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]
    header = orjson.dumps({"base": base_layout, "tensors": tensors})
    body = np.concatenate(planes) if planes else np.empty(0, np.uint8)
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(body.data)
    return _PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)) + header + frame


def _unpack(payload: bytes) -> _Frame:
    if len(payload) < _PREFIX.size:
        raise DamagedError(f"the payload is cut off after {len(payload)} bytes")
    magic, header_bytes, crc = _PREFIX.unpack_from(payload)
    if magic != _MAGIC:
        raise DamagedError(f"the payload starts with {magic!r} instead of {_MAGIC!r}: it holds no weights")
    body_start = _PREFIX.size + header_bytes
    header = memoryview(payload)[_PREFIX.size : body_start]
    if len(header) != header_bytes or zlib.crc32(header) != crc:
        raise DamagedError("the payload's header is damaged")
    base_layout, specs = _parse_header(header)
    sizes = [spec_bytes(spec) for spec in specs]
    body = _decompress(memoryview(payload)[body_start:], sum(sizes))
    planes = [body[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return _Frame(base_layout=base_layout, specs=specs, planes=planes)


def _parse_header(header: memoryview) -> tuple[str | None, list[TensorSpec]]:
    try:
        fields = orjson.loads(header)
        base_layout, tensors = fields["base"], fields["tensors"]
        specs = [_parse_spec(name, dtype, shape) for name, dtype, shape in tensors]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"the payload's header cannot be read: {error}") from error
    if not isinstance(base_layout, str | None):
        raise DamagedError(f"the payload's header names the base {base_layout!r}")
    names = [spec.name for spec in specs]
    if names != sorted(set(names)):
        raise DamagedError("the payload's tensors are not in ascending order of distinct names")
    return base_layout, specs


def _parse_spec(name: object, dtype: object, shape: object) -> TensorSpec:
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"{[name, dtype, shape]!r} is no tensor")
    if not all(type(extent) is int for extent in shape):
        raise ValueError(f"tensor {name!r} has the shape {shape!r}")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    spec_bytes(spec)
    return spec


def _decompress(frame: memoryview, size: int) -> Bytes1d:
    """The body, if it is exactly ``size`` bytes; nothing is allocated before that is known to be possible."""
    if size > len(frame) * _MAX_RATIO:
        raise DamagedError(f"the payload's body of {len(frame)} bytes cannot hold the {size} bytes its header declares")
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != size:
            raise DamagedError(f"the payload's body holds {declared} bytes, its header declares {size}")
        body = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"the payload's body is damaged: {error}") from error
    return np.frombuffer(body, np.uint8)
