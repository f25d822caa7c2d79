"""Payloads give back the same bits or an error, never other bits."""

import struct
import zlib

import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.codec import apply_delta, decode_full, encode_delta, encode_full
from etude.weights.state import ELEMENT_BYTES, State, StoredTensor, layout_digest, spec_bytes, state_digest

SPECS = st.builds(
    TensorSpec,
    name=st.text(max_size=8),
    dtype=st.sampled_from(sorted(ELEMENT_BYTES)),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
LAYOUTS = st.lists(SPECS, max_size=5, unique_by=lambda spec: spec.name)


def fill(layout: list[TensorSpec], data: st.DataObject) -> State:
    return {
        spec.name: stored(spec, data.draw(st.binary(min_size=spec_bytes(spec), max_size=spec_bytes(spec))))
        for spec in layout
    }


def stored(spec: TensorSpec, data: bytes) -> StoredTensor:
    return StoredTensor(spec=spec, data=np.frombuffer(data, np.uint8))


def floats(name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> StoredTensor:
    return stored(TensorSpec(name=name, dtype="F32", shape=values.shape), values.astype("<f4").tobytes())


def bits(state: State) -> dict[str, tuple[TensorSpec, bytes]]:
    return {name: (tensor.spec, tensor.data.tobytes()) for name, tensor in state.items()}


@given(LAYOUTS, st.data())
def test_full_is_bit_exact(layout: list[TensorSpec], data: st.DataObject) -> None:
    state = fill(layout, data)
    assert bits(decode_full(encode_full(state))) == bits(state)


@given(LAYOUTS, st.data())
def test_delta_is_bit_exact_and_leaves_the_base_alone(layout: list[TensorSpec], data: st.DataObject) -> None:
    base, state = fill(layout, data), fill(layout, data)
    before = bits(base)
    assert bits(apply_delta(base, encode_delta(base, state))) == bits(state)
    assert bits(base) == before


def test_every_special_float_survives() -> None:
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0xFF800000, 1], "<u4")
    special = {"w": stored(TensorSpec(name="w", dtype="F32", shape=(6,)), patterns.tobytes())}
    zeros = {"w": floats("w", np.zeros(6, np.float32))}
    assert bits(decode_full(encode_full(special))) == bits(special)
    assert bits(apply_delta(zeros, encode_delta(zeros, special))) == bits(special)
    assert bits(apply_delta(special, encode_delta(special, zeros))) == bits(zeros)


def test_an_unchanged_tensor_costs_nothing_and_is_shared() -> None:
    rng = np.random.default_rng(0)
    small, big = rng.standard_normal(4, np.float32), rng.standard_normal(10_000, np.float32)
    base = {"small": floats("small", small), "big": floats("big", big)}
    state = {"small": floats("small", small + 1), "big": floats("big", big.copy())}
    alone = {"small": base["small"]}, {"small": state["small"]}
    payload = encode_delta(base, state)
    assert len(payload) == len(encode_delta(*alone))
    assert apply_delta(base, payload)["big"] is base["big"]


def test_a_small_change_is_a_small_delta() -> None:
    values = np.random.default_rng(0).standard_normal(100_000, np.float32)
    base = {"w": floats("w", values)}
    state = {"w": floats("w", values * np.float32(1 + 1e-6))}
    assert len(encode_delta(base, state)) < len(encode_full(state)) / 3


def test_decoded_tensors_can_be_handed_to_a_framework() -> None:
    base = {"w": stored(TensorSpec(name="w", dtype="U8", shape=(3,)), b"abc")}
    state = {"w": stored(TensorSpec(name="w", dtype="U8", shape=(3,)), b"abd")}
    for decoded in (decode_full(encode_full(state)), apply_delta(base, encode_delta(base, state))):
        assert decoded["w"].data.flags.writeable and decoded["w"].data.flags.c_contiguous


@pytest.mark.parametrize("other", ["name", "dtype", "shape", "fewer"])
def test_a_base_of_another_layout_is_refused_at_both_ends(other: str) -> None:
    base = {"w": stored(TensorSpec(name="w", dtype="U8", shape=(4,)), b"abcd")}
    state = {"w": stored(TensorSpec(name="w", dtype="U8", shape=(4,)), b"abce")}
    strangers: dict[str, State] = {
        "name": {"v": stored(TensorSpec(name="v", dtype="U8", shape=(4,)), b"abcd")},
        "dtype": {"w": stored(TensorSpec(name="w", dtype="I8", shape=(4,)), b"abcd")},
        "shape": {"w": stored(TensorSpec(name="w", dtype="U8", shape=(2, 2)), b"abcd")},
        "fewer": {},
    }
    with pytest.raises(ValueError, match="publish a full version"):
        encode_delta(strangers[other], state)
    with pytest.raises(DamagedError, match="other tensor names, types or shapes"):
        apply_delta(strangers[other], encode_delta(base, state))


def test_full_and_delta_are_not_mistaken_for_each_other() -> None:
    state = {"w": floats("w", np.ones(3, np.float32))}
    with pytest.raises(DamagedError, match="is a delta"):
        decode_full(encode_delta(state, state))
    with pytest.raises(DamagedError, match="is a full one"):
        apply_delta(state, encode_full(state))


def outcome(base: State, payload: bytes, *, delta: bool) -> str:
    try:
        return state_digest(apply_delta(base, payload) if delta else decode_full(payload))
    except DamagedError:
        return "damaged"


@pytest.mark.parametrize("delta", [False, True])
def test_no_flipped_bit_and_no_cut_gives_other_weights(delta: bool) -> None:
    rng = np.random.default_rng(1)
    base = {name: floats(name, rng.standard_normal(6, np.float32)) for name in "ab"}
    state = {name: floats(name, rng.standard_normal(6, np.float32)) for name in "ab"}
    payload = encode_delta(base, state) if delta else encode_full(state)
    harmless = []
    for index in range(len(payload)):
        for bit in range(8):
            broken = payload[:index] + bytes([payload[index] ^ 1 << bit]) + payload[index + 1 :]
            if (result := outcome(base, broken, delta=delta)) != "damaged":
                assert result == state_digest(state), f"byte {index}, bit {bit}"
                harmless.append(index)
        assert outcome(base, payload[:index], delta=delta) == "damaged"
    assert len(harmless) <= 1, "one bit of a zstd frame header means nothing (RFC 8878, 3.1.1.1.1.3), all others do"
    assert outcome(base, payload + b"\0", delta=delta) == "damaged"


@given(st.binary(max_size=200), st.booleans())
def test_rubbish_is_damaged(rubbish: bytes, with_magic: bool) -> None:
    assert outcome({}, b"ETW1" * with_magic + rubbish, delta=False) == "damaged"


def sealed(header: object, body: bytes = b"") -> bytes:
    """A payload whose checksums are right, whatever it says."""
    text = orjson.dumps(header)
    frame = zstandard.ZstdCompressor().compress(body)
    return struct.pack("<4sII", b"ETW1", len(text), zlib.crc32(text)) + text + frame


@pytest.mark.parametrize(
    "header",
    [
        None,
        [],
        {"base": None},
        {"base": 3, "tensors": []},
        {"base": None, "tensors": 7},
        {"base": None, "tensors": [["w", "U8"]]},
        {"base": None, "tensors": [[1, "U8", [2]]]},
        {"base": None, "tensors": [["w", "U8", [True]]]},
        {"base": None, "tensors": [["w", "U9", [2]]]},
        {"base": None, "tensors": [["w", "U8", [-2]]]},
        {"base": None, "tensors": [["w", "U8", [3]]]},
        {"base": None, "tensors": [["w", "U8", [2**40, 2**40]]]},
        {"base": None, "tensors": [["w", "U8", [1]], ["w", "U8", [1]]]},
        {"base": None, "tensors": [["w", "U8", [1]], ["v", "U8", [1]]]},
    ],
)
def test_a_lying_header_is_damage_not_a_crash(header: object) -> None:
    assert outcome({}, sealed(header, b"ab"), delta=False) == "damaged"


def test_a_delta_cannot_smuggle_in_a_tensor() -> None:
    base = {"w": stored(TensorSpec(name="w", dtype="U8", shape=(2,)), b"ab")}
    payload = sealed({"base": layout_digest(base), "tensors": [["v", "U8", [2]]]}, b"ab")
    with pytest.raises(DamagedError, match="which its base does not have"):
        apply_delta(base, payload)
