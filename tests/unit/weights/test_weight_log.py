"""The log accepts one writer per version, even if answers get lost, and finds the paths to each version."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DamagedError, FencedError, InfrastructureError, UserError
from etude.objects import ObjectStore
from etude.types import WeightPack, WeightVersion
from etude.weights.log import WeightLog
from etude.weights.plan import Edge, LinkSpeed, plan
from etude.weights.records import Announcement, Link, commit_key, link_key, pack_key
from faulty_store import Failure, FaultyStore, random_failures

KEY = b"a key of 16 byte"
LAYOUT = "b" * 64
LOG = f"{1:032x}"


def pack(size_bytes: int = 10) -> WeightPack:
    return WeightPack(digest="a" * 64, size_bytes=size_bytes, first=0, last=0)


def record(version: int, base: int | None = None, digest: str = "", size_bytes: int = 10) -> WeightVersion:
    return WeightVersion(
        version=version,
        base=base,
        base_digest=None if base is None else f"{base:032x}",
        digest=digest or f"{version:032x}",
        layout=LAYOUT,
        packs=(pack(size_bytes),),
        step=version,
        recipe="quickstart",
        writer="writer-1",
        created="2026-01-01T00:00:00+00:00",
    )


def link(source: int | None, target: int, digest: str = "", size_bytes: int = 10) -> Link:
    return Link(
        source=source,
        source_digest=None if source is None else f"{source:032x}",
        target=target,
        digest=digest or f"{target:032x}",
        layout=LAYOUT,
        packs=(pack(size_bytes),),
    )


def memory_log(key: bytes | None = None) -> WeightLog:
    return WeightLog(ObjectStore("memory://"), key=key)


def chain(log: WeightLog, newest: int) -> None:
    for version in range(newest + 1):
        log.commit(record(version, version - 1 if version else None, size_bytes=10 if version else 1000))


def ends(edges: list[Edge] | tuple[Edge, ...]) -> list[tuple[int | None, int]]:
    return sorted(((edge.source, edge.target) for edge in edges), key=lambda pair: (pair[1], pair[0] is not None, pair))


# --- Versions ---


@pytest.mark.parametrize("key", [None, KEY])
def test_a_commit_can_be_read_back(key: bytes | None) -> None:
    log = memory_log(key)
    assert (log.versions(), log.latest(), log.read(0)) == ([], None, None)
    for version, base in ((10, 9), (0, None), (9, 0), (123_456_789, 10)):
        assert log.commit(record(version, base)) == record(version, base)
        assert WeightLog(log.store, key=key).read(version) == record(version, base)
    assert (log.versions(), log.latest()) == ([0, 9, 10, 123_456_789], 123_456_789)


def test_foreign_files_are_not_versions() -> None:
    log = memory_log()
    log.commit(record(3))
    for key in ("commits/3.json", "commits/00000004.json.bak", "commits/old/00000005.json", "commits-2/00000006.json"):
        log.store.put_if_absent(key, b"{}")
    assert log.versions() == [3]


def test_committing_the_same_weights_again_returns_the_first_record() -> None:
    log = memory_log()
    first = log.commit(record(1, 0))
    assert log.commit(dataclasses.replace(record(1, None), writer="writer-2")) == first
    assert log.read(1) == first


def test_a_second_writer_with_other_weights_is_fenced() -> None:
    log = memory_log()
    first = log.commit(record(1))
    with pytest.raises(FencedError, match="weight version 1 is already committed"):
        log.commit(record(1, digest="e" * 32))
    assert log.read(1) == first


def test_of_many_writers_one_wins() -> None:
    log = memory_log()

    def attempt(writer: int) -> bool:
        try:
            log.commit(record(1, digest=f"{writer:032x}"))
        except FencedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(32))) == 1


def test_a_record_is_fetched_once() -> None:
    store = FaultyStore(ObjectStore("memory://"))
    chain(WeightLog(store), 3)
    log = WeightLog(store)
    for _ in range(3):
        log.edges(None, 3)
        log.read(3)
    assert sum(method == "get" and key.startswith("commits/") for method, key in store.calls) == 4


def test_records_without_our_signature_are_damage() -> None:
    log = memory_log()
    chain(log, 1)
    with pytest.raises(DamagedError, match=r"commits/00000001\.json is damaged: it is not signed"):
        WeightLog(log.store, key=KEY).read(1)
    with pytest.raises(DamagedError, match="signature is wrong"):
        signed = memory_log(KEY)
        chain(signed, 0)
        WeightLog(signed.store, key=KEY[::-1]).read(0)
    with pytest.raises(UserError, match="at least 16"):
        memory_log(b"short")


@given(st.integers(0, 70), st.data())
def test_latest_is_found_from_any_older_version(newest: int, draw: st.DataObject) -> None:
    store = FaultyStore(ObjectStore("memory://"))
    for version in range(newest + 1):
        store.put_if_absent(commit_key(version), b"")
    log = WeightLog(store)
    store.calls.clear()
    assert log.latest(after=draw.draw(st.integers(0, newest))) == newest
    assert {method for method, _ in store.calls} <= {"exists", "list"}
    assert len(store.calls) <= 14


def test_latest_gets_over_versions_that_were_never_committed() -> None:
    log = memory_log()
    for version in (0, 1, 5, 6, 9):
        log.commit(record(version, None))
    assert log.latest(after=1) == 9
    assert log.latest(after=5) in (6, 9)
    assert log.latest(after=6) == 9


def test_latest_survives_that_its_starting_point_is_gone() -> None:
    log = memory_log()
    assert log.latest(after=5) is None
    log.commit(record(9, 8))
    assert log.latest(after=5) == 9


# --- Ways between versions ---


def test_links_are_kept_as_first_written() -> None:
    log = memory_log()
    assert log.add_link(link(None, 4)) == link(None, 4)
    assert log.add_link(link(None, 4, size_bytes=99)) == link(None, 4)
    assert log.add_link(link(0, 4)) == link(0, 4)
    assert log.links() == [link(0, 4), link(None, 4)]
    with pytest.raises(FencedError, match="two writers disagree about version 4"):
        log.add_link(link(None, 4, digest="e" * 32))


def test_edges_say_what_each_record_offers() -> None:
    log = memory_log()
    chain(log, 2)
    log.add_link(link(0, 2))
    log.add_link(link(2, 1))
    kinds = {(edge.source, edge.target): edge.kind for edge in log.edges(2, 1)}
    assert kinds == {(None, 0): "anchor", (0, 1): "delta", (2, 1): "inverse", (0, 2): "merged"}
    edge = next(edge for edge in log.edges(0, 2) if edge.kind == "merged")
    assert (edge.digest, edge.layout, edge.packs, edge.size_bytes) == (f"{2:032x}", LAYOUT, (pack(),), 10)


def test_only_what_lies_between_anchor_and_target_is_read() -> None:
    store = FaultyStore(ObjectStore("memory://"))
    chain(WeightLog(store), 20)
    for anchor in (4, 8, 16):
        WeightLog(store).add_link(link(None, anchor))
    WeightLog(store).add_link(link(0, 16))

    def edges(have: int | None, target: int) -> list[tuple[int | None, int]]:
        return ends(WeightLog(store).edges(have, target))

    store.calls.clear()
    assert edges(18, 19) == [(18, 19)], "who keeps up looks at the next version alone"
    assert [method for method, _ in store.calls] == ["get"]
    assert edges(17, 19) == [(None, 16), (15, 16), (16, 17), (17, 18), (18, 19)]
    assert sum(method == "get" for method, _ in store.calls) == 1 + 5
    assert edges(None, 9) == [(None, 8), (7, 8), (8, 9)]
    assert edges(7, 9) == [(6, 7), (None, 8), (7, 8), (8, 9)]
    assert edges(999, 9) == edges(None, 9)
    assert (0, 16) in edges(0, 20)
    assert edges(None, 3) == [(None, 0), (0, 1), (1, 2), (2, 3)]


def test_damaged_records_are_worked_around_and_reported() -> None:
    log = memory_log()
    chain(log, 9)
    log.add_link(link(None, 4))
    log.add_link(link(4, 8))
    for key in (link_key(None, 6), commit_key(7)):
        log.store.delete(key)
        log.store.put_if_absent(key, b"{}")
    fresh = WeightLog(log.store)
    assert ends(plan(fresh.edges(None, 9), 9, None, LinkSpeed()).edges) == [(None, 4), (4, 8), (8, 9)]
    assert [fault.split()[1] for fault in fresh.faults] == [commit_key(7), link_key(None, 6)]
    assert fresh.links() == [link(4, 8), link(None, 4)]
    log.store.delete(commit_key(7))
    fresh.commit(record(7, 6))
    assert (7, 8) in ends(fresh.edges(6, 9))
    assert (6, 7) in ends(fresh.edges(6, 9))
    assert len(fresh.faults) == 1


def test_a_link_to_other_weights_than_the_commit_is_not_used() -> None:
    log = memory_log()
    chain(log, 2)
    log.add_link(link(0, 2, digest="e" * 32))
    assert (0, 2) not in ends(log.edges(0, 2))
    assert log.faults[0].startswith(f"record {link_key(0, 2)} leads to state {'e' * 32}")


# --- Payloads ---


def test_packs_and_layouts_come_back() -> None:
    log = memory_log()
    digest = log.put_pack(b"frames")
    whole = WeightPack(digest=digest, size_bytes=6, first=0, last=0)
    assert log.put_pack(b"frames") == digest
    assert log.pack(whole) == b"frames"
    layout = log.put_layout(b"parts")
    assert log.layout(layout) == b"parts"
    assert log.layout("c" * 64) is None
    with pytest.raises(DamagedError, match="has 6 bytes, its record says 7"):
        log.pack(dataclasses.replace(whole, size_bytes=7))
    with pytest.raises(DamagedError, match=r"packs/a{64} is not in memory"):
        log.pack(pack())


def test_broken_payloads_are_damage() -> None:
    log = memory_log()
    whole = WeightPack(digest=log.put_pack(b"frames"), size_bytes=6, first=0, last=0)
    log.store.delete(pack_key(whole.digest))
    log.store.put_if_absent(pack_key(whole.digest), b"fra?es")
    with pytest.raises(DamagedError, match=f"packs/{whole.digest} is damaged"):
        log.pack(whole)
    assert log.put_pack(b"frames") == whole.digest
    assert log.pack(whole) == b"frames", "what is not what its name says is replaced"
    log.store.put_if_absent(f"layouts/{LAYOUT}.json", b"")
    with pytest.raises(DamagedError, match=f"layouts/{LAYOUT}.json is damaged"):
        log.layout(LAYOUT)


# --- Announcements and leases ---


def test_announcements_are_found_in_order() -> None:
    log = memory_log()
    announcements = [
        Announcement(version=5, writer=writer, sequence=sequence, packs=())
        for writer in ("one", "two")
        for sequence in (2, 10)
    ]
    for announcement in reversed(announcements):
        log.announce(announcement)
    log.announce(dataclasses.replace(announcements[0], version=6))
    log.announce(announcements[0])
    log.store.put_if_absent("staged/00000005/one/rubbish", b"")
    assert log.announced(5) == announcements
    assert log.announced(4) == []
    assert "rubbish" in log.faults[0]
    with pytest.raises(FencedError, match="a second process writes as 'one'"):
        log.announce(dataclasses.replace(announcements[0], packs=(pack(),)))


def test_a_lease_is_renewed_without_a_gap_and_released() -> None:
    log = memory_log()
    lease = log.lease("reader-1")
    assert log.store.list("leases") == []
    for version in (3, 4, 4, 2):
        lease.renew(version)
    assert log.store.list("leases") == ["leases/reader-1/00000002.json", "leases/reader-1/00000003.json"]
    lease.release()
    lease.release()
    assert log.store.list("leases") == []


def test_two_readers_of_one_name_do_not_remove_each_others_leases() -> None:
    log = memory_log()
    one, two = log.lease("reader-1"), log.lease("reader-1")
    one.renew(3)
    for version in range(10, 14):
        two.renew(version)
    assert log.store.list("leases/reader-1")[0].endswith("00000000.json")
    one.renew(4)
    two.release()
    assert len(log.store.list("leases")) == 2


def test_a_restarted_reader_goes_on_counting() -> None:
    log = memory_log()
    log.lease("reader-1").renew(3)
    log.lease("reader-1").renew(1)
    assert len(log.store.list("leases")) == 2


@pytest.mark.parametrize("reader", ["", "../commits", "a/b"])
def test_a_reader_needs_a_plain_name(reader: str) -> None:
    with pytest.raises(UserError, match="becomes part of object keys"):
        memory_log().lease(reader)


# --- Failing storage ---


def work(log: WeightLog) -> None:
    """One of everything that writes."""
    log.put_layout(b"layout")
    log.put_pack(b"frames")
    log.announce(Announcement(version=0, writer="writer-1", sequence=0, packs=(pack(),)))
    log.commit(record(0))
    log.add_link(link(None, 0))
    lease = log.lease("reader-1")
    lease.renew(0)


def contents(store: ObjectStore) -> dict[str, bytes | None]:
    return {key: store.get(key) for folder in WRITTEN for key in store.list(folder)}


WRITTEN = ("layouts", "packs", "staged", "commits", "links", "leases")


@pytest.mark.parametrize("failure", [Failure.REFUSED, Failure.ANSWER_LOST, Failure.SLOW])
def test_a_single_failure_of_a_write_is_not_noticed(failure: Failure) -> None:
    clean = FaultyStore(ObjectStore("memory://"))
    work(WeightLog(clean))
    writes = [number for number, (method, _) in enumerate(clean.calls) if method == "put_if_absent"]
    assert len(writes) == 9  # two of them try out the storage
    for number in writes:
        store = ObjectStore("memory://")
        work(WeightLog(FaultyStore(store, {number: failure})))
        assert len(contents(store)) == 6


def test_after_dying_anywhere_the_work_can_be_done_again() -> None:
    clean = ObjectStore("memory://")
    work(WeightLog(clean, log_id=LOG))
    for number in range(20):
        store = ObjectStore("memory://")
        dying = FaultyStore(store, {number: Failure.GONE})
        if number < 7:
            with pytest.raises(InfrastructureError, match="gone, as planned"):
                work(WeightLog(dying, log_id=LOG))
        work(WeightLog(store, log_id=LOG))
        expected = contents(clean)
        assert {key: store.get(key) for key in expected} == expected


@given(st.integers(0, 1000))
def test_among_failing_writers_one_wins_and_knows_it(seed: int) -> None:
    store = ObjectStore("memory://")

    def attempt(writer: int) -> str | None:
        log = WeightLog(FaultyStore(store, random_failures(seed + writer, 10, 0.3), slow_s=0))
        try:
            return log.commit(record(1, digest=f"{writer:032x}")).digest
        except (FencedError, InfrastructureError):
            return None

    winners = {digest for digest in map(attempt, range(4)) if digest is not None}
    committed = WeightLog(store).read(1)
    assert winners <= ({committed.digest} if committed else set())


def test_a_store_that_takes_back_what_it_took_is_not_retried_for_ever() -> None:
    class Forgetful:
        """A store in which objects vanish as soon as they are there."""

        def __init__(self, inner: ObjectStore) -> None:
            self.url = inner.url
            self.renew, self.exists, self.entries = inner.renew, inner.exists, inner.entries
            self.list, self.delete, self.now = inner.list, inner.delete, inner.now
            self.remove_partial, self.stream = inner.remove_partial, inner.stream

        def put_if_absent(self, key: str, data: bytes) -> bool:
            return False

        def get(self, key: str) -> bytes | None:
            return None

    with pytest.raises(DamagedError, match="comes and goes"):
        WeightLog(Forgetful(ObjectStore("memory://"))).commit(record(0))


def test_failures_are_the_same_for_the_same_seed() -> None:
    first, again, other = (random_failures(seed, 100, 0.2) for seed in (1, 1, 2))
    assert first == again != other
    assert 0 < len(first) < 50
    with pytest.raises(ValueError, match="no probability"):
        random_failures(1, 1, 2.0)
