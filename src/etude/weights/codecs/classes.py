"""The exponent-class codec: the old value of a weight predicts whether it changes.

An update of an Adam-like optimiser is about as large for small weights as for large ones, but the spacing of floats
doubles with every exponent. So the chance that a weight changes halves from one exponent to the next larger one, and
the receiver knows all old exponents. ``class_walk.py`` sorts numbers into 16 classes by old exponent and counts each
change's gap in numbers of its own class. Inside a class, changes fall like coin tosses: gaps are geometric, and the
binary digits of a geometric variable are independent. So a gap is a quotient around 1, in unary, two digits below it,
all decisions with models of their own, and the digits below those, which are nearly fair coins, as plain bits. Steps
are Elias-gamma codes with modelled length and leading digit, and a plain sign.

    body = top: u8 | words: u32[], decisions from the front and plain bits from the back

The plain bits of a class begin with its number of changes and the number of plain digits of its gaps; classes are coded
one after another, and the models of one class are the initial models of the next.

This file owns the body of a classes frame. Bits and models are ``range_coder.py``'s; headers, digests and the
choice of a codec are ``frames.py``'s. Legend: n numbers of a chunk, k changed ones.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, final

import numpy as np

from etude.errors import DamagedError
from etude.jit import borrowing, inlined
from etude.weights.codecs.class_walk import (
    CLASS_COUNT,
    FAR,
    ClassCounts,
    ClassGrid,
    Counts,
    EventList,
    Gaps,
    Pending,
    PlacedChanges,
    find_events,
    find_positions,
    grid_of,
    in_blocks,
    sample_exponents,
)
from etude.weights.codecs.codec import Changes, CodecCost, Frame, Limits, Segments
from etude.weights.codecs.gaps import apply_changes
from etude.weights.codecs.range_coder import (
    Models,
    RangeReader,
    RangeWriter,
    Register,
    Words,
    begin_reading,
    begin_writing,
    finish_writing,
    fresh_models,
    inherit,
    is_whole,
    read,
    read_plain,
    write,
    write_plain,
)
from etude.weights.codecs.streams import Stream
from etude.weights.kernels import LANES, Positions, Steps, readonly
from etude.weights.state import Element

MAX_NUMBERS = 1 << 26
"""Largest chunk: what the width below can count."""
COUNT_BITS = 27
SHIFT_BITS = 5

TOP_SHARE = 0.02
"""Elements that must reach the top exponent, so that a few outliers need no class of their own."""
SAMPLE = 1 << 14
"""Numbers looked at to find it."""

GAP_SAMPLE = 512
"""Gaps of a class looked at to find how many of their digits to leave plain."""
DIGITS = 2
"""Modelled digits of a gap. Another one would save 0.1 % and cost a fifth of the decisions."""
QUOTIENT_MODELS = 8
QUOTIENT_LIMIT = 12
"""The excess of a quotient over this is spelt out, so that one huge gap among small ones is not a million decisions."""
DIGIT_MODEL = QUOTIENT_MODELS
LENGTH_MODEL = DIGIT_MODEL + DIGITS
LEADING_MODEL = LENGTH_MODEL + 32
MODELS = LEADING_MODEL + 32

WORDS_PER_EVENT = 64
"""More than any event takes: 12 + 2 + 33 + 1 decisions and 1 + 27 + 27 + 31 plain bits."""
MOST_EVENT_BYTES = 1 << 10
"""Bytes that a change takes at most in a frame, and far more than it does: a bound, not a format."""
SPARE_WORDS = 128
"""Room for what is not an event: the head of each class, the last words of both ends, and to spare."""


class Events(NamedTuple):
    """Events in order of class, as they are coded."""

    counts: Counts
    """[CLASS_COUNT] events of each class."""
    shifts: Counts
    """[CLASS_COUNT] plain digits of its gaps."""
    gaps: Gaps
    """[k]"""
    steps: Steps
    """[k]"""


@final
class ClassesCodec:
    """Gaps within exponent classes, range-coded: one stream, the body, which only means something beside the base."""

    name = "classes"
    number = 2
    is_additive = False
    cost: CodecCost | None = CodecCost(size_bytes=0.84, seconds=165e-9)

    def supports(self, element: Element) -> bool:
        """Only floats have exponents."""
        return element.exponent_bits > 0

    def encode(self, old: Segments, new: Segments, element: Element, changes: Changes) -> tuple[int, Iterable[Stream]]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        body = encode_classes(old, new, element)
        return len(changes), [Stream(size=len(body), stored=body)]

    def limits(self, frame: Frame) -> list[Limits]:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        return [(0, MOST_EVENT_BYTES * (frame.changed + 1))]

    def decode(self, frame: Frame, base: Segments | None) -> Changes:
        """See :class:`~etude.weights.codecs.codec.Codec`; the base is needed."""
        if base is None:
            raise ValueError("a classes frame can only be decoded beside the contents that it changes")
        positions, steps = decode_classes(frame.streams[0].read().data, base, frame.element, frame.changed)
        return Changes(positions=positions, steps=steps)

    def apply(self, frame: Frame, segments: Segments) -> Positions:
        """See :class:`~etude.weights.codecs.codec.Codec`."""
        changes = self.decode(frame, segments)
        apply_changes(changes, segments, frame.element)
        return changes.positions


def encode_classes(old: Segments, new: Segments, element: Element) -> bytes:
    """Encode the change from ``old`` to ``new`` as the codec's body.

    Raises ``ValueError`` for types without an exponent, segments of unequal lengths and more than 2^26 numbers.
    """
    grid = grid_of(element, top_exponent(old, element))
    total = sum(len(segment) for segment in old)
    if [len(segment) for segment in old] != [len(segment) for segment in new] or total > MAX_NUMBERS:
        raise ValueError(
            f"old and new must be segments of the same lengths with at most {MAX_NUMBERS} numbers; got {total} "
            f"and {sum(len(segment) for segment in new)} in {len(old)} and {len(new)} segments"
        )
    return bytes([grid.top]) + encode_events_as_words(events_between(old, new, grid))


def decode_classes(body: memoryview, base: Segments, element: Element, changed: int) -> tuple[Positions, Steps]:
    """The k = ``changed`` changes that a body makes to ``base``, which is only read: positions and steps.

    Raises ``DamagedError`` if the body is not what ``encode_classes`` makes for such a base.
    """
    total = sum(len(segment) for segment in base)
    if not 0 <= changed <= total:
        raise DamagedError(f"a frame of {total} numbers claims {changed} changes; fetch it again")
    if len(body) % 4 != 1:
        raise DamagedError(f"a classes body of {len(body)} bytes is cut off; fetch it again")
    words = np.frombuffer(bytes(body[1:]), "<u4")
    events = Events(np.zeros(CLASS_COUNT, np.int64), np.zeros(CLASS_COUNT, np.int64), *_room(changed))
    if not decode_events(words, fresh_models(MODELS), events, element.mantissa_bits + element.exponent_bits, total):
        raise DamagedError(f"the words of a classes body of {len(body)} bytes are not events; fetch it again")
    placed = PlacedChanges(*_room(changed), np.zeros(1, np.int64))
    located = locate(events, base, grid_of(element, body[0]), placed)
    if located != changed:
        raise DamagedError(
            f"only {located} of {changed} changes lie inside the {total} numbers; is the base another one?"
        )
    return placed.positions, placed.steps


def top_exponent(segments: Segments, element: Element) -> int:
    """The largest exponent that at least 2 % of a sample reach."""
    histogram = np.zeros(256, np.int64)
    stride = max(1, sum(len(segment) for segment in segments) // SAMPLE)
    for segment in segments:
        sample_exponents(readonly(segment), stride, grid_of(element, 0), histogram)
    reached = histogram[::-1].cumsum()[::-1]
    return int(np.flatnonzero(reached >= max(1.0, TOP_SHARE * reached[0]))[-1]) if reached[0] else 0


def events_between(old: Segments, new: Segments, grid: ClassGrid) -> Events:
    """All change events of a chunk, sorted by exponent class.

    Reserves room for every number to have changed; the system gives memory only for what is written.
    """
    total = sum(len(segment) for segment in old)
    located = EventList(np.empty(total, np.uint8), *_room(total), np.zeros(1, np.int64))
    tally = ClassCounts(
        np.zeros(CLASS_COUNT, np.int64), np.zeros(CLASS_COUNT, np.int64), np.empty(CLASS_COUNT, np.uint64)
    )
    for before, after in zip(old, new, strict=True):
        for (old_part, length), (new_part, _) in zip(in_blocks(before), in_blocks(after), strict=True):
            find_events(old_part, new_part, length, grid, tally, located)
    count = int(located.counter[0])
    counts = np.bincount(located.classes[:count], minlength=CLASS_COUNT).astype(np.int64)
    events = Events(counts, np.zeros(CLASS_COUNT, np.int64), *_room(count))
    sort_by_class(located, counts.cumsum() - counts, events)
    return events._replace(shifts=_shifts(events))


def _shifts(events: Events) -> Counts:
    """[CLASS_COUNT] digits of each class's gaps to leave plain: so many that the quotient is around 1.

    Goes by the mean logarithm of some gaps, so that a few huge ones count little; for a geometric variable, the
    logarithm of its mean is larger by γ / ln 2.
    """
    shifts = np.zeros(CLASS_COUNT, np.int64)
    ends = events.counts.cumsum()
    for each in np.flatnonzero(events.counts).tolist():
        count = int(events.counts[each])
        gaps = events.gaps[ends[each] - count : ends[each] : 1 + count // GAP_SAMPLE]
        level = float(np.log2(gaps + 0.5).mean()) + float(np.euler_gamma) / math.log(2)
        shifts[each] = max(round(level) + 1 - DIGITS, 0)
    return shifts


def _room(count: int) -> tuple[Positions, Steps]:
    return np.empty(count, np.uint32), np.empty(count, np.int32)


def encode_events_as_words(events: Events, words_per_event: int = 1) -> bytes:
    """Encode events as words. Tries again with more room in the rare case that they need more than expected."""
    while True:
        words = np.empty(SPARE_WORDS + words_per_event * len(events.gaps), np.uint32)
        front, back = encode_events(events, fresh_models(MODELS), words)
        if front + back <= len(words):
            return words[:front].tobytes() + words[len(words) - back :].tobytes()
        words_per_event = 4 * words_per_event + 1


def locate(events: Events, base: Segments, grid: ClassGrid, placed: PlacedChanges) -> int:
    """Put the changes that events make to a base where they go; return how many of them lie inside."""
    ends = events.counts.cumsum()
    following = ends - events.counts
    remaining = np.full(CLASS_COUNT, FAR, np.int64)
    present = np.flatnonzero(events.counts)
    remaining[present] = events.gaps[following[present]]
    room = np.empty(CLASS_COUNT, np.uint64), np.empty(LANES, np.int32)
    pending = Pending(events.gaps, events.steps, following, ends, remaining, *room)
    start = 0
    for segment in base:
        for part, length in in_blocks(segment):
            find_positions(part, start, length, grid, pending, placed)
            start += length
    return int(placed.counter[0])


@borrowing
def sort_by_class(located: EventList, places: Counts, events: Events) -> None:
    """Order of position → order of class, and of position within each, from where ``places`` says that each begins."""
    classes, gaps, steps, _ = located
    _, _, sorted_gaps, sorted_steps = events
    for event in range(len(sorted_gaps)):
        place = places[classes[event]]
        places[classes[event]] = place + 1
        sorted_gaps[place] = gaps[event]
        sorted_steps[place] = steps[event]


@borrowing
def encode_events(events: Events, models: Models, words: Words) -> tuple[int, int]:
    """Events → words; returns how many at the front and at the back. Together more than there are: it did not fit."""
    counts, shifts, gaps, steps = events
    writer = begin_writing()
    event = 0
    for each in range(CLASS_COUNT):
        writer = write_plain(writer, words, counts[each], COUNT_BITS)
        writer = write_plain(writer, words, shifts[each], SHIFT_BITS)
        inherit(models)
        for _ in range(counts[each]):
            if writer.at + writer.back + WORDS_PER_EVENT > words.size:
                return words.size, words.size
            writer = _write_gap(writer, words, models, np.int64(gaps[event]), shifts[each])
            writer = _write_step(writer, words, models, np.int64(steps[event]))
            event += 1
    return finish_writing(writer, words)


@borrowing
def decode_events(words: Words, models: Models, events: Events, sign_bit: int, total: int) -> bool:
    """Words → events, which have room for exactly those that are expected; numbers are ``sign_bit`` + 1 bits wide.

    Returns whether the words are these events and no more. Whatever they are, it ends after so many events.
    """
    counts, shifts, gaps, steps = events
    reader = begin_reading(words)
    event = 0
    for each in range(CLASS_COUNT):
        reader, counts[each] = read_plain(reader, words, COUNT_BITS)
        reader, shifts[each] = read_plain(reader, words, SHIFT_BITS)
        if counts[each] > gaps.size - event or shifts[each] > COUNT_BITS - DIGITS:
            return False
        inherit(models)
        rank = np.int64(0)
        for _ in range(counts[each]):
            reader, gap = _read_gap(reader, words, models, shifts[each])
            reader, step = _read_step(reader, words, models, sign_bit)
            rank += gap + 1
            if rank > total or step == 0:
                return False
            gaps[event] = gap
            steps[event] = step
            event += 1
    return event == gaps.size and is_whole(reader, words)


@inlined
def _write_gap(writer: RangeWriter, words: Words, models: Models, gap: Register, shift: Register) -> RangeWriter:
    """A gap is (quotient · 4 + digits) · 2^shift + plain bits."""
    quotient = gap >> (shift + DIGITS)
    count = 0
    while count < QUOTIENT_LIMIT:
        is_more = np.int64(quotient > count)
        writer = write(writer, words, models, min(count, QUOTIENT_MODELS - 1), is_more)
        if not is_more:
            break
        count += 1
    if count == QUOTIENT_LIMIT:
        writer = write_plain(writer, words, quotient - QUOTIENT_LIMIT, COUNT_BITS)
    for digit in range(DIGITS):
        writer = write(writer, words, models, DIGIT_MODEL + digit, (gap >> (shift + digit)) & 1)
    return write_plain(writer, words, gap & ((1 << shift) - 1), shift)


@inlined
def _read_gap(reader: RangeReader, words: Words, models: Models, shift: Register) -> tuple[RangeReader, Register]:
    """The inverse of ``_write_gap``."""
    quotient = np.int64(0)
    while quotient < QUOTIENT_LIMIT:
        reader, is_more = read(reader, words, models, min(quotient, QUOTIENT_MODELS - 1))
        if not is_more:
            break
        quotient += 1
    if quotient == QUOTIENT_LIMIT:
        reader, excess = read_plain(reader, words, COUNT_BITS)
        quotient += excess
    digits = np.int64(0)
    for digit in range(DIGITS):
        reader, bit = read(reader, words, models, DIGIT_MODEL + digit)
        digits |= bit << digit
    reader, rest = read_plain(reader, words, shift)
    return reader, (((quotient << DIGITS) | digits) << shift) | rest


@inlined
def _write_step(writer: RangeWriter, words: Words, models: Models, step: Register) -> RangeWriter:
    """A sign, then how many bits the size has after its first one, then these bits."""
    size = abs(step)
    writer = write_plain(writer, words, step < 0, 1)
    length = 0
    while size >> (length + 1):
        writer = write(writer, words, models, LENGTH_MODEL + length, 1)
        length += 1
    writer = write(writer, words, models, LENGTH_MODEL + length, 0)
    if length:
        writer = write(writer, words, models, LEADING_MODEL + length, (size >> (length - 1)) & 1)
        writer = write_plain(writer, words, size & ((1 << (length - 1)) - 1), length - 1)
    return writer


@inlined
def _read_step(reader: RangeReader, words: Words, models: Models, sign_bit: Register) -> tuple[RangeReader, Register]:
    """The inverse of ``_write_step``; 0 for a step that no number of this width can make."""
    reader, is_negative = read_plain(reader, words, 1)
    length = 0
    is_longer = 1
    while is_longer and length <= sign_bit:
        reader, is_longer = read(reader, words, models, LENGTH_MODEL + length)
        length += is_longer
    size = np.int64(1) << length
    if length:
        reader, leading = read(reader, words, models, LEADING_MODEL + min(length, sign_bit))
        reader, rest = read_plain(reader, words, length - 1)
        size |= (leading << (length - 1)) | rest
    is_possible = size - is_negative < np.int64(1) << sign_bit
    return reader, (-size if is_negative else size) if is_possible else 0


CLASSES = ClassesCodec()
