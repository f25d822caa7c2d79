"""Frames bundled into objects of a size that object stores like.

    pack    magic ``ETP2`` │ u32 frames │ index │ frames, one after the other
    index   per frame: u32 chunk, ascending │ u32 size in bytes

Little-endian throughout. This file owns the bundling; what a frame holds is ``frames.py``'s, where packs lie
``log.py``'s.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from etude.errors import DamagedError

PACK_BYTES = 32 << 20
"""A pack is closed once it is this large: one request each way, large enough that round trips do not count."""

_MAGIC = b"ETP2"
_HEAD = struct.Struct("<4sI")
_ENTRY_BYTES = 8
_MOST_FRAMES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledPack:
    """A pack that is ready to be stored."""

    data: bytes
    first: int
    """The lowest chunk in it."""
    last: int
    """The highest."""


def fill_packs(frames: Iterable[tuple[int, bytes]], pack_bytes: int = PACK_BYTES) -> Iterator[FilledPack]:
    """Bundle ``(chunk, frame)`` pairs in ascending order of chunks; each pack is given out as soon as it is full."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for chunk, frame in frames:
        batch.append((chunk, frame))
        size += len(frame)
        if size >= pack_bytes or len(batch) == _MOST_FRAMES:
            yield _fill(batch)
            batch, size = [], 0
    if batch:
        yield _fill(batch)


def read_pack(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """The ``(chunk, frame)`` pairs of a pack, without copying.

    Raises :class:`~etude.errors.DamagedError` unless frames fill it exactly, in ascending order of chunks.
    """
    if len(data) < _HEAD.size:
        raise DamagedError(f"a pack is cut off after {len(data)} bytes")
    magic, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or count > _MOST_FRAMES:
        raise DamagedError(f"a pack starts with {bytes(data[:8])!r}: it holds no frames")
    start = _HEAD.size + count * _ENTRY_BYTES
    if len(data) < start:
        raise DamagedError(f"a pack's index of {start} bytes is cut off after {len(data)}")
    index = np.frombuffer(data, "<u4", 2 * count, _HEAD.size).reshape(-1, 2).tolist()
    bounds = list(accumulate((size for _, size in index), initial=start))
    if bounds[-1] != len(data):
        raise DamagedError(f"a pack of {len(data)} bytes declares frames up to byte {bounds[-1]}")
    if any(one >= two for (one, _), (two, _) in pairwise(index)):
        raise DamagedError("a pack's chunks are not in ascending order")
    view = memoryview(data)
    for (chunk, _), (begin, end) in zip(index, pairwise(bounds), strict=True):
        yield chunk, view[begin:end]


def _fill(batch: list[tuple[int, bytes]]) -> FilledPack:
    index = b"".join(struct.pack("<II", chunk, len(frame)) for chunk, frame in batch)
    data = b"".join((_HEAD.pack(_MAGIC, len(batch)), index, *(frame for _, frame in batch)))
    return FilledPack(data=data, first=batch[0][0], last=batch[-1][0])
