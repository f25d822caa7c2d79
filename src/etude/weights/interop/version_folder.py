"""Version folders: the format in which slime, miles, SGLang and Stitch exchange weights through a shared file system.

    <root>/weight_v000012/
        model-00000-of-00001.safetensors      tensor → U8 [n] its compressed change; __metadata__: tensor → checksum
        model.safetensors.index.json          metadata: version, base_version ("000011"), delta_encoding,
                                              compression_format ("zstd"), checksum_format; weight_map: tensor → file

Each folder is a *full* version, an ordinary checkpoint, or a *delta* on the version before it, told apart by
``delta_encoding`` in the index. A delta holds the changed tensors only; the checksums are of their new bytes. Version 0
is the checkpoint that the engines were started with and is in no folder.

Written from the code that writes and reads them: THUDM/slime ``slime/backends/megatron_utils/update_weight/
update_weight_from_disk_delta.py`` and ``docs/en/advanced/delta-weight-sync.md``; radixark/miles ``miles/backends/
megatron_utils/update_weight/update_weight_from_distributed/delta.py``; the reader behind SGLang's ``/pull_weights``,
sgl-project/sglang ``python/sglang/srt/weight_sync/local_checkpoint.py``; modal-projects/stitch ``src/stitch/types.py``.

A payload is what changed in the bytes of one tensor, through zstd; integers are little-endian, positions ascend and
count bytes:

    ``xor``         new XOR old, as long as the tensor. Applied twice it undoes itself.
    ``overwrite``   u32 count | u32 position of each changed byte | its new value. Applied twice it does no harm.
    ``xor_sparse``  u64 count | u64 position of each changed byte | new XOR old. Read by Stitch's fork of SGLang only.

This file owns those folders and payloads, ``checkpoint.py`` the full versions. It serves only to exchange weights with
other systems: étude's own ``frames.py`` needs about half the bytes.
"""

import importlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar, assert_never

import numpy as np
import xxhash
import zstandard

from etude.errors import DamagedError, InfrastructureError, UserError
from etude.types import Json, TensorSpec
from etude.weights.interop.checkpoint import (
    INDEX_FILE,
    SHARD_BYTES,
    WEIGHTS_FILE,
    Index,
    read_checkpoint,
    read_index,
    read_indexed,
    split,
    write_checkpoint,
    write_index,
    write_tensor_file,
)
from etude.weights.state import Bytes1d, State, StoredTensor, ordered

DELTA_KEYS = frozenset({"base_version", "delta_encoding", "compression_format", "checksum_format"})
"""Index metadata that a delta has and a full version has not."""
ZSTD_LEVEL = 1
"""Compression level of slime and miles."""
COUNT_32 = np.dtype("<u4")
"""Count and positions of ``overwrite``."""
COUNT_64 = np.dtype("<u8")
"""Count and positions of ``xor_sparse``."""
WORKERS = min(32, os.cpu_count() or 1)
"""Tensors in work at a time; zstd, numpy and the checksums all let other threads run."""

Name = TypeVar("Name", bound=StrEnum)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Encoding(StrEnum):
    """Encoding of a change; the names are those of the index metadata ``delta_encoding``."""

    XOR = "xor"
    OVERWRITE = "overwrite"
    XOR_SPARSE = "xor_sparse"


class Checksum(StrEnum):
    """Checksum of a tensor's new bytes; the names are those of the index metadata ``checksum_format``."""

    XXH3_128 = "xxh3-128"
    BLAKE3 = "blake3"
    """Needs the package of that name."""
    ADLER32 = "adler32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaIndex:
    """The index of a delta."""

    version: int
    base: int
    """The version it must be applied to."""
    encoding: Encoding
    checksum: Checksum
    index: Index


def version_folder(root: Path, version: int) -> Path:
    """The folder of a version: ``<root>/weight_v000012``."""
    return root / f"weight_v{version:06d}"


# --- Reading ------------------------------------------------------------------------------------------------------


def read_version(root: Path, target: int, *, base: State, at: int = 0) -> dict[str, StoredTensor]:
    """The state at version ``target``, by name.

    Starts from the newest full version that is not after ``target``, or from ``base``, which is version ``at``, and
    applies the deltas from there on in order. ``base`` is left as it is and shares the tensors that did not change.

    Raises ``UserError`` if a version is missing or before ``at``, ``DamagedError`` if a file is broken, a delta builds
    on another version or a tensor does not have its checksum afterwards.
    """
    if target < at:
        raise UserError(f"version {target} is before version {at}, which is at hand; pass an older base")
    deltas: list[DeltaIndex] = []
    start = target
    while start > at and (delta := read_delta_index(root, start)) is not None:
        deltas.append(delta)
        start -= 1
    state = dict(base) if start == at else read_checkpoint(version_folder(root, start))
    for delta in reversed(deltas):
        state = read_delta(root, delta, state)
    return state


def read_delta(root: Path, delta: DeltaIndex, base: State) -> dict[str, StoredTensor]:
    """``base``, which is version ``delta.base``, with one delta applied and every changed tensor checked.

    The format has no checksum of tensors that a delta leaves alone: a base that is wrong there goes unnoticed.
    Raises ``DamagedError`` naming file and tensor.
    """
    folder = version_folder(root, delta.version)
    changes: list[tuple[StoredTensor, Bytes1d, str]] = []
    for file in read_indexed(folder, delta.index):
        for name, payload in file.tensors.items():
            if name not in base or name not in file.metadata:
                lacking = "base" if name not in base else "checksums"
                raise DamagedError(f"{folder} changes tensor {name!r}, which the {lacking} lack")
            changes.append((base[name], payload.data, file.metadata[name]))

    def changed(change: tuple[StoredTensor, Bytes1d, str]) -> StoredTensor:
        old, payload, expected = change
        origin = f"{folder}: tensor {old.spec.name!r}"
        new = apply_change(payload, old.data, delta.encoding, origin)
        if (actual := checksum(new, delta.checksum)) != expected:
            raise DamagedError(f"{origin} has {delta.checksum} {actual}, not {expected:.64}: wrong base or damaged")
        return StoredTensor(spec=old.spec, data=new)

    return {**base, **{tensor.spec.name: tensor for tensor in in_parallel(changed, changes)}}


def read_delta_index(root: Path, version: int) -> DeltaIndex | None:
    """The index of a version that is a delta, or ``None`` if the version is a full one.

    Raises ``UserError`` if there is no such version (yet), ``DamagedError`` if its index is broken or of a kind that
    nobody writes.
    """
    folder = version_folder(root, version)
    index = read_index(folder)
    if index is None and not (folder / WEIGHTS_FILE).exists():
        raise UserError(f"{folder} has no {INDEX_FILE}: version {version} is not published, or not yet")
    origin = folder / INDEX_FILE
    if index is None or (index.metadata and not index.metadata.keys() & DELTA_KEYS):
        return None
    if not index.metadata.keys() >= DELTA_KEYS:
        raise DamagedError(f"{origin}: metadata {sorted(index.metadata)} are neither a delta's nor a full version's")
    if index.metadata.get("compression_format") != "zstd":
        raise DamagedError(f"{origin}: compression_format {index.metadata.get('compression_format')!r:.50} is unknown")
    delta = DeltaIndex(
        version=_number(index, "version", origin),
        base=_number(index, "base_version", origin),
        encoding=_named(Encoding, index, "delta_encoding", origin),
        checksum=_named(Checksum, index, "checksum_format", origin),
        index=index,
    )
    if (delta.version, delta.base) != (version, version - 1):
        raise DamagedError(f"{origin} takes version {delta.base} to {delta.version}, not {version - 1} to {version}")
    return delta


def _number(index: Index, key: str, origin: Path) -> int:
    """A version number, which slime writes as a text of six digits."""
    value = index.metadata.get(key)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    if type(value) is int:
        return value
    raise DamagedError(f"{origin}: {key} is {value!r:.50}, expected a number")


def _named(kind: type[Name], index: Index, key: str, origin: Path) -> Name:
    value = index.metadata.get(key)
    if value not in list(kind):
        raise DamagedError(f"{origin}: {key} is {value!r:.50}, known are {', '.join(kind)}")
    return kind(value)


# --- Writing ------------------------------------------------------------------------------------------------------


def write_delta(
    root: Path,
    version: int,
    old: State,
    new: State,
    *,
    encoding: Encoding = Encoding.XOR,
    checksum_kind: Checksum = Checksum.XXH3_128,
) -> Path:
    """Publish ``new`` as a delta on ``old``, which is version ``version - 1``; the folder it is in.

    Tensors that did not change are left out, even if these are all. Raises ``UserError`` if the two states differ in
    more than values, or the version is published already; ``InfrastructureError`` if a file cannot be written.
    """
    pairs = matched(old, new)

    def change(pair: tuple[StoredTensor, StoredTensor]) -> tuple[StoredTensor, str] | None:
        before, after = pair
        if np.array_equal(before.data, after.data):
            return None
        payload = encode_change(before.data, after.data, encoding, ZSTD_LEVEL)
        return payload_tensor(after.spec.name, payload), checksum(after.data, checksum_kind)

    changes = [made for made in in_parallel(change, pairs) if made is not None]
    checksums = {payload.spec.name: digest for payload, digest in changes}
    shards = [shard for shard in split([payload for payload, _ in changes], SHARD_BYTES) if shard]
    metadata: dict[str, Json] = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": str(encoding),
        "compression_format": "zstd",
        "checksum_format": str(checksum_kind),
    }

    def fill(folder: Path) -> None:
        files: dict[str, str] = {}
        for number, shard in enumerate(shards):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            names = [payload.spec.name for payload in shard]
            write_tensor_file(folder / file, shard, {name: checksums[name] for name in names})
            files.update(dict.fromkeys(names, file))
        write_index(folder, Index(metadata=metadata, files=files))

    return _publish(root, version, fill)


def write_full(root: Path, version: int, state: State, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Publish ``state`` as a full version, which readers may start from; the folder it is in.

    Its index bears the version, as Stitch wants it. Raises ``UserError`` if the version is published already,
    ``InfrastructureError`` if a file cannot be written.
    """
    metadata: dict[str, Json] = {"version": f"{version:06d}"}
    return _publish(
        root, version, lambda folder: write_checkpoint(folder, state, shard_bytes=shard_bytes, metadata=metadata)
    )


def _publish(root: Path, version: int, fill: Callable[[Path], None]) -> Path:
    """Let ``fill`` write a folder and give it its name when it is complete: readers see all of it or nothing."""
    folder = version_folder(root, version)
    if not 0 < version < 10**6:
        raise UserError(f"version {version} cannot be published: folders are numbered from 1 to 999999")
    if folder.exists():
        raise UserError(f"{folder} exists: version {version} is published already")
    partial = root / f".{folder.name}.partial"
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        fill(partial)
        partial.rename(folder)
    except OSError as error:
        raise InfrastructureError(f"{folder} cannot be written: {error}") from error
    return folder


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
    """[≤ limit] decompress one zstd frame. Raises ``DamagedError`` if it is broken or above ``limit`` bytes."""
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

    Raises ``UserError`` if one lacks a tensor of the other or describes it otherwise.
    """
    before, after = ordered(old), ordered(new)
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
    """Map ``work`` over items, several at a time, in order. The first error ends it."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, items))
