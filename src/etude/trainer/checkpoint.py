"""Training checkpoints on disk: complete, verified, atomic, for any number of writing or reading processes.

    step-00000012/
        rank-00000.safetensors     rank 0's part of each tensor; the header has the position of each part
        rank-00001.safetensors     …
        manifest.json              SHA-256 of every file, written last

    trainer    copy to host memory ──▶ next steps …
    a thread        └──▶ own file, its SHA-256 ──▶ on rank 0: wait for the others' ──▶ manifest, rename, drop the oldest

Training waits only for the copy; from a GPU it goes into pinned memory. The folder is written under a temporary name,
synced to the disk and renamed when it is complete, so a crash or a power cut leaves the previous checkpoint intact. One
checkpoint is written at a time, and the last two are kept. A single process writes one file in the same format. Ranks
signal each other through files, so that the threads run no collectives that could interleave with those of training.

torch's distributed checkpoints are not used: their metadata is a pickle, and the ranks plan by exchanging pickles. Here
the header is JSON and has, for each part, the tensor's shape and the offset of the part. A rank that needs a region of
a tensor reads every part that overlaps it, so a run can resume with a different number of ranks.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from etude.errors import DamagedError, InfrastructureError
from etude.fsync import sync, write_whole
from etude.trainer.sharded import is_sharded, local, sharded_as
from etude.weights.device import STORED_TYPES

KEEP = 2
"""Checkpoints kept: the newest, and the one before it until the newest is known to be committed."""
MANIFEST = "manifest.json"
PARTS = "parts"
"""Key in a file's header: ``{tensor: {"shape": […], "start": […]}}`` as JSON."""
PARTIAL = ".partial"
DIGEST = ".sha256"
"""Suffix of the marker that a rank's file is complete; removed once the manifest has the digest."""
PARTS_S = 3600.0
"""Longest time that rank 0 waits for another rank's file."""
POLL_S = 0.05
"""Polling interval for that file: short compared with writing one."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for dtype, name in STORED_TYPES.items()})
"""Types by their names in the files."""
FIX = "restore it from a copy, or start a new run from the last published weights"

Like: TypeAlias = Callable[[str], Tensor | None]
"""Name of a tensor → a tensor of the same shape with the target sharding; ``None``: not sharded."""


def whole(_name: str) -> None:
    """The sharding of a single process: every tensor whole."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: offset and size on each axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements in the region."""
        return torch.Size(self.shape).numel()

    def overlap(self, other: "Box") -> "Box":
        """Intersection of both regions; a size of 0 on some axis if they do not overlap."""
        starts = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """Index of this region in a tensor that holds ``outer``."""
        offsets = (start - first for start, first in zip(self.start, outer.start, strict=True))
        return tuple(slice(offset, offset + size) for offset, size in zip(offsets, self.shape, strict=True))


def box_of(tensor: Tensor) -> Box:
    """The region of a tensor that this rank holds: its shard, or everything."""
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    if is_sharded(tensor):
        from torch.distributed.tensor import Replicate, Shard  # loaded anyway where something is sharded

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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._is_abandoned = Event()
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, step: int, tensors: Mapping[str, Tensor]) -> Future[None]:
        """Begin to write the state after ``step``; every rank has to call this, with the same names.

        The tensors may change as soon as this returns. On rank 0 the future completes when the whole checkpoint is on
        the disk and the oldest is dropped; on other ranks when their own file is on the disk. The previous checkpoint
        must be complete.
        """
        self.check()
        assert self._written is None or self._written.done(), "one checkpoint at a time"
        if self._rank == 0:
            for left in self._folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(left)
            self._partial(step).mkdir()
        self._meet()  # no rank writes before the folder exists
        self._written = self._thread.submit(self._write, step, _Parts.of(self._own(tensors)))
        return self._written

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state after ``step``; returns on every rank when the checkpoint is complete."""
        self.start(step, tensors).result()
        self._meet()

    def check(self) -> None:
        """Raise the error of the last write, if it has failed by now."""
        if self._written is not None and self._written.done():
            self._written.result()

    def abandon(self) -> None:
        """Stop waiting for other ranks' files: after an error they may never come."""
        self._is_abandoned.set()

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

    def _write(self, step: int, parts: "_Parts") -> None:
        partial, target = self._partial(step), self._path(step)
        digest = parts.write(partial / _file_name(self._rank)).hex()
        if self._rank:
            write_whole(partial / f"{_file_name(self._rank)}{DIGEST}", digest.encode("ascii"))
            return
        files = {_file_name(0): digest}
        for rank in range(1, 1 if self._mesh is None else self._mesh.size()):
            files[_file_name(rank)] = self._digest_of(partial / f"{_file_name(rank)}{DIGEST}")
        (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
        sync(partial / MANIFEST)
        if target.exists():
            shutil.rmtree(target)
        sync(partial)
        partial.rename(target)
        sync(self._folder)
        for old in self.steps()[:-KEEP]:
            shutil.rmtree(self._path(old))

    def _digest_of(self, path: Path) -> str:
        """SHA-256 of another rank's file, as that rank reports it once the file is complete."""
        deadline_s = time.monotonic() + PARTS_S
        while not path.exists():
            if self._is_abandoned.wait(POLL_S) or time.monotonic() > deadline_s:
                raise InfrastructureError(f"checkpoint {path.parent} is not whole: {path.stem} was not written")
        digest = path.read_text(encoding="ascii")
        path.unlink()
        return digest

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _partial(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}{PARTIAL}"

    def _own(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that this rank has to write: its parts of sharded tensors, and on rank 0 the replicated tensors."""
        for name, tensor in tensors.items():
            if not is_sharded(tensor):
                if self._rank == 0:
                    yield name, tensor
                continue
            coordinates = tensor.device_mesh.get_coordinate()
            assert coordinates is not None
            copies = zip(tensor.placements, coordinates, strict=True)
            if box_of(tensor).count and not any(at > 0 and placement.is_replicate() for placement, at in copies):
                yield name, tensor

    def _meet(self) -> None:
        """Barrier: wait until all ranks have called this."""
        if self._mesh is not None:
            dist.all_reduce(torch.zeros(1, device=self._mesh.device_type), group=self._mesh.get_group())
            if self._mesh.device_type == "cuda":
                torch.cuda.synchronize()


@final
class _Parts:
    """One rank's part of a checkpoint: copies in host memory, and their positions in the tensors."""

    def __init__(self, copies: dict[str, Tensor], places: dict[str, Any]) -> None:
        self._copies = copies
        self._places = places

    @classmethod
    def of(cls, tensors: Iterator[tuple[str, Tensor]]) -> "_Parts":
        """Copy this rank's parts of some tensors, which may change from then on."""
        copies, places, on_gpu = dict[str, Tensor](), dict[str, Any](), False
        for name, tensor in tensors:
            places[name] = {"shape": list(tensor.shape), "start": list(box_of(tensor).start)}
            own = local(tensor).detach()
            on_gpu = on_gpu or own.is_cuda
            copy = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            copies[name] = copy.copy_(own, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return cls(copies, places)

    def write(self, path: Path) -> bytes:
        """Write the file; returns its SHA-256."""
        save_file(self._copies, path, metadata={PARTS: json.dumps(self._places)})
        sync(path)
        return _sha256(path)


@final
class _Saved:
    """One checkpoint, read lazily: a rank reads and verifies only the files that it needs a part of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._unverified: dict[str, str] = {}
        """File → its expected SHA-256, until it is verified."""
        self._parts: dict[str, list[tuple[str, Box]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        name = MANIFEST
        try:
            self._unverified = dict(json.loads((folder / MANIFEST).read_bytes())["files"])
            for name in self._unverified:
                self._open(name)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"checkpoint {folder / name} cannot be read: {error!r}; {FIX}") from error

    @property
    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return sorted(self._parts)

    def read(self, name: str, like: Tensor | None) -> Tensor:
        """A tensor, whole on the CPU or sharded as ``like``, which must have the same shape."""
        shape = self._shapes[name]
        if like is None or not is_sharded(like) or like.shape != shape:
            return self._region(name, Box((0,) * len(shape), shape))
        own = self._region(name, box_of(like)).to(like.device)
        sharded = sharded_as(own, like, like.shape, like.stride())
        return sharded.to(like.device)  # from_local moves it to the mesh's device; offloaded moments belong elsewhere

    def _open(self, name: str) -> None:
        """Read the header of a file."""
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


def _sha256(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
