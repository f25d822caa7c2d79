"""However a state is divided, every number is in exactly one chunk and has its index in the whole."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import Json, TensorSpec
from etude.weights.chunks import Chunk, Layout
from etude.weights.digest import Digest, content_digest
from etude.weights.frames import scan
from etude.weights.state import ELEMENTS, State, StoredTensor, snapshot, spec_bytes

SPECS = st.builds(
    TensorSpec,
    name=st.text(max_size=3),
    dtype=st.sampled_from(sorted(ELEMENTS)),
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A state and its layout."""

    state: State
    layout: Layout


def random_tensor(spec: TensorSpec, seed: int) -> StoredTensor:
    data = np.random.default_rng(seed).integers(0, 256, spec_bytes(spec), np.uint8)
    return StoredTensor(spec=spec, data=data)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """A random state, cut in chunks of some size."""
    seed = draw(st.integers(0, 2**32))
    specs = draw(st.lists(SPECS, max_size=6, unique_by=lambda spec: spec.name))
    state = {spec.name: random_tensor(spec, seed + index) for index, spec in enumerate(specs)}
    return Example(state=state, layout=Layout.of(state, draw(st.sampled_from([1, 2, 7, 50, 1 << 22]))))


def all_places(chunk: Chunk) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.arange(chunk.count, dtype=np.uint32)


MATRIX = TensorSpec(name="m", dtype="BF16", shape=(4, 6))
VECTOR = TensorSpec(name="v", dtype="BF16", shape=(5,))


# ── cutting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(examples())
@settings(deadline=None)
def test_every_number_is_in_exactly_one_chunk_under_its_own_index(example: Example) -> None:
    seen: list[tuple[str, int]] = []
    for chunk in example.layout.chunks:
        placed = [(segment, local + segment.start) for segment, local in chunk.local(all_places(chunk))]
        for numbers, (segment, indices) in zip(chunk.numbers(example.state), placed, strict=True):
            name = segment.spec.name
            assert np.array_equal(numbers, example.state[name].numbers[indices])
            assert (np.diff(indices) > 0).all()
            seen += [(name, index) for index in indices.tolist()]
    everything = [(name, index) for name, tensor in example.state.items() for index in range(len(tensor.numbers))]
    assert sorted(seen) == sorted(everything)


@given(examples())
@settings(deadline=None)
def test_chunks_are_full_and_of_one_type(example: Example) -> None:
    chunks = example.layout.chunks
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert {ELEMENTS[segment.spec.dtype] for segment in chunk.segments} == {chunk.element}
        assert all(segment.count > 0 for segment in chunk.segments)
    for chunk, following in pairwise(chunks):
        assert chunk.count == example.layout.chunk_numbers or chunk.element != following.element
        assert chunk.count <= example.layout.chunk_numbers


@given(examples(), st.integers(0, 2**32))
@settings(deadline=None)
def test_digests_of_chunks_add_up_and_follow_changes(example: Example, seed: int) -> None:
    specs = [tensor.spec for tensor in example.state.values()]
    target = {spec.name: random_tensor(spec, seed + index) for index, spec in enumerate(specs)}
    before = after = Digest.ZERO
    for chunk in example.layout.chunks:
        old, new = chunk.numbers(example.state), chunk.numbers(target)
        start = chunk.digest(old)
        before += start
        changes = scan(old, new, chunk.element)
        difference = chunk.move(changes, old, take=False)
        moved = [numbers.copy() for numbers in old]
        assert chunk.move(changes, moved, take=True) == difference
        assert all((one == other).all() for one, other in zip(moved, new, strict=True))
        after += start + difference
    assert before == content_digest(example.state)
    assert after == content_digest(target)


def test_positions_are_split_among_segments() -> None:
    layout = Layout(specs=(MATRIX, VECTOR), chunk_numbers=10)
    cut = [(one.spec.name, one.start, one.stop) for chunk in layout.chunks for one in chunk.segments]
    assert cut == [("m", 0, 10), ("m", 10, 20), ("m", 20, 24), ("v", 0, 5)]
    local = layout.chunks[2].local(np.array([0, 3, 4, 8], np.uint32))
    assert [(places + segment.start).tolist() for segment, places in local] == [[20, 23], [0, 4]]


def test_types_of_eight_bytes_are_cut_between_their_halves_too() -> None:
    layout = Layout(specs=(TensorSpec(name="n", dtype="I64", shape=(3,)),), chunk_numbers=3)
    assert [chunk.count for chunk in layout.chunks] == [3, 3]


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        Layout(specs=(TensorSpec(name="m", dtype="bf16", shape=()),))
    with pytest.raises(ValueError, match="two tensors of one name"):
        Layout(specs=(MATRIX, MATRIX))
    with pytest.raises(ValueError, match="in the order of types"):
        Layout(specs=(VECTOR, MATRIX))
    for size in (0, -1, 2**40):
        with pytest.raises(ValueError, match="numbers: choose"):
            Layout(specs=(), chunk_numbers=size)


# ── as bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(examples())
@settings(deadline=None)
def test_layouts_survive_as_bytes(example: Example) -> None:
    again = Layout.from_bytes(example.layout.to_bytes())
    assert again == example.layout == Layout.of(snapshot(example.state), example.layout.chunk_numbers)
    assert (again.chunks, again.digest) == (example.layout.chunks, example.layout.digest)


def read(data: bytes) -> Layout | None:
    """The layout in any bytes, which must be in canonical form; ``None`` if they are damaged."""
    try:
        layout = Layout.from_bytes(data)
    except DamagedError:
        return None
    assert layout.to_bytes() == data
    return layout


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.binary(max_size=100) | JSON.map(orjson.dumps))
def test_any_bytes_are_damage(data: bytes) -> None:
    assert read(data) is None


@given(parts=JSON | st.lists(JSON, max_size=2), chunk_numbers=JSON)
def test_any_fields_are_damage(parts: Json, chunk_numbers: Json) -> None:
    if parts != []:
        assert read(orjson.dumps({"chunk_numbers": chunk_numbers, "parts": parts})) is None


@given(field=st.integers(0, 6), value=JSON)
def test_any_part_is_damage_or_a_part(field: int, value: Json) -> None:
    row: list[Json] = ["m", "BF16", [4, 6], 0, 24, 24, 1]
    row[field] = value
    layout = read(orjson.dumps({"chunk_numbers": 7, "parts": [row]}))
    if layout is not None:
        (spec,) = layout.specs
        assert spec_bytes(spec) == 48


@given(examples(), st.data())
@settings(deadline=None)
def test_flipped_bits_and_cuts_are_damage_or_another_layout(example: Example, data: st.DataObject) -> None:
    layout = example.layout
    damaged = bytearray(layout.to_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    assert read(bytes(damaged)) != layout
    assert read(bytes(damaged[:place])) is None


ROW: tuple[Json, ...] = ("m", "BF16", [4, 6], 0, 24, 24, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_numbers": True, "parts": []},
        {"chunk_numbers": 1.5, "parts": []},
        {"chunk_numbers": "7", "parts": []},
        {"chunk_numbers": None, "parts": []},
        {"chunk_numbers": 0, "parts": []},
        {"chunk_numbers": 2**63, "parts": []},
        {"chunk_numbers": 7, "parts": [[*ROW], [*ROW]]},
        {"chunk_numbers": 7, "parts": [["v", "BF16", [5], 0, 5, 5, 1], [*ROW]]},
        {"chunk_numbers": 7, "parts": [["m", "BF16", [4, 6], 0, 25, 25, 1]]},
        {"chunk_numbers": 7, "parts": [["m", "BF16", [4, 6], 0, 6, 5, 2]]},
        {"chunk_numbers": 7, "parts": [["m", "BF16", [4, 6], 0, 6, 6, 2**63]]},
        {"chunk_numbers": 7, "parts": [["m", "BF16", [-4, -6], 0, 24, 24, 1]]},
        {"chunk_numbers": 7, "parts": [["m", "BF16", [True], 0, 1, 1, 1]]},
        {"chunk_numbers": 7, "parts": [[*ROW, 1]]},
        {"parts": [[*ROW]], "chunk_numbers": 7},
        {"chunk_numbers": 7, "parts": [[*ROW]], "more": 1},
    ],
)
def test_lying_layouts_are_damage(fields: Json) -> None:
    assert read(orjson.dumps({"chunk_numbers": 7, "parts": [[*ROW]]})) is not None
    assert read(orjson.dumps(fields)) is None


def test_tensors_of_more_than_four_billion_numbers_are_cut_like_any_other() -> None:
    count = 2**33 + 5
    chunks = Layout(specs=(TensorSpec(name="huge", dtype="BF16", shape=(count,)),)).chunks
    assert sum(chunk.count for chunk in chunks) == count
    ((segment, local),) = chunks[-1].local(np.array([0, 4], np.uint32))
    assert (local + segment.start).tolist() == [2**33, 2**33 + 4]


@given(examples())
@settings(deadline=None)
def test_a_layout_recognises_its_own_states(example: Example) -> None:
    layout, state = example.layout, example.state
    assert layout.is_of(state)
    assert not layout.is_of({**state, "one more": random_tensor(replace(VECTOR, name="one more"), 0)})
    if state:
        name = min(state)
        other = random_tensor(replace(state[name].spec, shape=(*state[name].spec.shape, 1)), 0)
        assert not layout.is_of({**state, name: other})
