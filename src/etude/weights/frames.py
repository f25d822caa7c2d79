"""One chunk of weights as bytes: a *frame*, either a change of it or all of it.

This file owns the header of frames and that nothing in them can do harm: whatever a frame holds, reading it either
raises ``DamagedError`` or yields changes that lie in the chunk, and memory stays proportional to the chunk. It also has
the table of all codecs, which own the streams. What is done with before and after digests, and where frames are kept,
is up to others.

    frame     "ETF1" │ codec u8 │ bytes per number u8 │ exponent bits u8 │ streams u8 │ numbers u32 │ changed u32
              │ before 2 × u64 │ after 2 × u64 │ per stream: size u32, stored u32 │ the streams          little-endian
    stream    as it is where stored = size, else a zstd frame

Steps form a group, hence frames of additive codecs can be merged and inverted without the weights that they change. The
split into positions and steps in ulps is ours; prior systems store XORs or values.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from etude.errors import DamagedError
from etude.weights import kernels
from etude.weights.codecs.classes import CLASSES
from etude.weights.codecs.codec import Changes, Codec, Frame, Segments, check_fits
from etude.weights.codecs.dense import DENSE
from etude.weights.codecs.full import FULL
from etude.weights.codecs.gaps import GAPS
from etude.weights.codecs.streams import Stream, scratch
from etude.weights.digest import Digest
from etude.weights.kernels import Positions, readonly
from etude.weights.state import ELEMENTS, NUMBER_TYPES, Element

CODECS: Mapping[int, Codec] = MappingProxyType({codec.number: codec for codec in (GAPS, CLASSES, DENSE, FULL)})
"""All codecs, by the number that frames bear."""

MOST_NUMBERS = 1 << 26
"""Largest chunk: 16 times what we make, and still only a gigabyte to decode."""

_MAGIC = b"ETF1"
_HEADER = struct.Struct("<4s4BII4Q")
_STREAM = struct.Struct("<II")
_NO_CHANGES = Changes(positions=np.empty(0, np.uint32), steps=np.empty(0, np.int32))


def sparse_codecs() -> tuple[Codec, ...]:
    """The codecs to choose from for a version that changes few numbers."""
    return tuple(codec for codec in CODECS.values() if codec.cost is not None)


# ── encoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def scan(old: Segments, new: Segments, element: Element) -> Changes:
    """The exact difference of two contents of a chunk. Raises ``ValueError`` when they are not of one shape."""
    changes = _scan_scratch(old, new, element)
    return Changes(positions=changes.positions.copy(), steps=changes.steps.copy())


def encode(codec: Codec, old: Segments, new: Segments, element: Element, *, digests: tuple[Digest, Digest]) -> bytes:
    """A frame that turns ``old``, whose digest is the first of ``digests``, into ``new``, whose is the second.

    Raises ``ValueError`` when the two are not of one shape, and for a type that the codec does not support.
    """
    elements = _check_alike(old, new, element)
    changed, streams = codec.encode(old, new, element, _scan_scratch(old, new, element))
    return pack(codec, element, (elements, changed), digests, streams)


def encode_changes(changes: Changes, element: Element, elements: int, *, digests: tuple[Digest, Digest]) -> bytes:
    """A frame of the gaps codec with these changes of a chunk of ``elements`` numbers."""
    return pack(GAPS, element, (elements, len(changes)), digests, GAPS.streams(changes, element, elements))


def encode_full(new: Segments, element: Element, *, after: Digest) -> bytes:
    """A frame that :func:`apply` turns into ``new`` whatever was there before."""
    elements = _check_alike(new, new, element)
    _, streams = FULL.encode(new, new, element, _NO_CHANGES)
    return pack(FULL, element, (elements, elements), (Digest.ZERO, after), streams)


def merge(first: Frame, second: Frame) -> bytes | None:
    """One frame of the gaps codec that does what two additive ones do one after the other; ``None`` for nothing.

    Raises :class:`~etude.errors.DamagedError` when the second does not start where the first ends, ``ValueError`` for
    frames of codecs that are not additive.
    """
    if (first.elements, first.element, first.after) != (second.elements, second.element, second.before):
        raise DamagedError(
            f"frames do not follow each other: the first leads to {first.after.hex()} ({first.elements} numbers), "
            f"the second starts from {second.before.hex()} ({second.elements} numbers)"
        )
    one, other = _additive_changes(first), _additive_changes(second)
    positions = np.empty(len(one) + len(other), np.uint32)
    steps = np.empty(len(positions), np.int32)
    shift = 64 - 8 * first.element.size_bytes
    count = kernels.merge_changes((one.positions, one.steps), (other.positions, other.steps), positions, steps, shift)
    if count == 0:
        return None
    changes = Changes(positions=positions[:count], steps=steps[:count])
    return encode_changes(changes, first.element, first.elements, digests=(first.before, second.after))


def invert(frame: Frame) -> bytes:
    """The gaps-codec frame that undoes an additive one. Raises ``ValueError`` for other frames."""
    changes = _additive_changes(frame)
    width = np.dtype(f"i{frame.element.size_bytes}")
    undone = Changes(positions=changes.positions, steps=(-changes.steps).astype(width).astype(np.int32))
    return encode_changes(undone, frame.element, frame.elements, digests=(frame.after, frame.before))


def pack(
    codec: Codec,
    element: Element,
    counts: tuple[int, int],
    digests: tuple[Digest, Digest],
    streams: Iterable[Stream],
) -> bytes:
    """Assemble a frame from its streams; ``counts`` is (numbers of the chunk, changed numbers)."""
    ready = list(streams)
    kind = (codec.number, element.size_bytes, element.exponent_bits, len(ready))
    lanes = [lane for digest in digests for lane in (digest.first, digest.second)]
    table = (_STREAM.pack(stream.size, len(stream.stored)) for stream in ready)
    return b"".join((_HEADER.pack(_MAGIC, *kind, *counts, *lanes), *table, *(stream.stored for stream in ready)))


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(data: bytes | memoryview) -> Frame:
    """Parse a frame's header. Raises :class:`~etude.errors.DamagedError` for an invalid one."""
    view = memoryview(data).toreadonly()
    if len(view) < _HEADER.size:
        raise DamagedError(f"a frame is cut off after {len(view)} bytes")
    magic, number, size_bytes, exponent_bits, count, elements, changed, *digests = _HEADER.unpack_from(view)
    codec = CODECS.get(number)
    if magic != _MAGIC or codec is None:
        raise DamagedError(f"a frame starts with {magic!r} and codec {number}; this is no frame of this version")
    element = next(
        (e for e in ELEMENTS.values() if (e.size_bytes, e.exponent_bits) == (size_bytes, exponent_bits)), None
    )
    if element is None or not codec.supports(element) or not changed <= elements <= MOST_NUMBERS:
        raise DamagedError(
            f"a frame has {changed} of {elements} numbers of {size_bytes} bytes with {exponent_bits} exponent bits"
        )
    frame = Frame(
        codec=codec,
        element=element,
        elements=elements,
        changed=changed,
        before=Digest(*digests[:2]),
        after=Digest(*digests[2:]),
        streams=tuple(_parse_streams(view, count)),
    )
    limits = codec.limits(frame)
    sizes = [stream.size for stream in frame.streams]
    if len(sizes) != len(limits) or not all(low <= n <= high for n, (low, high) in zip(sizes, limits, strict=True)):
        raise DamagedError(f"a {codec.name} frame with {changed} of {elements} changed has streams of {sizes} bytes")
    return frame


def decode(frame: Frame, base: Segments | None = None) -> Changes | None:
    """The changes that a frame makes; ``None`` if it replaces everything. Some codecs need the chunk's old contents.

    Raises :class:`~etude.errors.DamagedError`, and ``ValueError`` when a base is missing.
    """
    if base is not None:
        check_fits(frame, base)
    return frame.codec.decode(frame, base)


def apply(frame: Frame, segments: Segments) -> Positions | None:
    """Apply a frame to a chunk, in place.

    Returns the [k] positions it touched, or ``None`` when that may be any. No digest is checked: an additive frame
    applied to a wrong base yields wrong numbers. Raises :class:`~etude.errors.DamagedError`, in which case nothing has
    been written.
    """
    check_fits(frame, segments)
    return frame.codec.apply(frame, segments)


def _additive_changes(frame: Frame) -> Changes:
    changes = frame.codec.decode(frame, None) if frame.codec.is_additive else None
    if changes is None:
        raise ValueError(f"a {frame.codec.name} frame holds no changes that stand alone")
    return changes


def _check_alike(old: Segments, new: Segments, element: Element) -> int:
    """Number of numbers in each of two contents of one chunk."""
    expected = np.dtype(NUMBER_TYPES[element.size_bytes])
    if [len(segment) for segment in old] != [len(segment) for segment in new]:
        raise ValueError("old and new contents of a chunk must be cut into the same segments")
    if wrong := {str(segment.dtype) for segment in (*old, *new) if segment.dtype != expected}:
        raise ValueError(f"{element.name} is read as {expected}, got segments of {', '.join(sorted(wrong))}")
    elements = sum(map(len, new))
    if elements > MOST_NUMBERS:
        raise ValueError(f"a chunk has at most {MOST_NUMBERS} numbers, got {elements}")
    return elements


def _scan_scratch(old: Segments, new: Segments, element: Element) -> Changes:
    """The same as :func:`scan`, but the next call in this thread overwrites the result."""
    elements = _check_alike(old, new, element)
    positions = scratch.take("positions", np.uint32, elements + 2)
    steps = scratch.take("steps", np.int32, elements + 2)
    start, count, fold = 0, 0, kernels.fold_of(element)
    for one, other in zip(old, new, strict=True):
        count = kernels.scan(readonly(one), readonly(other), (start, count), fold, positions, steps)
        start += len(one)
    return Changes(positions=positions[:count], steps=steps[:count])


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
