"""A codec: one way to write a chunk's change, or all of a chunk, as a few byte streams.

A codec owns what its streams mean and the check that they can do no harm. Headers, digests and the table of all codecs
are ``frames.py``'s; how a stream is stored is ``streams.py``'s. A new codec is one more file here and a row there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from etude.errors import DamagedError
from etude.weights.codecs.streams import Stream, join_planes, scratch
from etude.weights.digest import Digest
from etude.weights.kernels import Positions, Steps
from etude.weights.state import NUMBER_TYPES, Element, Numbers

Segments: TypeAlias = Sequence[Numbers]
"""The numbers of a chunk: arrays of one type, to be read as if concatenated."""
Limits: TypeAlias = tuple[int, int]
"""The fewest and the most bytes that a stream can be of."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """Changed positions of a chunk, and the step of each."""

    positions: Positions
    """[k] ascending."""
    steps: Steps
    """[k] ordinal differences, sign-extended from the width of the numbers, never 0."""

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Cost of a codec per changed number, measured by ``bench weights`` on bf16 at 1–2 % changed."""

    size_bytes: float
    """On the wire."""
    seconds: float
    """Encoding and decoding together, on one core, the scan included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A frame with a verified header; its streams are not yet decoded."""

    codec: "Codec"
    element: Element
    """A type with the frame's width and exponent; types that encode alike are not told apart."""
    elements: int
    """Numbers in the chunk."""
    changed: int
    """Numbers of them that change; all, in a frame that holds the whole chunk."""
    before: Digest
    """Digest of the contents that it applies to; zero in a frame that holds the whole chunk."""
    after: Digest
    """Digest of the contents that it leads to."""
    streams: tuple[Stream, ...]


class Codec(Protocol):
    """Encodes changes or contents of chunks as byte streams; stateless."""

    @property
    def name(self) -> str:
        """Name in options and messages, in lower case."""
        ...

    @property
    def number(self) -> int:
        """Number in the headers of frames; never given anew."""
        ...

    @property
    def is_additive(self) -> bool:
        """True if frames can be merged and inverted without the weights that they change."""
        ...

    @property
    def cost(self) -> CodecCost | None:
        """Cost of a sparse change, for the choice among codecs; ``None`` for one that is not made for those."""
        ...

    def supports(self, element: Element) -> bool:
        """Return true if numbers of this type can be encoded."""
        ...

    def encode(self, old: Segments, new: Segments, element: Element, changes: Changes) -> tuple[int, Iterable[Stream]]:
        """Return how many numbers count as changed, and the streams; ``changes`` is the difference of the two."""
        ...

    def limits(self, frame: Frame) -> list[Limits]:
        """Return the limits of each stream that a frame with this header must have."""
        ...

    def decode(self, frame: Frame, base: Segments | None) -> Changes | None:
        """Return the changes that a frame makes to ``base``, ``None`` if it replaces everything.

        Raises :class:`~etude.errors.DamagedError`, and ``ValueError`` for a missing base that is needed.
        """
        ...

    def apply(self, frame: Frame, segments: Segments) -> Positions | None:
        """Change a chunk in place; return the [k] positions touched, ``None`` when that may be any.

        Raises :class:`~etude.errors.DamagedError`, in which case nothing has been written.
        """
        ...


def split_like(numbers: Numbers, segments: Segments) -> Iterator[Numbers]:
    """Cut an array into parts that are as long as the segments of a chunk."""
    start = 0
    for segment in segments:
        yield numbers[start : start + len(segment)]
        start += len(segment)


def joined_planes(frame: Frame) -> Numbers:
    """Join the byte planes that a frame's streams are into [n] numbers, in scratch memory."""
    numbers: Numbers = scratch.take("numbers", NUMBER_TYPES[frame.element.size_bytes], frame.elements)
    join_planes(frame.streams, numbers)
    return numbers


def check_fits(frame: Frame, segments: Segments) -> None:
    """Raise :class:`~etude.errors.DamagedError` unless a frame is one of a chunk with these segments."""
    width = frame.element.size_bytes
    elements = sum(map(len, segments))
    if {segment.itemsize for segment in segments} - {width} or elements != frame.elements:
        raise DamagedError(f"a frame of {frame.elements} numbers of {width} bytes does not fit a chunk of {elements}")
