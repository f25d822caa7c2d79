"""Patch files: the changed numbers of a weight update, for engines in other processes.

    <run>/indices/<tensor>  U64 [k]            canonical indices, ascending
    <run>/bits/<tensor>     U8, U16 or U32 [k]   the new bits of the numbers
    metadata                base, digest         the states before and after

An ordinary safetensors file, so that any tool can inspect it. On a memory file system it is named shared memory. Owns
the file format, not the source or the use of the changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.interop.checkpoint import read_tensor_file, write_tensor_file
from etude.weights.replica import ChangedNumbers
from etude.weights.state import NUMBER_TYPES, StoredTensor

INDICES, BITS = "indices", "bits"
STORED_BITS = {np.dtype(kind): f"U{8 * size}" for size, kind in NUMBER_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """The changes from one weight state to another."""

    base: str
    """State digest before."""
    digest: str
    """State digest after."""
    changes: Mapping[str, Sequence[ChangedNumbers]]
    """Changes by tensor, in one or several runs each."""


def write_patch(path: Path, patch: Patch) -> None:
    """Write a patch file, atomically. Raises ``InfrastructureError``."""
    tensors = [
        stored
        for name, runs in patch.changes.items()
        for number, run in enumerate(runs)
        for stored in (
            _stored(f"{number}/{INDICES}/{name}", "U64", run.indices.astype(np.uint64).view(np.uint8)),
            _stored(f"{number}/{BITS}/{name}", STORED_BITS[run.bits.dtype], run.bits.view(np.uint8)),
        )
    ]
    write_tensor_file(path, tensors, {"base": patch.base, "digest": patch.digest})


def read_patch(path: Path) -> Patch:
    """Read a patch file. Raises :class:`~etude.errors.DamagedError` unless every run is whole."""
    file = read_tensor_file(path)
    if file.metadata.keys() != {"base", "digest"}:
        raise DamagedError(f"{path} is not a patch: its metadata is {sorted(file.metadata)}")
    runs: dict[str, list[tuple[int, ChangedNumbers]]] = {}
    for title, stored in file.tensors.items():
        number, _, rest = title.partition("/")
        kind, _, name = rest.partition("/")
        if kind == BITS:
            continue
        bits = file.tensors.get(f"{number}/{BITS}/{name}")
        if kind != INDICES or not number.isdecimal() or bits is None or bits.spec.shape != stored.spec.shape:
            raise DamagedError(f"{path}: {title!r} is not a run of changes, or has no bits of its shape")
        changed = ChangedNumbers(indices=stored.data.view(np.uint64), bits=bits.numbers)
        runs.setdefault(name, []).append((int(number), changed))
    changes = {name: [run for _, run in sorted(parts, key=lambda pair: pair[0])] for name, parts in runs.items()}
    return Patch(base=file.metadata["base"], digest=file.metadata["digest"], changes=changes)


def _stored(name: str, dtype: str, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> StoredTensor:
    size = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}[dtype]
    return StoredTensor(spec=TensorSpec(name=name, dtype=dtype, shape=(len(data) // size,)), data=data)
