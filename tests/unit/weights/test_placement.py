"""Maps between checkpoint and runtime coordinates: found exactly, kept small, looked up completely."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.types import TensorSpec
from etude.weights.placement import (
    Block,
    Numbering,
    Placement,
    Places,
    Rectangle,
    Scattering,
    digit,
    digit_base,
    digit_count,
    fit,
    random_bits,
)
from etude.weights.state import ELEMENTS

W = TensorSpec(name="w", dtype="BF16", shape=(24, 40))
V = TensorSpec(name="v", dtype="BF16", shape=(16, 40))
NUMBERING = Numbering.of([W, V])
W_CODES = np.arange(1, 24 * 40 + 1).reshape(24, 40)
V_CODES = np.arange(24 * 40 + 1, 40 * 40 + 1).reshape(16, 40)


def codes_from(blocks: list[Block], count: int) -> Places:
    """Every position's code as the blocks have it; a position may not be claimed twice."""
    starts = {spec.name: first for spec, first, _ in NUMBERING.codes()}
    codes = np.zeros(count, np.int64)
    for block in blocks:
        indices, positions = block.expand()
        assert not codes[positions].any()
        codes[positions] = starts[block.tensor] + indices
    return codes


@pytest.mark.parametrize(
    ("layout", "most_blocks"),
    [
        (W_CODES, 1),
        (W_CODES.T, 1),
        (W_CODES[12:], 1),
        (W_CODES[:, 20:], 1),
        (W_CODES[:, 20:].T, 1),
        (np.concatenate([W_CODES[12:], V_CODES[8:]]), 2),
        (np.stack([W_CODES[:16], V_CODES], axis=1), 2),  # rows of the two in turn
        (np.stack([W_CODES[:16], V_CODES], axis=2), 2),  # numbers of the two in turn
        (np.pad(W_CODES, ((0, 8), (0, 3))), 1),
        (np.concatenate([V_CODES[:4], V_CODES[:4], V_CODES]), 4),  # the rest of the third copy is apart
        (np.concatenate([V_CODES, V_CODES]), 2),
        (W_CODES.reshape(4, 6, 40).transpose(0, 2, 1), 4),
        (W_CODES[:, :1], 1),
        (W_CODES[::-1], 8),
    ],
)
def test_layouts_of_engines_are_few_blocks(layout: Places, most_blocks: int) -> None:
    blocks = NUMBERING.blocks("p", layout.ravel())
    assert len(blocks) <= most_blocks
    assert (codes_from(blocks, layout.size) == layout.ravel()).all()


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 60), st.floats(0, 1))
def test_any_map_is_reproduced(seed: int, count: int, span: int, order: float) -> None:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(count + span, count, replace=False)).astype(np.int64)
    positions = np.arange(count, dtype=np.int64)
    shuffled = rng.random(count) > order
    positions[shuffled] = rng.permutation(positions[shuffled])
    placed = [block.expand() for block in fit("w", "p", indices, positions)]
    pairs = np.concatenate([np.stack(pair) for pair in placed], axis=1)
    assert (pairs[:, pairs[0].argsort()] == np.stack((indices, positions))).all()


def test_a_map_without_order_is_kept_as_it_is() -> None:
    indices = np.arange(5000, dtype=np.int64)
    positions = np.random.default_rng(0).permutation(5000)
    [block] = fit("w", "p", indices, positions)
    assert isinstance(block, Scattering)
    assert (block.positions == positions).all()


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_lookup_finds_every_place_of_every_number(seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    parameters = {
        "fused": np.concatenate([W_CODES[12:], V_CODES[8:], V_CODES[8:]]).ravel(),
        "columns": np.pad(W_CODES[:, 20:].T, 2).ravel(),
        "shuffled": np.random.default_rng(1).permutation(V_CODES.ravel()),
    }
    placement = Placement(block for name, codes in parameters.items() for block in NUMBERING.blocks(name, codes))
    for spec, first, end in NUMBERING.codes():
        queried = np.flatnonzero(rng.random(end - first) < density).astype(np.uint64)
        places = set()
        for placed in placement.place(spec.name, queried):
            pairs = list(zip(placed.positions.tolist(), queried[placed.chosen].tolist(), strict=True))
            places |= {(placed.parameter, position, int(index)) for position, index in pairs}
        expected = {
            (name, position, int(codes[position]) - first)
            for name, codes in parameters.items()
            for position in np.flatnonzero(np.isin(codes, queried.astype(np.int64) + first)).tolist()
        }
        assert places == expected


def test_witnesses_hold_every_resident_number_once() -> None:
    overlapping = [W_CODES[:10].ravel(), W_CODES[5:15, 3:].ravel(), W_CODES[:15].T.ravel(), V_CODES[:, 7].ravel()]
    blocks = [block for name, codes in enumerate(overlapping) for block in NUMBERING.blocks(str(name), codes)]
    placement = Placement(blocks)
    for name, count in (("w", 15 * 40), ("v", 16)):
        parts = [witness.expand()[0] for witness in placement.witnesses if witness.tensor == name]
        indices = np.concatenate(parts)
        assert len(np.unique(indices)) == len(indices) == placement.resident(name) == count


@pytest.mark.parametrize("limit", [1, 7, 40, 55, 10_000])
@pytest.mark.parametrize("layout", [W_CODES, W_CODES[:, 20:].T, np.random.default_rng(2).permutation(W_CODES.ravel())])
def test_parts_are_the_same_in_small(limit: int, layout: Places) -> None:
    blocks = NUMBERING.blocks("p", layout.ravel())
    parts = [part for block in blocks for part in block.parts(limit)]
    assert max(part.count for part in parts) <= limit
    assert (codes_from(parts, layout.size) == layout.ravel()).all()


def test_digits_make_up_codes() -> None:
    end = 70_000
    codes = np.arange(1, end)
    for base in (8, 16, 256, 1 << 24):
        places = digit_count(end, base)
        rebuilt = sum((digit(codes, place, base) * base**place for place in range(places)), np.zeros_like(codes))
        assert (rebuilt == codes).all()


def test_the_base_is_what_the_least_exact_type_can_carry() -> None:
    def base(*names: str) -> int:
        return digit_base(ELEMENTS[name] for name in names)

    assert base("BF16") == 256
    assert base("F32", "F8_E4M3", "BF16") == 16
    assert base("F32") == 1 << 24


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F8_E4M3", "U8", "I32"])
def test_random_bits_are_finite_and_their_opposites_differ_everywhere(name: str) -> None:
    element = ELEMENTS[name]
    codes = np.arange(1, 20_000)
    bits, opposites = (random_bits(codes, element, flipped=flipped) for flipped in (False, True))
    assert (bits != opposites).all()
    assert len(np.unique(bits)) > 100
    if element.is_float:
        exponent = (2**element.exponent_bits - 1) << element.mantissa_bits
        assert not (bits & exponent == exponent).any()
        assert not (opposites & exponent == exponent).any()


def test_types_of_eight_bytes_and_truth_values_have_no_codes() -> None:
    kinds = [TensorSpec(name=name, dtype=name, shape=(3,)) for name in ("BOOL", "I64", "BF16", "C64", "F32")]
    empty = TensorSpec(name="empty", dtype="BF16", shape=(0, 4))
    numbering = Numbering.of([*kinds, empty])
    assert [spec.name for spec in numbering.specs] == ["BF16", "F32"]
    assert [(first, end) for _, first, end in numbering.codes()] == list(pairwise((1, 4, 7)))


def test_a_rectangle_finds_nothing_beside_its_columns() -> None:
    [block] = NUMBERING.blocks("p", W_CODES[:, 20:].ravel())
    assert isinstance(block, Rectangle)
    chosen, positions = block.find(np.array([19, 20, 39, 40, 59, 60], np.int64))
    assert chosen.tolist() == [1, 2, 5]
    assert positions.tolist() == [0, 19, 20]
