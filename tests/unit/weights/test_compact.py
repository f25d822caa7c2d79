"""Merged and inverse links lead where the chain leads, in fewer steps and fewer bytes."""

from dataclasses import replace

import pytest

from etude.errors import DamagedError
from etude.objects import ObjectStore
from etude.types import TensorSpec
from etude.weights.compact import Compactor
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import Receiver, pull
from etude.weights.records import pack_key
from etude.weights.state import State, StoredTensor
from synthetic_updates import alike, synthetic_version

OPTIONS = PublishOptions(codec="gaps", chunk_numbers=512, encoders=2, uploads=2, anchor_every=0, compact=False)


def chain(newest: int, codec: str = "gaps") -> WeightLog:
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log, replace(OPTIONS, codec=codec)) as publisher:
        for version in range(newest + 1):
            publisher.publish(synthetic_version(version), version=version, step=version).result(60)
    return log


def ends(log: WeightLog) -> list[tuple[int | None, int]]:
    return [(link.source, link.target) for link in log.links()]


def test_links_are_written_as_the_ladder_says() -> None:
    log = chain(32)
    compactor = Compactor(log)
    for version in range(33):
        compactor.after(version)
    assert ends(log) == sorted([(low, low + 4) for low in range(0, 32, 4)] + [(0, 16), (16, 32)])
    before = ends(log)
    Compactor(log, pack_bytes=1).after(32)
    assert ends(log) == before, "what is there is not written again"


@pytest.mark.parametrize(("source", "target"), [(0, 4), (2, 9), (9, 2), (1, 0), (0, 9), (9, 0)])
def test_a_link_leads_to_the_same_bytes(source: int, target: int) -> None:
    log = chain(9)
    link = Compactor(log, pack_bytes=100).link(source, target)
    assert link is not None
    assert link.digest == pull(log, target).digest
    with Receiver(log) as receiver:
        receiver.advance(source)
        assert receiver.advance(target).links == 1
        assert alike(receiver.weights().state, synthetic_version(target))


def test_a_merged_link_is_smaller_than_the_deltas() -> None:
    log = chain(8)
    link = Compactor(log).link(0, 8)
    assert link is not None
    deltas = sum(pack.size_bytes for edge in log.edges(0, 8) if edge.kind == "delta" for pack in edge.packs)
    assert sum(pack.size_bytes for pack in link.packs) < 0.7 * deltas


def test_there_and_back_is_an_empty_link() -> None:
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log, OPTIONS) as publisher:
        for version, content in enumerate((0, 1, 0)):
            publisher.publish(synthetic_version(content), version=version, step=version).result(60)
    link = Compactor(log).link(0, 2)
    assert link is not None and link.packs == ()
    with Receiver(log) as receiver:
        receiver.advance(0)
        assert receiver.advance(2).size_bytes == 0
        assert alike(receiver.weights().state, synthetic_version(0))


def test_class_frames_cannot_be_merged() -> None:
    log = chain(4, codec="classes")
    assert Compactor(log).link(0, 4) is None
    assert ends(log) == []


def test_nothing_is_merged_over_whole_missing_or_differently_laid_out_versions() -> None:
    log = chain(2)
    compactor = Compactor(log)
    assert compactor.link(0, 5) is None
    assert compactor.link(0, 1) is None, "that is a delta already"
    with Publisher(log, OPTIONS) as publisher:
        publisher.publish(synthetic_version(6), version=6, step=6).result(60)
        publisher.publish(synthetic_version(7), version=7, step=7).result(60)
    assert compactor.link(1, 7) is not None, "versions that were never committed do not hinder"
    with Publisher(log, replace(OPTIONS, chunk_numbers=100)) as publisher:
        publisher.publish(synthetic_version(8), version=8, step=8).result(60)
    assert compactor.link(6, 8) is None
    assert (6, 8) not in ends(log)


def test_damage_on_the_way_is_told() -> None:
    log = chain(4)
    record = log.read(2)
    assert record is not None
    log.store.delete(*(pack_key(pack.digest) for pack in record.packs))
    with pytest.raises(DamagedError, match="is not in memory"):
        Compactor(log).link(0, 4)
    assert ends(log) == []


def tiny(version: int) -> State:
    spec = TensorSpec(name="w", dtype="BF16", shape=(64,))
    data = synthetic_version(version, rows=1, columns=64)["layer.bf16"].data
    return {"w": StoredTensor(spec=spec, data=data)}


def test_a_reader_a_thousand_versions_behind_arrives_in_few_links() -> None:
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log, replace(OPTIONS, compact=True)) as publisher:
        for version in range(1001):
            publisher.publish(tiny(version), version=version, step=version).result(60)
            if version % 64 == 0:
                publisher.settle()
        publisher.settle()
    with Receiver(log) as receiver:
        receiver.advance(0)
        arrival = receiver.advance()
        assert arrival.version == 1000
        assert arrival.links <= 1000 // 64 + 3 * 3
        assert alike(receiver.weights().state, tiny(1000))
