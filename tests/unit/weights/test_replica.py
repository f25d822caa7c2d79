"""A replica follows links to the proven state, says what changed, and takes nothing that does not fit."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import TensorSpec, WeightPack, WeightVersion
from etude.weights.chunks import Layout, Part, Positions
from etude.weights.digest import state_digest
from etude.weights.frames import Codec
from etude.weights.packs import fill_packs
from etude.weights.replica import ChangedNumbers, Changes, Replica
from etude.weights.shards import Share
from etude.weights.state import Region, State, StoredTensor, snapshot
from etude.weights.subscription import EVERYTHING, Want

MATRIX = TensorSpec(name="m", dtype="BF16", shape=(20, 30))
VECTOR = TensorSpec(name="v", dtype="F32", shape=(50,))
CHUNK_NUMBERS = 128
PACK_BYTES = 400

Packs = list[tuple[WeightPack, bytes]]


def columns(low: int, high: int) -> Part:
    return Part(spec=MATRIX, region=Region(offset=low, width=high - low, stride=30, rows=20))


def layout(*parts: Part) -> Layout:
    return Layout(parts=parts, chunk_numbers=CHUNK_NUMBERS)


ALONE = (layout(Part(spec=MATRIX, region=Region.run(0, 600)), Part(spec=VECTOR, region=Region.run(0, 50))),)
PAIR = (layout(columns(0, 11), Part(spec=VECTOR, region=Region.run(0, 50))), layout(columns(11, 30)))
TRIO = (layout(columns(0, 5)), layout(columns(5, 30)), layout(Part(spec=VECTOR, region=Region.run(0, 50))))


@pytest.fixture(scope="module")
def appliers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Trainer:
    """Moves weights at random and publishes them to whoever asks, without a store."""

    def __init__(self, layouts: Sequence[Layout], seed: int = 0) -> None:
        self.layouts = tuple(layouts)
        self._random = np.random.default_rng(seed)
        self.state: State = {spec.name: self._tensor(spec) for spec in (MATRIX, VECTOR)}
        self._shares = [Share.copy_of(layout, layout.cut(self.state)) for layout in layouts]
        self._version = 0

    @property
    def record(self) -> WeightVersion:
        return WeightVersion(
            version=self._version,
            base=None,
            base_digest=None,
            digest=state_digest(self.state),
            layouts=tuple(layout.digest for layout in self.layouts),
            packs=(),
            step=0,
            recipe="",
            writer="",
            created="",
        )

    def full(self) -> Packs:
        """Everything."""
        return [
            pack
            for rank, share in enumerate(self._shares)
            for pack in as_packs(rank, [(chunk.index, share.full(chunk)) for chunk in share.layout.chunks])
        ]

    def step(self, changed: Mapping[str, Sequence[int]], codec: Codec = Codec.GAPS) -> Packs:
        """Change some numbers and give out the link to the next version."""
        target = snapshot(self.state)
        for name, places in changed.items():
            target[name].numbers[list(places)] += target[name].numbers.dtype.type(1)
        self.state = target
        self._version += 1
        link: Packs = []
        for rank, share in enumerate(self._shares):
            cut = share.layout.cut(target)
            moves = [share.advance(chunk, cut, codec) for chunk in share.layout.chunks]
            link += as_packs(rank, [(move.chunk.index, move.frame) for move in moves if move is not None])
        return link

    def replica(self, appliers: ThreadPoolExecutor, want: Want = EVERYTHING) -> Replica:
        empty = Replica.empty(self.record, self.layouts, want)
        return empty.follow(self.record, self.full(), appliers, Changes())

    def _tensor(self, spec: TensorSpec) -> StoredTensor:
        size = {"BF16": 2, "F32": 4}[spec.dtype] * int(np.prod(spec.shape))
        return StoredTensor(spec=spec, data=self._random.integers(0, 256, size, np.uint8))


def as_packs(rank: int, frames: Sequence[tuple[int, bytes]]) -> Packs:
    return [
        (
            WeightPack(
                digest=hashlib.sha256(pack.data).hexdigest(),
                size_bytes=len(pack.data),
                rank=rank,
                first=pack.first,
                last=pack.last,
            ),
            pack.data,
        )
        for pack in fill_packs(frames, PACK_BYTES)
    ]


def bits(state: State) -> dict[str, bytes]:
    return {name: tensor.data.tobytes() for name, tensor in state.items()}


def by_index(runs: Sequence[ChangedNumbers]) -> dict[int, int]:
    """Canonical index → bits, each index once."""
    pairs = [pair for run in runs for pair in zip(run.indices.tolist(), run.bits.tolist(), strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


# ── following ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layouts", [ALONE, PAIR, TRIO], ids=["alone", "pair", "trio"])
@pytest.mark.parametrize("codec", [Codec.GAPS, Codec.CLASSES])
def test_a_replica_follows_from_nothing_and_from_before(
    layouts: Sequence[Layout], codec: Codec, appliers: ThreadPoolExecutor
) -> None:
    trainer = Trainer(layouts)
    replica = trainer.replica(appliers)
    for changed in ({"m": range(0, 600, 40)}, {"v": [3], "m": range(200, 420)}, {}, {"v": range(50)}):
        link = trainer.step(changed, codec)
        replica = replica.follow(trainer.record, link, appliers, Changes())
        weights = replica.weights()
        assert bits(weights.state) == bits(trainer.state)
        assert (weights.version, weights.digest) == (trainer.record.version, state_digest(weights.state))
    assert replica.scrub() == []


@given(steps=st.lists(st.lists(st.integers(0, 599), max_size=60, unique=True), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_what_changed_is_named_with_its_new_bits(steps: list[list[int]]) -> None:
    with ThreadPoolExecutor(2) as appliers:
        trainer, changes = Trainer(PAIR), Changes()
        replica = trainer.replica(appliers)
        for places in steps:
            link = trainer.step({"m": places})
            replica = replica.follow(trainer.record, link, appliers, changes)
    found = by_index(replica.changed(changes).get("m", []))
    assert set(found) >= {place for places in steps for place in places}
    assert found == {index: int(trainer.state["m"].numbers[index]) for index in found}
    assert "v" not in replica.changed(changes)


def test_sparse_changes_are_named_exactly(appliers: ThreadPoolExecutor) -> None:
    trainer, changes = Trainer(PAIR), Changes()
    replica = trainer.replica(appliers)
    for places in ({"m": [0, 10, 599], "v": [7]}, {"m": [10, 11, 300]}):
        link = trainer.step(places)
        replica = replica.follow(trainer.record, link, appliers, changes)
    found = replica.changed(changes)
    assert set(by_index(found["m"])) == {0, 10, 11, 300, 599}
    assert by_index(found["v"]) == {7: int(trainer.state["v"].numbers[7])}
    for runs in found.values():
        assert all((np.diff(run.indices.astype(np.int64)) > 0).all() for run in runs)


def test_when_everything_may_have_changed_everything_is_named(appliers: ThreadPoolExecutor) -> None:
    trainer, changes = Trainer(PAIR), Changes()
    replica = trainer.replica(appliers)
    link = trainer.step({"m": [5]})
    replica = replica.follow(trainer.record, link, appliers, changes)
    changes.whole = True
    found = replica.laid_out(ALONE).changed(changes)
    assert {name: len(by_index(runs)) for name, runs in found.items()} == {"m": 600, "v": 50}


def test_applying_a_link_again_names_all_of_its_chunks(appliers: ThreadPoolExecutor) -> None:
    trainer, changes = Trainer(ALONE), Changes()
    replica = trainer.replica(appliers)
    link = trainer.step({"m": [130]})
    replica.follow(trainer.record, link, appliers, Changes())
    again = replica.follow(trainer.record, link, appliers, changes)
    assert set(by_index(again.changed(changes)["m"])) == set(range(128, 256))


def test_whole_tensors_are_not_copied_out(appliers: ThreadPoolExecutor) -> None:
    replica = Trainer(PAIR).replica(appliers)
    shared = {
        name: any(np.shares_memory(tensor.data, share.tensors[name].data)
                  for _, share in replica.present() if name in share.tensors)
        for name, tensor in replica.weights().state.items()
    }  # fmt: skip
    assert shared == {"m": False, "v": True}


def test_a_replica_can_be_laid_out_for_other_ranks(appliers: ThreadPoolExecutor) -> None:
    pair, trio = Trainer(PAIR), Trainer(TRIO)
    before = pair.replica(appliers)
    replica = before.laid_out(TRIO)
    assert bits(replica.weights().state) == bits(pair.state)
    link = trio.step({"m": range(0, 600, 31), "v": [0]})
    replica = replica.follow(trio.record, link, appliers, Changes())
    assert bits(replica.weights().state) == bits(trio.state)
    assert bits(before.weights().state) == bits(pair.state), "it has its own memory"


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_what_is_wanted_is_held_and_followed(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(PAIR)
    replica = trainer.replica(appliers, Want(ranks=frozenset({1})))
    assert [rank for rank, _ in replica.present()] == [1]
    changes = Changes()
    link = trainer.step({"m": [0, 11, 29, 31], "v": [1]})
    replica = replica.follow(trainer.record, link, appliers, changes)
    ((_, share),) = replica.present()
    assert bits(share.tensors) == bits(PAIR[1].cut(trainer.state))
    assert set(by_index(replica.changed(changes)["m"])) == {11, 29}
    with pytest.raises(ValueError, match="a share is missing"):
        replica.weights()
    with pytest.raises(DamagedError, match="read it from nothing"):
        replica.laid_out(ALONE)


def test_only_wanted_chunks_are_followed(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(ALONE)
    replica = trainer.replica(appliers, Want(pieces=lambda piece: piece.part.spec.name == "v"))
    link = trainer.step({"m": range(600), "v": [1, 49]})
    replica = replica.follow(trainer.record, link, appliers, Changes())
    ((_, share),) = replica.present()
    assert bits(share.tensors) == {"v": trainer.state["v"].data.tobytes()}


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_record_that_lies_about_the_state_is_found_out(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(PAIR)
    replica = trainer.replica(appliers)
    link = trainer.step({"m": [1]})
    lying = dataclasses.replace(trainer.record, digest="0" * 32)
    with pytest.raises(DamagedError, match=r"gives the state .* its commit record says 000000000000"):
        replica.follow(lying, link, appliers, Changes())


@pytest.mark.parametrize("lost", [0, -1])
def test_a_link_that_lacks_a_pack_is_found_out(lost: int, appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(PAIR)
    replica = trainer.replica(appliers)
    link = trainer.step({"m": range(0, 600, 3)})
    del link[lost]
    with pytest.raises(DamagedError, match="gives the state"):
        replica.follow(trainer.record, link, appliers, Changes())


def test_a_link_from_another_version_is_refused(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(PAIR)
    replica = trainer.replica(appliers)
    trainer.step({"m": [1]})
    link = trainer.step({"m": [2]})
    with pytest.raises(DamagedError, match="its frame leads from"):
        replica.follow(trainer.record, link, appliers, Changes())
    assert bits(replica.weights().state) != bits(trainer.state)


def test_a_link_that_changes_a_chunk_twice_is_refused(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(PAIR)
    replica = trainer.replica(appliers)
    before = bits(replica.weights().state)
    link = trainer.step({"m": [1]}) + trainer.step({"m": [1]})
    with pytest.raises(DamagedError, match="changes a chunk twice"):
        replica.follow(trainer.record, link, appliers, Changes())
    assert bits(replica.weights().state) == before


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_damaged_packs_never_give_other_weights(data: st.DataObject) -> None:
    with ThreadPoolExecutor(1) as appliers:
        trainer = Trainer(PAIR)
        replica = trainer.replica(appliers)
        link = trainer.step({"m": range(0, 600, 50), "v": [3]}, data.draw(st.sampled_from([Codec.GAPS, Codec.CLASSES])))
        chosen = data.draw(st.integers(0, len(link) - 1))
        pack, content = link[chosen]
        damaged = bytearray(content)
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        link[chosen] = (pack, bytes(damaged))
        try:
            replica = replica.follow(trainer.record, link, appliers, Changes())
        except DamagedError:
            return
    assert bits(replica.weights().state) == bits(trainer.state)


def test_packs_of_ranks_and_chunks_that_are_not_there_do_no_harm(appliers: ThreadPoolExecutor) -> None:
    trainer = Trainer(PAIR)
    replica = trainer.replica(appliers)
    link = [*trainer.step({"m": [1]}), *as_packs(9, [(0, b"junk")]), *as_packs(0, [(9999, b"junk")])]
    replica = replica.follow(trainer.record, link, appliers, Changes())
    assert bits(replica.weights().state) == bits(trainer.state)


def test_scrubbing_names_the_rank_and_the_chunk(appliers: ThreadPoolExecutor) -> None:
    replica = Trainer(PAIR).replica(appliers)
    ((_, share),) = [(rank, share) for rank, share in replica.present() if rank == 1]
    share.tensors["m"].numbers[CHUNK_NUMBERS + 1] ^= 4
    assert [(rank, chunk.index) for rank, chunk in replica.scrub()] == [(1, 1)]


# ── what may have changed ───────────────────────────────────────────────────────────────────────────────────────────


def positions(*places: int) -> Positions:
    return np.array(places, np.uint32)


def test_touched_places_of_several_links_are_united() -> None:
    changes = Changes()
    changes.note(1, 0, positions(1, 5))
    changes.note(0, 2, None)
    changes.note(0, 1, positions(7))
    changes.note(1, 0, positions(2, 5, 9))
    changes.note(0, 2, positions(3))
    changes.note(0, 1, None)
    named = [(rank, chunk, None if places is None else places.tolist()) for rank, chunk, places in changes.places()]
    assert named == [(0, 1, None), (0, 2, None), (1, 0, [1, 2, 5, 9])]


def test_nothing_has_changed_at_first() -> None:
    assert list(Changes().places()) == []
    assert not Changes().whole
