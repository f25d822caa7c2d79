"""Compiled loops over weight numbers, at the speed of memory.

Everything here is compiled by numba, releases the GIL and sees plain arrays: no bounds are checked but those named in
the docstrings. ``frames.py`` owns what the bytes mean and turns error codes into errors; ``digest.py`` owns what a
digest is.

``fold`` tells floats from integers without a branch: it is the largest signed number of the width for floats, 0 for
integers, and the ordinal of a signed number s is s ^ (fold if s < 0 else 0), its own inverse. Arithmetic is done in
int64 and cut back to the width by shifting up and down (``shift`` = 64 − bits of the width).

Arrays: positions uint32[k] ascending places in a chunk; steps int32[k] ordinal differences, sign-extended, never 0.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from etude.jit import inlined, kernel, vector
from etude.weights.state import Bytes1d, Element, Numbers

Positions = npt.NDArray[np.uint32]
"""[k] ascending places in a chunk."""
Steps = npt.NDArray[np.int32]
"""[k] ordinal differences, sign-extended from the width of the numbers, never 0."""
LANES = 64
"""Numbers that are compared at once: bits of a mask."""

Array = TypeVar("Array", bound=npt.NDArray[Any])

GAP_LIMIT = 255
"""A byte of the gap stream with this value says: that many unchanged numbers, and the gap goes on."""
EXCEPTION_LIMIT = 255
"""A byte of the exception stream with this value says: the size of the step is in the next two bytes."""
SMALLEST_EXCEPTION = 2
"""Steps of ±1 are no exceptions."""
INTACT = 0
"""Result of a decoder for well-formed streams."""

_READ_AHEAD = 256
"""Numbers read before the first of them is written, so that the waits for memory overlap: 1.6 times as fast."""
_ONE = np.uint64(1)
_LAST = np.uint64(1 << 63)
"""Keeps the search for the lowest set bit inside the block when there is none."""
_SIGN_CODE = 1
_EXCEPTION_CODE = 2

INDEX_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2⁶⁴ / φ, odd: what the place in the digest advances by from one canonical index to the next."""
MIX_FACTORS = (np.uint64(0xD6E8FEB86659FD93), np.uint64(0xC2B2AE3D27D4EB4F))
"""Odd, with about as many ones as zeros; from rrmxmx and xxHash."""
MIX_SHIFTS = (np.uint64(32), np.uint64(29), np.uint64(32))
"""Before the first product, after it, after the second."""


def fold_of(element: Element) -> int:
    """The ``fold`` of a type: see the top of this file."""
    return (1 << (8 * element.size_bytes - 1)) - 1 if element.is_float else 0


class Moves(NamedTuple):
    """Steps of some numbers of an array."""

    start: int
    """The position of the array's first number."""
    positions: Positions
    """[k] ascending, all in the array."""
    steps: Steps
    """[k]"""
    fold: int


class Stretch(NamedTuple):
    """The place of an array in a tensor: part of a region, as :class:`~etude.weights.state.Region` counts it."""

    key: np.uint64
    first: int
    """Index in the region of the array's first number."""
    offset: int
    width: int
    stride: int


def readonly(array: Array) -> Array:
    """A view that cannot be written to, so that kernels are compiled once for inputs and not twice."""
    view = array.view()
    view.flags.writeable = False
    return view


# ── 64 numbers at once, on any processor, without a C compiler ──────────────────────────────────────────────────────
#
# Each intrinsic is a few lines of LLVM vector code, which LLVM lowers to what the machine has (AVX-512, AVX2, SSE2,
# NEON). The result is a 64-bit mask: bit j speaks of element ``offset + j``. The arrays must hold 64 elements from
# ``offset`` on; nothing checks that here.


@vector
def unequal(_context: Any, first: Any, second: Any, offset: Any) -> Any:
    """Bit j: ``first[offset + j] != second[offset + j]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = _load(context, builder, signature.args[0], arguments[0], arguments[2])
        y = _load(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", x, y), ir.IntType(64))

    return types.uint64(first, second, types.int64), generate


@vector
def trailing_zeros(_context: Any, mask: Any) -> Any:
    """Index of the lowest set bit; undefined for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@vector
def popcount(_context: Any, mask: Any) -> Any:
    """Number of set bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    lanes = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), LANES)
    loaded = builder.load(builder.bitcast(builder.gep(data, [offset]), lanes.as_pointer()))
    loaded.align = array_type.dtype.bitwidth // 8
    return loaded


# ── ordinals and steps ──────────────────────────────────────────────────────────────────────────────────────────────


@inlined
def ordinal(bits: Any, fold: int, shift: int) -> Any:
    """Bits of a number → its ordinal, sign-extended to int64."""
    signed = (np.int64(bits) << shift) >> shift
    return signed ^ ((signed >> 63) & fold)


@inlined
def step_between(old: Any, new: Any, fold: int, shift: int) -> Any:
    """Bits of two numbers → the difference of their ordinals, wrapped to the width and sign-extended to int64."""
    return ((ordinal(new, fold, shift) - ordinal(old, fold, shift)) << shift) >> shift


@inlined
def stepped(bits: Any, step: Any, fold: int, shift: int) -> Any:
    """Bits of a number ``step`` ordinals further on, as int64 whose low bits are meant."""
    moved = ((ordinal(bits, fold, shift) + step) << shift) >> shift
    return moved ^ ((moved >> 63) & fold)


@kernel
def scan(old: Numbers, new: Numbers, place: tuple[int, int], fold: int, positions: Positions, steps: Steps) -> int:
    """Append the exact difference of two arrays to the changes found so far; return how many there are now.

    ``place`` is (position of the first number, changes so far). ``positions`` and ``steps`` must have room for every
    number to have changed, and two more: of each block the first two changes are written before it is known whether
    there are any, since a branch that cannot be predicted costs more.
    """
    start, count = place
    shift = 64 - 8 * new.itemsize
    aligned = len(new) - len(new) % LANES
    for block in range(0, aligned, LANES):
        mask = unequal(old, new, block)
        differing = popcount(mask)
        i = block + trailing_zeros(mask | _LAST)
        positions[count] = start + i
        steps[count] = step_between(old[i], new[i], fold, shift)
        mask &= mask - _ONE
        i = block + trailing_zeros(mask | _LAST)
        positions[count + 1] = start + i
        steps[count + 1] = step_between(old[i], new[i], fold, shift)
        mask &= mask - _ONE
        count += min(differing, 2)
        while mask != np.uint64(0):
            i = block + trailing_zeros(mask)
            mask &= mask - _ONE
            positions[count] = start + i
            steps[count] = step_between(old[i], new[i], fold, shift)
            count += 1
    for i in range(aligned, len(new)):
        if old[i] != new[i]:
            positions[count] = start + i
            steps[count] = step_between(old[i], new[i], fold, shift)
            count += 1
    return count


@kernel
def apply_steps(numbers: Numbers, start: int, positions: Positions, steps: Steps, fold: int) -> None:
    """Move the numbers at ``positions``, which count from ``start``, by ``steps``, in place."""
    shift = 64 - 8 * numbers.itemsize
    seen = np.empty(_READ_AHEAD, numbers.dtype)
    for low in range(0, len(positions), _READ_AHEAD):
        places = positions[low : low + _READ_AHEAD]
        for k in range(len(places)):
            seen[k] = numbers[np.int64(places[k]) - start]
        for k in range(len(places)):
            numbers[np.int64(places[k]) - start] = stepped(seen[k], steps[low + k], fold, shift)


@kernel
def put_numbers(numbers: Numbers, places: npt.NDArray[np.int64], bits: Numbers) -> None:
    """Set the numbers at ``places`` to ``bits``; both are [k]."""
    for k in range(len(places)):
        numbers[places[k]] = bits[k]


@kernel
def merge_changes(
    first: tuple[Positions, Steps], second: tuple[Positions, Steps], positions: Positions, steps: Steps, shift: int
) -> int:
    """Two ascending change lists, one after the other, as one; return its length: steps that cancel are left out.

    ``positions`` and ``steps`` must have room for both.
    """
    first_positions, first_steps = first
    second_positions, second_steps = second
    i = j = count = 0
    while i < len(first_positions) and j < len(second_positions):
        left, right = first_positions[i], second_positions[j]
        step = np.int64(0)
        if left <= right:
            step += first_steps[i]
            i += 1
        if right <= left:
            step += second_steps[j]
            j += 1
        step = (step << shift) >> shift
        positions[count] = min(left, right)
        steps[count] = step
        count += step != 0
    for rest in range(i, len(first_positions)):
        positions[count], steps[count] = first_positions[rest], first_steps[rest]
        count += 1
    for rest in range(j, len(second_positions)):
        positions[count], steps[count] = second_positions[rest], second_steps[rest]
        count += 1
    return count


# ── the streams of a GAPS frame ─────────────────────────────────────────────────────────────────────────────────────


@kernel
def write_gaps(positions: Positions, stream: Bytes1d) -> int:
    """Positions → bytes that say how many unchanged numbers precede each; return how many bytes.

    A gap g is ⌊g / 255⌋ bytes of 255 and one of g mod 255. At most k + ⌊positions[−1] / 255⌋ bytes are written.
    """
    size = 0
    next_position = np.int64(0)
    for k in range(len(positions)):
        position = np.int64(positions[k])
        gap = position - next_position
        next_position = position + 1
        while gap >= GAP_LIMIT:
            stream[size] = GAP_LIMIT
            size += 1
            gap -= GAP_LIMIT
        stream[size] = gap
        size += 1
    return size


@kernel
def read_gaps(stream: Bytes1d, elements: int, positions: Positions) -> int:
    """The inverse of :func:`write_gaps`. Returns ``INTACT`` when it yields exactly k positions below ``elements``."""
    ends = 0
    for i in range(len(stream)):
        ends += stream[i] != GAP_LIMIT
    if ends != len(positions) or (len(stream) > 0 and stream[len(stream) - 1] == GAP_LIMIT):
        return 1
    count = 0
    position = np.int64(0)
    for i in range(len(stream)):
        is_end = stream[i] != GAP_LIMIT
        position += stream[i]
        positions[count] = position
        count += is_end
        position += is_end
    return INTACT if position <= elements else 1


@kernel
def write_steps(steps: Steps, codes: Bytes1d, exceptions: Bytes1d) -> int:
    """Steps of 1 or 2 bytes → 2-bit codes and bytes for those other than ±1; return how many of the latter.

    A code is 1 for negative steps plus 2 for exceptions; four make a byte, low bits first. ``codes`` [⌈k / 4⌉] must be
    zero, ``exceptions`` have 3 k + 1 bytes of room. An exception of size m is m − 2, or 255 and m as two bytes.
    """
    size = 0
    for k in range(len(steps)):
        magnitude = np.int64(abs(steps[k]))
        code = (steps[k] < 0) * _SIGN_CODE + (magnitude != 1) * _EXCEPTION_CODE
        codes[k >> 2] |= code << (2 * (k & 3))
        exceptions[size] = magnitude - SMALLEST_EXCEPTION
        if magnitude >= EXCEPTION_LIMIT + SMALLEST_EXCEPTION:
            exceptions[size] = EXCEPTION_LIMIT
            exceptions[size + 1] = magnitude & 0xFF
            exceptions[size + 2] = magnitude >> 8
            size += 2
        size += magnitude != 1
    return size


@kernel
def read_steps(codes: Bytes1d, exceptions: Bytes1d, largest: int, steps: Steps) -> int:
    """The inverse of :func:`write_steps` for sizes up to ``largest``, the highest negative one of the width.

    Returns ``INTACT`` unless a stream ends early or late, or spells a step in a way that the writer would not.
    """
    size = 0
    for k in range(len(steps)):
        code = (codes[k >> 2] >> (2 * (k & 3))) & 3
        magnitude = np.int64(1)
        if code & _EXCEPTION_CODE:
            if size >= len(exceptions):
                return 1
            magnitude = np.int64(exceptions[size]) + SMALLEST_EXCEPTION
            size += 1
            if magnitude == EXCEPTION_LIMIT + SMALLEST_EXCEPTION:
                if size + 2 > len(exceptions):
                    return 1
                magnitude = np.int64(exceptions[size]) | (np.int64(exceptions[size + 1]) << 8)
                size += 2
                if magnitude < EXCEPTION_LIMIT + SMALLEST_EXCEPTION:
                    return 1
        is_negative = code & _SIGN_CODE
        if magnitude > largest - 1 + is_negative:
            return 1
        steps[k] = -magnitude if is_negative else magnitude
    unused = codes[len(codes) - 1] >> (2 * (len(steps) & 3)) if len(steps) & 3 else 0
    return INTACT if size == len(exceptions) and unused == 0 else 1


# ── numbers and byte planes ─────────────────────────────────────────────────────────────────────────────────────────


@inlined
def _zigzag(step: Any) -> Any:
    return (step << 1) ^ (step >> 63)


@inlined
def _unzigzag(number: Any) -> Any:
    return (number >> 1) ^ -(number & 1)


@kernel
def zigzag(steps: Steps, numbers: Numbers) -> None:
    """Steps 0, −1, 1, −2, … → numbers 0, 1, 2, 3, …"""
    for k in range(len(steps)):
        numbers[k] = _zigzag(np.int64(steps[k]))


@kernel
def unzigzag(numbers: Numbers, steps: Steps) -> int:
    """The inverse of :func:`zigzag`; returns how many steps are not 0."""
    count = 0
    for k in range(len(numbers)):
        steps[k] = _unzigzag(np.int64(numbers[k]))
        count += numbers[k] != 0
    return count


@kernel
def zigzag_between(old: Numbers, new: Numbers, fold: int, numbers: Numbers) -> int:
    """The steps between all numbers of two arrays, zigzagged; returns how many are not 0."""
    shift = 64 - 8 * new.itemsize
    count = 0
    for i in range(len(new)):
        numbers[i] = _zigzag(step_between(old[i], new[i], fold, shift))
        count += old[i] != new[i]
    return count


@kernel
def apply_zigzag(numbers: Numbers, zigzags: Numbers, fold: int) -> None:
    """Move all numbers of an array by zigzagged steps, in place."""
    shift = 64 - 8 * numbers.itemsize
    for i in range(len(numbers)):
        numbers[i] = stepped(numbers[i], _unzigzag(np.int64(zigzags[i])), fold, shift)


@kernel
def gather_changes(zigzags: Numbers, positions: Positions, steps: Steps) -> None:
    """The zigzagged steps of a whole chunk → its changes; both outputs have exactly as much room as there are."""
    count = 0
    for i in range(len(zigzags)):
        if zigzags[i] != 0:
            positions[count] = i
            steps[count] = _unzigzag(np.int64(zigzags[i]))
            count += 1


@kernel
def count_nonzero(numbers: Numbers) -> int:
    """Count the numbers that are not 0."""
    count = 0
    for i in range(len(numbers)):
        count += numbers[i] != 0
    return count


@kernel
def rotate(numbers: Numbers, left: int, rotated: Numbers) -> None:
    """Rotate each number's bits; ``left`` from 0 to its width."""
    width = 8 * numbers.itemsize
    for i in range(len(numbers)):
        bits = np.int64(numbers[i])
        rotated[i] = (bits << left) | (bits >> (width - left))


@kernel
def take_plane(numbers: Numbers, plane: int, taken: Bytes1d) -> None:
    """One byte of each number; plane 0 is the lowest."""
    for i in range(len(numbers)):
        taken[i] = numbers[i] >> (8 * plane)


@kernel
def put_plane(taken: Bytes1d, plane: int, numbers: Numbers) -> None:
    """The inverse of :func:`take_plane`; plane 0 comes first and clears the others."""
    if plane == 0:
        numbers[:] = 0
    for i in range(len(numbers)):
        numbers[i] |= np.int64(taken[i]) << (8 * plane)


# ── digests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@inlined
def _mix(place: Any, bits: Any) -> Any:
    """Mix a place and the bits that are there into 64.

    Places are key + index · 2⁶⁴/φ, so far from each other that adding up to 32 bits makes none meet (three-gap theorem:
    the nearest of 2ⁿ places are about 2⁶⁴⁻ⁿ apart). One round of xor-shift, multiply, xor-shift as in MurmurHash3's
    finaliser makes the first lane, another the second. Few enough to run at the speed of memory; enough that, of two
    million swaps of neighbouring values between neighbouring places, all changed either lane, no two alike in the
    second.
    """
    mixed = place + bits
    mixed = (mixed ^ (mixed >> MIX_SHIFTS[0])) * MIX_FACTORS[0]
    return mixed ^ (mixed >> MIX_SHIFTS[1])


@inlined
def _second_lane(mixed: Any) -> Any:
    """The second lane's 64 bits from those of the first."""
    again = mixed * MIX_FACTORS[1]
    return again ^ (again >> MIX_SHIFTS[2])


@kernel
def _digest_run(numbers: Numbers, place: np.uint64, lanes: npt.NDArray[np.uint64]) -> None:
    """Add the terms of numbers that lie beside each other, the first of them at ``place``."""
    first = second = np.uint64(0)
    for i in range(len(numbers)):
        mixed = _mix(place, np.uint64(numbers[i]))
        place += INDEX_FACTOR
        first += mixed
        second += _second_lane(mixed)
    lanes[0] += first
    lanes[1] += second


@kernel
def digest_region(
    numbers: Numbers, key: np.uint64, shape: tuple[int, int, int], start: int, lanes: npt.NDArray[np.uint64]
) -> None:
    """Add to ``lanes`` [2] the terms of numbers ``start``, … of a region; ``shape`` is (offset, width, stride)."""
    offset, width, stride = shape
    done = 0
    while done < len(numbers):
        row, column = divmod(start + done, width)
        stop = min(len(numbers), done + width - column)
        place = key + np.uint64(offset + row * stride + column) * INDEX_FACTOR
        _digest_run(numbers[done:stop], place, lanes)
        done = stop


@kernel
def take_steps(numbers: Numbers, moves: Moves, part: Stretch, take: bool, lanes: npt.NDArray[np.uint64]) -> None:
    """Add to ``lanes`` [2] what moving numbers does to a digest; ``take`` the steps as well, in place, or only tell."""
    shift = 64 - 8 * numbers.itemsize
    seen = np.empty(_READ_AHEAD, numbers.dtype)
    first = second = np.uint64(0)
    for low in range(0, len(moves.positions), _READ_AHEAD):
        places = moves.positions[low : low + _READ_AHEAD]
        for k in range(len(places)):
            seen[k] = numbers[np.int64(places[k]) - moves.start]
        for k in range(len(places)):
            here = np.int64(places[k]) - moves.start
            bits = numbers.dtype.type(stepped(seen[k], moves.steps[low + k], moves.fold, shift))
            index = part.first + here
            if index >= part.width:
                index = index // part.width * part.stride + index % part.width
            place = part.key + np.uint64(part.offset + index) * INDEX_FACTOR
            before, after = _mix(place, np.uint64(seen[k])), _mix(place, np.uint64(bits))
            first += after - before
            second += _second_lane(after) - _second_lane(before)
            if take:
                numbers[here] = bits
    lanes[0] += first
    lanes[1] += second


@kernel
def digest_change(
    indices: npt.NDArray[np.uint64], old: Numbers, new: Numbers, key: np.uint64, lanes: npt.NDArray[np.uint64]
) -> None:
    """Add to ``lanes`` [2] the terms of ``new`` at canonical ``indices`` and take away those of ``old``."""
    first = second = np.uint64(0)
    for k in range(len(indices)):
        place = key + indices[k] * INDEX_FACTOR
        before = _mix(place, np.uint64(old[k]))
        after = _mix(place, np.uint64(new[k]))
        first += after - before
        second += _second_lane(after) - _second_lane(before)
    lanes[0] += first
    lanes[1] += second
