"""The native engine's wire format: messages arrive as sent, and other data is rejected."""

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from etude.engines.http import (
    FINISH,
    MAX_LINE_BYTES,
    ChunkReader,
    decode_completion,
    decode_request,
    encode_chunk,
    encode_completion,
    encode_request,
)
from etude.protocols import MAX_SEED, Completion, SamplingParams, TokenChunk
from etude.types import MAX_TEMPERATURE, MIN_TEMPERATURE, Finish, Json, Routes, SamplingMask

IDS = st.integers(0, 2**31 - 1)
WHOLE = st.integers(0, MAX_SEED)
LOGPROBS = st.floats(max_value=0.0, width=32, allow_infinity=False)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, MAX_SEED),
    temperature=st.just(0.0) | st.floats(MIN_TEMPERATURE, MAX_TEMPERATURE),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=WHOLE,
    stop_ids=st.lists(IDS, max_size=4).map(tuple),
    seed=st.none() | WHOLE,
    priority=st.integers(-MAX_SEED, MAX_SEED),
    want_routes=st.booleans(),
)


@st.composite
def routes_of(draw: st.DrawFn, rows: int) -> Routes:
    shape = (rows, draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    experts = draw(st.sampled_from((4, 384, 2**16)))
    return np.random.default_rng(draw(IDS)).integers(0, experts, shape, dtype=np.uint16)


@st.composite
def mask_of(draw: st.DrawFn, tokens: int) -> SamplingMask:
    sets = [sorted(draw(st.sets(IDS, max_size=4))) for _ in range(tokens)]
    offsets = np.append(0, np.cumsum([len(ids) for ids in sets])).astype(np.int64)
    return SamplingMask(offsets=offsets, token_ids=np.array([token for ids in sets for token in ids], np.int32))


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    tokens = draw(st.integers(1, 6))
    several = st.lists(IDS, min_size=tokens, max_size=tokens)
    return Completion(
        token_ids=np.array(draw(several), np.int32),
        logprobs=np.array(draw(st.lists(LOGPROBS, min_size=tokens, max_size=tokens)), np.float32),
        versions=np.array(draw(several), np.int32),
        finish=draw(st.sampled_from(Finish)),
        routes=draw(st.none() | routes_of(draw(st.integers(0, 5)) + tokens)),
        sampling_mask=draw(st.none() | mask_of(tokens)),
    )


def make_completion() -> Completion:
    return Completion(
        token_ids=np.array([3, 4], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([7, 7], np.int32),
        finish=Finish.STOP,
        routes=np.zeros((4, 2, 2), np.uint16),
        sampling_mask=SamplingMask(offsets=np.array([0, 2, 2]), token_ids=np.array([3, 9], np.int32)),
    )


def assert_same_array(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


def assert_same(one: Completion, other: Completion) -> None:
    for name in ("token_ids", "logprobs", "versions"):
        assert_same_array(getattr(one, name), getattr(other, name))
    assert one.finish is other.finish
    assert (one.routes is None, one.sampling_mask is None) == (other.routes is None, other.sampling_mask is None)
    if one.routes is not None and other.routes is not None:
        assert_same_array(one.routes, other.routes)
    if one.sampling_mask is not None and other.sampling_mask is not None:
        assert_same_array(one.sampling_mask.offsets, other.sampling_mask.offsets)
        assert_same_array(one.sampling_mask.token_ids, other.sampling_mask.token_ids)


# Requests


@given(prompt=st.lists(WHOLE, max_size=8), params=PARAMS, session=st.text(st.characters(codec="utf-8"), max_size=8))
def test_a_request_arrives_as_it_was_sent(prompt: list[int], params: SamplingParams, session: str) -> None:
    assert decode_request(encode_request(prompt, params, session)) == (prompt, params, session)


def test_what_is_not_said_has_the_values_of_the_sampling_parameters() -> None:
    body = orjson.dumps({"prompt_ids": [1], "session": "s", "max_tokens": 4})
    assert decode_request(body) == ([1], SamplingParams(max_tokens=4), "s")


def test_every_sampling_parameter_is_carried() -> None:
    sent = orjson.loads(encode_request([1], SamplingParams(max_tokens=4), "s"))
    assert set(sent) == {"prompt_ids", "session", *asdict(SamplingParams(max_tokens=4))}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt_ids": [2**63]}, r"prompt_ids\[0\]"),
        ({"prompt_ids": [1, None]}, r"prompt_ids\[1\]"),
        ({"prompt_ids": {"0": 1}}, "prompt_ids"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "most"}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_ids": 3}, "stop_ids"),
        ({"seed": -1}, "seed"),
        ({"priority": "high"}, "priority"),
        ({"want_routes": 1}, "want_routes"),
        ({"want_routes": None}, "want_routes"),
        ({"session": None}, "session"),
        ({"stream": True}, "stream=True"),
    ],
)
def test_the_field_at_fault_is_named(change: dict[str, Json], word: str) -> None:
    body = orjson.dumps({"prompt_ids": [1], "session": "s", "max_tokens": 4, **change})
    with pytest.raises(ValueError, match=word):
        decode_request(body)


@given(body=st.binary(max_size=40) | st.from_regex(rb"\{.*\}") | st.just(b"NaN") | st.just(b'{"prompt_ids": [1]}'))
def test_what_is_no_request_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_request(body)


# Completions


@given(completion=completions())
def test_a_completion_arrives_as_it_was_sent(completion: Completion) -> None:
    assert_same(decode_completion(encode_completion(completion)), completion)


def test_views_are_sent_as_what_they_show() -> None:
    wide = np.arange(48, dtype=np.uint16).reshape(4, 3, 4)
    completion = replace(make_completion(), routes=wide[:, ::2, :2], token_ids=np.array([3, 0, 4, 0], np.int32)[::2])
    assert_same(decode_completion(encode_completion(completion)), completion)


@settings(max_examples=300)
@given(data=st.data(), completion=completions())
def test_a_damaged_completion_is_a_value_error_or_a_sound_one(data: st.DataObject, completion: Completion) -> None:
    sent = bytearray(encode_completion(completion))
    if data.draw(st.booleans()):
        del sent[data.draw(st.integers(0, len(sent) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(sent) - 1))
        sent[place] ^= data.draw(st.integers(1, 255))
    try:
        arrived = decode_completion(bytes(sent))
    except ValueError:
        return
    assert len(arrived.token_ids) == len(arrived.logprobs) == len(arrived.versions)
    assert np.isfinite(arrived.logprobs).all()
    assert arrived.token_ids.dtype == arrived.versions.dtype == np.int32
    assert arrived.routes is None or (arrived.routes.dtype == np.uint16 and arrived.routes.ndim == 3)


Arrays = dict[str, npt.NDArray[np.generic]]
Change = Callable[[Arrays], Arrays]


def without(name: str) -> Change:
    return lambda arrays: {key: array for key, array in arrays.items() if key != name}


def with_array(name: str, array: npt.NDArray[np.generic]) -> Change:
    return lambda arrays: {**arrays, name: array}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (without("token_ids"), "token_ids"),
        (without(FINISH), "finish"),
        (without("kept_offsets"), "kept_offsets"),
        (with_array("token_ids", np.array([3, 4])), "token_ids is int64"),
        (with_array("token_ids", np.array([[3, 4]], np.int32)), r"token_ids is int32\[1, 2\]"),
        (with_array("token_ids", np.array([3], np.int32)), "as many of each"),
        (with_array("versions", np.zeros(3, np.int32)), "as many of each"),
        (with_array("logprobs", np.zeros(2)), "logprobs is float64"),
        (with_array("logprobs", np.array([-1.0, np.nan], np.float32)), "not finite"),
        (with_array("logprobs", np.array([-np.inf, -1.0], np.float32)), "not finite"),
        (with_array(FINISH, np.array([9], np.uint8)), "IndexError"),
        (with_array(FINISH, np.zeros(0, np.uint8)), "IndexError"),
        (with_array("routes", np.zeros((4, 2), np.uint16)), "routes"),
        (with_array("routes", np.zeros((4, 2, 2), np.int16)), "routes is int16"),
        (with_array("kept_offsets", np.array([0, 5, 2])), "sampling mask"),
        (with_array("kept_offsets", np.array([0, 2])), "sampling mask"),
        (with_array("kept_ids", np.array([3.0, 9.0], np.float32)), "kept_ids is float32"),
        (with_array("surprise", np.zeros(1, np.int32)), "surprise"),
    ],
)
def test_a_file_that_is_no_completion_is_refused(change: Change, word: str) -> None:
    arrays = load(encode_completion(make_completion()))
    decode_completion(save(arrays))
    with pytest.raises(ValueError, match=word):
        decode_completion(save(change(arrays)))


# Streams


@given(completion=completions(), cuts=st.lists(st.integers(0, 5000), max_size=8))
def test_a_stream_arrives_as_it_was_sent_however_it_was_cut(completion: Completion, cuts: list[int]) -> None:
    count = len(completion.token_ids)
    sent = b"".join(encode_chunk(part(completion, at, last=at == count - 1)) for at in range(count))
    reader, edges = ChunkReader(), [0, *sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]
    chunks = [chunk for first, end in pairwise(edges) if (chunk := reader.feed(sent[first:end])) is not None]
    assert_same_array(np.concatenate([chunk.token_ids for chunk in chunks]), completion.token_ids)
    assert_same_array(np.concatenate([chunk.logprobs for chunk in chunks]), completion.logprobs)
    assert_same_array(np.concatenate([chunk.versions for chunk in chunks]), completion.versions)
    *before, last = chunks
    assert all(chunk.completion is None and len(chunk.token_ids) for chunk in before)
    assert last.completion is not None
    assert_same(last.completion, completion)


@given(completion=completions())
def test_a_completion_comes_once_and_ends_its_stream(completion: Completion) -> None:
    sent, reader = encode_chunk(part(completion, 0, last=True)), ChunkReader()
    assert reader.feed(sent) is not None
    assert reader.feed(b"") is None
    with pytest.raises(ValueError, match="1 bytes more behind the completion"):
        reader.feed(b"\n")
    with pytest.raises(ValueError, match="bytes more behind the completion"):
        ChunkReader().feed(sent + sent)


def part(completion: Completion, at: int, *, last: bool) -> TokenChunk:
    token = slice(at, at + 1)
    return TokenChunk(
        token_ids=completion.token_ids[token],
        logprobs=completion.logprobs[token],
        versions=completion.versions[token],
        completion=completion if last else None,
    )


def test_lines_that_arrive_at_once_are_one_chunk() -> None:
    chunk = ChunkReader().feed(b"".join(encode_chunk(part(make_completion(), at, last=False)) for at in range(2)))
    assert chunk is not None
    assert_same_array(chunk.token_ids, make_completion().token_ids[:2])


def test_a_line_that_never_ends_is_refused() -> None:
    reader = ChunkReader()
    with pytest.raises(ValueError, match="a line of more than"):
        for _ in range(3):
            reader.feed(b" " * (MAX_LINE_BYTES // 2))


LINE: dict[str, Json] = {"token_ids": [3], "logprobs": [-0.5], "versions": [7], "completion_bytes": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": 3},
        {"token_ids": [2**31]},
        {"token_ids": [[3]]},
        {"token_ids": ["3"]},
        {"token_ids": [3.5]},
        {"token_ids": [3, 4]},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": [None]},
        {"logprobs": ["-1"]},
        {"logprobs": [-1e300]},
        {"versions": []},
        {"versions": [-1]},
        {"completion_bytes": -1},
        {"completion_bytes": None},
        {"completion_bytes": 1.5},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_line_that_is_no_chunk_is_refused(change: dict[str, Json]) -> None:
    assert ChunkReader().feed(orjson.dumps(LINE) + b"\n") is not None
    with pytest.raises(ValueError, match=r"."):
        ChunkReader().feed(orjson.dumps({**LINE, **change}) + b"\n")


@pytest.mark.parametrize("line", [b"", b"[]", b"null", b"{}", b"{", b"\xff\xfe", orjson.dumps(LINE)[:-1]])
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        ChunkReader().feed(line + b"\n")
