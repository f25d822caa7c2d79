"""Training checkpoints on disk: complete, verified, atomic, for any number of writing or reading processes.

    step-00000012/
        rank-00000.safetensors     what rank 0 holds: its part of each tensor, and in the header where that part lies
        rank-00001.safetensors     …
        manifest.json              SHA-256 of every file, written last

The folder is written under another name, synced to the disk and renamed when it is complete, so a crash or a power cut
leaves the previous one; the rename is synced before anybody goes on. The last two are kept. One process writes one
file, in the same form.

torch's own distributed checkpoints are not used: their metadata are a pickle, and the ranks plan by sending pickles to
each other. Here a header is JSON and says of each part its tensor's shape and where the part begins; a rank that wants
any region of a tensor reads what overlaps it, so the ranks of a resumed run need not be those that saved.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from etude.errors import DamagedError
from etude.fsync import sync
from etude.weights.device import STORED_TYPES

KEEP = 2
"""Checkpoints kept: the newest, and the one before it until the newest is known to be committed."""
MANIFEST = "manifest.json"
PARTS = "parts"
"""Key in a file's header: ``{tensor: {"shape": […], "start": […]}}`` as JSON."""
PARTIAL = ".partial"
DIGEST_BYTES = 32
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for dtype, name in STORED_TYPES.items()})
"""Types by the names that files have for them."""
FIX = "restore it from a copy, or start a new run from the last published weights"

Like: TypeAlias = Callable[[str], Tensor | None]
"""Name of a tensor → one of its shape that is sharded as it shall be; ``None``: it shall be whole."""


def whole(_name: str) -> None:
    """The sharding of a single process: every tensor whole."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: offset and size on each axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Numbers in it."""
        return torch.Size(self.shape).numel()

    def overlap(self, other: "Box") -> "Box":
        """Region that lies in both; of shape 0 somewhere if nothing does."""
        starts = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """Index of a tensor that holds ``outer`` to get this region of it."""
        offsets = (start - first for start, first in zip(self.start, outer.start, strict=True))
        return tuple(slice(offset, offset + size) for offset, size in zip(offsets, self.shape, strict=True))


def box_of(tensor: Tensor) -> Box:
    """The region of a tensor that this rank holds: its shard, or everything."""
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None
        for axis, (placement, coordinate) in enumerate(zip(tensor.placements, coordinates, strict=True)):
            assert type(placement) in (Shard, Replicate), f"{placement} has no box"
            if isinstance(placement, Shard):
                size = -(-shape[placement.dim] // tensor.device_mesh.size(axis))
                first = min(coordinate * size, shape[placement.dim])
                start[placement.dim] += first
                shape[placement.dim] = min(size, shape[placement.dim] - first)
    return Box(tuple(start), tuple(shape))


@final
class Checkpoints:
    """The training checkpoints of one run, in a folder that all ranks of ``mesh`` share."""

    def __init__(self, folder: Path, mesh: DeviceMesh | None = None) -> None:
        self._folder = folder
        self._mesh = mesh
        self._rank = 0 if mesh is None else mesh.get_local_rank()
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state after ``step`` and drop the oldest; every rank has to call it, with the same names."""
        target = self._path(step)
        partial = target.with_name(target.name + PARTIAL)
        if self._rank == 0:
            for left in self._folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(left)
            partial.mkdir()
        self._gather(bytes(DIGEST_BYTES))  # no rank writes before the folder is there
        digest = _write_parts(partial / _file_name(self._rank), self._own(tensors))
        digests = self._gather(digest)
        if self._rank == 0:
            files = {_file_name(rank): digest.hex() for rank, digest in enumerate(digests)}
            (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
            sync(partial / MANIFEST)
            if target.exists():
                shutil.rmtree(target)
            sync(partial)
            partial.rename(target)
            sync(self._folder)
            for old in self.steps()[:-KEEP]:
                shutil.rmtree(self._path(old))
        self._gather(bytes(DIGEST_BYTES))  # no rank goes on before it is saved

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        names = (path.name.removeprefix("step-") for path in self._folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def load(self, step: int, like: Like = whole) -> dict[str, Tensor]:
        """Read and verify a checkpoint, each tensor whole or sharded as ``like`` is.

        Raises :class:`~etude.errors.DamagedError` naming the file and the fix.
        """
        saved = _Saved(self._path(step))
        return {name: saved.read(name, like(name)) for name in saved.names}

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _own(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that this rank has to write: its parts of sharded tensors, and on rank 0 what all ranks hold
        alike.
        """
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                if self._rank == 0:
                    yield name, tensor
                continue
            coordinates = tensor.device_mesh.get_coordinate()
            assert coordinates is not None
            copies = zip(tensor.placements, coordinates, strict=True)
            if box_of(tensor).count and not any(at > 0 and placement.is_replicate() for placement, at in copies):
                yield name, tensor

    def _gather(self, digest: bytes) -> list[bytes]:
        """The ``digest`` of every rank, in their order; returns on none before all have called."""
        if self._mesh is None:
            return [digest]
        own = torch.tensor(list(digest), dtype=torch.uint8, device=self._mesh.device_type)
        every = [torch.empty_like(own) for _ in range(self._mesh.size())]
        dist.all_gather(every, own, self._mesh.get_group())
        return [bytes(one.tolist()) for one in every]


@final
class _Saved:
    """One checkpoint, read as far as it is asked for: a rank reads and verifies the files that it needs a part of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._unverified: dict[str, str] = {}
        """File → its SHA-256, until it was found to have it."""
        self._parts: dict[str, list[tuple[str, Box]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        name = MANIFEST
        try:
            self._unverified = dict(json.loads((folder / MANIFEST).read_bytes())["files"])
            for name in self._unverified:
                self._open(name)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"checkpoint {folder / name} cannot be read: {error!r}; {FIX}") from error

    @property
    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return sorted(self._parts)

    def read(self, name: str, like: Tensor | None) -> Tensor:
        """A tensor, whole on the CPU or sharded as ``like``, which then must have its shape."""
        shape = self._shapes[name]
        if not isinstance(like, DTensor) or like.shape != shape:
            return self._region(name, Box((0,) * len(shape), shape))
        own = self._region(name, box_of(like)).to(like.device)
        sharded = DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return sharded.to(like.device)  # from_local puts it on the mesh's, where moments of another home only pass

    def _open(self, name: str) -> None:
        """Find out what a file says it has."""
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file of this folder")
        self._files[name] = safe_open(self._folder / name, framework="pt")
        for tensor, part in json.loads(self._files[name].metadata()[PARTS]).items():
            stored = self._files[name].get_slice(tensor)
            box = Box(tuple(part["start"]), tuple(stored.get_shape()))
            self._parts.setdefault(tensor, []).append((name, box))
            self._shapes[tensor], self._dtypes[tensor] = tuple(part["shape"]), DTYPES[stored.get_dtype()]

    def _verify(self, name: str) -> None:
        digest = self._unverified.pop(name, None)
        if digest is not None and _sha256(self._folder / name).hex() != digest:
            raise DamagedError(f"checkpoint {self._folder / name} does not match its SHA-256; {FIX}")

    def _region(self, name: str, box: Box) -> Tensor:
        parts = self._parts[name]
        filled, region = 0, torch.empty(box.shape, dtype=self._dtypes[name])
        for file, part in parts:
            common = part.overlap(box)
            if common.count:
                self._verify(file)
                region[common.inside(box)] = self._files[file].get_slice(name)[common.inside(part)]
                filled += common.count
        if filled != box.count:
            raise DamagedError(f"checkpoint {self._folder} has {filled} of the {box.count} numbers of {name!r}; {FIX}")
        return region


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_parts(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> bytes:
    """Write this rank's file; returns its SHA-256."""
    parts, places = {}, {}
    for name, tensor in tensors:
        places[name] = {"shape": list(tensor.shape), "start": list(box_of(tensor).start)}
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        parts[name] = own.detach().cpu().contiguous()
    save_file(parts, path, metadata={PARTS: json.dumps(places)})
    sync(path)
    return _sha256(path)


def _sha256(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
