"""A want takes what is asked for, and never too little."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.types import TensorSpec, WeightPack
from etude.weights.chunks import Layout, Part, Piece
from etude.weights.state import Region
from etude.weights.subscription import EVERYTHING, Want, wanted_regions

ROWS, COLUMNS = 8, 10
MATRIX = TensorSpec(name="m", dtype="BF16", shape=(ROWS, COLUMNS))
VECTOR = TensorSpec(name="v", dtype="BF16", shape=(12,))


def part(spec: TensorSpec, region: Region) -> Part:
    return Part(spec=spec, region=region)


LAYOUT = Layout(parts=(part(MATRIX, Region.run(0, 80)), part(VECTOR, Region.run(0, 12))), chunk_numbers=30)
"""Chunks: m[0:30], m[30:60], m[60:80] and v[0:10], v[10:12]."""
VECTOR_ONLY = Want(pieces=lambda piece: piece.part.spec.name == "v")


def pack(first: int, last: int, rank: int = 0) -> WeightPack:
    return WeightPack(digest="a" * 64, size_bytes=1, rank=rank, first=first, last=last)


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """A rectangle of the matrix, or one run of it."""
    if draw(st.booleans()):
        low = draw(st.integers(0, ROWS * COLUMNS))
        return Region.run(low, draw(st.integers(low, ROWS * COLUMNS)))
    left, top = draw(st.integers(0, COLUMNS - 1)), draw(st.integers(0, ROWS - 1))
    width, rows = draw(st.integers(1, COLUMNS - left)), draw(st.integers(1, ROWS - top))
    return Region(offset=top * COLUMNS + left, width=width, stride=COLUMNS, rows=rows)


def indices(region: Region) -> set[int]:
    return set(part(MATRIX, region).indices(np.arange(region.count)).tolist())


def test_everything_is_everything() -> None:
    assert EVERYTHING.everything
    assert EVERYTHING.rank(7)
    assert all(map(EVERYTHING.chunk, LAYOUT.chunks))
    share = EVERYTHING.empty_share(7, LAYOUT)
    assert share is not None
    assert share.wanted == {0, 1, 2, 3}


@pytest.mark.parametrize("want", [Want(ranks=frozenset({1})), Want(pieces=lambda piece: True), Want(ranks=frozenset())])
def test_any_restriction_is_not_everything(want: Want) -> None:
    assert not want.everything


def test_other_ranks_are_left_out() -> None:
    want = Want(ranks=frozenset({1}))
    assert [want.rank(rank) for rank in range(3)] == [False, True, False]
    assert want.pack(pack(0, 3, rank=1), LAYOUT)
    assert not want.pack(pack(0, 3, rank=0), LAYOUT)
    assert want.empty_share(0, LAYOUT) is None
    assert want.empty_share(1, LAYOUT) is not None


def test_chunks_with_a_wanted_piece_are_held_whole() -> None:
    assert [VECTOR_ONLY.chunk(chunk) for chunk in LAYOUT.chunks] == [False, False, True, True]
    share = VECTOR_ONLY.empty_share(0, LAYOUT)
    assert share is not None
    assert share.wanted == {2, 3}
    assert set(share.tensors) == {"m", "v"}, "chunk 2 ends the matrix"
    assert Want(pieces=lambda piece: False).empty_share(0, LAYOUT) is None


@pytest.mark.parametrize(
    ("first", "last", "wanted"), [(0, 0, False), (0, 1, False), (1, 2, True), (3, 3, True), (0, 3, True), (4, 9, False)]
)
def test_packs_are_wanted_for_a_chunk_that_may_be_in_them(first: int, last: int, wanted: bool) -> None:
    assert VECTOR_ONLY.pack(pack(first, last), LAYOUT) is wanted


@given(held=regions().filter(lambda region: region.count > 0), wanted=regions(), data=st.data())
def test_regions_never_want_too_little(held: Region, wanted: Region, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, held.count - 1))
    piece = Piece(part=part(MATRIX, held), start=start, stop=data.draw(st.integers(start + 1, held.count)))
    of_piece = set(piece.part.indices(np.arange(piece.start, piece.stop)).tolist())
    wants = wanted_regions({"m": [wanted]})(piece)
    assert wants or not of_piece & indices(wanted)
    span = set(range(min(of_piece), max(of_piece) + 1))
    assert not wants or span & set(range(wanted.offset, wanted.end + 1)), "nor what lies far away"


def test_regions_of_other_tensors_do_not_count() -> None:
    wants = wanted_regions({"v": [Region.run(0, 2), Region.run(10, 12)], "w": [Region.run(0, 80)]})
    chosen = [[wants(piece) for piece in chunk.pieces] for chunk in LAYOUT.chunks]
    assert chosen == [[False], [False], [False, True], [True]]
    assert not wanted_regions({})(LAYOUT.chunks[0].pieces[0])
