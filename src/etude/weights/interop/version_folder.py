"""Version folders: how slime, miles, SGLang and Stitch hand weights over through a shared file system.

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

This file owns those folders; ``payloads.py`` owns what is inside a change, ``checkpoint.py`` the full versions.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np

from etude.errors import DamagedError, InfrastructureError, UserError
from etude.types import Json
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
)
from etude.weights.interop.payloads import (
    Checksum,
    Encoding,
    apply_change,
    checksum,
    encode_change,
    in_parallel,
    matched,
    payload_tensor,
)
from etude.weights.interop.tensor_file import whole, write_tensor_file
from etude.weights.state import Bytes1d, State, StoredTensor

DELTA_KEYS = frozenset({"base_version", "delta_encoding", "compression_format", "checksum_format"})
"""Index metadata that a delta has and a full version has not."""
ZSTD_LEVEL = 1
"""What slime and miles compress with."""

Name = TypeVar("Name", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What the index of a delta says about it."""

    version: int
    base: int
    """The version it must be applied to."""
    encoding: Encoding
    checksum: Checksum
    index: Index


def version_folder(root: Path, version: int) -> Path:
    """Where a version is: ``<root>/weight_v000012``."""
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
    deltas: list[Delta] = []
    start = target
    while start > at and (delta := read_delta_index(root, start)) is not None:
        deltas.append(delta)
        start -= 1
    state = dict(base) if start == at else read_checkpoint(version_folder(root, start))
    for delta in reversed(deltas):
        state = read_delta(root, delta, state)
    return state


def read_delta(root: Path, delta: Delta, base: State) -> dict[str, StoredTensor]:
    """``base``, which is version ``delta.base``, with one delta applied and every changed tensor checked.

    The format has no checksum of tensors that a delta leaves alone: a base that is wrong there goes unnoticed.
    Raises ``DamagedError`` naming file and tensor.
    """
    folder = version_folder(root, delta.version)
    whole(base)
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
        if (found := checksum(new, delta.checksum)) != expected:
            raise DamagedError(f"{origin} has {delta.checksum} {found}, not {expected:.64}: wrong base or damaged")
        return StoredTensor(spec=old.spec, data=new)

    return {**base, **{tensor.spec.name: tensor for tensor in in_parallel(changed, changes)}}


def read_delta_index(root: Path, version: int) -> Delta | None:
    """What the index of a version says, or ``None`` if the version is a full one.

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
    delta = Delta(
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

    Its index bears the version, as Stitch wants it. Raises ``UserError`` if the version is published already or
    ``state`` is only one rank's share, ``InfrastructureError`` if a file cannot be written.
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
