"""A region's store is a log in its own right: each byte comes from far away once."""

from collections import Counter
from dataclasses import replace

import pytest

from etude.errors import DamagedError, FencedError, InfrastructureError
from etude.objects import ObjectStore
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import Receiver, pull
from etude.weights.records import commit_key, pack_key
from etude.weights.relay import Relay
from faulty_store import Failure, FaultyStore
from synthetic_updates import alike, synthetic_version

OPTIONS = PublishOptions(codec="gaps", chunk_numbers=512, pack_bytes=1000, encoders=2, uploads=2, anchor_every=0)
KEY = b"the key that signs records"


def memory_log(key: bytes | None = None) -> WeightLog:
    return WeightLog(ObjectStore("memory://"), key=key)


def publish(log: WeightLog, *versions: int, options: PublishOptions = OPTIONS) -> None:
    with Publisher(log, options) as publisher:
        for version in versions:
            publisher.publish(synthetic_version(version), version=version, step=version).result(60)
            publisher.settle()


def packs_read(store: FaultyStore) -> Counter[str]:
    return Counter(key for method, key in store.calls if method == "get" and key.startswith("packs/"))


def test_every_byte_comes_from_afar_once_for_any_number_of_receivers() -> None:
    far, region = FaultyStore(ObjectStore("memory://")), memory_log()
    origin = WeightLog(far)
    read: Counter[str] = Counter()
    with Relay(WeightLog(far), region) as relay, Receiver(region) as one, Receiver(region) as two:
        for version in range(9):
            publish(origin, version)
            far.calls.clear()
            assert relay.advance() == version
            for receiver in (one, two):
                receiver.advance()
                assert alike(receiver.weights().state, synthetic_version(version))
            read += packs_read(far)
    deltas = {pack.digest for version in range(9) if (record := origin.read(version)) for pack in record.packs}
    assert read == Counter(dict.fromkeys(map(pack_key, deltas), 1))
    assert [(link.source, link.target) for link in region.links()] == [(0, 4), (4, 8)], "made in the region"


def test_a_second_relay_takes_what_the_first_has_brought() -> None:
    """Regression: only a relay's own memory was asked, so each one fetched every announced pack from afar."""
    inner, region = ObjectStore("memory://"), memory_log()
    publish(WeightLog(inner), 0)
    publish(WeightLog(inner), 1, options=replace(OPTIONS, pack_bytes=1))
    record = WeightLog(inner).read(1)
    assert record is not None
    torn = pack_key(record.packs[0].digest)
    far = FaultyStore(inner)
    with Relay(WeightLog(far), region) as first:
        assert first.advance() == 1
        read = packs_read(far)
        assert sum(read.values()) == len(read) > 2
        region.store.delete(commit_key(1))
        region.store.renew(torn, b"torn")
    far.calls.clear()
    with Relay(WeightLog(far), WeightLog(region.store)) as second:
        assert second.prefetch() > 0
        assert second.advance() == 1
    assert packs_read(far) == Counter([torn]), "what is damaged is fetched again, and nothing else"
    assert alike(pull(WeightLog(region.store)).state, synthetic_version(1))


def test_a_relay_does_not_go_back() -> None:
    origin, region = memory_log(KEY), memory_log(KEY)
    publish(origin, 0, 1, 2)
    with Relay(WeightLog(origin.store, key=KEY), region) as relay:
        assert relay.advance() == 2
    origin.store.delete(commit_key(2))
    with Relay(WeightLog(origin.store, key=KEY), region) as relay, pytest.raises(DamagedError, match=r"is 1, but .* 2"):
        relay.advance()
    assert region.latest() == 2


def test_a_relay_with_nothing_to_do_says_so() -> None:
    origin, region = memory_log(), memory_log()
    with Relay(origin, region) as relay:
        assert relay.advance() is None
        publish(origin, 0)
        assert (relay.advance(), relay.advance()) == (0, 0)


def test_packs_may_come_before_their_version() -> None:
    inner = ObjectStore("memory://")
    publish(WeightLog(inner), 0)
    publish(WeightLog(inner), 1, options=replace(OPTIONS, pack_bytes=1))
    record = inner.get(commit_key(1))
    assert record is not None
    inner.delete(commit_key(1))
    far = FaultyStore(inner)
    region = memory_log()
    with Relay(WeightLog(far), region) as relay:
        assert relay.advance() == 0
        assert relay.prefetch() > 0
        inner.put_if_absent(commit_key(1), record)
        far.calls.clear()
        assert relay.advance() == 1
        assert packs_read(far) == Counter()
    assert alike(pull(region).state, synthetic_version(1))


def test_another_relay_goes_on_where_the_last_one_stopped() -> None:
    origin, region = memory_log(), memory_log()
    publish(origin, 0, 1, 2)
    with Relay(origin, region) as relay:
        relay.advance()
    publish(origin, 3, 4)
    with Relay(origin, region) as first, Relay(origin, region) as second:
        assert (first.advance(), second.advance()) == (4, 4)
    for version in range(5):
        assert alike(pull(region, version).state, synthetic_version(version))


@pytest.mark.parametrize("side", ["origin", "region"])
def test_a_relay_may_die_at_any_call(side: str) -> None:
    origin = memory_log()
    publish(origin, 0, 1, 2, 3, 4)
    number, happened = 0, True
    while happened:
        region = memory_log()
        failing = FaultyStore((origin if side == "origin" else region).store, {number: Failure.GONE})
        ends = (WeightLog(failing), region) if side == "origin" else (origin, WeightLog(failing))
        with Relay(*ends) as relay:
            try:
                relay.advance()
            except InfrastructureError:
                if region.latest() is not None:
                    assert alike(pull(region).state, synthetic_version(pull(region).version))
        with Relay(origin, region) as relay:
            assert relay.advance() == 4
        assert alike(pull(region).state, synthetic_version(4))
        happened = len(failing.calls) > number
        number += 1
    assert number > 10


def test_a_relay_far_behind_takes_the_short_way() -> None:
    origin, region = memory_log(), memory_log()
    publish(origin, *range(18), options=replace(OPTIONS, anchor_every=16))
    with Relay(origin, region) as relay:
        assert relay.advance() == 17
    assert region.versions() == [16, 17]
    with Receiver(region) as receiver:
        receiver.advance()
        assert alike(receiver.weights().state, synthetic_version(17))


def test_signatures_are_copied_as_they_are() -> None:
    origin, region = memory_log(KEY), memory_log()
    publish(origin, 0, 1)
    with Relay(WeightLog(origin.store), region) as relay:
        relay.advance()
    assert alike(pull(WeightLog(region.store, key=KEY)).state, synthetic_version(1))
    with pytest.raises(DamagedError, match="signature is wrong"):
        pull(WeightLog(region.store, key=KEY[::-1]))


def test_what_is_damaged_in_the_region_is_copied_again() -> None:
    origin, region = memory_log(), memory_log()
    publish(origin, 0, 1)
    with Relay(origin, region) as relay:
        relay.advance()
    region.store.renew(commit_key(1), b"torn")
    with Relay(origin, WeightLog(region.store)) as relay:
        assert relay.advance() == 1
    assert alike(pull(WeightLog(region.store)).state, synthetic_version(1))


def test_damage_at_the_origin_is_got_around_and_not_copied() -> None:
    origin, region = memory_log(), memory_log()
    publish(origin, *range(6))
    (broken,) = origin.links()
    origin.store.renew(pack_key(broken.packs[0].digest), b"torn")
    with Relay(WeightLog(origin.store), region) as relay:
        assert relay.advance() == 5, "not over the merged link from 0 to 4"
        assert region.versions() == [0, 1, 2, 3, 4, 5]
        origin.store.renew(commit_key(5), b"torn")
        publish(WeightLog(origin.store), 6)
        assert relay.advance() == 6
    assert not region.store.exists(pack_key(broken.packs[0].digest))
    assert alike(pull(region).state, synthetic_version(6))


def test_a_region_of_another_log_is_refused() -> None:
    origin, region = memory_log(), memory_log()
    publish(origin, 0, 1, 2)
    with Publisher(region, OPTIONS) as publisher:
        publisher.publish(synthetic_version(77), version=1, step=0).result(60)
    with Relay(origin, region) as relay, pytest.raises(FencedError, match="give each log a regional store of its own"):
        relay.advance()
    assert region.versions() == [1]


def test_a_round_asks_two_things_at_a_time_and_a_version_costs_its_packs_beside() -> None:
    """Each call to a distant store takes a round trip, and a reader of the version waits for all of them."""
    far, region = FaultyStore(ObjectStore("memory://")), memory_log()
    origin = WeightLog(far)
    publish(origin, 0)
    with Relay(WeightLog(far), region) as relay:
        assert (relay.follow(), relay.follow()) == (0, 0)
        far.calls.clear()
        assert relay.follow() == 0
        assert sorted(method for method, _ in far.calls) == ["get", "list"]
        publish(origin, 1)
        record = origin.read(1)
        assert record is not None
        far.calls.clear()
        assert relay.follow() == 1
        read = Counter(key for method, key in far.calls if method == "get" and not key.startswith("staged/"))
        expected = [commit_key(1), *(pack_key(pack.digest) for pack in record.packs)]
        assert read - Counter([commit_key(2)]) == Counter(dict.fromkeys(expected, 1))
    assert alike(pull(region).state, synthetic_version(1))
