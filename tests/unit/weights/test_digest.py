"""Digests do not depend on the division, follow changes, and detect errors."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.types import TensorSpec
from etude.weights.digest import (
    Digest,
    content_digest,
    digest_change,
    digest_numbers,
    presence,
    state_digest,
)
from etude.weights.state import Bytes1d, Numbers, Region, StoredTensor

KEY = 0xFEDC_BA98_7654_3210
LANE = st.integers(0, 2**64 - 1)
DIGESTS = st.builds(Digest, LANE, LANE)
FAR = 1 << 33
"""Beyond 32 bits, and beyond any array here."""


def random_numbers(count: int, dtype: type[np.unsignedinteger] = np.uint16, seed: int = 0) -> Numbers:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)


def tensor(name: str, dtype: str, shape: tuple[int, ...], data: Bytes1d) -> StoredTensor:
    return StoredTensor(spec=TensorSpec(name=name, dtype=dtype, shape=shape), data=data)


def whole(numbers: Numbers, key: int = KEY) -> Digest:
    return digest_numbers(numbers, key, Region.run(0, len(numbers)))


@settings(deadline=None)
@given(one=DIGESTS, other=DIGESTS)
def test_digests_are_a_group(one: Digest, other: Digest) -> None:
    assert one + other - other == one
    assert one - one == Digest.ZERO
    assert one + other == other + one
    assert Digest.parse(one.hex()) == one


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "-" + "0" * 31, "0_" + "0" * 30])
def test_what_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Digest.parse(text)


def test_a_known_digest_stays_what_it_is() -> None:
    numbers = np.array([0, 1, 0xFFFF], np.uint16)
    lanes = [0, 0]
    for index, bits in enumerate(numbers.tolist()):
        word = (KEY + index * 0x9E3779B97F4A7C15 + bits) % 2**64
        word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93 % 2**64
        word ^= word >> 29
        lanes[0] += word
        word = word * 0xC2B2AE3D27D4EB4F % 2**64
        lanes[1] += word ^ (word >> 32)
    assert whole(numbers) == Digest(lanes[0] % 2**64, lanes[1] % 2**64)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_rows_and_columns_add_up_to_the_whole(dtype: type[np.unsignedinteger]) -> None:
    matrix = random_numbers(40 * 70, dtype).reshape(40, 70)
    total = whole(matrix.reshape(-1))
    rows = [digest_numbers(matrix[a:b].reshape(-1), KEY, Region.run(70 * a, 70 * b)) for a, b in ((0, 13), (13, 40))]
    columns = [
        digest_numbers(
            np.ascontiguousarray(matrix[:, a:b]).reshape(-1), KEY, Region(offset=a, width=b - a, stride=70, rows=40)
        )
        for a, b in ((0, 1), (1, 33), (33, 70))
    ]
    assert sum(rows, Digest.ZERO) == total
    assert sum(columns, Digest.ZERO) == total


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=5))
def test_ranges_of_a_region_add_up_to_it(cuts: list[int]) -> None:
    region = Region(offset=11, width=15, stride=40, rows=20)
    numbers = random_numbers(300)
    ends = [0, *sorted(cuts), 300]
    parts = (digest_numbers(numbers[a:b], KEY, region, a) for a, b in pairwise(ends))
    assert sum(parts, Digest.ZERO) == digest_numbers(numbers, KEY, region)


def test_numbers_outside_of_the_region_are_refused() -> None:
    with pytest.raises(ValueError, match="not all in"):
        digest_numbers(random_numbers(5), KEY, Region.run(0, 8), 4)


@settings(deadline=None)
@given(places=st.sets(st.integers(0, 199), max_size=50), offset=st.sampled_from([0, FAR]))
def test_a_change_updates_the_digest(places: set[int], offset: int) -> None:
    chosen = np.array(sorted(places), np.int64)
    old = random_numbers(200)
    new = old.copy()
    new[chosen] = random_numbers(len(chosen), seed=1)
    region = Region.run(offset, offset + 200)
    gained = digest_change(KEY, (chosen + offset).astype(np.uint64), old[chosen], new[chosen])
    assert digest_numbers(old, KEY, region) + gained == digest_numbers(new, KEY, region)


def test_far_indices_are_not_near_ones() -> None:
    numbers = random_numbers(100)
    digests = {digest_numbers(numbers, KEY, Region.run(start, start + 100)) for start in (0, 1, 2**32, FAR, FAR + 1)}
    assert len(digests) == 5


def test_a_change_of_a_wrong_base_is_noticed() -> None:
    index = np.zeros(1, np.uint64)
    one, two, three, four = (np.array([bits], np.uint16) for bits in (1, 2, 3, 4))
    assert digest_change(KEY, index, one, two) != digest_change(KEY, index, three, four)


@settings(deadline=None)
@given(seed=st.integers(0, 999), first=st.integers(0, 99), second=st.integers(0, 99))
def test_swapped_numbers_are_noticed(seed: int, first: int, second: int) -> None:
    numbers = random_numbers(100, np.uint8, seed)
    swapped = numbers.copy()
    swapped[[first, second]] = numbers[[second, first]]
    digest, expected = whole(swapped), whole(numbers)
    assert (digest == expected) == bool(numbers[first] == numbers[second])
    assert (digest.second == expected.second) == (digest == expected), "either lane sees it alone"


def test_every_single_bit_and_key_matters() -> None:
    numbers = random_numbers(64)
    flipped = [numbers ^ (np.eye(64, dtype=np.uint16)[i] << np.uint16(bit)) for i in range(64) for bit in range(16)]
    digests = {whole(numbers), whole(numbers, KEY + 1), *map(whole, flipped)}
    assert len(digests) == 2 + 64 * 16
    assert len({digest.first for digest in digests}) == len({digest.second for digest in digests}) == len(digests)


def test_names_types_and_shapes_count_without_numbers_too() -> None:
    nothing = np.empty(0, np.uint8)
    states = [
        {},
        {"a": tensor("a", "BF16", (0,), nothing)},
        {"b": tensor("b", "BF16", (0,), nothing)},
        {"a": tensor("a", "F16", (0,), nothing)},
        {"a": tensor("a", "BF16", (0, 1), nothing)},
    ]
    assert len({state_digest(state) for state in states}) == len(states)


def test_equal_bytes_under_another_name_have_another_digest() -> None:
    data = random_numbers(8).view(np.uint8)
    one, other = tensor("a", "BF16", (8,), data), tensor("b", "BF16", (8,), data)
    assert content_digest({"a": one}) != content_digest({"b": other})
    assert presence(one.spec) != presence(other.spec)
