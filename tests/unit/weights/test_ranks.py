"""Several ranks publish one version: sharded any way, dying at any time, launched again with another world size."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from etude.errors import DamagedError, FencedError, InfrastructureError
from etude.types import WeightVersion
from etude.weights.chunks import Layout, Part
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import Receiver, pull, pull_share
from etude.weights.ranks import Rank
from etude.weights.records import pack_key
from etude.weights.state import Region, State
from etude.weights.store import ObjectStore
from etude.weights.synthetic_updates import alike, drifting

OPTIONS = PublishOptions(codec="gaps", chunk_numbers=256, pack_bytes=1500, encoders=2, uploads=2, deadline_s=60)


def cut(state: State, world: int) -> list[State]:
    """Rows of the first two tensors, columns of the third, and whole tensors, as experts are, of the rest."""
    parts: list[list[Part]] = [[] for _ in range(world)]
    ordered = sorted(state.items(), key=lambda item: (item[1].spec.dtype, item[0]))
    for place, (name, tensor) in enumerate(ordered):
        for rank in range(world):
            if name in ("layer.bf16", "layer.f32"):
                rows, width = tensor.spec.shape
                region = Region.run(rank * rows // world * width, (rank + 1) * rows // world * width)
            elif name == "layer.f8_e4m3":
                rows, width = tensor.spec.shape
                first, last = rank * width // world, (rank + 1) * width // world
                region = Region(offset=first, width=last - first, stride=width, rows=rows)
            elif place % world == rank:
                region = tensor.held
            else:
                continue
            parts[rank].append(Part(spec=tensor.spec, region=region))
    return [Layout(parts=tuple(own)).cut(state) for own in parts]


@contextmanager
def launch(log: WeightLog, world: int, name: str, options: PublishOptions = OPTIONS) -> Iterator[Sequence[Publisher]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Publisher(log, options, Rank(index=index, world=world, launch=name)))
            for index in range(world)
        ]


@contextmanager
def impatient(*publishers: Publisher) -> Iterator[None]:
    """For what must fail: these wait a moment for the other ranks. What must succeed may take its time."""
    with ExitStack() as stack:
        for publisher in publishers:
            stack.enter_context(patch.object(publisher._ranks, "_deadline_s", 0.3))
        yield


def publish(publishers: Sequence[Publisher], version: int) -> list[WeightVersion]:
    shares = cut(drifting(version), len(publishers))
    publications = [
        publisher.publish(share, version=version, step=version)
        for publisher, share in zip(publishers, shares, strict=True)
    ]
    return [publication.result(60) for publication in publications]


def memory_log() -> WeightLog:
    return WeightLog(ObjectStore("memory://"))


def assert_newest(receiver: Receiver, version: int) -> None:
    receiver.advance()
    weights = receiver.weights()
    assert weights.version == version
    assert weights.digest == state_digest(drifting(version))
    assert alike(weights.state, drifting(version))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_publish_one_version_together(world: int) -> None:
    log = memory_log()
    with launch(log, world, "first", replace(OPTIONS, anchor_every=4)) as publishers, Receiver(log) as receiver:
        for version in range(9):
            records = publish(publishers, version)
            assert len(set(records)) == 1, "all ranks see the record of rank 0"
            assert len(records[0].layouts) == world
            assert {pack.rank for pack in records[0].packs} <= set(range(world))
            assert_newest(receiver, version)
        for publisher in publishers:
            publisher.settle()
    assert [(link.source, link.target) for link in log.links()] == [(0, 4), (4, 8), (None, 4), (None, 8)]
    for version in range(9):
        assert alike(pull(log, version).state, drifting(version))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_share_can_be_had_alone(rank: int) -> None:
    log = memory_log()
    with launch(log, 2, "first") as publishers:
        for version in range(3):
            publish(publishers, version)
    share = cut(drifting(2), 2)[rank]
    assert alike(pull_share(log, 2, rank, Layout.of(share, OPTIONS.chunk_numbers)).tensors, share)
    assert alike(pull_share(log, 2, 7, Layout.of(share)).tensors, share)
    whole = drifting(2)
    assert alike(pull_share(log, 2, 0, Layout.of(whole)).tensors, whole)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_another_world_size_goes_on_where_the_last_one_stopped(before: int, after: int) -> None:
    log = memory_log()
    with Receiver(log) as receiver:
        for launched, world in enumerate((before, after, before)):
            with launch(log, world, f"launch-{launched}", replace(OPTIONS, anchor_every=0)) as publishers:
                for version in range(3 * launched, 3 * launched + 3):
                    records = publish(publishers, version)
                    assert records[0].base == (version - 1 if version else None)
                    assert_newest(receiver, version)
    for version in range(9):
        assert alike(pull(log, version).state, drifting(version))


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_silent_rank_costs_one_version(silent: int) -> None:
    log = memory_log()
    with launch(log, 3, "first") as publishers, Receiver(log) as receiver:
        publish(publishers, 0)
        shares = cut(drifting(1), 3)
        with impatient(*publishers):
            others = [
                publisher.publish(share, version=1, step=1)
                for rank, (publisher, share) in enumerate(zip(publishers, shares, strict=True))
                if rank != silent
            ]
            for publication in others:
                with pytest.raises(InfrastructureError, match=r"rank 0 did not commit|ranks \[\d\] did not announce"):
                    publication.result(60)
        assert_newest(receiver, 0)
        assert {record.base for record in publish(publishers, 2)} == {0}
        assert_newest(receiver, 2)


def test_a_failed_version_can_be_tried_again() -> None:
    log = memory_log()
    with launch(log, 2, "first", replace(OPTIONS, codec="classes")) as publishers:
        publish(publishers, 0)
        with impatient(publishers[1]), pytest.raises(InfrastructureError):
            publishers[1].publish(cut(drifting(1), 2)[1], version=1, step=1).result(60)
        assert publish(publishers, 1)[0].base == 0
        with impatient(publishers[1]), pytest.raises(InfrastructureError):
            publishers[1].publish(cut(drifting(2), 2)[1], version=2, step=2).result(60)
        with pytest.raises(FencedError, match="contributed other weights"):
            publishers[1].publish(cut(drifting(22), 2)[1], version=2, step=2).result(60)
    assert alike(pull(log).state, drifting(1))


def test_a_rank_that_missed_a_commit_goes_on_from_the_log() -> None:
    log = memory_log()
    with launch(log, 2, "first") as publishers, Receiver(log) as receiver:
        publish(publishers, 0)
        shares = cut(drifting(1), 2)
        with impatient(publishers[1]), pytest.raises(InfrastructureError, match="rank 0 did not commit"):
            publishers[1].publish(shares[1], version=1, step=1).result(60)
        assert publishers[0].publish(shares[0], version=1, step=1).result(60).base == 0
        assert_newest(receiver, 1)
        assert publish(publishers, 2)[0].base == 1
        assert_newest(receiver, 2)


def test_a_change_of_another_version_is_not_taken() -> None:
    log, other = memory_log(), memory_log()
    with launch(log, 2, "first") as publishers, launch(other, 2, "first") as elsewhere:
        publish(publishers, 0)
        publish(elsewhere, 0)
        publish(publishers, 1)
        # It lets everyone know that its change starts from version 0.
        with impatient(elsewhere[1]), pytest.raises(InfrastructureError):
            elsewhere[1].publish(cut(drifting(2), 2)[1], version=2, step=2).result(60)
        for key in other.store.list("staged/00000002"):
            data = other.store.get(key)
            assert data is not None
            log.store.put_if_absent(key, data)
        apart = r"ranks \[1\] did not announce weight version 2, or built it upon"
        with impatient(publishers[0]), pytest.raises(InfrastructureError, match=apart):
            publishers[0].publish(cut(drifting(2), 2)[0], version=2, step=2).result(60)
        assert log.latest() == 1
        assert publish(publishers, 2)[0].base == 1
    assert alike(pull(log).state, drifting(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_share_is_damaged_the_next_launch_publishes_all_of_them(rank: int) -> None:
    log = memory_log()
    with launch(log, 2, "first", replace(OPTIONS, anchor_every=0)) as publishers:
        for version in range(3):
            records = publish(publishers, version)
    log.store.delete(*(pack_key(pack.digest) for pack in records[0].packs if pack.rank == rank))
    with launch(log, 2, "second") as publishers, Receiver(log) as receiver:
        with pytest.raises(DamagedError):
            receiver.advance()
        assert publish(publishers, 3)[0].kind == "full"
        assert_newest(receiver, 3)
        assert publish(publishers, 4)[0].base == 3
        assert_newest(receiver, 4)


def test_readers_that_no_way_leads_on_are_helped_by_the_version_after_the_next() -> None:
    log = memory_log()
    with launch(log, 2, "first", replace(OPTIONS, anchor_every=0)) as publishers, Receiver(log) as receiver:
        publish(publishers, 0)
        assert_newest(receiver, 0)
        record = publish(publishers, 1)[0]
        log.store.delete(*(pack_key(pack.digest) for pack in record.packs if pack.rank == 1))
        with pytest.raises(DamagedError):
            receiver.advance()
        assert [publish(publishers, version)[0].kind for version in (2, 3, 4)] == ["delta", "full", "delta"]
        assert_newest(receiver, 4)


def test_a_number_on_two_ranks_is_refused() -> None:
    log, shares = memory_log(), cut(drifting(0), 2)
    replicated = [{**share, "counter": drifting(0)["counter"]} for share in shares]
    with launch(log, 2, "first") as publishers:
        publications = [
            publisher.publish(share, version=0, step=0) for publisher, share in zip(publishers, replicated, strict=True)
        ]
        with pytest.raises(ValueError, match=r"the ranks hold 4 numbers of .*counter"):
            publications[0].result(60)
        with launch(log, 1, "second") as (later,):  # whoever commits ends what rank 1 still waits for
            later.publish(drifting(0), version=0, step=0).result(60)
        with pytest.raises(FencedError, match="was committed by second"):
            publications[1].result(60)


def test_a_late_zombie_rank_0_is_fenced() -> None:
    log = memory_log()
    with launch(log, 1, "old") as (zombie,), launch(log, 2, "new") as publishers:
        zombie.publish(drifting(0), version=0, step=0).result(60)
        publish(publishers, 1)
        with pytest.raises(FencedError, match="already committed"):
            zombie.publish(drifting(66), version=1, step=1).result(60)
        publish(publishers, 2)
    assert alike(pull(log).state, drifting(2))


def test_ranks_need_a_launch_and_a_place() -> None:
    with pytest.raises(ValueError, match="launch name"):
        Rank(index=0, world=2)
    with pytest.raises(ValueError, match="below the world size"):
        Rank(index=2, world=2, launch="a")


def test_readers_may_follow_while_ranks_publish() -> None:
    log = memory_log()
    with launch(log, 2, "first") as publishers:
        publish(publishers, 0)

        def follow() -> int:
            with Receiver(log) as receiver:
                while receiver.version != 12:
                    receiver.prefetch()
                    receiver.advance()
                    assert receiver.version is not None
                    assert alike(receiver.weights().state, drifting(receiver.version))
                return receiver.version

        with ThreadPoolExecutor(2) as readers:
            arrived = [readers.submit(follow) for _ in range(2)]
            for version in range(1, 13):
                publish(publishers, version)
            assert [one.result(60) for one in arrived] == [12, 12]
