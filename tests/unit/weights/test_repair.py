"""What is broken is mended from a mirror or made again, and nothing is invented."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from etude.weights.codec_choice import CodecWish
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import pull
from etude.weights.records import commit_key, layout_key, link_key, pack_key
from etude.weights.relay import Relay
from etude.weights.repair import Repair, repair
from etude.weights.store import ObjectStore
from etude.weights.synthetic_updates import alike, drifting
from etude.weights.verify import verify

OPTIONS = PublishOptions(codec="gaps", chunk_numbers=512, pack_bytes=1000, encoders=2, uploads=2, anchor_every=3)

Break = Callable[[ObjectStore, str], None]


def tear(store: ObjectStore, key: str) -> None:
    store.renew(key, b"torn")


BREAKS: tuple[Break, ...] = (tear, ObjectStore.delete)


def published(store: ObjectStore, newest: int, codec: CodecWish = "gaps") -> WeightLog:
    log = WeightLog(store)
    with Publisher(log, replace(OPTIONS, codec=codec)) as publisher:
        for version in range(newest + 1):
            publisher.publish(drifting(version), version=version, step=version).result(60)
            publisher.settle()
    return log


def mirrored(log: WeightLog) -> WeightLog:
    mirror = WeightLog(ObjectStore("memory://"))
    with Relay(log, mirror) as relay:
        relay.advance()
    return mirror


def mended(store: ObjectStore, mirror: WeightLog | None = None) -> list[Repair]:
    return list(repair(WeightLog(store), mirror))


def assert_sound(store: ObjectStore, newest: int) -> None:
    log = WeightLog(store)
    assert not [check for check in verify(log) if check.fault]
    for version in range(newest + 1):
        assert alike(pull(log, version).state, drifting(version))


def test_a_sound_log_is_left_alone() -> None:
    store = ObjectStore("memory://")
    published(store, 4)
    assert mended(store) == []


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("codec", ["gaps", "classes"])
def test_a_delta_is_encoded_again_from_its_ends(codec: CodecWish, breaks: Break) -> None:
    """Version 3 can be had from its anchor, version 2 from the chain: what leads from one to the other is known."""
    store = ObjectStore("memory://")
    log = published(store, 4, codec)
    record = log.read(3)
    assert record is not None
    for pack in record.packs:
        breaks(store, pack_key(pack.digest))
    found = mended(store)
    assert {one.name for one in found} == {pack_key(pack.digest) for pack in record.packs}
    assert {(one.action, one.mended) for one in found} == {("encoded again", True)}
    assert_sound(store, 4)


@pytest.mark.parametrize("breaks", BREAKS)
def test_a_mirror_has_what_cannot_be_made_again(breaks: Break) -> None:
    store = ObjectStore("memory://")
    log = published(store, 2)
    mirror = mirrored(log)
    record = log.read(1)
    assert record is not None
    names = [*(pack_key(pack.digest) for pack in record.packs), layout_key(record.layouts[0])]
    for name in names:
        breaks(store, name)
    alone = mended(store)
    assert {one.mended for one in alone} == {False}
    assert {one.name for one in alone} == set(names)
    assert {one.action for one in mended(store, mirror)} == {"copied from the mirror"}
    assert_sound(store, 2)


def test_a_commit_record_comes_from_the_mirror_or_not_at_all() -> None:
    store = ObjectStore("memory://")
    mirror = mirrored(published(store, 2))
    tear(store, commit_key(2))
    (left,) = mended(store)
    assert (left.name, left.mended) == (commit_key(2), False)
    mirror.store.renew(commit_key(2), b"torn as well")
    assert not any(one.mended for one in mended(store, WeightLog(mirror.store)))


def test_a_commit_record_and_what_it_names_are_mended_together() -> None:
    store = ObjectStore("memory://")
    log = published(store, 2)
    mirror = mirrored(log)
    record = log.read(2)
    assert record is not None
    tear(store, commit_key(2))
    tear(store, pack_key(record.packs[0].digest))
    found = mended(store, mirror)
    assert {(one.name, one.mended) for one in found} == {
        (commit_key(2), True),
        (pack_key(record.packs[0].digest), True),
    }
    assert_sound(store, 2)


def test_a_broken_link_is_removed() -> None:
    store = ObjectStore("memory://")
    log = published(store, 8)
    (merged,) = [link for link in log.links() if (link.source, link.target) == (4, 8)]
    tear(store, link_key(0, 4))
    tear(store, pack_key(merged.packs[0].digest))
    found = mended(store)
    assert {one.name for one in found if one.action.startswith("removed")} == {link_key(0, 4), link_key(4, 8)}
    assert_sound(store, 8)
