"""The weight store under all kinds of damage to stores, processes and bytes.

The invariant: a receiver holds one committed version, bit for bit, never a mixture. After any damage, the publisher's
next version reaches every reader without a human.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Event

import pytest

from etude.errors import DamagedError, FencedError, InfrastructureError
from etude.objects import ObjectEntry, Objects, ObjectStore, StoreOptions
from etude.types import WeightVersion
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.plan import edge_of, reachable
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import ReceiveOptions, Receiver
from etude.weights.records import Link, commit_key, layout_key, link_key, pack_key
from etude.weights.retention import collect
from etude.weights.state import State
from fake_clock_store import FakeClockStore
from faulty_store import Failure, FaultyStore, random_failures
from synthetic_updates import alike, synthetic_version

OPTIONS = PublishOptions(
    codec="gaps",
    chunk_numbers=100,
    pack_bytes=400,
    encoders=2,
    uploads=2,
    anchor_every=3,
)
READING = ReceiveOptions(connections=2, appliers=2)
BUSY_S = 120.0
"""For what competes with threads that never rest."""
KEY = b"the key that signs records"
FOLDERS = ("commits", "links", "layouts", "packs", "staged", "leases")

Fresh = Callable[[], ObjectStore]
"""Makes an empty store."""


@pytest.fixture(params=["memory", "folder"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    if request.param == "memory":
        return lambda: ObjectStore("memory://")
    return lambda: ObjectStore(str(tmp_path / f"{random.getrandbits(64):x}"))


@pytest.fixture
def cloud(endpoint: str, tmp_path: Path) -> Fresh:
    options = StoreOptions(
        endpoint=endpoint, allow_http=True, region="us-east-1", access_key_id="id", secret_access_key="secret"
    )
    return lambda: ObjectStore(f"s3://bucket/{tmp_path.name}/{random.getrandbits(64):x}", options)


def weights(version: int) -> State:
    return synthetic_version(version, rows=10, columns=12)


def assert_committed(receiver: Receiver) -> None:
    """The receiver holds exactly one committed version, or nothing."""
    if receiver.version is not None:
        before = receiver.weights()
        assert before.digest == state_digest(before.state)
        assert alike(before.state, weights(receiver.version))


def assert_reaches(log: WeightLog, version: int, *have: int | None) -> None:
    """Receivers that hold nothing, or any of some versions, get to a version."""
    for start in have:
        with Receiver(log, READING) as receiver:
            if start is not None:
                receiver.advance(start)
            assert receiver.advance().version == version
            assert_committed(receiver)


def write(log: WeightLog, *versions: int, options: PublishOptions = OPTIONS) -> None:
    with Publisher(log, options) as publisher:
        for version in versions:
            publisher.publish(weights(version), version=version, step=version).result(20)
            publisher.settle()


# --- Failing calls ---


def publish_stubbornly(store: FaultyStore, inner: Objects, newest: int) -> None:
    """Publish up to ``newest``, retrying failures, with a new publisher if this one lost its access for good."""
    log = WeightLog(store)
    with Publisher(log, OPTIONS) as publisher:
        version = 0
        while version <= newest:
            try:
                publisher.publish(weights(version), version=version, step=version).result(20)
                version += 1
            except InfrastructureError as error:
                if Failure.GONE.value in str(error):
                    break
    if version <= newest:
        write(WeightLog(inner), *range(version, newest + 1))


def publisher_fails_at(fresh: Fresh, number: int, failure: Failure) -> bool:
    """Inject a failure into the publisher's call ``number``; returns true if there was such a call."""
    inner, newest = fresh(), 4
    store = FaultyStore(inner, {number: failure})
    publish_stubbornly(store, inner, newest)
    log = WeightLog(inner)
    assert log.versions() == list(range(newest + 1))
    with Receiver(log, READING) as receiver:
        for version in log.versions():
            assert receiver.advance(version).faults == ()
            assert_committed(receiver)
    assert_reaches(log, newest, None)
    return len(store.calls) > number


@pytest.mark.parametrize("failure", [Failure.REFUSED, Failure.ANSWER_LOST, Failure.GONE])
def test_a_publisher_may_fail_at_any_call(fresh: Fresh, failure: Failure) -> None:
    number, stride = 0, 1 if fresh().url == "memory://" else 5
    while publisher_fails_at(fresh, number, failure):
        number += stride
    assert number > 40


def receiver_fails_at(fresh: Fresh, inner: ObjectStore, number: int) -> bool:
    store = FaultyStore(inner, {number: Failure.REFUSED})
    with Receiver(WeightLog(store), READING) as receiver:
        for target in (1, 3, 2, None):
            try:
                receiver.prefetch()
                receiver.advance(target)
            except InfrastructureError:
                assert_committed(receiver)
                receiver.advance(target)
            assert receiver.version == (4 if target is None else target)
            assert_committed(receiver)
    return len(store.calls) > number


def test_a_receiver_may_fail_at_any_call(fresh: Fresh) -> None:
    inner = fresh()
    write(WeightLog(inner), *range(5))
    number = 0
    while receiver_fails_at(fresh, inner, number):
        number += 1
    assert number > 20


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_costs_time_only(fresh: Fresh, seed: int) -> None:
    inner = fresh()
    store = FaultyStore(inner, random_failures(seed, 3000, rate=0.1), slow_s=0.001)
    log = WeightLog(store)
    with Publisher(log, OPTIONS) as publisher, Receiver(log, READING) as receiver:
        for version in range(8):
            while True:
                with suppress(InfrastructureError):
                    publisher.publish(weights(version), version=version, step=version).result(20)
                    break
            with suppress(InfrastructureError):
                receiver.advance()
            assert_committed(receiver)
    assert_reaches(WeightLog(inner), 7, None, 0, 4)


# --- Damage ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damaged object."""

    key: str
    data: bytes | None
    """What lies there instead; ``None`` for nothing."""


def contents(store: Objects) -> dict[str, bytes]:
    arrived = {key: store.get(key) for folder in FOLDERS for key in store.list(folder)}
    return {key: data for key, data in arrived.items() if data is not None}


def damages(objects: Mapping[str, bytes], seed: int, flips: int) -> Iterator[Damage]:
    """Every object missing, cut off, and in place of another; and as many flipped bits in each, anywhere in it."""
    draw = random.Random(seed)
    for key, data in objects.items():
        yield Damage(key=key, data=None)
        yield Damage(key=key, data=data[: draw.randrange(len(data))])
        twin = draw.choice([other for other in objects if other.partition("/")[0] == key.partition("/")[0]])
        yield Damage(key=key, data=objects[twin] if twin != key else b"")
        for _ in range(flips):
            place = draw.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            yield Damage(key=key, data=bytes(flipped))


def can_be_reached(objects: Mapping[str, bytes], log: WeightLog, broken: str, have: int | None, target: int) -> bool:
    """Return true if an intact path remains, by the records of the log before the damage.

    A reader that holds a version knows the layout already, and need not read it.
    """
    records: list[WeightVersion | Link] = [record for version in log.versions() if (record := log.read(version))]
    records += log.links()
    sound = [
        edge_of(record)
        for record in records
        if broken not in {pack_key(pack.digest) for pack in record.packs}
        and (have is not None or broken != layout_key(record.layout))
        and broken not in {own_key(record), commit_key(edge_of(record).target)}
    ]
    return target in reachable(sound, {None, have})


def own_key(record: WeightVersion | Link) -> str:
    return link_key(record.source, record.target) if isinstance(record, Link) else commit_key(record.version)


def survive(store: ObjectStore, sound: WeightLog, objects: Mapping[str, bytes], damage: Damage) -> None:
    """A new receiver and one at version 2 avoid the damage where they can; the next version repairs the rest.

    Without signatures some damage of records does no harm and is not seen (the name of the recipe, say).
    """
    newest = 7
    for key, data in objects.items():
        store.put_if_absent(key, data)

    def opened() -> WeightLog:
        return WeightLog(store, key=sound.key)

    with Receiver(opened(), READING) as joining, Receiver(opened(), READING) as following:
        following.advance(2)
        if damage.data is None:
            store.delete(damage.key)
        else:
            store.renew(damage.key, damage.data)
        for receiver, have in ((joining, None), (following, 2)):
            if damage.data is None and damage.key == commit_key(newest):
                assert advance_far(receiver) == newest - 1, "it was never there"
            elif can_be_reached(objects, sound, damage.key, have, newest):
                assert advance_far(receiver) == newest
            else:
                with pytest.raises(DamagedError) if sound.key else suppress(DamagedError):
                    advance_far(receiver)
            assert_committed(receiver)
        with Publisher(opened(), OPTIONS) as publisher:
            publisher.publish(weights(newest + 1), version=newest + 1, step=0).result(20)
        for receiver in (joining, following):
            assert advance_far(receiver) == newest + 1
            assert_committed(receiver)
        assert_reaches(opened(), newest + 1, None)


def advance_far(receiver: Receiver) -> int:
    """Advance until there is nothing more: over a missing record that takes two steps."""
    reached = receiver.advance().version
    while (further := receiver.advance().version) != reached:
        reached = further
    return reached


def damaged_log(key: bytes | None = KEY) -> tuple[WeightLog, dict[str, bytes]]:
    log = WeightLog(ObjectStore("memory://"), key=key)
    write(log, *range(8))
    return log, contents(log.store)


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
def test_any_damage_is_got_around_or_named_and_then_healed(fresh: Fresh, key: bytes | None) -> None:
    log, objects = damaged_log(key)
    stride = 1 if fresh().url == "memory://" else 5
    for damage in list(damages(objects, seed=1, flips=2))[::stride]:
        if damage.data != objects[damage.key]:
            survive(fresh(), log, objects, damage)


@pytest.mark.parametrize("seed", range(25))
def test_a_publisher_that_lives_on_heals_what_readers_cannot_get_around(fresh: Fresh, seed: int) -> None:
    """The publisher has everything in memory, and learns of the damage only by readers' requests."""
    store = fresh()
    log = WeightLog(store)
    with Publisher(log, OPTIONS) as publisher, Receiver(WeightLog(store), READING) as following:
        for version in range(8):
            publisher.publish(weights(version), version=version, step=version).result(20)
            publisher.settle()
        following.advance(2)
        draw, objects = random.Random(seed), contents(store)
        for key in draw.sample(sorted(objects), 3):
            store.renew(key, objects[key][:-1]) if draw.random() < 0.5 else store.delete(key)
        with Receiver(WeightLog(store), READING) as joining:
            for receiver in (joining, following):
                with suppress(DamagedError):
                    advance_far(receiver)
                assert_committed(receiver)
            publisher.publish(weights(8), version=8, step=8).result(20)
            for receiver in (joining, following):
                assert advance_far(receiver) == 8
                assert_committed(receiver)
        assert_reaches(WeightLog(store), 8, None)


# --- Several writers ---


@pytest.mark.parametrize("seed", range(5))
def test_of_two_writers_one_goes_on(fresh: Fresh, seed: int) -> None:
    log, start = WeightLog(fresh()), Barrier(2)
    write(log, 0, 1)

    def go_on(offset: int) -> int:
        with Publisher(WeightLog(log.store), OPTIONS) as publisher:
            start.wait(10)
            for version in range(2, 8):
                try:
                    publisher.publish(weights(version + offset), version=version, step=version).result(20)
                except FencedError:
                    return version
            return 8

    with ThreadPoolExecutor(2) as writers:
        reached = list(writers.map(go_on, (0, 100 * (seed + 1))))
    assert sorted(reached)[1] == 8 and sorted(reached)[0] < 8
    winner = 0 if reached[0] == 8 else 100 * (seed + 1)
    with Receiver(WeightLog(log.store), READING) as receiver:
        for version in range(min(reached), 8):
            receiver.advance(version)
            assert alike(receiver.weights().state, weights(version + winner))


# --- Collection and clocks ---


def test_readers_arrive_while_a_collector_removes_what_they_came_over() -> None:
    store, done = FakeClockStore(), Event()
    log = WeightLog(store)
    write(log, 0)

    def clean() -> int:
        return collect(WeightLog(store), keep=1, grace_s=25, lease_s=100).objects

    def go_on_cleaning() -> int:
        removed = 0
        while not done.is_set():
            removed += clean()
        return removed

    def read(leases: bool) -> int:
        arrivals, log = 0, WeightLog(store)
        lease = log.lease("reader")
        with Receiver(log, READING) as receiver:
            while receiver.version != 40 and not done.is_set():
                receiver.advance()
                assert_committed(receiver)
                arrivals += 1
                if leases and receiver.version is not None:
                    lease.renew(receiver.version)
        return arrivals

    with ThreadPoolExecutor(4) as threads:
        cleaner = threads.submit(go_on_cleaning)
        readers = [threads.submit(read, leases) for leases in (True, False, False)]
        try:
            with Publisher(log, OPTIONS) as publisher:
                for version in range(1, 41):
                    publisher.publish(weights(version), version=version, step=version).result(BUSY_S)
                    store.now_s += 10  # an upload takes no longer than 10 s, hence less than the grace period
            arrivals = [reader.result(BUSY_S) for reader in readers]
        finally:
            done.set()
    assert cleaner.result(BUSY_S) + clean() > 100  # it may have come to little while the others were busy
    assert all(arrivals)
    assert_reaches(WeightLog(store), 40, None)


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_that_jumps_removes_nothing_that_is_needed(seed: int) -> None:
    store, draw = FakeClockStore(), random.Random(seed)
    log = WeightLog(store)
    with Publisher(log, OPTIONS) as publisher, Receiver(log, READING) as receiver:
        lease = log.lease("reader")
        for version in range(30):
            publisher.publish(weights(version), version=version, step=version).result(20)
            publisher.settle()
            if draw.random() < 0.3:
                receiver.advance()
                lease.renew(version)
            store.now_s += draw.choice([1, 3600, 1e6, -3600, -1e6, -1e9])
            collect(log, keep=2, grace_s=60, lease_s=60)
            assert_committed(receiver)
            assert_reaches(log, version, None, *[one for one in log.versions() if one >= version - 2])
        receiver.advance()
        assert_committed(receiver)
    assert len(log.versions()) < 30


def test_a_pack_that_comes_back_into_use_survives_the_collector() -> None:
    """A frozen tensor always gives the same pack, so a pack that is garbage now may be needed the next moment."""
    store = FakeClockStore()
    log = WeightLog(store)
    digest = log.put_pack(b"once used, then rubbish")
    write(log, 0)
    store.now_s += 1000
    list_entries, listed = store.entries, []

    def use_again_after_list(prefix: str) -> "list[ObjectEntry]":
        entries = list_entries(prefix)
        listed.append(prefix)
        if prefix == "clock":  # the last folder of the first pass over what is old
            log.put_pack(b"once used, then rubbish")
        return entries

    store.entries = use_again_after_list  # type: ignore[method-assign]  # this double is ours to bend
    collect(log, keep=0, grace_s=60, lease_s=60)
    assert "clock" in listed
    assert store.exists(pack_key(digest))


# --- A real server ---


def test_a_publisher_may_fail_at_some_calls_to_a_cloud(cloud: Fresh) -> None:
    for number, failure in ((3, Failure.ANSWER_LOST), (11, Failure.GONE), (19, Failure.REFUSED), (30, Failure.GONE)):
        assert publisher_fails_at(cloud, number, failure)


def test_a_receiver_may_fail_at_some_calls_to_a_cloud(cloud: Fresh) -> None:
    inner = cloud()
    write(WeightLog(inner), *range(5))
    for number in (2, 9, 17):
        assert receiver_fails_at(cloud, inner, number)


def test_some_damage_in_a_cloud(cloud: Fresh) -> None:
    log, objects = damaged_log()
    draw = random.Random(5)
    for damage in draw.sample(list(damages(objects, seed=2, flips=1)), 4):
        if damage.data != objects[damage.key]:
            survive(cloud(), log, objects, damage)
