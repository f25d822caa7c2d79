"""Turns as one blob: exact in both directions, each branch once, and other data is rejected."""

import json
import tracemalloc
import zlib
from base64 import b85decode

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from etude.ledger.turns import decode_turns, encode_turns
from etude.types import Finish, Ids, PayloadRef, Turn, TurnKind

IDS = st.integers(0, 2**31 - 1)
ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "versions")
FIRST_FORM = (
    b"c-oy(O-jTt7_I*b9zwGI7HJwvXEyEx58!GjL$v8kpffE^6vm-2M{(~R^eP^~8|ar##D>upeem&;Ht*%-OP=<F7He`>E~-KrRW7Gxo@;3|8LvrZR+"
    b"S`UavgI5M9+ntO`;S?CXD!AIibLK+5oA<swhP^)#_39IIvv@#(~q;qQ)rZUnw|+xQ$`tqLQ^R_qCtmYA8j_A!$<-<qU(|`s#@F@1IZ@F{|!$Q)T`"
    b"chCD_LLdrXh=rxFU4NwgsORU3#tTkr%TL9ETxV?&8EtQ^k)i+6h|4@ix)_n?@nn~?nr0)XJk46j_jnk&NKm-nZjt?AvIGhJQ+_Mgjy|3?=TYf{{y"
    b"y5_B^I|<uvCgoLoaT$|zZ1uH&%<trU-3MEPs2U>pa"
)
"""``FIRST_TURNS`` as they were written before branches were written once."""


def some_turn(prompt: Ids | None = None, payload: PayloadRef | None = None) -> Turn:
    one = np.array([1], np.int32)
    return Turn(
        prompt_ids=one if prompt is None else prompt,
        completion_ids=one,
        logprobs=np.array([-1.0], np.float32),
        versions=one,
        finish=Finish.STOP,
        payload=payload,
    )


FIRST_TURNS = (
    some_turn(np.array([5, 6], np.int32)),
    Turn(
        prompt_ids=np.array([5, 6, 1, 7], np.int32),
        completion_ids=np.array([8, 9], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([3, 4], np.int32),
        finish=Finish.LENGTH,
        temperature=0.5,
        payload=PayloadRef(digest="ab" * 32, size_bytes=12),
    ),
)


@st.composite
def prompts(draw: st.DrawFn, memory: Ids) -> Ids:
    """Any part of some memory that others lie in, too, in any stride; or an array of its own."""
    first, last = sorted((draw(st.integers(0, len(memory))), draw(st.integers(0, len(memory)))))
    part = memory[first : last : draw(st.sampled_from([1, 1, 1, 2, -1]))]
    return part.copy() if draw(st.booleans()) else part


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    memory = draw(hnp.arrays(np.int32, 8, elements=IDS))
    return draw(st.lists(turns(memory), max_size=5))


@st.composite
def turns(draw: st.DrawFn, memory: Ids) -> Turn:
    sampled = draw(st.integers(0, 5))
    ids = hnp.arrays(np.int32, sampled, elements=IDS)
    digest = st.binary(min_size=32, max_size=32).map(bytes.hex)
    refs = st.builds(lambda digest, size: PayloadRef(digest=digest, size_bytes=size), digest, st.integers(0, 2**40))
    return Turn(
        prompt_ids=draw(prompts(memory)),
        completion_ids=draw(ids),
        logprobs=draw(hnp.arrays(np.float32, sampled, elements=st.floats(-1e6, 0, width=32))),
        versions=draw(ids),
        finish=draw(st.sampled_from(Finish)),
        temperature=draw(st.floats(0, 1e3)),
        kind=draw(st.sampled_from(TurnKind)),
        payload=draw(st.none() | refs),
    )


def assert_same(received: tuple[Turn, ...], sent: list[Turn] | tuple[Turn, ...]) -> None:
    assert len(received) == len(sent)
    for before, after in zip(sent, received, strict=True):
        for name in ARRAYS:
            old, new = getattr(before, name), getattr(after, name)
            assert old.dtype == new.dtype and np.array_equal(old, new), name
            assert not new.flags.writeable
        for name in ("finish", "temperature", "kind", "payload"):
            assert getattr(before, name) == getattr(after, name), name


@settings(max_examples=60)
@given(conversations())
def test_turns_come_back_as_they_were(sent: list[Turn]) -> None:
    assert_same(decode_turns(encode_turns(sent)), sent)


def test_a_blob_of_the_first_form_is_still_read() -> None:
    assert_same(decode_turns(zlib.decompress(b85decode(FIRST_FORM))), FIRST_TURNS)


def test_a_branch_is_written_once_however_often_it_was_read() -> None:
    left, right = np.arange(30_000, dtype=np.int32), -np.arange(1, 20_001, dtype=np.int32)
    sent = [some_turn(token_buffer[:length]) for length in range(100, 20_001, 100) for token_buffer in (left, right)]
    blob = encode_turns(sent)
    assert len(blob) < 4 * 40_000 + 12 * len(sent) + 80 * len(sent) + 2_000
    received = decode_turns(blob)
    assert_same(received, sent)
    assert len({id(turn.prompt_ids.base) for turn in received}) == 1
    assert encode_turns(received) == blob


def test_a_small_blob_stays_small_whatever_it_claims() -> None:
    ids = np.arange(2**18, dtype=np.int32)
    blob = encode_turns([some_turn(ids)] * 1000)  # a gigabyte, if it were written out
    tracemalloc.start()
    assert len(decode_turns(blob)) == 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(blob)


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


WORDS = st.integers(-3, 9) | st.integers(-(2**63), 2**63 - 1)


@given(hnp.arrays(np.int64, 3, elements=WORDS), hnp.arrays(np.int64, 3, elements=WORDS))
def test_prompts_lie_within_what_there_is_or_are_refused(starts: Ids, lengths: Ids) -> None:
    ids = np.arange(6, dtype=np.int32)
    arrays = load(encode_turns([some_turn(ids)] * 3)) | {"prompt_starts": starts, "prompt_lengths": lengths}
    spans = list(zip(starts.tolist(), lengths.tolist(), strict=True))
    if all(0 <= start <= start + length <= 6 for start, length in spans):
        received = decode_turns(save(arrays))
        assert [turn.prompt_ids.tolist() for turn in received] == [
            list(range(start, start + length)) for start, length in spans
        ]
    else:
        first = next(turn for turn, (start, length) in enumerate(spans) if not 0 <= start <= start + length <= 6)
        with pytest.raises(ValueError, match=f"turn {first} has a prompt of .*: there are 6"):
            decode_turns(save(arrays))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("finish", np.array([9], np.uint8), "turn 0 has finish 9 and kind 0, expected less than 2 and 2"),
        ("finish", np.array([2], np.uint8), "finish 2"),
        ("kind", np.array([2], np.uint8), "kind 2"),
        ("kind", np.array([0, 0], np.uint8), "fit"),
        ("prompt_starts", np.array([0, 0], np.int64), "fit"),
        ("prompt_starts", np.array(0, np.int64), "fit"),
        ("prompt_starts", np.array([0], np.uint64), "made of"),
        ("prompt_lengths", np.array([2], np.int64), "turn 0 has a prompt of 2 ids from 0 on: there are 1"),
        ("prompt_offsets", np.array([0, 2], np.int64), "prompt of 2 ids"),
        ("prompt_offsets", np.array([1, 0], np.int64), "prompt of -1 ids"),
        ("prompt_offsets", np.array([], np.int64), "fit"),
        ("prompt_offsets", np.array(0, np.int64), "fit"),
        ("completion_offsets", np.array([1, 1], np.int64), "do not ascend"),
        ("completion_offsets", np.array([0, 2], np.int64), "do not ascend"),
        ("completion_ids", np.array([1, 2], np.int32), "fit"),
        ("logprobs", np.array([1.0], np.float64), r"made of .*, expected \{'prompt_ids'"),
        ("versions", np.array([-1], np.int32), "weight version"),
        ("payload_sizes", np.array([-2], np.int64), "turn 0 has a payload of -2 bytes"),
        ("payload_digests", np.zeros((1, 31), np.uint8), "fit"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(name: str, value: np.ndarray, words: str) -> None:
    arrays = load(encode_turns([some_turn()])) | {name: value}
    with pytest.raises(ValueError, match=words):
        decode_turns(save(arrays))


def test_a_type_that_numpy_does_not_have_is_refused() -> None:
    header = json.dumps({"finish": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    with pytest.raises(ValueError, match="not a safetensors file"):
        decode_turns(len(header).to_bytes(8, "little") + header + bytes(2))


def test_the_metadata_name_the_rollout() -> None:
    def metadata(blob: bytes) -> object:
        size = int.from_bytes(blob[:8], "little")
        return json.loads(blob[8 : 8 + size]).get("__metadata__")

    assert metadata(encode_turns([some_turn()], "r-7")) == {"rollout": "r-7"}
    assert metadata(encode_turns([some_turn()])) is None


def test_completions_that_overlap_are_refused() -> None:
    arrays = load(encode_turns([some_turn()] * 3)) | {"completion_offsets": np.array([0, 3, 0, 3], np.int64)}
    with pytest.raises(ValueError, match="do not ascend"):
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
    with pytest.raises(ValueError, match="store them in a payload file first"):
        encode_turns([turn])
