"""States describe their content, and impossible tensors and regions are refused at creation."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.types import TensorSpec
from etude.weights.state import (
    ELEMENTS,
    NUMBER_TYPES,
    Bytes1d,
    Region,
    State,
    StoredTensor,
    ordered,
    snapshot,
    spec_bytes,
    spec_key,
    state_bytes,
)

MATRIX = TensorSpec(name="m", dtype="BF16", shape=(4, 6))


def tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    return StoredTensor(spec=spec, data=np.frombuffer(data, np.uint8))


def state_of(*tensors: StoredTensor) -> State:
    return {tensor.spec.name: tensor for tensor in tensors}


def indices(region: Region) -> list[int]:
    """The canonical indices in a region, as its docstring defines them."""
    return [
        region.offset + (place // region.width) * region.stride + place % region.width for place in range(region.count)
    ]


# ── regions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_columns_are_a_region() -> None:
    region = Region(offset=2, width=2, stride=10, rows=8)
    inside = np.zeros((8, 10), bool)
    inside[:, 2:4] = True
    assert indices(region) == np.flatnonzero(inside).tolist()
    assert (region.count, region.end) == (16, 74)


@given(offset=st.integers(0, 99), width=st.integers(0, 9), margin=st.integers(0, 9), rows=st.integers(0, 9))
def test_a_region_ends_after_its_last_number(offset: int, width: int, margin: int, rows: int) -> None:
    region = Region(offset=offset, width=width, stride=width + margin, rows=rows)
    places = indices(region)
    assert len(set(places)) == len(places) == region.count
    assert region.end == max(places, default=offset - 1) + 1
    assert places == sorted(places)


def test_a_run_is_a_region() -> None:
    assert indices(Region.run(3, 7)) == [3, 4, 5, 6]
    assert Region.run(3, 7).end == 7
    assert Region.run(5, 5).count == 0


@pytest.mark.parametrize(
    "fields", [(-1, 1, 1, 1), (0, -1, 1, 1), (0, 1, -1, 1), (0, 1, 1, -1), (0, 3, 2, 2), (0, 2**70, 1, 2)]
)
def test_runs_that_overlap_or_count_from_below_zero_are_no_region(fields: tuple[int, int, int, int]) -> None:
    offset, width, stride, rows = fields
    with pytest.raises(ValueError, match="is not a region"):
        Region(offset=offset, width=width, stride=stride, rows=rows)
    with pytest.raises(ValueError, match="is not a region"):
        Region.run(3, 2)


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F32", (), 4), ("BF16", (3, 5), 30), ("I64", (2, 0), 0), ("U8", (7,), 7)]
)
def test_spec_bytes(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert spec_bytes(TensorSpec(name="w", dtype=dtype, shape=shape)) == size


@pytest.mark.parametrize("dtype", sorted(ELEMENTS))
def test_bytes_are_read_as_numbers_of_the_type(dtype: str) -> None:
    element = ELEMENTS[dtype]
    size = 3 * element.per_value * element.size_bytes
    stored = tensor("w", dtype, (3,), bytes(range(size)))
    assert stored.numbers.dtype == NUMBER_TYPES[element.size_bytes]
    assert stored.numbers.tobytes() == bytes(range(size))
    assert np.shares_memory(stored.numbers, stored.data)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "message"),
    [
        ("float32", (1,), bytes(4), "unknown dtype 'float32'"),
        ("F32", (2,), bytes(7), "is 8 bytes, got 7"),
        ("F32", (-1,), b"", "impossible shape"),
        ("F32", (-1, -1), bytes(4), "impossible shape"),
        ("U8", (0, 2**63), b"", "impossible shape"),
    ],
)
def test_impossible_tensors_are_refused(dtype: str, shape: tuple[int, ...], data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor("w", dtype, shape, data)


@pytest.mark.parametrize("data", [np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(4, np.int8)])
def test_bytes_must_be_flat_and_contiguous(data: Bytes1d) -> None:
    with pytest.raises(ValueError, match="pass its raw bytes"):
        StoredTensor(spec=TensorSpec(name="w", dtype="U8", shape=(4,)), data=data)


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_state_bytes_counts_what_is_stored() -> None:
    matrix = tensor("m", "BF16", (4, 6), bytes(48))
    assert state_bytes(state_of(tensor("a", "F32", (2,), bytes(8)), matrix)) == 56


def test_tensors_are_ordered_by_name() -> None:
    names = ["b", "a", "ä", "B", "a.1"]
    state = state_of(*(tensor(name, "U8", (), b"1") for name in names))
    assert [tensor.spec.name for tensor in ordered(state)] == ["B", "a", "a.1", "b", "ä"]


def test_a_tensor_under_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is filed under 'b'"):
        ordered({"b": tensor("a", "U8", (1,), b"1")})


def test_a_snapshot_survives_training_in_place() -> None:
    live = np.zeros(4, np.uint8)
    copy = snapshot(state_of(StoredTensor(spec=TensorSpec(name="v", dtype="F32", shape=()), data=live)))
    live[0] = 1
    assert [tensor.data.tolist() for tensor in copy.values()] == [[0, 0, 0, 0]]


def test_the_key_of_a_tensor_is_what_its_docstring_says() -> None:
    expected = hashlib.sha256(b'["m","BF16",[4,6]]').digest()[:8]
    assert spec_key(MATRIX) == int.from_bytes(expected, "little")


def test_name_type_and_shape_all_count_in_the_key() -> None:
    specs = [
        MATRIX,
        TensorSpec(name="n", dtype="BF16", shape=(4, 6)),
        TensorSpec(name="m", dtype="F16", shape=(4, 6)),
        TensorSpec(name="m", dtype="BF16", shape=(6, 4)),
        TensorSpec(name="m", dtype="BF16", shape=(24,)),
        TensorSpec(name="m", dtype="BF16", shape=()),
    ]
    assert len({spec_key(spec) for spec in specs}) == len(specs)
    assert all(0 <= spec_key(spec) < 2**64 for spec in specs)
