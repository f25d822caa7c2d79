"""Walking over numbers 64 at a time while counting how many of each exponent class have passed.

This file owns what class a number is in, and the two walks: from numbers to changes counted in their classes, and back
to positions. How changes become bytes is ``classes.py``'s.

Numbers are in one of 16 *classes*, by how far their exponent is below ``top``. A change is an *event*: its class, its
*gap*, which is how many numbers of its class lie between it and the event before in that class, and its step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from etude.jit import borrowing, inlined, vector
from etude.weights.kernels import (
    LANES,
    Positions,
    Steps,
    fold_of,
    popcount,
    readonly,
    step_between,
    trailing_zeros,
    unequal,
)
from etude.weights.state import Element, Numbers

Counts: TypeAlias = npt.NDArray[np.int64]
"""[CLASS_COUNT] one number per class."""
Masks: TypeAlias = npt.NDArray[np.uint64]
"""[CLASS_COUNT] bit j of mask c: number j of a block is in class c."""
Gaps: TypeAlias = npt.NDArray[np.uint32]
"""[k] numbers of the same class between an event and the one before."""

CLASS_COUNT = 16
"""Down to 2^−15 of the top: what is smaller changes nearly always, and is one class."""
FAR = 1 << 40
"""Numbers of a class until its next event when there is none."""

_ONE = np.uint64(1)


class ClassGrid(NamedTuple):
    """The classes of the numbers of a type."""

    top: int
    """Class 0 has this exponent or a larger one."""
    mantissa_bits: int
    exponent_mask: int
    """Largest exponent, before the mantissa is put below it."""
    fold: int
    """See ``kernels.py``."""


class ClassCounts(NamedTuple):
    """Position of a walk in each class, and room for the masks of a block."""

    passed: Counts
    """[CLASS_COUNT] numbers of each class so far."""
    settled: Counts
    """[CLASS_COUNT] how many of them up to the last event of the class."""
    masks: Masks


class EventList(NamedTuple):
    """Events in order of position. Each array has room for every number to have changed."""

    classes: npt.NDArray[np.uint8]
    gaps: Gaps
    steps: Steps
    counter: Counts
    """[1] how many there are so far."""


class Pending(NamedTuple):
    """Events in order of class, and which of them come next: what a walk to their positions consumes."""

    gaps: Gaps
    """[k]"""
    steps: Steps
    """[k]"""
    following: Counts
    """[CLASS_COUNT] index of the next event of each class."""
    ends: Counts
    """[CLASS_COUNT] index after its last event."""
    remaining: Counts
    """[CLASS_COUNT] numbers of the class from here up to its next event, ``FAR`` if there is none."""
    masks: Masks
    """Room for the masks of a block."""
    steps_of_block: Steps
    """[LANES] room for its steps."""


class PlacedChanges(NamedTuple):
    """Changes in order of position, as a walk to positions finds them."""

    positions: Positions
    """[k] ascending."""
    steps: Steps
    """[k]"""
    counter: Counts
    """[1] how many there are so far."""


def grid_of(element: Element, top: int) -> ClassGrid:
    """The classes of the numbers of a type. Raises ``ValueError`` for types without an exponent."""
    if not element.exponent_bits:
        raise ValueError(f"{element.name} has no exponent to tell classes by; encode it with gaps")
    return ClassGrid(top, element.mantissa_bits, (1 << element.exponent_bits) - 1, fold_of(element))


@vector
def class_masks(_context: Any, array: Any, offset: Any, grid: Any, masks: Any) -> Any:
    """Write to ``masks`` in which class each of 64 numbers is.

    Classes are made as 64 bytes, whatever the width of the numbers, and compared with 0 … 15: one vector instruction
    per class on AVX-512, two on AVX2.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fields = [builder.extract_value(arguments[2], place) for place in range(3)]
        classes = _classes(context, builder, signature.args[0], arguments[:2], fields)
        place = context.make_array(signature.args[3])(context, builder, arguments[3]).data
        for number in range(CLASS_COUNT):
            members = builder.icmp_unsigned("==", classes, _constant(classes.type, number))
            builder.store(builder.bitcast(members, ir.IntType(64)), builder.gep(place, [ir.IntType(64)(number)]))
        return context.get_dummy_value()

    return types.void(array, types.int64, grid, masks), generate


def _classes(context: Any, builder: Any, array_type: Any, where: Any, fields: Any) -> Any:
    """<64 x i8>: clip(top − exponent, 0, CLASS_COUNT − 1)."""
    number = ir.IntType(array_type.dtype.bitwidth)
    lanes = ir.VectorType(ir.IntType(8), LANES)
    data = context.make_array(array_type)(context, builder, where[0]).data
    loaded = builder.load(builder.bitcast(builder.gep(data, [where[1]]), ir.VectorType(number, LANES).as_pointer()))
    loaded.align = array_type.dtype.bitwidth // 8
    top, mantissa_bits, exponent_mask = fields
    shifted = builder.lshr(loaded, _splat(builder, _resized(builder, mantissa_bits, number), loaded.type))
    exponents = shifted if number.width == 8 else builder.trunc(shifted, lanes)
    exponents = builder.and_(exponents, _splat(builder, _resized(builder, exponent_mask, lanes.element), lanes))
    tops = _splat(builder, _resized(builder, top, lanes.element), lanes)
    zero, last = _constant(lanes, 0), _constant(lanes, CLASS_COUNT - 1)
    below = builder.select(builder.icmp_unsigned(">", exponents, tops), zero, builder.sub(tops, exponents))
    return builder.select(builder.icmp_unsigned(">", below, last), last, below)


def _resized(builder: Any, number: Any, kind: Any) -> Any:
    return number if number.type == kind else builder.trunc(number, kind)


def _splat(builder: Any, number: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _constant(vector: Any, number: int) -> Any:
    return ir.Constant(vector, [number] * LANES)


@borrowing
def sample_exponents(numbers: Numbers, stride: int, grid: ClassGrid, histogram: Counts) -> None:
    """Add to ``histogram`` [256] the exponents of every stride-th number."""
    for i in range(0, len(numbers), stride):
        histogram[(np.int64(numbers[i]) >> grid.mantissa_bits) & grid.exponent_mask] += 1


def in_blocks(numbers: Numbers) -> Iterator[tuple[Numbers, int]]:
    """The array as read-only arrays of whole blocks, and how many numbers count in each: those before padding."""
    aligned = len(numbers) - len(numbers) % LANES
    if aligned:
        yield readonly(numbers[:aligned]), aligned
    if aligned < len(numbers):
        padded = np.zeros(LANES, numbers.dtype)
        padded[: len(numbers) - aligned] = numbers[aligned:]
        yield readonly(padded), len(numbers) - aligned


@borrowing
def find_events(
    old: Numbers, new: Numbers, length: int, grid: ClassGrid, counters: ClassCounts, events: EventList
) -> None:
    """Append the events of two arrays of whole blocks, of which ``length`` numbers count."""
    passed, settled, masks = counters
    classes, gaps, steps, counter = events
    count = counter[0]
    shift = 64 - 8 * new.itemsize
    for block in range(0, length, LANES):
        class_masks(old, block, grid, masks)
        _clear_padding(masks, length - block)
        changed = unequal(old, new, block)
        while changed:
            lane = trailing_zeros(changed)
            changed &= changed - _ONE
            i = block + lane
            own = _class_of(old[i], grid)
            rank = passed[own] + popcount(masks[own] & _below(lane))
            classes[count] = own
            gaps[count] = rank - settled[own]
            steps[count] = step_between(old[i], new[i], grid.fold, shift)
            settled[own] = rank + 1
            count += 1
        for each in range(CLASS_COUNT):
            passed[each] += popcount(masks[each])
    counter[0] = count


@borrowing
def find_positions(
    numbers: Numbers, start: int, length: int, grid: ClassGrid, pending: Pending, placed: PlacedChanges
) -> None:
    """Append the positions of the events that are in an array of whole blocks, of which ``length`` numbers count.

    ``start`` is the position of its first number. Never more are events than there are events.
    """
    gaps, steps, following, ends, remaining, masks, steps_of_block = pending
    positions, steps_by_position, counter = placed
    count = counter[0]
    for block in range(0, length, LANES):
        class_masks(numbers, block, grid, masks)
        _clear_padding(masks, length - block)
        due = _advance(remaining, masks)
        changed = np.uint64(0)
        while due:
            own = trailing_zeros(due)
            due &= due - _ONE
            members = masks[own]
            size = popcount(members)
            event = following[own]
            left = remaining[own]
            while left < 0:
                lane = _select(members, left + size)
                changed |= _ONE << np.uint64(lane)
                steps_of_block[lane] = steps[event]
                event += 1
                left += np.int64(gaps[event]) + 1 if event < ends[own] else FAR
            following[own] = event
            remaining[own] = left
        while changed:
            lane = trailing_zeros(changed)
            changed &= changed - _ONE
            positions[count] = start + block + lane
            steps_by_position[count] = steps_of_block[lane]
            count += 1
    counter[0] = count


@inlined
def _advance(remaining: Counts, masks: Masks) -> Any:
    """Pass a block; return, as a mask of classes, those whose next event is in it."""
    signs = np.int64(0)
    for each in range(CLASS_COUNT):
        remaining[each] -= popcount(masks[each])
        signs |= remaining[each]
    due = np.uint64(0)
    if signs < 0:
        for each in range(CLASS_COUNT):
            due |= np.uint64(remaining[each] < 0) << np.uint64(each)
    return due


@inlined
def _select(mask: Any, rank: int) -> Any:
    """Index of the set bit that has ``rank`` set bits below it, by halving; no branch to guess wrongly."""
    lane = np.int64(0)
    for halving in range(6):
        half = 32 >> halving
        below = popcount(mask & _below(half))
        is_above = below <= rank
        rank = rank - below if is_above else rank
        mask = mask >> np.uint64(half) if is_above else mask
        lane = lane + half if is_above else lane
    return lane


@inlined
def _below(lane: int) -> Any:
    """The mask of all lanes below one; not of 64."""
    return (_ONE << np.uint64(lane)) - _ONE


@inlined
def _class_of(number: Any, grid: ClassGrid) -> Any:
    exponent = (np.int64(number) >> grid.mantissa_bits) & grid.exponent_mask
    return min(max(grid.top - exponent, 0), CLASS_COUNT - 1)


@inlined
def _clear_padding(masks: Masks, size: int) -> None:
    """Leave only the first ``size`` numbers of a block in any class."""
    if size < LANES:
        for each in range(CLASS_COUNT):
            masks[each] &= _below(size)
