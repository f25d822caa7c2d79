"""The full codec: all numbers of a chunk, without reference to anything.

Byte planes; floats are rotated left by one bit, so that the exponent fills the highest plane.
"""

from collections.abc import Iterable
from typing import final

from etude.weights import kernels
from etude.weights.codecs.codec import Changes, CodecCost, Frame, Limits, Segments, joined_planes, split_like
from etude.weights.codecs.streams import Stream, planes, scratch
from etude.weights.kernels import readonly
from etude.weights.state import NUMBER_TYPES, Element


@final
class FullCodec:
    """Encodes all numbers of a chunk, independent of its old contents."""

    name = "full"
    number = 4
    is_additive = False
    cost: CodecCost | None = None

    def supports(self, element: Element) -> bool:
        """Every type has bits."""
        return True

    def encode(self, old: Segments, new: Segments, element: Element, changes: Changes) -> tuple[int, Iterable[Stream]]:
        """See :class:`~etude.weights.codecs.codec.Codec`; only ``new`` is looked at."""
        elements = sum(map(len, new))
        rotated = scratch.take("numbers", NUMBER_TYPES[element.size_bytes], elements)
        for segment, room in zip(new, split_like(rotated, new), strict=True):
            kernels.rotate(readonly(segment), int(element.is_float), room)
        return elements, planes(rotated)

    def limits(self, frame: Frame) -> list[Limits]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        return [(frame.elements, frame.elements)] * frame.element.size_bytes

    def decode(self, frame: Frame, base: Segments | None) -> None:
        """Nothing is known of what changes."""

    def apply(self, frame: Frame, segments: Segments) -> None:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        rotated = joined_planes(frame)
        back = 8 * frame.element.size_bytes - int(frame.element.is_float)
        for segment, part in zip(segments, split_like(rotated, segments), strict=True):
            kernels.rotate(readonly(part), back, segment)


FULL = FullCodec()
