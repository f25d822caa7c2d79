"""Frames bundled into objects of a size that object stores like.

    pack    magic ``ETP2`` │ u32 frames │ index │ frames, one after the other
    index   per frame: u32 chunk, ascending │ u32 size in bytes

Little-endian throughout. The index comes first, so that a reader that needs a few chunks can fetch the head of a pack
and then only their ranges. This file owns the bundling; what a frame holds is ``frames.py``'s, where packs lie
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a chunk's frame lies in a pack."""

    chunk: int
    offset: int
    size_bytes: int


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


def index_bytes(head: bytes) -> int:
    """How many bytes of a pack its index takes, magic included, from its first 8 or more bytes.

    Raises :class:`~etude.errors.DamagedError` when these are not the first bytes of a pack.
    """
    if len(head) < _HEAD.size:
        raise DamagedError(f"a pack is cut off after {len(head)} bytes")
    magic, count = _HEAD.unpack_from(head)
    if magic != _MAGIC or count > _MOST_FRAMES:
        raise DamagedError(f"a pack starts with {bytes(head[:8])!r}: it holds no frames")
    return int(_HEAD.size + count * _ENTRY_BYTES)


def parse_index(head: bytes, pack_bytes: int) -> list[Entry]:
    """The frames of a pack of ``pack_bytes`` from at least its index.

    Raises :class:`~etude.errors.DamagedError` unless they fill the pack exactly, in ascending order of chunks.
    """
    start = index_bytes(head)
    if len(head) < start:
        raise DamagedError(f"a pack's index of {start} bytes is cut off after {len(head)}")
    table = np.frombuffer(head, "<u4", (start - _HEAD.size) // 4, _HEAD.size).reshape(-1, 2).tolist()
    offsets = list(accumulate((size for _, size in table), initial=start))
    if offsets[-1] != pack_bytes:
        raise DamagedError(f"a pack of {pack_bytes} bytes declares frames up to byte {offsets[-1]}")
    entries = [
        Entry(chunk=chunk, offset=offset, size_bytes=size)
        for (chunk, size), offset in zip(table, offsets, strict=False)
    ]
    if any(one.chunk >= two.chunk for one, two in pairwise(entries)):
        raise DamagedError("a pack's chunks are not in ascending order")
    return entries


def read_pack(data: bytes) -> Iterator[tuple[int, memoryview]]:
    """The ``(chunk, frame)`` pairs of a whole pack, without copying. Raises :class:`~etude.errors.DamagedError`."""
    view = memoryview(data)
    for entry in parse_index(data, len(data)):
        yield entry.chunk, view[entry.offset : entry.offset + entry.size_bytes]


def _fill(batch: list[tuple[int, bytes]]) -> FilledPack:
    index = b"".join(struct.pack("<II", chunk, len(frame)) for chunk, frame in batch)
    data = b"".join((_HEAD.pack(_MAGIC, len(batch)), index, *(frame for _, frame in batch)))
    return FilledPack(data=data, first=batch[0][0], last=batch[-1][0])
