"""One chunk of weights as bytes: a *frame*, either a change of it or all of it.

A chunk is a list of pieces, arrays of numbers of one type that are read as if concatenated. This file owns the bytes
and that nothing in them can do harm: whatever a frame holds, reading it either raises ``DamagedError`` or yields
changes that lie in the chunk, and memory stays proportional to the chunk. What is done with before and after digests,
and where frames are kept, is up to others.

    frame     "ETF1" │ codec u8 │ bytes per number u8 │ exponent bits u8 │ streams u8 │ numbers u32 │ changed u32
              │ before 2 × u64 │ after 2 × u64 │ per stream: size u32, stored u32 │ the streams          little-endian
    stream    as it is where stored = size, else a zstd frame
    GAPS      positions as gaps, each the number of unchanged numbers before it: ⌊g / 255⌋ bytes of 255, then g mod 255;
              steps of 1- and 2-byte numbers: 2-bit codes (sign, |d| > 1), for |d| > 1 then |d| − 2, or 255, |d| u16;
              steps of 4-byte numbers: four byte planes of the zigzagged step
    CLASSES   gaps within exponent classes, range-coded: one stream, owned by ``classes.py``
    DENSE     the zigzagged steps of all numbers as byte planes
    FULL      all numbers as byte planes; floats are rotated left by one bit, so that the exponent fills the highest

Gaps between changes that come as if by chance are geometrically distributed, for which counting in 255s loses nothing,
however rare they are; zstd serves as a Huffman coder. Steps form a group, hence frames can be merged and inverted
without the weights they change. The positions-and-ulps split is ours; prior systems store XORs or values.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import NotRequired, TypeAlias, TypedDict, Unpack

import numpy as np

from etude.errors import DamagedError
from etude.weights import classes, kernels
from etude.weights.digest import Digest
from etude.weights.elements import ELEMENTS, Element
from etude.weights.kernels import Positions, Steps, readonly
from etude.weights.state import NUMBER_TYPES, Bytes1d, Numbers
from etude.weights.streams import Stream, join_planes, planes, scratch

Pieces: TypeAlias = Sequence[Numbers]
"""The numbers of a chunk: arrays of one type, to be read as if concatenated."""

MOST_NUMBERS = 1 << 26
"""Largest chunk: 16 times what we make, and still only a gigabyte to decode."""

_MAGIC = b"ETF1"
_HEADER = struct.Struct("<4s4BII4Q")
_STREAM = struct.Struct("<II")
_MOST_CLASS_BYTES = 1 << 10
"""What a change takes at most in a CLASSES frame, and far more than it does: a bound, not a format."""


class Codec(IntEnum):
    """How a frame encodes its chunk."""

    GAPS = 1
    """A change, as gaps and steps: fast, small, mergeable."""
    CLASSES = 2
    """A change of floats, in the context of the old exponents: smaller, slower, only read beside the old weights."""
    DENSE = 3
    """A change of most numbers."""
    FULL = 4
    """Everything, without reference to anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """Which numbers of a chunk change, and by how much."""

    positions: Positions
    """[k] ascending."""
    steps: Steps
    """[k] ordinal differences, sign-extended from the width of the numbers, never 0."""

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A frame whose header is known to be sound; its streams have not been looked into."""

    codec: Codec
    element: Element
    """A type with the frame's width and exponent; types that encode alike are not told apart."""
    elements: int
    """Numbers in the chunk."""
    changed: int
    """How many of them change; all, in a FULL frame."""
    before: Digest
    """Of the chunk's contents that it applies to; zero in a FULL frame."""
    after: Digest
    """Of the chunk's contents that it leads to."""
    streams: tuple[Stream, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of one number."""
        return self.element.size_bytes


# ── encoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def scan(old: Pieces, new: Pieces, element: Element) -> Changes:
    """The exact difference of two contents of a chunk. Raises ``ValueError`` when they are not of one shape."""
    changes = _scan_scratch(old, new, element)
    return Changes(positions=changes.positions.copy(), steps=changes.steps.copy())


class Known(TypedDict):
    """What the caller of :func:`encode` knows of the two contents of a chunk."""

    before: Digest
    """Of the old one."""
    after: Digest
    """Of the new one."""
    changes: NotRequired[Changes | None]
    """Their difference; saves the scan."""


def encode(codec: Codec, old: Pieces, new: Pieces, element: Element, **known: Unpack[Known]) -> bytes:
    """A frame that turns ``old`` into ``new``.

    Raises ``ValueError`` when the two are not of one shape, for a FULL frame (see :func:`encode_full`), and for CLASSES
    of integers.
    """
    elements = _check_alike(old, new, element)
    digests = (known["before"], known["after"])
    changes = known.get("changes")
    if codec is Codec.GAPS:
        found = _scan_scratch(old, new, element) if changes is None else changes
        return encode_changes(found, element, elements, before=digests[0], after=digests[1])
    if codec is Codec.CLASSES:
        changed = _count_unequal(old, new) if changes is None else len(changes)
        body = classes.encode_classes(old, new, element)
        return _pack(codec, element, (elements, changed), digests, [Stream(size=len(body), stored=body)])
    if codec is Codec.DENSE:
        zigzags = scratch.take("numbers", NUMBER_TYPES[element.size_bytes], elements)
        changed, fold = 0, kernels.fold_of(element)
        for one, other, room in zip(old, new, _split_like(zigzags, new), strict=True):
            changed += kernels.zigzag_between(readonly(one), readonly(other), fold, room)
        return _pack(codec, element, (elements, changed), digests, planes(zigzags))
    raise ValueError("a FULL frame has no old contents; call encode_full")


def encode_changes(changes: Changes, element: Element, elements: int, *, before: Digest, after: Digest) -> bytes:
    """A GAPS frame with these changes of a chunk of ``elements`` numbers."""
    count = len(changes)
    positions, steps = readonly(changes.positions), readonly(changes.steps)
    gaps = scratch.take("gaps", np.uint8, count + elements // kernels.GAP_LIMIT + 1)
    gaps = gaps[: kernels.write_gaps(positions, gaps)]
    if element.size_bytes == max(NUMBER_TYPES):
        zigzags = scratch.take("numbers", np.uint32, count)
        kernels.zigzag(steps, zigzags)
        return _pack(Codec.GAPS, element, (elements, count), (before, after), [Stream.of(gaps), *planes(zigzags)])
    codes = np.zeros(-(-count // 4), np.uint8)
    exceptions = scratch.take("exceptions", np.uint8, 3 * count + 3)
    exceptions = exceptions[: kernels.write_steps(steps, codes, exceptions)]
    return pack_gaps([gaps, codes, exceptions], element, (elements, count), (before, after))


def pack_gaps(
    contents: Sequence[Bytes1d], element: Element, counts: tuple[int, int], digests: tuple[Digest, Digest]
) -> bytes:
    """A GAPS frame from what its streams hold, for those who make that elsewhere; ``counts`` is (numbers, changed)."""
    return _pack(Codec.GAPS, element, counts, digests, map(Stream.of, contents))


def encode_full(new: Pieces, element: Element, *, after: Digest) -> bytes:
    """A frame that :func:`apply` turns into ``new`` whatever was there before."""
    elements = _check_alike(new, new, element)
    rotated = scratch.take("numbers", NUMBER_TYPES[element.size_bytes], elements)
    for piece, room in zip(new, _split_like(rotated, new), strict=True):
        kernels.rotate(readonly(piece), int(element.is_float), room)
    return _pack(Codec.FULL, element, (elements, elements), (Digest.ZERO, after), planes(rotated))


def merge(first: Frame, second: Frame) -> bytes | None:
    """One GAPS frame that does what two GAPS or DENSE frames do one after the other; ``None`` if that is nothing.

    Raises :class:`~etude.errors.DamagedError` when the second does not start where the first ends, ``ValueError`` for
    frames of other codecs.
    """
    if (first.elements, first.element, first.after) != (second.elements, second.element, second.before):
        raise DamagedError(
            f"frames do not follow each other: the first leads to {first.after.hex()} ({first.elements} numbers), "
            f"the second starts from {second.before.hex()} ({second.elements} numbers)"
        )
    one, other = _decode_steps(first), _decode_steps(second)
    positions = np.empty(len(one) + len(other), np.uint32)
    steps = np.empty(len(positions), np.int32)
    shift = 64 - 8 * first.element.size_bytes
    count = kernels.merge_changes((one.positions, one.steps), (other.positions, other.steps), positions, steps, shift)
    if count == 0:
        return None
    changes = Changes(positions=positions[:count], steps=steps[:count])
    return encode_changes(changes, first.element, first.elements, before=first.before, after=second.after)


def invert(frame: Frame) -> bytes:
    """The GAPS frame that undoes a GAPS or DENSE frame. Raises ``ValueError`` for frames of other codecs."""
    changes = _decode_steps(frame)
    width = np.dtype(f"i{frame.element.size_bytes}")
    undone = Changes(positions=changes.positions, steps=(-changes.steps).astype(width).astype(np.int32))
    return encode_changes(undone, frame.element, frame.elements, before=frame.after, after=frame.before)


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(data: bytes | memoryview) -> Frame:
    """Read a frame's header. Raises :class:`~etude.errors.DamagedError` when it cannot be one of ours."""
    view = memoryview(data).toreadonly()
    if len(view) < _HEADER.size:
        raise DamagedError(f"a frame is cut off after {len(view)} bytes")
    magic, codec, size_bytes, exponent_bits, count, elements, changed, *digests = _HEADER.unpack_from(view)
    if magic != _MAGIC or codec not in Codec.__members__.values():
        raise DamagedError(f"a frame starts with {magic!r} and codec {codec}; this is no frame, or of another version")
    element = next(
        (e for e in ELEMENTS.values() if (e.size_bytes, e.exponent_bits) == (size_bytes, exponent_bits)), None
    )
    is_readable = element is not None and (element.is_float or codec != Codec.CLASSES)
    if element is None or not is_readable or not changed <= elements <= MOST_NUMBERS:
        raise DamagedError(
            f"a frame has {changed} of {elements} numbers of {size_bytes} bytes with {exponent_bits} exponent bits"
        )
    frame = Frame(
        codec=Codec(codec),
        element=element,
        elements=elements,
        changed=changed,
        before=Digest(*digests[:2]),
        after=Digest(*digests[2:]),
        streams=tuple(_parse_streams(view, count)),
    )
    limits = _stream_limits(frame)
    sizes = [stream.size for stream in frame.streams]
    if len(sizes) != len(limits) or not all(low <= n <= high for n, (low, high) in zip(sizes, limits, strict=True)):
        raise DamagedError(
            f"a {frame.codec.name} frame with {changed} of {elements} changed has streams of {sizes} bytes"
        )
    return frame


def decode(frame: Frame, base: Pieces | None = None) -> Changes | None:
    """The changes a frame makes; ``None`` for a FULL one. A CLASSES frame needs the chunk's old contents.

    Raises :class:`~etude.errors.DamagedError`, and ``ValueError`` when the base is missing.
    """
    if frame.codec is Codec.FULL:
        return None
    if frame.codec is not Codec.CLASSES:
        return _decode_steps(frame)
    if base is None:
        raise ValueError("a CLASSES frame can only be decoded beside the contents that it changes")
    _check_fits(frame, base)
    body = frame.streams[0].read().data
    positions, steps = classes.decode_classes(body, base, frame.element, frame.changed)
    return Changes(positions=positions, steps=steps)


def apply(frame: Frame, pieces: Pieces) -> Positions | None:
    """Do to a chunk, in place, what the frame says.

    Returns the [k] positions it touched, or ``None`` when that may be any. No digest is checked: a GAPS or DENSE frame
    applied to a wrong base yields wrong numbers. Raises :class:`~etude.errors.DamagedError`, in which case nothing has
    been written.
    """
    _check_fits(frame, pieces)
    if frame.codec is Codec.CLASSES:
        body = frame.streams[0].read().data
        return classes.apply_classes(body, pieces, frame.element, frame.changed)
    fold = kernels.fold_of(frame.element)
    if frame.codec is Codec.GAPS:
        changes = _decode_gaps(frame)
        apply_changes(changes, pieces, frame.element)
        return changes.positions
    if frame.codec is Codec.DENSE:
        zigzags = _read_dense(frame)
        for piece, part in zip(pieces, _split_like(zigzags, pieces), strict=True):
            kernels.apply_zigzag(piece, part, fold)
        return None
    rotated = _joined(frame)
    back = 8 * frame.element.size_bytes - int(frame.element.is_float)
    for piece, part in zip(pieces, _split_like(rotated, pieces), strict=True):
        kernels.rotate(readonly(part), back, piece)
    return None


def apply_changes(changes: Changes, pieces: Pieces, element: Element) -> None:
    """Move the numbers of a chunk by the steps of ``changes``, in place; all positions must lie in it."""
    fold = kernels.fold_of(element)
    ends = list(accumulate((len(piece) for piece in pieces), initial=0))
    cuts = np.searchsorted(changes.positions, ends).tolist()
    for index, piece in enumerate(pieces):
        low, high = cuts[index], cuts[index + 1]
        parts = (readonly(changes.positions[low:high]), readonly(changes.steps[low:high]))
        kernels.apply_steps(piece, ends[index], *parts, fold)


def _decode_steps(frame: Frame) -> Changes:
    if frame.codec is Codec.GAPS:
        return _decode_gaps(frame)
    if frame.codec is not Codec.DENSE:
        raise ValueError(f"a {frame.codec.name} frame holds no changes that stand alone; merge GAPS and DENSE frames")
    zigzags = _read_dense(frame)
    changes = Changes(positions=np.empty(frame.changed, np.uint32), steps=np.empty(frame.changed, np.int32))
    kernels.gather_changes(zigzags, changes.positions, changes.steps)
    return changes


def _decode_gaps(frame: Frame) -> Changes:
    gaps = frame.streams[0].read()
    changes = Changes(positions=np.empty(frame.changed, np.uint32), steps=np.empty(frame.changed, np.int32))
    if kernels.read_gaps(gaps, frame.elements, changes.positions) != kernels.INTACT:
        raise DamagedError(f"a frame's gaps do not make {frame.changed} positions below {frame.elements}")
    if frame.element.size_bytes == max(NUMBER_TYPES):
        zigzags = scratch.take("numbers", np.uint32, frame.changed)
        join_planes(frame.streams[1:], zigzags)
        if kernels.unzigzag(zigzags, changes.steps) != frame.changed:
            raise DamagedError(f"some of a frame's {frame.changed} steps are 0")
        return changes
    codes, exceptions = frame.streams[1].read(), frame.streams[2].read()
    largest = 1 << (8 * frame.element.size_bytes - 1)
    if kernels.read_steps(codes, exceptions, largest, changes.steps) != kernels.INTACT:
        raise DamagedError(f"a frame's codes do not make {frame.changed} steps")
    return changes


def _read_dense(frame: Frame) -> Numbers:
    """[n] the zigzagged steps of a DENSE frame, in scratch memory."""
    zigzags = _joined(frame)
    changed = kernels.count_nonzero(zigzags)
    if changed != frame.changed:
        raise DamagedError(f"a frame changes {changed} numbers, its header says {frame.changed}")
    return zigzags


def _joined(frame: Frame) -> Numbers:
    """[n] the numbers whose byte planes a frame's streams are, in scratch memory."""
    numbers: Numbers = scratch.take("numbers", NUMBER_TYPES[frame.element.size_bytes], frame.elements)
    join_planes(frame.streams, numbers)
    return numbers


def _check_fits(frame: Frame, pieces: Pieces) -> None:
    widths = {piece.itemsize for piece in pieces} - {frame.element.size_bytes}
    elements = sum(map(len, pieces))
    if widths or elements != frame.elements:
        raise DamagedError(
            f"a frame of {frame.elements} numbers of {frame.size_bytes} bytes does not fit a chunk of {elements}"
        )


def _check_alike(old: Pieces, new: Pieces, element: Element) -> int:
    """Number of numbers in each of two contents of one chunk."""
    expected = np.dtype(NUMBER_TYPES[element.size_bytes])
    if [len(piece) for piece in old] != [len(piece) for piece in new]:
        raise ValueError("old and new contents of a chunk must be cut into the same pieces")
    if wrong := {str(piece.dtype) for piece in (*old, *new) if piece.dtype != expected}:
        raise ValueError(f"{element.name} is read as {expected}, got pieces of {', '.join(sorted(wrong))}")
    elements = sum(map(len, new))
    if elements > MOST_NUMBERS:
        raise ValueError(f"a chunk has at most {MOST_NUMBERS} numbers, got {elements}")
    return elements


def _scan_scratch(old: Pieces, new: Pieces, element: Element) -> Changes:
    """As :func:`scan`, but what it returns is overwritten by the next call in this thread."""
    elements = _check_alike(old, new, element)
    positions = scratch.take("positions", np.uint32, elements + 2)
    steps = scratch.take("steps", np.int32, elements + 2)
    start, count, fold = 0, 0, kernels.fold_of(element)
    for one, other in zip(old, new, strict=True):
        count = kernels.scan(readonly(one), readonly(other), (start, count), fold, positions, steps)
        start += len(one)
    return Changes(positions=positions[:count], steps=steps[:count])


def _count_unequal(old: Pieces, new: Pieces) -> int:
    return sum(kernels.count_unequal(readonly(one), readonly(other)) for one, other in zip(old, new, strict=True))


def _split_like(numbers: Numbers, pieces: Pieces) -> Iterator[Numbers]:
    """Parts of an array that are as long as the pieces of a chunk."""
    start = 0
    for piece in pieces:
        yield numbers[start : start + len(piece)]
        start += len(piece)


def _pack(
    codec: Codec,
    element: Element,
    counts: tuple[int, int],
    digests: tuple[Digest, Digest],
    streams: Iterable[Stream],
) -> bytes:
    ready = list(streams)
    kind = (int(codec), element.size_bytes, element.exponent_bits, len(ready))
    lanes = [lane for digest in digests for lane in (digest.first, digest.second)]
    table = (_STREAM.pack(stream.size, len(stream.stored)) for stream in ready)
    return b"".join((_HEADER.pack(_MAGIC, *kind, *counts, *lanes), *table, *(stream.stored for stream in ready)))


def _parse_streams(view: memoryview, count: int) -> Iterator[Stream]:
    start = _HEADER.size + count * _STREAM.size
    if start > len(view):
        raise DamagedError(f"a frame of {len(view)} bytes ends within its header")
    for size, stored in _STREAM.iter_unpack(view[_HEADER.size : start]):
        if stored > size or start + stored > len(view):
            raise DamagedError(f"a frame's stream of {size} bytes is stored in {stored}, at {start} of {len(view)}")
        yield Stream(size=size, stored=view[start : start + stored])
        start += stored
    if start != len(view):
        raise DamagedError(f"a frame of {start} bytes is followed by {len(view) - start} others")


def _stream_limits(frame: Frame) -> list[tuple[int, int]]:
    """For each stream that the frame must have, the fewest and the most bytes it can be of."""
    changed, elements, width = frame.changed, frame.elements, frame.element.size_bytes
    if frame.codec is Codec.CLASSES:
        return [(0, _MOST_CLASS_BYTES * (changed + 1))]
    if frame.codec is not Codec.GAPS:
        return [(elements, elements)] * width
    gaps = (changed, changed + (elements - changed) // kernels.GAP_LIMIT)
    if width == max(NUMBER_TYPES):
        return [gaps, *[(changed, changed)] * width]
    codes = -(-changed // 4)
    return [gaps, (codes, codes), (0, 3 * changed)]
