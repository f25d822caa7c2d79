"""Packs fetched early are used once, within a bound, and only if they match their digest."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from etude.errors import DamagedError, InfrastructureError
from etude.objects import ObjectStore
from etude.types import WeightPack
from etude.weights.log import WeightLog
from etude.weights.pull import PackCache
from etude.weights.records import pack_key
from faulty_store import Failure, FaultyStore

SIZE = 10


def put(store: ObjectStore, name: str) -> WeightPack:
    data = name.encode().ljust(SIZE)
    return WeightPack(digest=WeightLog(store).put_pack(data), size_bytes=SIZE, first=0, last=0)


def meet(barrier: Barrier) -> None:
    barrier.wait()


def gets(store: FaultyStore, pack: WeightPack) -> int:
    return store.calls.count(("get", pack_key(pack.digest)))


@pytest.fixture
def storage() -> ObjectStore:
    return ObjectStore("memory://")


@pytest.fixture
def store(storage: ObjectStore) -> FaultyStore:
    """The same objects, with counted calls."""
    return FaultyStore(storage)


def test_a_pack_is_fetched_once_and_leaves_when_it_is_used(storage: ObjectStore, store: FaultyStore) -> None:
    pack, cache = put(storage, "a"), PackCache(WeightLog(store), 100)
    assert [cache.fetch_early(pack) for _ in range(3)] == [SIZE, 0, 0]
    assert gets(store, pack) == 1
    assert cache.fetch(pack) == b"a".ljust(SIZE)
    assert gets(store, pack) == 1
    assert cache.fetch(pack) == b"a".ljust(SIZE)
    assert gets(store, pack) == 2


def test_the_oldest_leave_when_room_is_short(storage: ObjectStore, store: FaultyStore) -> None:
    packs, cache = [put(storage, name) for name in "abcd"], PackCache(WeightLog(store), 2 * SIZE + 5)
    for pack in packs[:3]:
        assert cache.fetch_early(pack) == SIZE
    for pack in packs[1:3]:
        cache.fetch(pack)
    assert [gets(store, pack) for pack in packs[:3]] == [1, 1, 1], "the younger two were still there"
    cache.fetch(packs[0])
    assert gets(store, packs[0]) == 2
    for pack in (packs[3], packs[0]):
        assert cache.fetch_early(pack) == SIZE, "what was used makes room"
    cache.fetch(packs[3])
    assert gets(store, packs[3]) == 1


def test_a_pack_beyond_the_bound_is_not_fetched_early(storage: ObjectStore, store: FaultyStore) -> None:
    pack = put(storage, "a")
    cache = PackCache(WeightLog(store), SIZE - 1)
    assert cache.fetch_early(pack) == 0
    assert store.calls == []
    assert PackCache(WeightLog(store), SIZE).fetch_early(pack) == SIZE


def test_what_is_not_there_or_not_sound_counts_only_when_it_is_needed(storage: ObjectStore) -> None:
    missing = WeightPack(digest="0" * 64, size_bytes=SIZE, first=0, last=0)
    damaged = WeightPack(digest="1" * 64, size_bytes=SIZE, first=0, last=0)
    storage.put_if_absent(pack_key(damaged.digest), bytes(SIZE))
    cache = PackCache(WeightLog(storage), 100)
    for pack, why in ((missing, "is not in memory"), (damaged, "is damaged")):
        assert cache.fetch_early(pack) == 0
        with pytest.raises(DamagedError, match=why):
            cache.fetch(pack)


def test_a_store_that_does_not_answer_is_told(storage: ObjectStore) -> None:
    pack = put(storage, "a")
    cache = PackCache(WeightLog(FaultyStore(storage, {0: Failure.REFUSED, 1: Failure.REFUSED})), 100)
    with pytest.raises(InfrastructureError):
        cache.fetch_early(pack)
    with pytest.raises(InfrastructureError):
        cache.fetch(pack)
    assert cache.fetch_early(pack) == SIZE


def test_a_pack_that_two_threads_fetch_at_once_takes_its_room_once(storage: ObjectStore) -> None:
    both = Barrier(2, timeout=30)
    store = FaultyStore(storage, {0: Failure.SLOW, 1: Failure.SLOW}, sleep=lambda _: meet(both))
    first, second = put(storage, "a"), put(storage, "b")
    cache = PackCache(WeightLog(store), 2 * SIZE)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(cache.fetch_early, [first, first])) == [SIZE, SIZE]
    assert gets(store, first) == 2
    assert cache.fetch_early(second) == SIZE
    cache.fetch(first)
    cache.fetch(second)
    assert (gets(store, first), gets(store, second)) == (2, 1), "both were in the cache"
