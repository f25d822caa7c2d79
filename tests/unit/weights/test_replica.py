"""A replica follows its target chunk by chunk and its log link by link, and never takes a step from the wrong place."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import TensorSpec, WeightVersion
from etude.weights.chunks import Chunk, Layout
from etude.weights.codecs.classes import CLASSES
from etude.weights.codecs.codec import Codec
from etude.weights.codecs.dense import DENSE
from etude.weights.codecs.gaps import GAPS
from etude.weights.digest import Digest, state_digest
from etude.weights.frames import encode_full, parse
from etude.weights.kernels import Positions
from etude.weights.packs import fill_packs
from etude.weights.replica import ChangedNumbers, ChangedPlaces, Move, Replica
from etude.weights.state import ELEMENTS, Numbers, State, StoredTensor, snapshot, spec_bytes

DTYPES = pytest.mark.parametrize("dtype", sorted(ELEMENTS))
CODECS = pytest.mark.parametrize("codec", [GAPS, CLASSES])
DENSITIES = pytest.mark.parametrize("density", [0.01, 0.8])
CHUNK_NUMBERS = 500


def random_state(dtype: str, seed: int = 0) -> State:
    """Four tensors in several chunks that replica tensors and are shared by them."""
    rng = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        return StoredTensor(spec=spec, data=rng.integers(0, 256, spec_bytes(spec), np.uint8))

    tensors = (tensor("a", (1200,)), tensor("b", ()), tensor("c", (40, 5)), tensor("d", (3, 0)))
    return {tensor.spec.name: tensor for tensor in tensors}


def nudged(state: State, density: float, seed: int = 1) -> State:
    """A copy in which a share of the numbers has changed, most by one step, some by any amount."""
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


def replica_of(state: State) -> Replica:
    return Replica.copy_of(Layout.of(state, CHUNK_NUMBERS), state)


def bits(state: State) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in state.items()}


def advance_all(replica: Replica, target: State, codec: Codec = GAPS) -> list[Move]:
    moves = [replica.advance(chunk, target, codec) for chunk in replica.layout.chunks]
    return [move for move in moves if move is not None]


def one_move(density: float = 0.05, codec: Codec = GAPS) -> tuple[State, State, Chunk, Move]:
    """The old state, the new state, a chunk, and its move between them."""
    state = random_state("BF16")
    target = nudged(state, density)
    replica = replica_of(state)
    chunk = replica.layout.chunks[1]
    move = replica.advance(chunk, target, codec)
    assert move is not None
    return state, target, chunk, move


def damaged_chunks(replica: Replica) -> list[int]:
    return [chunk.index for chunk in replica.scrub()]


def concatenated(replica: Replica, chunk: Chunk) -> Numbers:
    return np.concatenate(replica.numbers(chunk))


# ── to the target and back ──────────────────────────────────────────────────────────────────────────────────────────


@DTYPES
@CODECS
@DENSITIES
def test_publisher_and_receiver_reach_the_target_bit_for_bit(dtype: str, codec: Codec, density: float) -> None:
    state = random_state(dtype)
    target = nudged(state, density)
    publisher, receiver = replica_of(state), replica_of(state)
    before = bits(target)
    moves = advance_all(publisher, target, codec)
    assert moves
    for move in moves:
        old = concatenated(receiver, move.chunk)
        touched = receiver.apply(move.chunk, parse(move.frame))
        differing = np.flatnonzero(old != concatenated(receiver, move.chunk))
        assert move.changed == len(differing)
        assert touched is None if density > 0.5 else np.array_equal(np.asarray(touched), differing)
    for replica in (publisher, receiver):
        assert bits(replica.tensors) == before
        assert replica.state_digest() == state_digest(target)
        assert replica.scrub() == []
    assert bits(target) == before


@DTYPES
@CODECS
@DENSITIES
def test_what_was_moved_can_be_taken_back(dtype: str, codec: Codec, density: float) -> None:
    state = random_state(dtype)
    replica = replica_of(state)
    for move in advance_all(replica, nudged(state, density), codec):
        replica.undo(move)
    assert bits(replica.tensors) == bits(state)
    assert replica.state_digest() == state_digest(state)
    assert replica.scrub() == []


@pytest.mark.parametrize(
    ("dtype", "density", "wish", "codec"),
    [
        ("BF16", 0.01, CLASSES, CLASSES),
        ("F32", 0.01, CLASSES, CLASSES),
        ("F8_E4M3", 0.01, CLASSES, CLASSES),
        ("BF16", 0.01, GAPS, GAPS),
        ("I32", 0.01, CLASSES, GAPS),
        ("F64", 0.01, CLASSES, GAPS),
        ("BF16", 0.9, CLASSES, DENSE),
        ("U8", 0.9, GAPS, DENSE),
    ],
)
def test_the_codec_is_the_wanted_one_unless_it_does_not_fit(
    dtype: str, density: float, wish: Codec, codec: Codec
) -> None:
    state = random_state(dtype)
    moves = advance_all(replica_of(state), nudged(state, density), wish)
    assert {parse(move.frame).codec for move in moves if move.chunk.count == CHUNK_NUMBERS} == {codec}


def test_frames_say_from_where_to_where_they_lead() -> None:
    state = random_state("BF16")
    target = nudged(state, 0.05)
    replica = replica_of(state)
    for move in advance_all(replica, target):
        frame = parse(move.frame)
        assert frame.before == move.chunk.digest(move.chunk.numbers(state))
        assert frame.after == move.chunk.digest(move.chunk.numbers(target))


def test_a_chunk_that_is_at_the_target_stays() -> None:
    state = random_state("BF16")
    replica = replica_of(state)
    target = snapshot(state)
    target["a"].numbers[CHUNK_NUMBERS] ^= 1
    assert [move.chunk.index for move in advance_all(replica, target)] == [1]
    assert advance_all(replica, target) == []


def test_a_copy_has_its_own_bytes() -> None:
    state = random_state("BF16")
    replica = replica_of(state)
    state["a"].data[:] = 0
    assert replica.tensors["a"].data.any()


@given(seeds=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.02, 0.5]), st.booleans()), max_size=5))
@settings(deadline=None, max_examples=25)
def test_any_chain_of_versions_is_followed(seeds: list[tuple[int, float, bool]]) -> None:
    state = random_state("BF16")
    publisher, receiver = replica_of(state), replica_of(state)
    for seed, density, classes in seeds:
        state = nudged(state, density, seed)
        for move in advance_all(publisher, state, CLASSES if classes else GAPS):
            receiver.apply(move.chunk, parse(move.frame))
        assert bits(receiver.tensors) == bits(publisher.tensors) == bits(state)
        assert receiver.state_digest() == publisher.state_digest() == state_digest(state)


# ── whole chunks, and parts of a replica ──────────────────────────────────────────────────────────────────────────────


@DTYPES
def test_full_frames_fill_an_empty_replica_or_any_other(dtype: str) -> None:
    state = random_state(dtype)
    source = replica_of(state)
    for receiver in (Replica.empty(source.layout), replica_of(random_state(dtype, seed=9))):
        for chunk in source.layout.chunks:
            assert receiver.apply(chunk, parse(source.full(chunk))) is None
        assert bits(receiver.tensors) == bits(state)
        assert receiver.state_digest() == state_digest(state)


# ── idempotence, and what is refused ────────────────────────────────────────────────────────────────────────────────


@CODECS
@DENSITIES
def test_applying_again_changes_nothing(codec: Codec, density: float) -> None:
    state, _, chunk, move = one_move(density, codec)
    receiver = replica_of(state)
    receiver.apply(chunk, parse(move.frame))
    after = bits(receiver.tensors)
    assert receiver.apply(chunk, parse(move.frame)) is None, "after a crash it is unknown which places were new"
    assert bits(receiver.tensors) == after
    assert receiver.digest(chunk) == parse(move.frame).after


@CODECS
@DENSITIES
def test_a_wrong_base_is_refused_and_left_alone(codec: Codec, density: float) -> None:
    state, _, chunk, move = one_move(density, codec)
    stranger = replica_of(nudged(state, 0.01, seed=5))
    before = bits(stranger.tensors)
    for _ in range(2):
        with pytest.raises(DamagedError, match=r"chunk 1 holds .* its frame leads from"):
            stranger.apply(chunk, parse(move.frame))
    assert bits(stranger.tensors) == before


@CODECS
@DENSITIES
@pytest.mark.parametrize("digest_is_known", [True, False])
def test_a_torn_chunk_is_recognised_and_repaired_by_a_whole_one(
    codec: Codec, density: float, digest_is_known: bool
) -> None:
    state, target, chunk, move = one_move(density, codec)
    receiver = replica_of(state)
    if digest_is_known:
        receiver.digest(chunk)
    own, new = receiver.numbers(chunk)[0], chunk.numbers(target)[0]
    own[: len(own) // 2] = new[: len(own) // 2]
    for _ in range(2):
        with pytest.raises(DamagedError, match="chunk 1 "):
            receiver.apply(chunk, parse(move.frame))
    receiver.apply(chunk, parse(encode_full(chunk.numbers(target), chunk.element, after=parse(move.frame).after)))
    assert np.array_equal(concatenated(receiver, chunk), np.concatenate(chunk.numbers(target)))
    assert receiver.digest(chunk) == parse(move.frame).after


def test_what_is_remembered_is_looked_at_again_before_a_frame_is_refused() -> None:
    state, target, chunk, move = one_move()
    receiver = Replica.empty(Layout.of(state, CHUNK_NUMBERS))
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
    receiver = replica_of(state)
    with pytest.raises(DamagedError, match=f"promised {Digest.ZERO.hex()}"):
        receiver.apply(chunk, parse(bytes(lying)))
    with pytest.raises(DamagedError, match="holds"):
        receiver.apply(chunk, parse(bytes(lying)))
    assert receiver.digest(chunk) == chunk.digest(receiver.numbers(chunk)), "a failure leaves no wrong knowledge"


@pytest.mark.parametrize("dtype", ["F32", "U8"])
def test_a_frame_of_another_chunk_is_damage(dtype: str) -> None:
    state, _, chunk, move = one_move()
    receiver = replica_of(state)
    small = receiver.layout.chunks[-1]
    assert small.count < chunk.count
    with pytest.raises(DamagedError, match="does not fit chunk"):
        receiver.apply(small, parse(move.frame))
    other = replica_of(random_state(dtype))
    with pytest.raises(DamagedError, match="does not fit chunk 1"):
        other.apply(other.layout.chunks[1], parse(move.frame))
    with pytest.raises(DamagedError):
        other.apply(
            other.layout.chunks[1], parse(encode_full([np.zeros(500, np.uint16)], chunk.element, after=Digest.ZERO))
        )
    assert bits(other.tensors) == bits(random_state(dtype))


def test_a_frame_of_the_same_width_and_another_type_is_damage() -> None:
    move = one_move()[3]
    receiver = replica_of(random_state("I16"))
    with pytest.raises(DamagedError):
        receiver.apply(receiver.layout.chunks[1], parse(move.frame))


@pytest.mark.parametrize("place", [0, 1, 700, 1999])
def test_scrubbing_finds_a_flipped_bit(place: int) -> None:
    state = random_state("BF16")
    replica = replica_of(state)
    assert replica.state_digest() == state_digest(state)
    assert replica.scrub() == []
    replica.tensors["a"].data[place] ^= 0x40
    assert damaged_chunks(replica) == [place // 2 // CHUNK_NUMBERS]
    replica.tensors["c"].data[-1] ^= 1
    assert damaged_chunks(replica) == [place // 2 // CHUNK_NUMBERS, len(replica.layout.chunks) - 1]


def test_scrubbing_does_not_judge_what_was_never_computed() -> None:
    replica = Replica.empty(Layout.of(random_state("BF16"), CHUNK_NUMBERS))
    replica.tensors["a"].data[:] = 7
    assert replica.scrub() == []


# ── following links ─────────────────────────────────────────────────────────────────────────────────────────────────

MATRIX = TensorSpec(name="m", dtype="BF16", shape=(20, 30))
VECTOR = TensorSpec(name="v", dtype="F32", shape=(50,))
LINK_LAYOUT = Layout(specs=(MATRIX, VECTOR), chunk_numbers=128)
PACK_BYTES = 400
LINK_CODECS: st.SearchStrategy[Codec] = st.sampled_from([GAPS, CLASSES])


@pytest.fixture(scope="module")
def appliers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Trainer:
    """Moves weights at random and gives out links, without a store."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.state: State = {
            spec.name: StoredTensor(spec=spec, data=rng.integers(0, 256, spec_bytes(spec), np.uint8))
            for spec in (MATRIX, VECTOR)
        }
        self._replica = Replica.copy_of(LINK_LAYOUT, self.state)
        self._version = 0

    @property
    def record(self) -> WeightVersion:
        return WeightVersion(
            version=self._version,
            base=None,
            base_digest=None,
            digest=state_digest(self.state),
            layout=LINK_LAYOUT.digest,
            packs=(),
            step=0,
            recipe="",
            writer="",
            created="",
        )

    def step(self, changed: Mapping[str, Sequence[int]], codec: Codec = GAPS) -> list[bytes]:
        """Change some numbers and give out the link to the next version."""
        target = snapshot(self.state)
        for name, places in changed.items():
            target[name].numbers[list(places)] += target[name].numbers.dtype.type(1)
        self.state = target
        self._version += 1
        return as_packs([(move.chunk.index, move.frame) for move in advance_all(self._replica, target, codec)])

    def replica(self, appliers: ThreadPoolExecutor) -> Replica:
        replica = Replica.empty(LINK_LAYOUT)
        everything = as_packs([(chunk.index, self._replica.full(chunk)) for chunk in LINK_LAYOUT.chunks])
        replica.follow(self.record, everything, appliers, ChangedPlaces())
        return replica


def as_packs(frames: Sequence[tuple[int, bytes]]) -> list[bytes]:
    return [pack.data for pack in fill_packs(frames, PACK_BYTES)]


def by_index(runs: Sequence[ChangedNumbers]) -> dict[int, int]:
    """Canonical index → bits, each index once."""
    pairs = [pair for run in runs for pair in zip(run.indices.tolist(), run.bits.tolist(), strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("codec", [GAPS, CLASSES])
def test_a_replica_follows_from_nothing_and_from_before(codec: Codec, appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    replica = trainer.replica(appliers)
    for changed in ({"m": range(0, 600, 40)}, {"v": [3], "m": range(200, 420)}, {}, {"v": range(50)}):
        link = trainer.step(changed, codec)
        replica.follow(trainer.record, link, appliers, ChangedPlaces())
        assert bits(replica.tensors) == bits(trainer.state)
    assert replica.scrub() == []


@given(steps=st.lists(st.lists(st.integers(0, 599), max_size=60, unique=True), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_what_changed_is_named_with_its_new_bits(steps: list[list[int]]) -> None:
    with ThreadPoolExecutor(2) as appliers:
        trainer, changes = Trainer(), ChangedPlaces()
        replica = trainer.replica(appliers)
        for places in steps:
            link = trainer.step({"m": places})
            replica.follow(trainer.record, link, appliers, changes)
    named = by_index(replica.changed(changes).get("m", []))
    assert set(named) >= {place for places in steps for place in places}
    assert named == {index: int(trainer.state["m"].numbers[index]) for index in named}
    assert "v" not in replica.changed(changes)


def test_sparse_changes_are_named_exactly(appliers: ThreadPoolExecutor) -> None:
    trainer, changes = Trainer(), ChangedPlaces()
    replica = trainer.replica(appliers)
    for places in ({"m": [0, 10, 599], "v": [7]}, {"m": [10, 11, 300]}):
        link = trainer.step(places)
        replica.follow(trainer.record, link, appliers, changes)
    named = replica.changed(changes)
    assert set(by_index(named["m"])) == {0, 10, 11, 300, 599}
    assert by_index(named["v"]) == {7: int(trainer.state["v"].numbers[7])}
    for runs in named.values():
        assert all((np.diff(run.indices.astype(np.int64)) > 0).all() for run in runs)


def test_a_replica_that_is_cut_otherwise_names_everything(appliers: ThreadPoolExecutor) -> None:
    trainer, changes = Trainer(), ChangedPlaces()
    replica = trainer.replica(appliers).laid_out(Layout(specs=LINK_LAYOUT.specs, chunk_numbers=100))
    changes.whole = True
    assert {name: len(by_index(runs)) for name, runs in replica.changed(changes).items()} == {"m": 600, "v": 50}
    assert replica.state_digest() == state_digest(trainer.state)
    with pytest.raises(ValueError, match="'v' differs from the version before"):
        replica.laid_out(Layout(specs=(MATRIX,)))


def test_applying_a_link_again_names_all_of_its_chunks(appliers: ThreadPoolExecutor) -> None:
    trainer, changes = Trainer(), ChangedPlaces()
    replica = trainer.replica(appliers)
    link = trainer.step({"m": [130]})
    replica.follow(trainer.record, link, appliers, ChangedPlaces())
    replica.follow(trainer.record, link, appliers, changes)
    assert set(by_index(replica.changed(changes)["m"])) == set(range(128, 256))


def test_a_record_that_lies_about_the_state_is_found_out(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    replica = trainer.replica(appliers)
    link = trainer.step({"m": [1]})
    lying = dataclasses.replace(trainer.record, digest="0" * 32)
    with pytest.raises(DamagedError, match=r"gives the state .* its commit record says 000000000000"):
        replica.follow(lying, link, appliers, ChangedPlaces())


@pytest.mark.parametrize("lost", [0, -1])
def test_a_link_that_lacks_a_pack_is_found_out(lost: int, appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    replica = trainer.replica(appliers)
    link = trainer.step({"m": range(0, 600, 3)})
    del link[lost]
    with pytest.raises(DamagedError, match="gives the state"):
        replica.follow(trainer.record, link, appliers, ChangedPlaces())


def test_a_link_from_another_version_is_refused(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    replica = trainer.replica(appliers)
    trainer.step({"m": [1]})
    link = trainer.step({"m": [2]})
    with pytest.raises(DamagedError, match="its frame leads from"):
        replica.follow(trainer.record, link, appliers, ChangedPlaces())


def test_a_link_that_changes_a_chunk_twice_is_refused(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    replica = trainer.replica(appliers)
    before = bits(replica.tensors)
    link = trainer.step({"m": [1]}) + trainer.step({"m": [1]})
    with pytest.raises(DamagedError, match="changes a chunk twice"):
        replica.follow(trainer.record, link, appliers, ChangedPlaces())
    assert bits(replica.tensors) == before


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_damaged_packs_never_give_other_weights(data: st.DataObject) -> None:
    with ThreadPoolExecutor(1) as appliers:
        trainer = Trainer()
        replica = trainer.replica(appliers)
        link = trainer.step({"m": range(0, 600, 50), "v": [3]}, data.draw(LINK_CODECS))
        chosen = data.draw(st.integers(0, len(link) - 1))
        damaged = bytearray(link[chosen])
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        link[chosen] = bytes(damaged)
        try:
            replica.follow(trainer.record, link, appliers, ChangedPlaces())
        except DamagedError:
            return
    assert bits(replica.tensors) == bits(trainer.state)


def test_frames_of_chunks_that_are_not_there_do_no_harm(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    replica = trainer.replica(appliers)
    link = [*trainer.step({"m": [1]}), *as_packs([(9999, b"junk")])]
    replica.follow(trainer.record, link, appliers, ChangedPlaces())
    assert bits(replica.tensors) == bits(trainer.state)


def positions(*places: int) -> Positions:
    return np.array(places, np.uint32)


def test_touched_places_of_several_links_are_united() -> None:
    changes = ChangedPlaces()
    changes.note(3, positions(1, 5))
    changes.note(2, None)
    changes.note(1, positions(7))
    changes.note(3, positions(2, 5, 9))
    changes.note(2, positions(3))
    changes.note(1, None)
    named = [(chunk, None if places is None else places.tolist()) for chunk, places in changes.places()]
    assert named == [(1, None), (2, None), (3, [1, 2, 5, 9])]
    assert not changes.whole
