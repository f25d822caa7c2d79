"""Turns as one blob: exact both ways, and nothing else is taken for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from etude.tokens.turns import decode_turns, encode_turns
from etude.types import Finish, PayloadRef, Turn

IDS = st.integers(0, 2**31 - 1)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    sampled = draw(st.integers(0, 5))
    ids = hnp.arrays(np.int32, sampled, elements=IDS)
    digest = st.binary(min_size=32, max_size=32).map(bytes.hex)
    refs = st.builds(lambda digest, size: PayloadRef(digest=digest, size_bytes=size), digest, st.integers(0, 2**40))
    return Turn(
        prompt_ids=draw(hnp.arrays(np.int32, st.integers(0, 6), elements=IDS)),
        completion_ids=draw(ids),
        logprobs=draw(hnp.arrays(np.float32, sampled, elements=st.floats(-1e6, 0, width=32))),
        versions=draw(ids),
        finish=draw(st.sampled_from(Finish)),
        temperature=draw(st.floats(0, 1e3)),
        payload=draw(st.none() | refs),
    )


def some_turn() -> Turn:
    one = np.array([1], np.int32)
    return Turn(
        prompt_ids=one, completion_ids=one, logprobs=np.array([-1.0], np.float32), versions=one, finish=Finish.STOP
    )


@settings(max_examples=40)
@given(st.lists(turns(), max_size=4))
def test_turns_come_back_as_they_were(sent: list[Turn]) -> None:
    received = decode_turns(encode_turns(sent))
    assert len(received) == len(sent)
    for before, after in zip(sent, received, strict=True):
        for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
            old, new = getattr(before, name), getattr(after, name)
            assert old.dtype == new.dtype and np.array_equal(old, new), name
        assert (before.finish, before.temperature, before.payload) == (after.finish, after.temperature, after.payload)


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="turns"):
        decode_turns(data)


@given(st.data())
def test_a_flipped_byte_is_refused_or_makes_another_valid_blob(data: st.DataObject) -> None:
    blob = bytearray(encode_turns([some_turn(), some_turn()]))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    try:
        received = decode_turns(bytes(blob))
    except ValueError:
        return
    assert len(received) == 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("finish", np.array([9], np.uint8), "finish 9"),
        ("prompt_offsets", np.array([0, 2], np.int64), "prompt_offsets"),
        ("prompt_offsets", np.array([1, 1], np.int64), "prompt_offsets"),
        ("completion_ids", np.array([1, 2], np.int32), "fit"),
        ("logprobs", np.array([1.0], np.float64), "made of"),
        ("versions", np.array([-1], np.int32), "weight version"),
        ("payload_sizes", np.array([-2], np.int64), "-2 bytes"),
        ("payload_digests", np.zeros((1, 31), np.uint8), "fit"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(name: str, value: np.ndarray, words: str) -> None:
    arrays = load(encode_turns([some_turn()])) | {name: value}
    with pytest.raises(ValueError, match=words):
        decode_turns(save(arrays))


def test_routes_do_not_travel() -> None:
    one = np.array([1], np.int32)
    turn = Turn(
        prompt_ids=one,
        completion_ids=one,
        logprobs=np.array([-1.0], np.float32),
        versions=one,
        finish=Finish.STOP,
        routes=np.zeros((1, 1, 1), np.uint16),
    )
    with pytest.raises(ValueError, match="payload file"):
        encode_turns([turn])
