"""The dense codec: the zigzagged steps of all numbers as byte planes, for changes of most numbers."""

from collections.abc import Iterable
from typing import final

import numpy as np

from etude.errors import DamagedError
from etude.weights import kernels
from etude.weights.codecs.codec import Changes, CodecCost, Frame, Limits, Segments, joined_planes, split_like
from etude.weights.codecs.streams import Stream, planes, scratch
from etude.weights.kernels import readonly
from etude.weights.state import NUMBER_TYPES, Element, Numbers


@final
class DenseCodec:
    """Encodes the steps of all numbers, zeros included."""

    name = "dense"
    number = 3
    is_additive = True
    cost: CodecCost | None = None

    def supports(self, element: Element) -> bool:
        """Every type has steps."""
        return True

    def encode(self, old: Segments, new: Segments, element: Element, changes: Changes) -> tuple[int, Iterable[Stream]]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        zigzags = scratch.take("numbers", NUMBER_TYPES[element.size_bytes], sum(map(len, new)))
        changed, fold = 0, kernels.fold_of(element)
        for one, other, room in zip(old, new, split_like(zigzags, new), strict=True):
            changed += kernels.zigzag_between(readonly(one), readonly(other), fold, room)
        return changed, planes(zigzags)

    def limits(self, frame: Frame) -> list[Limits]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        return [(frame.elements, frame.elements)] * frame.element.size_bytes

    def decode(self, frame: Frame, base: Segments | None) -> Changes:
        """Read the changes; the base is not looked at."""
        zigzags = _zigzags(frame)
        changes = Changes(positions=np.empty(frame.changed, np.uint32), steps=np.empty(frame.changed, np.int32))
        kernels.gather_changes(zigzags, changes.positions, changes.steps)
        return changes

    def apply(self, frame: Frame, segments: Segments) -> None:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        zigzags, fold = _zigzags(frame), kernels.fold_of(frame.element)
        for segment, part in zip(segments, split_like(zigzags, segments), strict=True):
            kernels.apply_zigzag(segment, part, fold)


def _zigzags(frame: Frame) -> Numbers:
    """[n] the zigzagged steps, in scratch memory."""
    zigzags = joined_planes(frame)
    changed = kernels.count_nonzero(zigzags)
    if changed != frame.changed:
        raise DamagedError(f"a frame changes {changed} numbers, its header says {frame.changed}")
    return zigzags


DENSE = DenseCodec()
