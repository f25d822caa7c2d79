"""One relay of a region is active, and another one takes over: nothing comes from far away twice."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from etude.errors import InfrastructureError
from etude.objects import ObjectEntry, Objects, ObjectStore
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import pull
from etude.weights.relay import Relay
from etude.weights.relay_lease import LEASE_FOLDER, RelayLease
from faulty_store import Failure, FaultyStore
from synthetic_updates import alike, synthetic_version
from waiting import wait_until

TERM_S = 1.0
PACKS = 60


class CountedStore:
    """A far store that counts the bytes of packs which were asked for; after ``slow_s`` each is there."""

    def __init__(self, inner: Objects, slow_s: float = 0.0) -> None:
        self.url = inner.url
        self.put_if_absent, self.renew, self.exists = inner.put_if_absent, inner.renew, inner.exists
        self.list, self.delete, self.now, self.remove_partial = (
            inner.list,
            inner.delete,
            inner.now,
            inner.remove_partial,
        )
        self.read_bytes = self.read_packs = 0
        self._inner = inner
        self._slow_s = slow_s
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """An object, late."""
        data = self._inner.get(key)
        if key.startswith("packs/") and data is not None:
            with self._lock:
                self.read_bytes += len(data)
                self.read_packs += 1
            time.sleep(self._slow_s)
        return data

    def stream(self, key: str, first: int, part_bytes: int) -> Iterator[bytes] | None:
        """An object from a byte on, late."""
        data = self.get(key)
        return None if data is None else iter((data[first:],))

    def entries(self, prefix: str) -> "list[ObjectEntry]":
        """The inner store's entries."""
        return self._inner.entries(prefix)


@pytest.fixture
def region(tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path / "region"))


@pytest.fixture
def leases() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def taken(lease: RelayLease) -> bool:
    return lease.wait(20 * TERM_S)


def follow(copying: Relay, lease: RelayLease, over: threading.Event) -> None:
    """Do what the command ``etude weights relay`` does."""
    while not over.is_set():
        if lease.wait(0.1):
            with suppress(InfrastructureError):
                copying.prefetch()
                copying.advance()


def test_one_is_active_and_another_takes_over_at_once_or_after_a_term(region: ObjectStore, leases: ExitStack) -> None:
    dying = FaultyStore(region)
    first = leases.enter_context(RelayLease(dying, term_s=TERM_S))
    assert taken(first)
    second = leases.enter_context(RelayLease(region, term_s=TERM_S))
    third = leases.enter_context(RelayLease(region, term_s=TERM_S))
    began_s = time.monotonic()
    while time.monotonic() - began_s < 2 * TERM_S:
        assert not second.is_held and not third.is_held
        time.sleep(0.05)
    dying.fail({0: Failure.GONE})  # its machine is dead, or cut off
    wait_until(lambda: second.is_held or third.is_held)
    assert not first.is_held, "it stopped before anybody else began"
    active, standby = (second, third) if second.is_held else (third, second)
    active.release()
    assert taken(standby)
    assert not active.is_held
    assert len(region.entries(LEASE_FOLDER)) <= 3


def test_who_was_suspended_does_not_believe_in_an_old_lease(region: ObjectStore, leases: ExitStack) -> None:
    now_s = [0.0]
    lease = leases.enter_context(RelayLease(region, term_s=TERM_S, stopwatch=lambda: now_s[0]))
    wait_until(lambda: lease.is_held)
    now_s[0] += 1e6
    assert not lease.is_held
    assert taken(lease), "nobody else wanted it"
    # Others came past meanwhile, and what they wrote first is deleted: the number that is free again is worth nothing.
    (*_, newest) = region.entries(LEASE_FOLDER)
    later = int(newest.key.rpartition("/")[2]) + 50
    region.put_if_absent(f"{LEASE_FOLDER}/{later:012d}", b"another")
    now_s[0] += 1e6
    assert not lease.wait(TERM_S / 2)


@pytest.mark.parametrize("dies", [False, True], ids=["both live", "the active one dies in mid-transfer"])
def test_two_relays_fetch_one_copy(region: ObjectStore, leases: ExitStack, *, dies: bool) -> None:
    inner = ObjectStore("memory://")
    options = PublishOptions(codec="gaps", chunk_numbers=64, pack_bytes=1, encoders=2, uploads=2, anchor_every=0)
    with Publisher(WeightLog(inner), options) as publisher:
        publisher.publish(synthetic_version(0, rows=60, columns=60), version=0, step=0).result(60)
    record = WeightLog(inner).read(0)
    assert record is not None and len(record.packs) > PACKS
    copy_bytes = sum(pack.size_bytes for pack in record.packs)
    far, over = CountedStore(inner, slow_s=0.02), threading.Event()
    ends = [(FaultyStore(far), FaultyStore(region)) for _ in range(2)]
    threads = []
    for origin, near in ends:
        lease = leases.enter_context(RelayLease(near, term_s=TERM_S))
        copying = leases.enter_context(Relay(WeightLog(origin), WeightLog(near), connections=2, lease=lease))
        threads.append(threading.Thread(target=follow, args=(copying, lease, over)))
        if len(threads) == 1:
            assert taken(lease)
    for thread in threads:
        thread.start()
    try:
        if dies:
            wait_until(lambda: far.read_packs > PACKS / 2)
            for store in ends[0]:
                store.fail({0: Failure.GONE})
        wait_until(lambda: WeightLog(region).latest() == 0)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert alike(pull(WeightLog(region)).state, synthetic_version(0, rows=60, columns=60))
    assert copy_bytes <= far.read_bytes <= 1.05 * copy_bytes
