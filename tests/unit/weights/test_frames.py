"""Frames are exact for every bit pattern, merge and invert as a group, and nothing in them can do harm."""

import struct
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.jit import kernel
from etude.weights import kernels
from etude.weights.codecs.classes import CLASSES
from etude.weights.codecs.codec import Changes, Codec, Frame, Segments
from etude.weights.codecs.dense import DENSE
from etude.weights.codecs.gaps import GAPS
from etude.weights.digest import Digest
from etude.weights.frames import (
    MOST_NUMBERS,
    apply,
    decode,
    encode,
    encode_changes,
    encode_full,
    invert,
    merge,
    parse,
    scan,
)
from etude.weights.kernels import fold_of, step_between, stepped
from etude.weights.state import ELEMENTS, NUMBER_TYPES, Element, Numbers

BF16 = ELEMENTS["BF16"]
FLOATS = tuple(element for element in ELEMENTS.values() if element.is_float)
BEFORE, AFTER, LATER = Digest(1, 2), Digest(3, 4), Digest(5, 6)
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 200, 1000]), max_size=4)
DENSITIES = st.sampled_from([0.0, 0.003, 0.05, 0.5, 1.0])
SEEDS = st.integers(0, 2**32 - 1)
elements = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


def random_segments(seed: int, lengths: Sequence[int], element: Element) -> list[Numbers]:
    rng = np.random.default_rng(seed)
    dtype = NUMBER_TYPES[element.size_bytes]
    return [rng.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True) for length in lengths]


def nudged(segments: Segments, seed: int, density: float) -> list[Numbers]:
    """Some numbers, most of them moved by little, others to anywhere."""
    rng = np.random.default_rng(seed)
    result = []
    for segment in segments:
        near = segment + rng.integers(-3, 4, len(segment)).astype(segment.dtype)
        far = rng.integers(0, np.iinfo(segment.dtype).max, len(segment), segment.dtype, endpoint=True)
        moved = np.where(rng.random(len(segment)) < 0.9, near, far)
        result.append(np.where(rng.random(len(segment)) < density, moved, segment))
    return result


def copies(segments: Segments) -> list[Numbers]:
    return [segment.copy() for segment in segments]


def same(one: Segments, other: Segments) -> bool:
    return all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


def gaps_frame(old: Segments, new: Segments, element: Element, before: Digest, after: Digest) -> Frame:
    return parse(encode(GAPS, old, new, element, digests=(before, after)))


def assert_equal(changes: Changes | None, expected: Changes) -> None:
    assert changes is not None
    assert np.array_equal(changes.positions, expected.positions)
    assert np.array_equal(changes.steps, expected.steps)


# ── ordinals ────────────────────────────────────────────────────────────────────────────────────────────────────────


@kernel
def count_lossy_pairs(numbers: Numbers, fold: int) -> int:
    """The number of pairs of numbers for which the step between them does not lead from one to the other."""
    shift = 64 - 8 * numbers.itemsize
    lossy = 0
    for i in range(len(numbers)):
        for j in range(len(numbers)):
            step = np.int32(step_between(numbers[i], numbers[j], fold, shift))
            reached = stepped(numbers[i], step, fold, shift)
            lossy += (reached ^ numbers[j]) << shift != 0
            lossy += (step == 0) != (i == j)
    return lossy


@pytest.mark.parametrize("name", ["BF16", "I8", "F8_E4M3"])
def test_all_pairs_of_bit_patterns_are_lossless(name: str) -> None:
    element = ELEMENTS[name]
    numbers = np.arange(1 << 8 * element.size_bytes).astype(NUMBER_TYPES[element.size_bytes])
    assert count_lossy_pairs(numbers, fold_of(element)) == 0


def test_consecutive_floats_differ_by_one_step() -> None:
    ascending = np.array([0xFF80, 0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80, 0x7F80], np.uint16)
    changes = scan([ascending[:-1]], [ascending[1:]], BF16)
    assert (changes.steps > 0).all()
    assert changes.steps[2:5].tolist() == [1, 1, 1]


def test_patterns_that_are_no_numbers_survive() -> None:
    odd = np.array([0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x7FFF, 0xFFFF, 0x0001], np.uint16)
    old, new = [odd.repeat(len(odd))], [np.tile(odd, len(odd))]
    for codec in (GAPS, CLASSES, DENSE):
        numbers = copies(old)
        moved = apply(parse(encode(codec, old, new, BF16, digests=(BEFORE, AFTER))), numbers)
        assert same(numbers, new), codec
        if codec is GAPS:
            assert moved is not None and np.array_equal(moved, np.flatnonzero(old[0] != new[0]))


# ── round trips ─────────────────────────────────────────────────────────────────────────────────────────────────────


@elements
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, lengths=LENGTHS, density=DENSITIES)
def test_every_codec_leads_from_old_to_new(element: Element, seed: int, lengths: list[int], density: float) -> None:
    old = random_segments(seed, lengths, element)
    new = nudged(old, seed + 1, density)
    changes = scan(old, new, element)
    codecs: list[Codec] = [GAPS, DENSE, *([CLASSES] if element in FLOATS else [])]
    for codec in codecs:
        data = encode(codec, old, new, element, digests=(BEFORE, AFTER))
        assert data == encode(codec, old, new, element, digests=(BEFORE, AFTER))
        frame = parse(data)
        assert (frame.codec, frame.element.size_bytes, frame.elements) == (codec, element.size_bytes, sum(lengths))
        assert (frame.before, frame.after, frame.changed) == (BEFORE, AFTER, len(changes))
        assert_equal(decode(frame, old), changes)
        numbers = copies(old)
        touched = apply(frame, numbers)
        assert same(numbers, new)
        assert touched is None or np.array_equal(touched, changes.positions)


@elements
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, lengths=LENGTHS)
def test_full_frames_need_nothing(element: Element, seed: int, lengths: list[int]) -> None:
    new = random_segments(seed, lengths, element)
    frame = parse(encode_full(new, element, after=AFTER))
    numbers = [np.zeros_like(segment) for segment in new]
    assert apply(frame, numbers) is None
    assert same(numbers, new)
    assert decode(frame) is None
    assert (frame.before, frame.after, frame.changed) == (Digest.ZERO, AFTER, sum(lengths))


@given(seed=SEEDS, lengths=LENGTHS, density=DENSITIES)
@settings(deadline=None)
def test_scan_finds_what_differs(seed: int, lengths: list[int], density: float) -> None:
    old = random_segments(seed, lengths, BF16)
    new = nudged(old, seed + 1, density)
    flat_old, flat_new = np.concatenate([*old, np.empty(0, np.uint16)]), np.concatenate([*new, np.empty(0, np.uint16)])
    assert np.array_equal(scan(old, new, BF16).positions, np.flatnonzero(flat_old != flat_new))


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 65534, 65535, 65536, 300_000])
def test_gaps_of_any_length(gap: int) -> None:
    old = [np.zeros(gap + 3, np.uint16)]
    new = copies(old)
    new[0][[0, gap + 1]] = 7
    frame = gaps_frame(old, new, BF16, BEFORE, AFTER)
    assert_equal(decode(frame), Changes(positions=np.array([0, gap + 1], np.uint32), steps=np.full(2, 7, np.int32)))


@pytest.mark.parametrize("name", ["I8", "I16", "BF16", "I32", "F32"])
def test_steps_of_any_size(name: str) -> None:
    element = ELEMENTS[name]
    largest = 1 << (8 * element.size_bytes - 1)
    near_limits = [size for size in (1, 2, 3, 127, 128, 255, 256, 257, 258, 32767, largest - 1) if size < largest]
    steps = np.array([*near_limits, *(-size for size in near_limits), -largest], np.int32)
    changes = Changes(positions=np.arange(len(steps), dtype=np.uint32), steps=steps)
    assert_equal(decode(parse(encode_changes(changes, element, len(steps), digests=(BEFORE, AFTER)))), changes)


def test_long_streams_are_compressed_only_where_that_pays() -> None:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    frame = parse(encode_full([weights.astype(np.uint16)], BF16, after=AFTER))
    mantissas, exponents = frame.streams
    assert len(mantissas.stored) == mantissas.size
    assert len(exponents.stored) < 0.36 * exponents.size


def test_realistic_changes_take_little_more_than_their_entropy() -> None:
    rng = np.random.default_rng(0)
    changed = rng.random(1 << 20) < 0.015
    steps = np.where(rng.random(1 << 20) < 0.9, 1, 2) * np.where(rng.random(1 << 20) < 0.5, 1, -1)
    old = [rng.integers(0x3000, 0x4000, 1 << 20).astype(np.uint16)]
    new = [(old[0] + np.where(changed, steps, 0)).astype(np.uint16)]
    size = len(encode(GAPS, old, new, BF16, digests=(BEFORE, AFTER)))
    density = changed.mean()
    position_bits = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / density
    step_bits = 1 - 0.9 * np.log2(0.9) - 0.1 * np.log2(0.1)
    assert size < 1.04 * changed.sum() * (position_bits + step_bits) / 8


# ── the group of changes ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["F8_E5M2", "BF16", "F32", "I32"])
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, lengths=LENGTHS, density=DENSITIES, dense=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_merging_is_associative_and_exact(
    name: str, seed: int, lengths: list[int], density: float, dense: tuple[bool, bool, bool]
) -> None:
    element = ELEMENTS[name]
    states = [random_segments(seed, lengths, element)]
    for turn in range(3):
        states.append(nudged(states[-1], seed + turn + 1, density))
    ends = (BEFORE, AFTER, LATER, Digest(7, 8))
    codecs: list[Codec] = [DENSE if is_dense else GAPS for is_dense in dense]
    frames = [
        parse(encode(codecs[i], states[i], states[i + 1], element, digests=(ends[i], ends[i + 1]))) for i in range(3)
    ]
    direct = scan(states[0], states[3], element)
    left, right = merge(frames[0], frames[1]), merge(frames[1], frames[2])
    if left is None or right is None or not len(direct):
        return
    merged = merge(parse(left), frames[2])
    assert merged is not None
    assert merged == merge(frames[0], parse(right))
    assert merged == encode_changes(direct, element, sum(lengths), digests=(ends[0], ends[3]))


@pytest.mark.parametrize("codec", [GAPS, DENSE])
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, name=st.sampled_from(sorted(ELEMENTS)), density=st.sampled_from([0.05, 1.0]))
def test_inverting_undoes_and_merging_with_the_inverse_leaves_nothing(
    codec: Codec, seed: int, name: str, density: float
) -> None:
    element = ELEMENTS[name]
    old = random_segments(seed, [100, 31], element)
    new = nudged(old, seed + 1, density)
    frame = parse(encode(codec, old, new, element, digests=(BEFORE, AFTER)))
    inverse = parse(invert(frame))
    assert (inverse.before, inverse.after) == (AFTER, BEFORE)
    numbers = copies(new)
    apply(inverse, numbers)
    assert same(numbers, old)
    assert merge(frame, inverse) is None


def test_frames_that_do_not_follow_each_other_are_not_merged() -> None:
    old, new = random_segments(0, [10], BF16), random_segments(1, [10], BF16)
    first = gaps_frame(old, new, BF16, BEFORE, AFTER)
    with pytest.raises(DamagedError, match="do not follow"):
        merge(first, gaps_frame(new, old, BF16, LATER, BEFORE))
    with pytest.raises(DamagedError, match="do not follow"):
        merge(first, gaps_frame(new, old, ELEMENTS["U16"], AFTER, BEFORE))


def test_only_additive_frames_are_merged_or_inverted() -> None:
    with pytest.raises(ValueError, match="full frame"):
        invert(parse(encode_full(random_segments(0, [10], BF16), BF16, after=AFTER)))


def test_wrong_arguments_are_refused() -> None:
    segment = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="same segments"):
        scan([segment], [segment[:3]], BF16)
    with pytest.raises(ValueError, match="uint32"):
        scan([segment], [segment], ELEMENTS["F32"])
    with pytest.raises(ValueError, match="beside"):
        decode(parse(encode(CLASSES, [segment], [segment + np.uint16(1)], BF16, digests=(BEFORE, AFTER))))


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def sample_frames(element: Element) -> tuple[list[Numbers], list[bytes]]:
    old = random_segments(5, [300, 0, 77], element)
    new = nudged(old, 6, 0.3)
    codecs: list[Codec] = [GAPS, DENSE, *([CLASSES] if element in FLOATS else [])]
    frames = [encode(codec, old, new, element, digests=(BEFORE, AFTER)) for codec in codecs]
    sparse = nudged(old, 7, 0.02)
    frames.append(encode(GAPS, old, sparse, element, digests=(BEFORE, AFTER)))
    return old, [*frames, encode_full(new, element, after=AFTER)]


def read_damaged(data: bytes, base: Segments) -> None:
    """Any bytes either raise an error or give changes inside of the chunk."""
    numbers = copies(base)
    try:
        frame = parse(data)
        changes = decode(frame, base)
        touched = apply(frame, numbers)
    except DamagedError:
        assert same(numbers, base), "a frame that is refused must not have written"
        return
    for positions in (touched, None if changes is None else changes.positions):
        if positions is not None and len(positions):
            assert int(positions[-1]) < frame.elements
            assert (np.diff(positions.astype(np.int64)) > 0).all()
    if changes is not None:
        assert (changes.steps != 0).all()


@pytest.mark.parametrize("name", ["F8_E4M3", "I8", "BF16", "F32"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bits_and_cuts_do_no_harm(name: str, data: st.DataObject) -> None:
    base, frames = sample_frames(ELEMENTS[name])
    damaged = bytearray(data.draw(st.sampled_from(frames)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    read_damaged(bytes(damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))]), base)


@pytest.mark.parametrize("name", ["F8_E4M3", "BF16", "F32"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_header_fields_of_any_value_do_no_harm(name: str, data: st.DataObject) -> None:
    base, frames = sample_frames(ELEMENTS[name])
    damaged = bytearray(data.draw(st.sampled_from(frames)))
    extremes = st.sampled_from([0, 1, 255, 377, 65535, MOST_NUMBERS, MOST_NUMBERS + 1, 2**31, 2**32 - 1])
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(4, 7))] = data.draw(st.integers(0, 255))
    for _ in range(data.draw(st.integers(0, 2))):
        words = [8, 12, *range(48, 48 + 8 * damaged[7], 4)]
        place = data.draw(st.sampled_from([word for word in words if word + 4 <= len(damaged)]))
        damaged[place : place + 4] = struct.pack("<I", data.draw(extremes))
    read_damaged(bytes(damaged), base)


@settings(max_examples=150, deadline=None)
@given(junk=st.binary(max_size=300), start=st.integers(0, 60))
def test_arbitrary_bytes_do_no_harm(junk: bytes, start: int) -> None:
    base, frames = sample_frames(BF16)
    read_damaged(junk, base)
    for frame in frames:
        read_damaged(frame[:start] + junk, base)


@settings(max_examples=150, deadline=None)
@given(
    streams=st.tuples(st.binary(max_size=40), st.binary(max_size=10), st.binary(max_size=20)),
    changed=st.integers(0, 40),
    name=st.sampled_from(["F8_E4M3", "BF16"]),
)
def test_arbitrary_uncompressed_streams_do_no_harm(streams: tuple[bytes, ...], changed: int, name: str) -> None:
    element = ELEMENTS[name]
    base = random_segments(5, [30, 0, 97], element)
    header = struct.pack("<4s4BII4Q", b"ETF1", 1, element.size_bytes, element.exponent_bits, 3, 127, changed, *[0] * 4)
    table = b"".join(struct.pack("<II", len(stream), len(stream)) for stream in streams)
    read_damaged(header + table + b"".join(streams), base)


def test_a_header_cannot_make_us_allocate() -> None:
    zeros = [np.zeros(1000, np.uint16)]
    full = bytearray(encode_full(zeros, BF16, after=AFTER))
    full[8:16] = struct.pack("<II", MOST_NUMBERS, MOST_NUMBERS)
    for stream in range(2):
        full[48 + 8 * stream : 52 + 8 * stream] = struct.pack("<I", MOST_NUMBERS)
    tracemalloc.start()
    frame = parse(bytes(full))
    with pytest.raises(DamagedError, match="does not fit"):
        apply(frame, zeros)
    with pytest.raises(DamagedError, match="cannot hold"):
        frame.streams[0].read()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_frame_of_another_chunk_is_damage() -> None:
    frame = gaps_frame(random_segments(0, [10], BF16), random_segments(1, [10], BF16), BF16, BEFORE, AFTER)
    with pytest.raises(DamagedError, match="does not fit"):
        apply(frame, random_segments(0, [9], BF16))
    with pytest.raises(DamagedError, match="does not fit"):
        apply(frame, random_segments(0, [10], ELEMENTS["F32"]))


def test_readers_of_streams_never_pass_an_end() -> None:
    steps = np.empty(2, np.int32)
    both_exceptions = kernels.readonly(np.array([0b1010], np.uint8))
    for exceptions in ([], [0], [0, 255], [0, 255, 0], [0, 255, 1, 0], [0, 1, 2]):
        stream = kernels.readonly(np.array(exceptions, np.uint8))
        assert kernels.read_steps(both_exceptions, stream, 1 << 15, steps) != kernels.INTACT
    positions = np.empty(2, np.uint32)
    for gaps in ([], [1], [1, 255], [1, 1, 1], [1, 255, 255], [50, 49]):
        stream = kernels.readonly(np.array(gaps, np.uint8))
        assert kernels.read_gaps(stream, 100, positions) != kernels.INTACT
    assert kernels.read_gaps(kernels.readonly(np.array([50, 48], np.uint8)), 100, positions) == kernels.INTACT
    assert positions.tolist() == [50, 99]
