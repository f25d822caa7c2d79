"""The exponent-class codec: exact for any bits, near its entropy for real ones, and unimpressed by damage."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.weights.codecs.class_walk import CLASS_COUNT, grid_of
from etude.weights.codecs.classes import (
    decode_classes,
    encode_classes,
    encode_events_as_words,
    events_between,
    top_exponent,
)
from etude.weights.codecs.codec import Changes, Segments
from etude.weights.codecs.gaps import apply_changes
from etude.weights.kernels import Positions
from etude.weights.state import ELEMENTS, NUMBER_TYPES, Element, Numbers

FLOATS = ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32")
"""One type of each shape; C64 is F32 twice."""


def apply_body(body: bytes, segments: Segments, element: Element, changed: int) -> Positions:
    positions, steps = decode_classes(memoryview(body), segments, element, changed)
    apply_changes(Changes(positions=positions, steps=steps), segments, element)
    return positions


def numbers_of(element: Element, bits: npt.NDArray[np.integer] | list[int]) -> Numbers:
    return np.asarray(bits).astype(np.uint64).astype(NUMBER_TYPES[element.size_bytes])


def noise(element: Element, count: int, seed: int) -> Numbers:
    random = np.random.default_rng(seed)
    return random.integers(0, 256**element.size_bytes, count, np.uint64).astype(NUMBER_TYPES[element.size_bytes])


def ordinals(numbers: Numbers) -> npt.NDArray[np.int64]:
    bits = 8 * numbers.itemsize
    signed = numbers.astype(np.int64)
    largest = np.int64(2 ** (bits - 1) - 1)
    return np.where(signed > largest, -1 - (signed & largest), signed)


def steps_between(old: Numbers, new: Numbers) -> npt.NDArray[np.int64]:
    half = np.int64(256**old.itemsize // 2)
    difference: npt.NDArray[np.int64] = (ordinals(new) - ordinals(old) + half) % (2 * half) - half
    return difference


def cut(numbers: Numbers, cuts: list[int]) -> list[Numbers]:
    return [segment.copy() for segment in np.split(numbers, sorted(cuts))]


def assert_round_trip(old: list[Numbers], new: list[Numbers], element: Element) -> bytes:
    body = encode_classes(old, new, element)
    before, after = np.concatenate(old), np.concatenate(new)
    expected = np.flatnonzero(before != after)
    positions, steps = decode_classes(memoryview(body), old, element, len(expected))
    np.testing.assert_array_equal(np.concatenate(old), before)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_array_equal(steps, steps_between(before, after)[expected])
    segments = [segment.copy() for segment in old]
    np.testing.assert_array_equal(apply_body(body, segments, element, len(expected)), expected)
    for segment, target in zip(segments, new, strict=True):
        np.testing.assert_array_equal(segment, target)
    return body


def updated(count: int, rate: float, seed: int = 0) -> tuple[Numbers, Numbers]:
    """Bfloat16 weights before and after a step of an Adam-like optimiser on their float32 masters."""
    random = np.random.default_rng(seed)
    masters = random.standard_normal(count, np.float32) * np.float32(0.02)
    moved = masters + np.float32(rate) * np.clip(random.standard_normal(count, np.float32) * 0.5, -1, 1)
    old, new = (((x.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16) for x in (masters, moved))
    return old, new


def entropy(counts: npt.NDArray[np.integer]) -> float:
    """Bits of all outcomes that were counted."""
    present = counts[counts > 0]
    return float((present * np.log2(present.sum() / present)).sum())


def floor_bits(old: Numbers, new: Numbers) -> float:
    """The least bits for positions and steps if only each number's exponent class is known."""
    exponents = (old >> 7) & 0xFF
    changed = old != new
    steps = steps_between(old, new)
    bits = 0.0
    for exponent in np.unique(exponents):
        own = exponents == exponent
        bits += entropy(np.bincount(changed[own]))
        bits += entropy(np.unique(steps[own & changed], return_counts=True)[1])
    return bits


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 4099])
def test_noise_comes_back(name: str, count: int) -> None:
    element = ELEMENTS[name]
    old, new = noise(element, count, 1), noise(element, count, 2)
    assert_round_trip([old], [new], element)
    new = np.where(np.arange(count) % 7 == 3, new, old)
    assert_round_trip([old], [new], element)
    assert_round_trip([old], [old.copy()], element)


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_all_pairs_of_bytes_come_back(name: str) -> None:
    element = ELEMENTS[name]
    old = numbers_of(element, np.repeat(np.arange(256), 256))
    new = numbers_of(element, np.tile(np.arange(256), 256))
    assert_round_trip([old], [new], element)


@pytest.mark.parametrize("name", FLOATS)
def test_all_pairs_of_special_numbers_come_back(name: str) -> None:
    """Zeros, the smallest and largest subnormals, one, infinities, NaNs, and all of them negative."""
    element = ELEMENTS[name]
    sign = 8 * element.size_bytes - 1
    infinity = ((1 << element.exponent_bits) - 1) << element.mantissa_bits
    one = (infinity >> 1) >> element.mantissa_bits << element.mantissa_bits
    sizes = [0, 1, (1 << element.mantissa_bits) - 1, 1 << element.mantissa_bits, one, infinity - 1, infinity]
    sizes += [min(infinity + 1, (1 << sign) - 1), (1 << sign) - 1]
    special = sizes + [size | 1 << sign for size in sizes]
    old = numbers_of(element, [a for a in special for _ in special])
    new = numbers_of(element, special * len(special))
    assert_round_trip([old], [new], element)


@given(st.data())
def test_any_change_of_any_segments_comes_back(data: st.DataObject) -> None:
    element = ELEMENTS[data.draw(st.sampled_from(FLOATS))]
    count = data.draw(st.integers(0, 400))
    cuts = data.draw(st.lists(st.integers(0, count), max_size=5))
    old = noise(element, count, data.draw(st.integers(0, 5)))
    near = numbers_of(element, old.astype(np.uint64) + data.draw(st.sampled_from([1, 3, 127])))
    chosen = np.random.default_rng(data.draw(st.integers(0, 5))).random(count) < data.draw(st.floats(0, 1))
    assert_round_trip(cut(old, cuts), cut(np.where(chosen, near, old), cuts), element)


def test_how_a_chunk_is_cut_does_not_matter() -> None:
    old, new = updated(10_000, 1e-5)
    bodies = [
        assert_round_trip(cut(old, cuts), cut(new, cuts), ELEMENTS["BF16"])
        for cuts in ([], [0], [64, 128], [1, 2, 3, 4099], [5000, 5000, 10_000])
    ]
    assert len(set(bodies)) == 1


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3])
def test_updates_cost_little_more_than_their_entropy(rate: float) -> None:
    old, new = updated(1 << 20, rate)
    body = assert_round_trip([old], [new], ELEMENTS["BF16"])
    assert 8 * len(body) < 1.03 * floor_bits(old, new)


def test_one_huge_gap_among_small_ones_is_cheap() -> None:
    old = np.full(1 << 20, 0x3C00, np.uint16)
    new = old.copy()
    new[:5000] += 1
    new[-1] += 1
    assert len(assert_round_trip([old], [new], ELEMENTS["BF16"])) < 5000 / 8 + 200


def test_all_numbers_alike_and_all_changed_alike_cost_a_sign_each() -> None:
    old = np.full(1 << 16, 0x3C00, np.uint16)
    assert len(assert_round_trip([old], [old + np.uint16(1)], ELEMENTS["BF16"])) < (1 << 16) / 8 + 200


def test_words_that_do_not_fit_are_tried_again_with_more_room() -> None:
    old, new = noise(ELEMENTS["F32"], 5000, 1), noise(ELEMENTS["F32"], 5000, 2)
    events = events_between([old], [new], grid_of(ELEMENTS["F32"], 128))
    assert encode_events_as_words(events, words_per_event=0) == encode_events_as_words(events, words_per_event=64)


def test_the_top_exponent_ignores_a_few_outliers() -> None:
    element = ELEMENTS["BF16"]
    old = np.full(1000, 0x3C00, np.uint16)
    assert top_exponent([old], element) == 0x78
    old[:10] = 0x4000
    assert top_exponent([old], element) == 0x78
    old[:100] = 0x4000
    assert top_exponent([old], element) == 0x80
    assert top_exponent([old[:0]], element) == 0


def test_events_count_gaps_in_their_own_class() -> None:
    element = ELEMENTS["BF16"]
    large, small = 0x3F80, 0x3E80
    old = np.array([large, small, small, large, large, small, large], np.uint16)
    new = old + np.array([0, 1, 0, 0, 2, 1, 1], np.uint16)
    events = events_between([old[:3], old[3:]], [new[:3], new[3:]], grid_of(element, 0x7F))
    assert events.counts.tolist() == [2, 0, 2] + [0] * (CLASS_COUNT - 3)
    assert events.gaps.tolist() == [2, 0, 0, 1]
    assert events.steps.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize("name", ["U8", "I32", "F64", "BOOL"])
def test_integers_are_refused(name: str) -> None:
    element = ELEMENTS[name]
    segments = [noise(element, 8, 0)]
    with pytest.raises(ValueError, match="no exponent"):
        encode_classes(segments, segments, element)


def test_segments_of_different_lengths_are_refused() -> None:
    old, new = updated(128, 1e-3)
    with pytest.raises(ValueError, match="same lengths"):
        encode_classes([old], [new[:64], new[64:]], ELEMENTS["BF16"])


def attempt(body: bytes, old: Numbers, changed: int) -> "Numbers | None":
    """The result of applying a body to a base, or ``None`` if it is refused; the base must then be unchanged."""
    segments = cut(old, [100])
    try:
        positions = apply_body(body, segments, ELEMENTS["BF16"], changed)
    except DamagedError:
        np.testing.assert_array_equal(np.concatenate(segments), old)
        return None
    new = np.concatenate(segments)
    np.testing.assert_array_equal(positions, np.flatnonzero(new != old))
    return new


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_refused_or_make_so_many_changes(body: bytes, changed: int) -> None:
    old, _ = updated(200, 1e-3)
    new = attempt(body, old, changed)
    assert new is None or int((new != old).sum()) == changed


@given(st.data())
def test_damage_is_refused_or_makes_so_many_changes(data: st.DataObject) -> None:
    old, new = updated(3000, 1e-4)
    changed = int((old != new).sum())
    body = bytearray(encode_classes([old], [new], ELEMENTS["BF16"]))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(body) - 1))
        body[bit // 8] ^= 1 << bit % 8
    result = attempt(bytes(body), old, changed)
    assert result is None or int((result != old).sum()) == changed


@given(st.integers(0, 10_000))
def test_a_truncated_body_is_refused(size: int) -> None:
    old, new = updated(3000, 1e-4)
    body = encode_classes([old], [new], ELEMENTS["BF16"])
    assert attempt(body[: size % len(body)], old, int((old != new).sum())) is None


@pytest.mark.parametrize("wrong", [-1, 1])
def test_another_number_of_changes_is_refused(wrong: int) -> None:
    old, new = updated(3000, 1e-4)
    body = encode_classes([old], [new], ELEMENTS["BF16"])
    assert attempt(body, old, int((old != new).sum()) + wrong) is None


def test_events_beyond_the_base_are_refused() -> None:
    old, new = updated(3000, 1e-4)
    body = encode_classes([old], [new], ELEMENTS["BF16"])
    without_small = np.full(3000, 0x3C00, np.uint16)
    assert attempt(body, without_small, int((old != new).sum())) is None


def test_more_changes_than_numbers_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(DamagedError, match="claims"):
        decode_classes(memoryview(b"\0" * 9), [np.zeros(4, np.uint16)], ELEMENTS["BF16"], 1 << 60)
