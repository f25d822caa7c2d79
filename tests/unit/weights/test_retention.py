"""Collections delete what no reader needs, and never a path that a reader needs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError, InfrastructureError, UserError
from etude.types import WeightPack, WeightVersion
from etude.weights.log import WeightLog
from etude.weights.plan import LinkSpeed, edge_of, plan, reachable
from etude.weights.records import Announcement, Link, commit_key, link_key, pack_key
from etude.weights.retention import CollectReport, collect, deletions_of
from fake_clock_store import FakeClockStore
from faulty_store import Failure, FaultyStore
from waiting import wait_until


def put(log: WeightLog, content: str) -> WeightPack:
    data = content.encode()
    return WeightPack(digest=log.put_pack(data), size_bytes=len(data), first=0, last=0)


def publish(log: WeightLog, version: int, base: int | None) -> WeightVersion:
    record = WeightVersion(
        version=version,
        base=base,
        base_digest=None if base is None else f"{base:032x}",
        digest=f"{version:032x}",
        layout=log.put_layout(b"layout"),
        packs=(put(log, f"{base} to {version}"),),
        step=version,
        recipe="quickstart",
        writer="writer-1",
        created="2026-01-01T00:00:00+00:00",
    )
    return log.commit(record)


def connect(log: WeightLog, source: int | None, target: int) -> Link:
    layout = log.put_layout(b"layout")
    packs = (put(log, f"link {source} to {target}"),)
    start = None if source is None else f"{source:032x}"
    digest = f"{target:032x}"
    return log.add_link(
        Link(source=source, source_digest=start, target=target, digest=digest, layout=layout, packs=packs)
    )


def chain(log: WeightLog, newest: int, anchors: Sequence[int] = ()) -> None:
    for version in range(newest + 1):
        publish(log, version, version - 1 if version else None)
    for version in anchors:
        connect(log, None, version)


def sweep(log: WeightLog, keep: int = 2, *, dry_run: bool = False) -> CollectReport:
    return collect(log, keep=keep, grace_s=60, lease_s=100, dry_run=dry_run)


def fetch(log: WeightLog, have: int | None, target: int) -> None:
    """Fetch all bytes that a reader needs for a version."""
    for edge in plan(log.edges(have, target), target, have, LinkSpeed()).edges:
        assert log.layout(edge.layout)
        for pack in edge.packs:
            log.pack(pack)


# --- The decision ---


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[WeightVersion], list[Link], set[str]]:
    """Random records, most of whose packs exist."""
    newest = draw(st.integers(0, 12))
    numbers = draw(st.sets(st.integers(0, newest), min_size=1))
    ends = st.tuples(st.none() | st.integers(0, newest), st.sampled_from(sorted(numbers)))
    pairs = draw(st.sets(ends.filter(lambda pair: pair[0] != pair[1]), max_size=10))
    bases = {number: draw(st.sampled_from([None, *range(number)][-3:])) for number in numbers}
    packs = {name: WeightPack(digest=repr(name), size_bytes=1, first=0, last=0) for name in (*bases.items(), *pairs)}
    versions = [
        WeightVersion(
            version=number,
            base=base,
            base_digest=None,
            digest="",
            layout="",
            packs=(packs[number, base],),
            step=0,
            recipe="",
            writer="",
            created="",
        )
        for number, base in sorted(bases.items())
    ]
    links = [
        Link(source=source, source_digest=None, target=target, digest="", layout="", packs=(packs[source, target],))
        for source, target in pairs
    ]
    lost = draw(st.sets(st.sampled_from(sorted(pack.digest for pack in packs.values())), max_size=2))
    return versions, links, {pack.digest for pack in packs.values()} - lost


@given(logs(), st.sets(st.integers(0, 12), max_size=3), st.integers(0, 5))
@settings(max_examples=500)
def test_every_reader_still_reaches_what_it_reached_before(
    log: tuple[list[WeightVersion], list[Link], set[str]], leases: set[int], keep: int
) -> None:
    versions, links, stored = log
    decision = deletions_of(versions, links, leases, keep, stored)
    numbers = {record.version for record in versions}
    remaining = numbers - set(decision.drop_versions)
    assert decision.keep_from == min(remaining)
    assert {number for number in numbers if number >= max(numbers) - keep} <= remaining
    assert leases & numbers <= remaining
    sound = [edge_of(record) for record in versions] + [edge_of(one) for one in links]
    sound = [edge for edge in sound if edge.packs[0].digest in stored]
    dropped_links = set(decision.drop_links)
    left = [
        edge
        for edge in sound
        if (edge.kind == "delta" or (edge.source, edge.target) not in dropped_links)
        and edge.target not in decision.drop_versions
    ]
    for start in (None, *(leases & numbers)):
        before = {place for place in reachable(sound, (start,)) if place in remaining}
        assert before <= reachable(left, (start,))
    if decision.drop_versions or decision.drop_links:
        assert decision.keep_from in reachable(left, (None,))


@pytest.mark.parametrize(
    ("leases", "keep", "lost", "floor"),
    [
        (set(), 0, "", 16),
        (set(), 4, "", 16),
        (set(), 5, "", 8),
        ({11, 19}, 0, "", 8),
        ({8}, 0, "", 8),
        ({7}, 0, "", 0),
        (set(), 99, "", 0),
        ({999}, 0, "", 16),
        (set(), 0, "link None to 16", 8),
        (set(), 0, "19 to 20", 16),
        (set(), 0, "18 to 19", 16),
    ],
)
def test_the_floor_is_the_newest_sound_anchor_below_all_leases(
    leases: set[int], keep: int, lost: str, floor: int
) -> None:
    log = WeightLog(FakeClockStore(now_s=1000.0))
    chain(log, 20, anchors=(8, 16))
    log.store.delete(pack_key(put(log, lost).digest))
    stored = {key.removeprefix("packs/") for key in log.store.list("packs")}
    versions = [record for record in map(log.read, log.versions()) if record is not None]
    decision = deletions_of(versions, log.links(), leases, keep, stored)
    assert (decision.keep_from, decision.drop_versions) == (floor, tuple(range(floor)))
    assert decision.drop_links == tuple((None, version) for version in (8, 16) if version < floor)


def test_a_version_whose_base_is_below_the_floor_keeps_it_down() -> None:
    log = WeightLog(FakeClockStore(now_s=1000.0))
    chain(log, 4, anchors=(4,))
    publish(log, 5, 3)
    stored = {key.removeprefix("packs/") for key in log.store.list("packs")}
    versions = [record for record in map(log.read, log.versions()) if record is not None]
    assert deletions_of(versions, log.links(), (), 0, stored).keep_from == 0
    assert deletions_of([], [], (), 0, stored).keep_from is None


# --- Acting on it ---


def test_a_collection_frees_what_is_below_the_floor() -> None:
    store = FakeClockStore(now_s=1000.0)
    log = WeightLog(store)
    chain(log, 20, anchors=(8, 16))
    connect(log, 4, 8)
    connect(log, 16, 20)
    connect(log, 17, 15)
    store.now_s += 200
    expected = sweep(log, dry_run=True)
    assert len(log.versions()) == 21
    report = sweep(log)
    assert report == CollectReport(
        keep_from=16,
        versions=16,
        objects=expected.objects,
        size_bytes=expected.size_bytes,
        dry_run=False,
    )
    assert report.objects == 16 + 3 + 16 + 3
    assert log.versions() == [16, 17, 18, 19, 20]
    assert store.list("links") == [link_key(16, 20), link_key(None, 16)]
    assert len(store.list("packs")) == 5 + 2
    assert len(store.list("layouts")) == 1
    assert sweep(log).objects == 0
    for have in (None, 16, 18, 3):
        fetch(WeightLog(store), have, 20)


def test_without_an_anchor_nothing_is_freed() -> None:
    store = FakeClockStore(now_s=1000.0)
    log = WeightLog(store)
    assert sweep(log).keep_from is None
    chain(log, 20)
    store.now_s += 200
    assert (sweep(log).objects, sweep(log).keep_from) == (0, 0)


def test_a_lease_holds_the_floor_down_until_it_expires() -> None:
    store = FakeClockStore(now_s=1000.0)
    log = WeightLog(store)
    chain(log, 20, anchors=(8, 16))
    store.now_s += 200
    lease = log.lease("reader-1")
    lease.renew(10)
    store.now_s += 99
    assert sweep(log).keep_from == 8
    fetch(log, 10, 20)
    lease.renew(11)
    store.now_s += 99
    assert sweep(log).keep_from == 8
    store.now_s += 2
    assert sweep(log).keep_from == 16
    assert store.list("leases") == []


def test_what_is_being_uploaded_is_left_alone() -> None:
    store = FakeClockStore(now_s=1000.0)
    log = WeightLog(store)
    chain(log, 0)
    old, again = put(log, "of a dead writer"), put(log, "uploaded a second time")
    log.announce(Announcement(version=1, writer="dead", sequence=0, packs=(old,)))
    store.put_if_absent("clock/left behind", b"")
    store.now_s += 61
    put(log, "uploaded a second time")
    young = put(log, "new")
    log.announce(Announcement(version=1, writer="alive", sequence=0, packs=(young,)))
    assert sweep(log).objects == 3
    assert store.list("staged") == ["staged/00000001/alive/000000.json"]
    assert store.list("clock") == []
    assert [log.pack(pack) for pack in (again, young)] == [b"uploaded a second time", b"new"]


def test_a_damaged_commit_stops_the_collection_before_it_starts() -> None:
    store = FakeClockStore(now_s=1000.0)
    chain(WeightLog(store), 20, anchors=(16,))
    store.delete(commit_key(3))
    store.put_if_absent(commit_key(3), b"{}")
    store.now_s += 200
    with pytest.raises(DamagedError, match=r"commits/00000003\.json is damaged"):
        sweep(WeightLog(store))
    assert len(WeightLog(store).versions()) == 21
    with pytest.raises(UserError, match="must not be negative"):
        sweep(WeightLog(store), keep=-1)


def test_a_collection_that_dies_anywhere_is_finished_by_the_next() -> None:
    for number in range(40):
        store = FakeClockStore(now_s=1000.0)
        chain(WeightLog(store), 12, anchors=(4, 8))
        store.now_s += 200
        try:
            sweep(WeightLog(FaultyStore(store, {number: Failure.GONE})))
        except InfrastructureError:
            for have in (None, 8, 10):
                fetch(WeightLog(store), have, 12)
        sweep(WeightLog(store))
        assert len(store.list("packs")) == 5 + 1


@given(st.lists(st.sampled_from(["publish", "anchor", "merge", "lease", "collect", "wait"]), max_size=40))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_readers_can_go_on(events: list[str]) -> None:
    store = FakeClockStore(now_s=1000.0)
    log = WeightLog(store)
    lease, leased, newest = log.lease("reader-1"), 0, 0
    publish(log, 0, None)
    lease.renew(0)
    for event in events:
        store.now_s += 1
        if event == "publish":
            newest += 1
            publish(log, newest, newest - 1)
        elif event == "anchor":
            connect(log, None, newest)
        elif event == "merge" and newest >= 4:
            connect(log, newest - 4, newest)
        elif event == "lease":
            leased = (leased + newest) // 2
            lease.renew(leased)
        elif event == "wait":
            store.now_s += 40
            lease.renew(leased)
        elif event == "collect":
            sweep(WeightLog(store), keep=0)
        fetch(WeightLog(store), None, newest)
        fetch(WeightLog(store), leased, newest)


def test_a_writer_a_collector_and_readers_at_once() -> None:
    store = FakeClockStore(now_s=1000.0)
    publish(WeightLog(store), 0, None)
    newest, written, leased = 60, 0, 0

    def reader_is_near() -> bool:
        return written - leased <= 3

    def write() -> None:
        nonlocal written
        log = WeightLog(store)
        for version in range(1, newest + 1):
            publish(log, version, version - 1)
            if version % 8 == 0:
                connect(log, None, version)
            written = version
            wait_until(reader_is_near)  # else the clock would outrun the lease of a reader that is alive
            store.now_s += 20

    def clean() -> int:
        log = WeightLog(store)
        return sum(sweep(log, keep=16).objects for _ in range(60))

    def follow() -> None:
        nonlocal leased
        log = WeightLog(store)
        lease = log.lease("reader-1")
        lease.renew(leased)
        while leased < newest:
            target = log.latest(after=leased)
            assert target is not None
            fetch(log, leased, target)
            lease.renew(target)
            leased = target
        lease.release()

    with ThreadPoolExecutor(3) as pool:
        following, cleaning, writing = pool.submit(follow), pool.submit(clean), pool.submit(write)
        following.result(timeout=60)
        writing.result(timeout=60)
        assert cleaning.result(timeout=60) + sweep(WeightLog(store), keep=16).objects > 0
    fetch(WeightLog(store), None, newest)
