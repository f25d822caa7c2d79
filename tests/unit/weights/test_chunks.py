"""However a state is shared out and cut, every number is in exactly one chunk and known by its place in the whole."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import Json, TensorSpec
from etude.weights.chunks import Chunk, Layout, Part, assemble
from etude.weights.digest import Digest, content_digest
from etude.weights.elements import ELEMENTS
from etude.weights.frames import scan
from etude.weights.state import Region, State, StoredTensor, snapshot, spec_bytes

SPECS = st.builds(
    TensorSpec,
    name=st.text(max_size=3),
    dtype=st.sampled_from(sorted(ELEMENTS)),
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """A state of whole tensors and what each of its ranks holds."""

    state: State
    layouts: tuple[Layout, ...]

    @property
    def shares(self) -> list[dict[str, StoredTensor]]:
        return [layout.cut(self.state) for layout in self.layouts]


def random_tensor(spec: TensorSpec, seed: int) -> StoredTensor:
    data = np.random.default_rng(seed).integers(0, 256, spec_bytes(spec), np.uint8)
    return StoredTensor(spec=spec, data=data)


def regions_of(spec: TensorSpec, kind: str, fractions: Sequence[float]) -> list[Region]:
    """The tensor in as many parts as there are fractions and one: rows, columns or flat ranges."""
    numbers = spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes
    if kind == "flat" or not spec.shape or not numbers:
        bounds = [0, *sorted(round(fraction * numbers) for fraction in fractions), numbers]
        return [Region.run(low, high) for low, high in pairwise(bounds)]
    axis = 0 if kind == "rows" else -1
    bounds = [0, *sorted(round(fraction * spec.shape[axis]) for fraction in fractions), spec.shape[axis]]
    if kind == "rows":
        size = numbers // spec.shape[0]
        return [Region.run(low * size, high * size) for low, high in pairwise(bounds)]
    rows = math.prod(spec.shape[:-1])
    stride = numbers // rows
    size = stride // spec.shape[-1]
    return [
        Region(offset=low * size, width=(high - low) * size, stride=stride, rows=rows) for low, high in pairwise(bounds)
    ]


@st.composite
def sharded(draw: st.DrawFn) -> Sharded:
    """A random state, each tensor on one rank or spread over all of them in one of the usual ways."""
    ranks = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32))
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    specs = draw(st.lists(SPECS, max_size=6, unique_by=lambda spec: spec.name))
    for spec in specs:
        kind = draw(st.sampled_from(["whole", "rows", "columns", "flat"]))
        if kind == "whole":
            parts[draw(st.integers(0, ranks - 1))].append(Part(spec=spec, region=regions_of(spec, "flat", [])[0]))
            continue
        fractions = draw(st.lists(st.floats(0, 1), min_size=ranks - 1, max_size=ranks - 1))
        for rank, region in enumerate(regions_of(spec, kind, fractions)):
            parts[rank].append(Part(spec=spec, region=region))
    size = draw(st.sampled_from([1, 2, 7, 50, 1 << 22]))
    layouts = [
        Layout(parts=tuple(sorted(held, key=lambda part: (part.spec.dtype, part.spec.name))), chunk_numbers=size)
        for held in parts
    ]
    state = {spec.name: random_tensor(spec, seed + index) for index, spec in enumerate(specs)}
    return Sharded(state=state, layouts=tuple(layouts))


def bits(state: State) -> dict[str, tuple[TensorSpec, bytes]]:
    return {name: (tensor.spec, tensor.data.tobytes()) for name, tensor in state.items()}


def all_places(chunk: Chunk) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.arange(chunk.count, dtype=np.uint32)


def whole(spec: TensorSpec) -> Part:
    return Part(spec=spec, region=Region.run(0, spec_bytes(spec) // ELEMENTS[spec.dtype].size_bytes))


MATRIX = TensorSpec(name="m", dtype="BF16", shape=(4, 6))
VECTOR = TensorSpec(name="v", dtype="BF16", shape=(5,))


# ── cutting and putting together ────────────────────────────────────────────────────────────────────────────────────


@given(sharded())
@settings(deadline=None)
def test_shares_put_together_are_the_state(example: Sharded) -> None:
    assert bits(assemble(example.shares)) == bits(example.state)
    for layout, share in zip(example.layouts, example.shares, strict=True):
        assert Layout.of(share, layout.chunk_numbers) == layout


@given(sharded())
@settings(deadline=None)
def test_every_number_is_in_exactly_one_chunk_under_its_own_index(example: Sharded) -> None:
    seen: list[tuple[str, int]] = []
    for layout, share in zip(example.layouts, example.shares, strict=True):
        for chunk in layout.chunks:
            placed = [
                (piece, piece.part.indices(local + piece.start)) for piece, local in chunk.local(all_places(chunk))
            ]
            for numbers, (piece, indices) in zip(chunk.numbers(share), placed, strict=True):
                name = piece.part.spec.name
                assert np.array_equal(numbers, example.state[name].numbers[indices])
                assert (np.diff(indices.astype(np.int64)) > 0).all()
                seen += [(name, index) for index in indices.tolist()]
    everything = [(name, index) for name, tensor in example.state.items() for index in range(len(tensor.numbers))]
    assert sorted(seen) == sorted(everything)


@given(sharded())
@settings(deadline=None)
def test_chunks_are_full_and_of_one_type(example: Sharded) -> None:
    for layout in example.layouts:
        assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
        for chunk in layout.chunks:
            assert {piece.part.element for piece in chunk.pieces} == {chunk.element}
            assert all(piece.count > 0 for piece in chunk.pieces)
        for chunk, following in pairwise(layout.chunks):
            assert chunk.count == layout.chunk_numbers or chunk.element != following.element
            assert chunk.count <= layout.chunk_numbers


@given(sharded(), st.integers(0, 2**32))
@settings(deadline=None)
def test_digests_of_chunks_add_up_and_follow_changes(example: Sharded, seed: int) -> None:
    target = {name: random_tensor(tensor.spec, seed + index) for index, (name, tensor) in
              enumerate(example.state.items())}  # fmt: skip
    before = after = Digest.ZERO
    for layout, share in zip(example.layouts, example.shares, strict=True):
        assert sum((chunk.digest(chunk.numbers(share)) for chunk in layout.chunks), Digest.ZERO) == content_digest(
            share
        )
        new_share = layout.cut(target)
        for chunk in layout.chunks:
            old, new = chunk.numbers(share), chunk.numbers(new_share)
            start = chunk.digest(old)
            before += start
            changes = scan(old, new, chunk.element)
            told = chunk.move(changes, old, take=False)
            moved = [numbers.copy() for numbers in old]
            assert chunk.move(changes, moved, take=True) == told
            assert all((one == other).all() for one, other in zip(moved, new, strict=True))
            after += start + told
    assert before == content_digest(example.state)
    assert after == content_digest(target)


def test_positions_are_split_among_pieces() -> None:
    layout = Layout(parts=(whole(MATRIX), whole(VECTOR)), chunk_numbers=10)
    (first, second, third) = layout.chunks
    assert [(piece.part.spec.name, piece.start, piece.stop) for chunk in (first, second, third) for piece in
            chunk.pieces] == [("m", 0, 10), ("m", 10, 20), ("m", 20, 24), ("v", 0, 5)]  # fmt: skip
    split = [local.tolist() for _, local in third.local(np.array([0, 3, 4, 8], np.uint32))]
    assert split == [[0, 3], [0, 4]]
    local = third.local(np.array([0, 3, 4, 8], np.uint32))
    assert [piece.part.indices(places + piece.start).tolist() for piece, places in local] == [[20, 23], [0, 4]]


def test_columns_are_counted_in_the_whole_tensor() -> None:
    part = Part(spec=MATRIX, region=Region(offset=2, width=2, stride=6, rows=4))
    assert part.indices(np.arange(8)).tolist() == [2, 3, 8, 9, 14, 15, 20, 21]


def test_types_of_eight_bytes_are_cut_between_their_halves_too() -> None:
    layout = Layout(parts=(whole(TensorSpec(name="n", dtype="I64", shape=(3,))),), chunk_numbers=3)
    assert [chunk.count for chunk in layout.chunks] == [3, 3]


def test_a_share_shares_memory_where_it_can() -> None:
    state = {"m": random_tensor(MATRIX, 0)}
    parts = {
        "whole": whole(MATRIX),
        "rows": Part(spec=MATRIX, region=Region.run(6, 18)),
        "columns": Part(spec=MATRIX, region=Region(offset=1, width=2, stride=6, rows=4)),
    }
    shares = {name: Layout(parts=(part,)).cut(state)["m"] for name, part in parts.items()}
    shared = {name for name, share in shares.items() if np.shares_memory(share.data, state["m"].data)}
    assert shared == {"whole", "rows"}
    assert np.shares_memory(assemble([{"m": shares["whole"]}])["m"].data, state["m"].data)
    assert np.array_equal(shares["columns"].numbers, state["m"].numbers.reshape(4, 6)[:, 1:3].reshape(-1))


def test_read_only_states_can_be_cut_and_put_together() -> None:
    state = {"m": StoredTensor(spec=MATRIX, data=np.frombuffer(bytes(range(48)), np.uint8))}
    halves = [Part(spec=MATRIX, region=Region(offset=3 * half, width=3, stride=6, rows=4)) for half in range(2)]
    shares = [Layout(parts=(half,)).cut(state) for half in halves]
    assert bits(assemble(shares)) == bits(state)


def test_an_empty_share_has_only_what_is_wanted() -> None:
    layout = Layout(parts=(Part(spec=MATRIX, region=Region.run(0, 12)), whole(VECTOR)), chunk_numbers=12)
    assert {name: tensor.held for name, tensor in layout.empty_share().items()} == {
        "m": Region.run(0, 12),
        "v": Region.run(0, 5),
    }
    only = layout.empty_share([layout.chunks[1]])
    assert list(only) == ["v"]
    assert not only["v"].data.any()
    assert only["v"].region is None


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(state: State, low: int, high: int) -> State:
    return Layout(parts=(Part(spec=MATRIX, region=Region.run(6 * low, 6 * high)),)).cut(state)


def test_a_missing_share_is_noticed_even_when_another_comes_twice() -> None:
    state = {"m": random_tensor(MATRIX, 0)}
    upper, lower = rows_of(state, 0, 2), rows_of(state, 2, 4)
    assert bits(assemble([upper, lower, upper])) == bits(state)
    with pytest.raises(ValueError, match="no rank holds number 12 of tensor 'm'"):
        assemble([upper, upper])
    with pytest.raises(ValueError, match="no rank holds number 0 of tensor 'm'"):
        assemble([lower])
    assert assemble([]) == {}


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    state = {"m": random_tensor(MATRIX, 0)}
    longer = TensorSpec(name="m", dtype="BF16", shape=(400, 6))
    stranger = Layout(parts=(Part(spec=longer, region=Region.run(2000, 2400)),)).cut({"m": random_tensor(longer, 1)})
    with pytest.raises(ValueError, match="do not agree about tensor 'm'"):
        assemble([rows_of(state, 0, 2), stranger])
    with pytest.raises(ValueError, match="do not agree about tensor 'm'"):
        assemble([state, stranger])


def test_a_state_that_does_not_fit_the_layout_is_refused() -> None:
    layout = Layout(parts=(whole(MATRIX),))
    other = TensorSpec(name="m", dtype="F16", shape=(4, 6))
    strangers: list[State] = [{}, {"m": random_tensor(other, 0)}, rows_of({"m": random_tensor(MATRIX, 0)}, 0, 2)]
    for state in strangers:
        with pytest.raises(ValueError, match="the layout holds"):
            layout.cut(state)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="reaches beyond tensor 'm'"):
        Part(spec=MATRIX, region=Region.run(20, 25))
    with pytest.raises(ValueError, match="unknown dtype"):
        Part(spec=TensorSpec(name="m", dtype="bf16", shape=()), region=Region.run(0, 1))
    with pytest.raises(ValueError, match="two parts of one tensor"):
        Layout(parts=(whole(MATRIX), whole(MATRIX)))
    with pytest.raises(ValueError, match="in the order of types"):
        Layout(parts=(whole(VECTOR), whole(MATRIX)))
    for size in (0, -1, 2**40):
        with pytest.raises(ValueError, match="numbers: choose"):
            Layout(parts=(), chunk_numbers=size)


# ── as bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(sharded())
@settings(deadline=None)
def test_layouts_survive_as_bytes(example: Sharded) -> None:
    for layout in example.layouts:
        again = Layout.from_bytes(layout.to_bytes())
        assert again == layout
        assert again.chunks == layout.chunks
        assert again.digest == layout.digest
    digests = {layout.digest for layout in example.layouts}
    assert len(digests) == len({layout.to_bytes() for layout in example.layouts})


def test_a_snapshot_has_the_same_layout() -> None:
    share = rows_of({"m": random_tensor(MATRIX, 0)}, 1, 3)
    assert Layout.of(snapshot(share)) == Layout.of(share)


def read(data: bytes) -> Layout | None:
    """What comes of bytes that may be anything: a layout in canonical form, or damage and nothing else."""
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
    row: list[Json] = ["m", "BF16", [4, 6], 1, 2, 6, 4]
    row[field] = value
    layout = read(orjson.dumps({"chunk_numbers": 7, "parts": [row]}))
    if layout is not None:
        (part,) = layout.parts
        assert part.region.end * part.element.size_bytes <= spec_bytes(part.spec)


@given(sharded(), st.data())
@settings(deadline=None)
def test_flipped_bits_and_cuts_are_damage_or_another_layout(example: Sharded, data: st.DataObject) -> None:
    layout = example.layouts[0]
    damaged = bytearray(layout.to_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    assert read(bytes(damaged)) != layout
    assert read(bytes(damaged[:place])) is None


ROW: Sequence[Json] = ("m", "BF16", [4, 6], 0, 24, 24, 1)


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
    part = Part(spec=TensorSpec(name="huge", dtype="BF16", shape=(count,)), region=Region.run(0, count))
    chunks = Layout(parts=(part,)).chunks
    assert sum(chunk.count for chunk in chunks) == count
    ((piece, local),) = chunks[-1].local(np.array([0, 4], np.uint32))
    assert piece.part.indices(local + piece.start).tolist() == [2**33, 2**33 + 4]


@given(sharded())
@settings(deadline=None)
def test_a_layout_knows_its_own_shares(example: Sharded) -> None:
    for layout, share in zip(example.layouts, example.shares, strict=True):
        assert layout.is_of(share)
        assert not layout.is_of({**share, "one more": random_tensor(replace(VECTOR, name="one more"), 0)})
        if share:
            name = min(share)
            other = random_tensor(replace(share[name].spec, shape=(*share[name].spec.shape, 1)), 0)
            assert not layout.is_of({**share, name: other})
