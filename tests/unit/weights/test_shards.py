"""A share follows its target chunk by chunk, takes steps back, and never takes one from the wrong place."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.chunks import Chunk, Layout
from etude.weights.digest import Digest, content_digest
from etude.weights.elements import ELEMENTS
from etude.weights.frames import Codec, encode_full, parse
from etude.weights.shards import Move, Share
from etude.weights.state import Numbers, Region, State, StoredTensor, snapshot

DTYPES = pytest.mark.parametrize("dtype", sorted(ELEMENTS))
CODECS = pytest.mark.parametrize("codec", [Codec.GAPS, Codec.CLASSES])
DENSITIES = pytest.mark.parametrize("density", [0.01, 0.8])
CHUNK_NUMBERS = 500


def random_state(dtype: str, seed: int = 0) -> State:
    """Four parts, one of them some columns, in several chunks that share tensors and are shared by them."""
    rng = np.random.default_rng(seed)
    per_value, size = ELEMENTS[dtype].per_value, ELEMENTS[dtype].size_bytes

    def tensor(name: str, shape: tuple[int, ...], region: Region | None, count: int) -> StoredTensor:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        return StoredTensor(spec=spec, data=rng.integers(0, 256, count * size, np.uint8), region=region)

    columns = Region(offset=3 * per_value, width=5 * per_value, stride=11 * per_value, rows=40)
    tensors = (
        tensor("a", (1200,), None, 1200 * per_value),
        tensor("b", (), None, per_value),
        tensor("c", (40, 11), columns, columns.count),
        tensor("d", (3, 0), None, 0),
    )
    return {tensor.spec.name: tensor for tensor in tensors}


def nudged(state: State, density: float, seed: int = 1) -> State:
    """A copy in which a share of the numbers have moved, most by one, some to anywhere."""
    rng = np.random.default_rng(seed)
    moved = snapshot(state)
    for tensor in moved.values():
        numbers = tensor.numbers
        if not len(numbers):
            continue
        places = np.flatnonzero(rng.random(len(numbers)) < density)
        limit = np.iinfo(numbers.dtype).max
        anywhere = rng.integers(0, limit, len(places), numbers.dtype, endpoint=True)
        numbers[places] = np.where(rng.random(len(places)) < 0.8, numbers[places] + numbers.dtype.type(1), anywhere)
    return moved


def share_of(state: State) -> Share:
    return Share.copy_of(Layout.of(state, CHUNK_NUMBERS), state)


def bits(state: State) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in state.items()}


def advance_all(share: Share, target: State, codec: Codec = Codec.GAPS) -> list[Move]:
    moves = [share.advance(chunk, target, codec) for chunk in share.layout.chunks]
    return [move for move in moves if move is not None]


def one_move(density: float = 0.05, codec: Codec = Codec.GAPS) -> tuple[State, State, Chunk, Move]:
    """What was, what is, and a chunk's way between them."""
    state = random_state("BF16")
    target = nudged(state, density)
    share = share_of(state)
    chunk = share.layout.chunks[1]
    move = share.advance(chunk, target, codec)
    assert move is not None
    return state, target, chunk, move


def concatenated(share: Share, chunk: Chunk) -> Numbers:
    return np.concatenate(share.numbers(chunk))


# ── to the target and back ──────────────────────────────────────────────────────────────────────────────────────────


@DTYPES
@CODECS
@DENSITIES
def test_publisher_and_receiver_reach_the_target_bit_for_bit(dtype: str, codec: Codec, density: float) -> None:
    state = random_state(dtype)
    target = nudged(state, density)
    publisher, receiver = share_of(state), share_of(state)
    before = bits(target)
    moves = advance_all(publisher, target, codec)
    assert moves
    for move in moves:
        old = concatenated(receiver, move.chunk)
        touched = receiver.apply(move.chunk, parse(move.frame))
        differing = np.flatnonzero(old != concatenated(receiver, move.chunk))
        assert move.changed == len(differing)
        assert touched is None if density > 0.5 else np.array_equal(np.asarray(touched), differing)
    for share in (publisher, receiver):
        assert bits(share.tensors) == before
        assert share.content() == content_digest(target)
        assert share.scrub() == []
    assert bits(target) == before


@DTYPES
@CODECS
@DENSITIES
def test_what_was_moved_can_be_taken_back(dtype: str, codec: Codec, density: float) -> None:
    state = random_state(dtype)
    share = share_of(state)
    for move in advance_all(share, nudged(state, density), codec):
        share.undo(move)
    assert bits(share.tensors) == bits(state)
    assert share.content() == content_digest(state)
    assert share.scrub() == []


@pytest.mark.parametrize(
    ("dtype", "density", "wish", "codec"),
    [
        ("BF16", 0.01, Codec.CLASSES, Codec.CLASSES),
        ("F32", 0.01, Codec.CLASSES, Codec.CLASSES),
        ("F8_E4M3", 0.01, Codec.CLASSES, Codec.CLASSES),
        ("BF16", 0.01, Codec.GAPS, Codec.GAPS),
        ("I32", 0.01, Codec.CLASSES, Codec.GAPS),
        ("F64", 0.01, Codec.CLASSES, Codec.GAPS),
        ("BF16", 0.9, Codec.CLASSES, Codec.DENSE),
        ("U8", 0.9, Codec.GAPS, Codec.DENSE),
    ],
)
def test_the_codec_is_the_wanted_one_unless_it_does_not_fit(
    dtype: str, density: float, wish: Codec, codec: Codec
) -> None:
    state = random_state(dtype)
    moves = advance_all(share_of(state), nudged(state, density), wish)
    assert {parse(move.frame).codec for move in moves if move.chunk.count == CHUNK_NUMBERS} == {codec}


def test_frames_say_from_where_to_where_they_lead() -> None:
    state = random_state("BF16")
    target = nudged(state, 0.05)
    share = share_of(state)
    for move in advance_all(share, target):
        frame = parse(move.frame)
        assert frame.before == move.chunk.digest(move.chunk.numbers(state))
        assert frame.after == move.chunk.digest(move.chunk.numbers(target))


def test_a_chunk_that_is_at_the_target_stays() -> None:
    state = random_state("BF16")
    share = share_of(state)
    target = snapshot(state)
    target["a"].numbers[CHUNK_NUMBERS] ^= 1
    assert [move.chunk.index for move in advance_all(share, target)] == [1]
    assert advance_all(share, target) == []


def test_a_copy_has_its_own_bytes() -> None:
    state = random_state("BF16")
    share = share_of(state)
    state["a"].data[:] = 0
    assert share.tensors["a"].data.any()


@given(seeds=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.02, 0.5]), st.booleans()), max_size=5))
@settings(deadline=None, max_examples=25)
def test_any_chain_of_versions_is_followed(seeds: list[tuple[int, float, bool]]) -> None:
    state = random_state("BF16")
    publisher, receiver = share_of(state), share_of(state)
    for seed, density, classes in seeds:
        state = nudged(state, density, seed)
        for move in advance_all(publisher, state, Codec.CLASSES if classes else Codec.GAPS):
            receiver.apply(move.chunk, parse(move.frame))
        assert bits(receiver.tensors) == bits(publisher.tensors) == bits(state)
        assert receiver.content() == publisher.content() == content_digest(state)


# ── whole chunks, and parts of a share ──────────────────────────────────────────────────────────────────────────────


@DTYPES
def test_full_frames_fill_an_empty_share_or_any_other(dtype: str) -> None:
    state = random_state(dtype)
    source = share_of(state)
    for receiver in (Share.empty(source.layout), share_of(random_state(dtype, seed=9))):
        for chunk in source.layout.chunks:
            assert receiver.apply(chunk, parse(source.full(chunk))) is None
        assert bits(receiver.tensors) == bits(state)
        assert receiver.content() == content_digest(state)


def test_a_receiver_may_hold_some_chunks_only() -> None:
    state = random_state("BF16")
    source = share_of(state)
    last = source.layout.chunks[-1]

    def once() -> Iterator[int]:
        yield last.index

    part = Share.empty(source.layout, once())
    assert part.wanted == {last.index}
    assert set(part.tensors) == {piece.part.spec.name for piece in last.pieces} < set(state)
    part.apply(last, parse(source.full(last)))
    assert part.content() == source.digest(last)


# ── idempotence, and what is refused ────────────────────────────────────────────────────────────────────────────────


@CODECS
@DENSITIES
def test_applying_again_changes_nothing(codec: Codec, density: float) -> None:
    state, _, chunk, move = one_move(density, codec)
    receiver = share_of(state)
    receiver.apply(chunk, parse(move.frame))
    after = bits(receiver.tensors)
    assert receiver.apply(chunk, parse(move.frame)) is None, "after a crash nobody knows which places were new"
    assert bits(receiver.tensors) == after
    assert receiver.digest(chunk) == parse(move.frame).after


@CODECS
@DENSITIES
def test_a_wrong_base_is_refused_and_left_alone(codec: Codec, density: float) -> None:
    state, _, chunk, move = one_move(density, codec)
    stranger = share_of(nudged(state, 0.01, seed=5))
    before = bits(stranger.tensors)
    for _ in range(2):
        with pytest.raises(DamagedError, match=r"chunk 1 holds .* its frame leads from"):
            stranger.apply(chunk, parse(move.frame))
    assert bits(stranger.tensors) == before


@CODECS
@DENSITIES
@pytest.mark.parametrize("digest_is_known", [True, False])
def test_a_torn_chunk_is_recognised_and_mended_by_a_whole_one(
    codec: Codec, density: float, digest_is_known: bool
) -> None:
    state, target, chunk, move = one_move(density, codec)
    receiver = share_of(state)
    if digest_is_known:
        receiver.digest(chunk)
    held, new = receiver.numbers(chunk)[0], chunk.numbers(target)[0]
    held[: len(held) // 2] = new[: len(held) // 2]
    for _ in range(2):
        with pytest.raises(DamagedError, match="chunk 1 "):
            receiver.apply(chunk, parse(move.frame))
    receiver.apply(chunk, parse(encode_full(chunk.numbers(target), chunk.element, after=parse(move.frame).after)))
    assert np.array_equal(concatenated(receiver, chunk), np.concatenate(chunk.numbers(target)))
    assert receiver.digest(chunk) == parse(move.frame).after


def test_what_is_known_is_looked_at_again_before_a_frame_is_refused() -> None:
    state, target, chunk, move = one_move()
    receiver = Share.empty(Layout.of(state, CHUNK_NUMBERS))
    receiver.digest(chunk)
    for mine, theirs in zip(receiver.numbers(chunk), chunk.numbers(state), strict=True):
        mine[:] = theirs
    receiver.apply(chunk, parse(move.frame))
    assert np.array_equal(concatenated(receiver, chunk), np.concatenate(chunk.numbers(target)))


@DENSITIES
def test_a_frame_that_does_not_keep_its_promise_is_damage(density: float) -> None:
    state, _, chunk, move = one_move(density)
    lying = bytearray(move.frame)
    lying[32:48] = bytes(16)  # the digest after
    receiver = share_of(state)
    with pytest.raises(DamagedError, match=f"promised {Digest.ZERO.hex()}"):
        receiver.apply(chunk, parse(bytes(lying)))
    with pytest.raises(DamagedError, match="holds"):
        receiver.apply(chunk, parse(bytes(lying)))
    assert receiver.digest(chunk) == chunk.digest(receiver.numbers(chunk)), "a failure leaves no wrong knowledge"


@pytest.mark.parametrize("dtype", ["F32", "U8"])
def test_a_frame_of_another_chunk_is_damage(dtype: str) -> None:
    state, _, chunk, move = one_move()
    receiver = share_of(state)
    small = receiver.layout.chunks[-1]
    assert small.count < chunk.count
    with pytest.raises(DamagedError, match="does not fit chunk"):
        receiver.apply(small, parse(move.frame))
    other = share_of(random_state(dtype))
    with pytest.raises(DamagedError, match="does not fit chunk 1"):
        other.apply(other.layout.chunks[1], parse(move.frame))
    with pytest.raises(DamagedError):
        other.apply(
            other.layout.chunks[1], parse(encode_full([np.zeros(500, np.uint16)], chunk.element, after=Digest.ZERO))
        )
    assert bits(other.tensors) == bits(random_state(dtype))


def test_a_frame_of_the_same_width_and_another_type_is_damage() -> None:
    move = one_move()[3]
    receiver = share_of(random_state("I16"))
    with pytest.raises(DamagedError):
        receiver.apply(receiver.layout.chunks[1], parse(move.frame))


@pytest.mark.parametrize("place", [0, 1, 700, 1999])
def test_scrubbing_finds_a_flipped_bit(place: int) -> None:
    state = random_state("BF16")
    share = share_of(state)
    assert share.content() == content_digest(state)
    assert share.scrub() == []
    share.tensors["a"].data[place] ^= 0x40
    assert share.scrub() == [place // 2 // CHUNK_NUMBERS]
    share.tensors["c"].data[-1] ^= 1
    assert share.scrub() == [place // 2 // CHUNK_NUMBERS, len(share.layout.chunks) - 1]


def test_scrubbing_does_not_judge_what_was_never_known() -> None:
    share = Share.empty(Layout.of(random_state("BF16"), CHUNK_NUMBERS))
    share.tensors["a"].data[:] = 7
    assert share.scrub() == []
