"""What changed in the bytes of one tensor, in the encodings of slime, miles, SGLang and Stitch.

``xor``         new XOR old, as long as the tensor. Applied twice it undoes itself.
``overwrite``   u32 count | u32 position of each changed byte | its new value. Applied twice it does no harm.
``xor_sparse``  u64 count | u64 position of each changed byte | new XOR old. Read by Stitch's fork of SGLang only.

All integers are little-endian, positions ascend and count bytes, and the whole goes through zstd. ``arc_v2`` of
Fireworks is the first of them, too. Written from THUDM/slime ``slime/utils/disk_delta.py`` (the same in radixark/miles)
and ``python/sglang/srt/weight_sync/local_checkpoint.py`` of sgl-project/sglang and, with ``xor_sparse``, of
modal-projects/sglang.

This file owns the arithmetic: tensors in, payloads out, and back. Files are ``version_folder.py``'s and ``arc.py``'s.
It is here to exchange weights with others, not to compete: our own ``frames.py`` needs about half the bytes.
"""

import importlib
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TypeVar, assert_never

import numpy as np
import xxhash
import zstandard

from etude.errors import DamagedError, UserError
from etude.types import TensorSpec
from etude.weights.interop.tensor_file import whole
from etude.weights.state import Bytes1d, State, StoredTensor

COUNT_32 = np.dtype("<u4")
"""Count and positions of ``overwrite``."""
COUNT_64 = np.dtype("<u8")
"""Count and positions of ``xor_sparse``."""
WORKERS = min(32, os.cpu_count() or 1)
"""Tensors in work at a time; zstd, numpy and the checksums all let other threads run."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Encoding(StrEnum):
    """How a change is written; the names are those of the index metadata ``delta_encoding``."""

    XOR = "xor"
    OVERWRITE = "overwrite"
    XOR_SPARSE = "xor_sparse"


class Checksum(StrEnum):
    """How a tensor's new bytes are checked; the names are those of the index metadata ``checksum_format``."""

    XXH3_128 = "xxh3-128"
    BLAKE3 = "blake3"
    """Needs the package of that name."""
    ADLER32 = "adler32"


# --- Changes ------------------------------------------------------------------------------------------------------


def encode_change(old: Bytes1d, new: Bytes1d, encoding: Encoding, level: int) -> bytes:
    """[n], [n] → the compressed change from ``old`` to ``new``; ``level`` is zstd's.

    Raises ``UserError`` if the encoding cannot point at every byte of so large a tensor.
    """
    return zstandard.ZstdCompressor(level=level).compress(_change(old, new, encoding).data)


def apply_change(payload: Bytes1d, old: Bytes1d, encoding: Encoding, origin: str) -> Bytes1d:
    """[n] the bytes after a change; ``old`` stays as it is.

    No more is ever unpacked than a change of so many bytes can hold. Raises ``DamagedError`` naming ``origin`` for
    anything that is no such change. That ``old`` was the right base is for :func:`checksum` to tell.
    """
    match encoding:
        case Encoding.XOR:
            change = inflate(payload, len(old), origin)
            if len(change) != len(old):
                raise DamagedError(f"{origin}: the change is {len(change)} bytes long, the tensor {len(old)}")
            return np.bitwise_xor(old, change)
        case Encoding.OVERWRITE:
            positions, values = _sparse(inflate(payload, 4 + 5 * len(old), origin), COUNT_32, len(old), origin)
            new = old.copy()
            new[positions] = values
            return new
        case Encoding.XOR_SPARSE:
            positions, values = _sparse(inflate(payload, 8 + 9 * len(old), origin), COUNT_64, len(old), origin)
            new = old.copy()
            new[positions] ^= values
            return new
        case _:
            assert_never(encoding)


def _change(old: Bytes1d, new: Bytes1d, encoding: Encoding) -> Bytes1d:
    if encoding is Encoding.XOR:
        return np.bitwise_xor(old, new)
    count_type = COUNT_32 if encoding is Encoding.OVERWRITE else COUNT_64
    if len(new) >= 2**32 and count_type == COUNT_32:
        raise UserError(f"a tensor of {len(new)} bytes is too large for {encoding}, whose counts have 32 bits; use xor")
    positions = np.flatnonzero(old != new)
    values = new[positions] if encoding is Encoding.OVERWRITE else new[positions] ^ old[positions]
    count = np.array([len(positions)], count_type)
    return np.concatenate([count.view(np.uint8), positions.astype(count_type).view(np.uint8), values])


def _sparse(
    change: Bytes1d, count_type: np.dtype[np.unsignedinteger], size: int, origin: str
) -> tuple["np.typing.NDArray[np.unsignedinteger]", Bytes1d]:
    """The positions, all of them below ``size``, and one value for each."""
    width = count_type.itemsize
    count = int.from_bytes(change[:width].tobytes(), "little")
    if len(change) != width + count * (width + 1):
        raise DamagedError(f"{origin}: a change of {count} places cannot be {len(change)} bytes long")
    values_start = width + count * width
    positions = change[width:values_start].view(count_type)
    if count and (int(positions[-1]) >= size or bool((positions[1:] <= positions[:-1]).any())):
        raise DamagedError(f"{origin}: the changed places do not ascend within the tensor's {size} bytes")
    return positions, change[values_start:]


# --- Compression --------------------------------------------------------------------------------------------------


def inflate(payload: Bytes1d, limit: int, origin: str) -> Bytes1d:
    """[≤ limit] what one zstd frame holds. Raises ``DamagedError`` if that is more than ``limit`` bytes or broken."""
    try:
        size = zstandard.frame_content_size(payload.data)
        if size > limit:
            raise DamagedError(f"{origin} unpacks to {size} bytes, at most {limit} make sense")
        decompressor = zstandard.ZstdDecompressor()
        if size >= 0:
            content = decompressor.decompress(payload.data, allow_extra_data=False)
        else:
            content = decompressor.stream_reader(payload.data).read(limit + 1)
    except zstandard.ZstdError as error:
        raise DamagedError(f"{origin} cannot be unpacked: {error}") from error
    if len(content) > limit:
        raise DamagedError(f"{origin} unpacks to more than the {limit} bytes that make sense")
    return np.frombuffer(content, np.uint8)


# --- Checksums ----------------------------------------------------------------------------------------------------


def checksum(data: Bytes1d, kind: Checksum) -> str:
    """The lower-case hex digits that the index calls for. Raises ``UserError`` if a package is missing."""
    match kind:
        case Checksum.XXH3_128:
            return xxhash.xxh3_128_hexdigest(data.data)
        case Checksum.ADLER32:
            return f"{zlib.adler32(data.data):08x}"
        case Checksum.BLAKE3:
            return _blake3(data)
        case _:
            assert_never(kind)


def _blake3(data: Bytes1d) -> str:
    try:
        blake3 = importlib.import_module("blake3")
    except ModuleNotFoundError as error:
        raise UserError("checksums of kind blake3 need the package: pip install blake3") from error
    return str(blake3.blake3(data.data).hexdigest())


# --- Tensors ------------------------------------------------------------------------------------------------------


def matched(old: State, new: State) -> list[tuple[StoredTensor, StoredTensor]]:
    """The same tensor in both states, by ascending name.

    Raises ``UserError`` if one lacks a tensor of the other, describes it otherwise or holds only a part of it.
    """
    before, after = whole(old), whole(new)
    described = {tensor.spec for tensor in before} ^ {tensor.spec for tensor in after}
    if described:
        example = min(described, key=lambda spec: spec.name)
        raise UserError(f"a change needs the same tensors before and after; {example} is only in one of them")
    return list(zip(before, after, strict=True))


def payload_tensor(name: str, payload: bytes) -> StoredTensor:
    """A compressed change as what it is in a file: U8 [n] under the name of its tensor."""
    spec = TensorSpec(name=name, dtype="U8", shape=(len(payload),))
    return StoredTensor(spec=spec, data=np.frombuffer(payload, np.uint8))


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``work`` on each item, several at a time, in order. The first error ends it."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, items))
