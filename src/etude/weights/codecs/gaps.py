"""The gaps codec: a change as distances between changed numbers and steps. Fast, small, mergeable.

    stream 0     gaps, each the number of unchanged numbers before a change: ⌊g / 255⌋ bytes of 255, then g mod 255
    1, 2         steps of 1- and 2-byte numbers: 2-bit codes (sign, |d| > 1); for |d| > 1 then |d| − 2, or 255, |d| u16
    1 … 4        steps of 4-byte numbers: four byte planes of the zigzagged step

Gaps between changes that come as if by chance are geometrically distributed, for which counting in 255s loses nothing,
however rare they are; zstd serves as a Huffman coder.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import final

import numpy as np

from etude.errors import DamagedError
from etude.weights import kernels
from etude.weights.codecs.codec import Changes, CodecCost, Frame, Limits, Segments
from etude.weights.codecs.streams import Stream, join_planes, planes, scratch
from etude.weights.kernels import Positions, readonly
from etude.weights.state import NUMBER_TYPES, Element

WIDEST = max(NUMBER_TYPES)


@final
class GapsCodec:
    """Encodes changed positions as gaps, and steps as codes or byte planes."""

    name = "gaps"
    number = 1
    is_additive = True
    cost: CodecCost | None = CodecCost(size_bytes=1.22, seconds=55e-9)

    def supports(self, element: Element) -> bool:
        """Every type has steps."""
        return True

    def encode(self, old: Segments, new: Segments, element: Element, changes: Changes) -> tuple[int, Iterable[Stream]]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        return len(changes), self.streams(changes, element, sum(map(len, new)))

    def streams(self, changes: Changes, element: Element, elements: int) -> list[Stream]:
        """Encode changes of a chunk of ``elements`` numbers, without the numbers."""
        count = len(changes)
        positions, steps = readonly(changes.positions), readonly(changes.steps)
        gaps = scratch.take("gaps", np.uint8, count + elements // kernels.GAP_LIMIT)
        gaps = gaps[: kernels.write_gaps(positions, gaps)]
        if element.size_bytes == WIDEST:
            zigzags = scratch.take("numbers", np.uint32, count)
            kernels.zigzag(steps, zigzags)
            return [Stream.of(gaps), *planes(zigzags)]
        codes = np.zeros(-(-count // 4), np.uint8)
        exceptions = scratch.take("exceptions", np.uint8, 3 * count + 3)
        exceptions = exceptions[: kernels.write_steps(steps, codes, exceptions)]
        return [Stream.of(gaps), Stream.of(codes), Stream.of(exceptions)]

    def limits(self, frame: Frame) -> list[Limits]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        changed, elements, width = frame.changed, frame.elements, frame.element.size_bytes
        gaps = (changed, changed + (elements - changed) // kernels.GAP_LIMIT)
        if width == WIDEST:
            return [gaps, *[(changed, changed)] * width]
        codes = -(-changed // 4)
        return [gaps, (codes, codes), (0, 3 * changed)]

    def decode(self, frame: Frame, base: Segments | None) -> Changes:
        """Read the changes; the base is not looked at."""
        changes = Changes(positions=np.empty(frame.changed, np.uint32), steps=np.empty(frame.changed, np.int32))
        if kernels.read_gaps(frame.streams[0].read(), frame.elements, changes.positions) != kernels.INTACT:
            raise DamagedError(f"a frame's gaps do not make {frame.changed} positions below {frame.elements}")
        if frame.element.size_bytes == WIDEST:
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

    def apply(self, frame: Frame, segments: Segments) -> Positions:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        changes = self.decode(frame, None)
        apply_changes(changes, segments, frame.element)
        return changes.positions


def apply_changes(changes: Changes, segments: Segments, element: Element) -> None:
    """Move the numbers of a chunk by the steps of ``changes``, in place; all positions must lie in it."""
    fold = kernels.fold_of(element)
    ends = list(accumulate((len(segment) for segment in segments), initial=0))
    bounds = np.searchsorted(changes.positions, ends).tolist()
    for index, segment in enumerate(segments):
        low, high = bounds[index], bounds[index + 1]
        parts = (readonly(changes.positions[low:high]), readonly(changes.steps[low:high]))
        kernels.apply_steps(segment, ends[index], *parts, fold)


GAPS = GapsCodec()
