"""Everything published is verified, damage is named, and repaired from a mirror or by encoding it again."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from etude.objects import ObjectStore
from etude.types import WeightVersion
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import pull
from etude.weights.records import commit_key, layout_key, link_key, pack_key
from etude.weights.relay import Relay
from etude.weights.repair import RepairResult, repair, verify
from synthetic_updates import alike, synthetic_version

VERIFY_OPTIONS = PublishOptions(
    codec="gaps", chunk_numbers=512, pack_bytes=1000, encoders=2, uploads=2, anchor_every=0, compact=False
)
OPTIONS = PublishOptions(codec="gaps", chunk_numbers=512, pack_bytes=1000, encoders=2, uploads=2, anchor_every=3)

Break = Callable[[ObjectStore, str], None]


def tear(store: ObjectStore, key: str) -> None:
    store.renew(key, b"torn")


BREAKS: tuple[Break, ...] = (tear, ObjectStore.delete)


def published(store: ObjectStore, newest: int, codec: str = "gaps") -> WeightLog:
    log = WeightLog(store)
    with Publisher(log, replace(OPTIONS, codec=codec)) as publisher:
        for version in range(newest + 1):
            publisher.publish(synthetic_version(version), version=version, step=version).result(60)
            publisher.settle()
    return log


def mirrored(log: WeightLog) -> WeightLog:
    mirror = WeightLog(ObjectStore("memory://"))
    with Relay(log, mirror) as relay:
        relay.advance()
    return mirror


def repaired(store: ObjectStore, mirror: WeightLog | None = None) -> list[RepairResult]:
    return list(repair(WeightLog(store), mirror))


def assert_sound(store: ObjectStore, newest: int) -> None:
    log = WeightLog(store)
    assert not [check for check in verify(log) if check.fault]
    for version in range(newest + 1):
        assert alike(pull(log, version).state, synthetic_version(version))


def test_a_sound_log_is_left_alone() -> None:
    store = ObjectStore("memory://")
    published(store, 4)
    assert repaired(store) == []


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("codec", ["gaps", "classes"])
def test_a_delta_is_encoded_again_from_its_ends(codec: str, breaks: Break) -> None:
    """Version 3 is available from its anchor and version 2 from the chain, so the delta between them can be encoded."""
    store = ObjectStore("memory://")
    log = published(store, 4, codec)
    record = log.read(3)
    assert record is not None
    for pack in record.packs:
        breaks(store, pack_key(pack.digest))
    results = repaired(store)
    assert {one.name for one in results} == {pack_key(pack.digest) for pack in record.packs}
    assert {(one.action, one.is_fixed) for one in results} == {("encoded again", True)}
    assert_sound(store, 4)


@pytest.mark.parametrize("breaks", BREAKS)
def test_a_mirror_has_what_cannot_be_made_again(breaks: Break) -> None:
    store = ObjectStore("memory://")
    log = published(store, 2)
    mirror = mirrored(log)
    record = log.read(1)
    assert record is not None
    names = [*(pack_key(pack.digest) for pack in record.packs), layout_key(record.layout)]
    for name in names:
        breaks(store, name)
    alone = repaired(store)
    assert {one.is_fixed for one in alone} == {False}
    assert {one.name for one in alone} == set(names)
    assert {one.action for one in repaired(store, mirror)} == {"copied from the mirror"}
    assert_sound(store, 2)


def test_a_commit_record_comes_from_the_mirror_or_not_at_all() -> None:
    store = ObjectStore("memory://")
    mirror = mirrored(published(store, 2))
    tear(store, commit_key(2))
    (left,) = repaired(store)
    assert (left.name, left.is_fixed) == (commit_key(2), False)
    mirror.store.renew(commit_key(2), b"torn as well")
    assert not any(one.is_fixed for one in repaired(store, WeightLog(mirror.store)))


def test_a_commit_record_and_what_it_names_are_repaired_at_once() -> None:
    store = ObjectStore("memory://")
    log = published(store, 2)
    mirror = mirrored(log)
    record = log.read(2)
    assert record is not None
    tear(store, commit_key(2))
    tear(store, pack_key(record.packs[0].digest))
    results = repaired(store, mirror)
    assert {(one.name, one.is_fixed) for one in results} == {
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
    results = repaired(store)
    assert {one.name for one in results if one.action.startswith("removed")} == {link_key(0, 4), link_key(4, 8)}
    assert_sound(store, 8)


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def memory_log() -> WeightLog:
    return WeightLog(ObjectStore("memory://"))


def publish(log: WeightLog, *versions: int, options: PublishOptions = VERIFY_OPTIONS) -> list[WeightVersion]:
    records = []
    with Publisher(log, options) as publisher:
        for version in versions:
            records.append(publisher.publish(synthetic_version(version), version=version, step=version).result(60))
            publisher.settle()
    return records


def faults(log: WeightLog) -> dict[str, str]:
    return {check.name: check.fault for check in verify(WeightLog(log.store)) if check.fault is not None}


def test_verify_of_a_sound_log_finds_nothing() -> None:
    log = memory_log()
    assert list(verify(log)) == []
    publish(log, *range(6), options=replace(VERIFY_OPTIONS, compact=True, anchor_every=3))
    checks = list(verify(log))
    assert [check.name for check in checks] == [*(f"version {n}" for n in range(6)), "0 → 4", "anchor 3"]
    assert not [check for check in checks if check.fault or check.detour]


@pytest.mark.parametrize("broken", [b"", b"ETP2 torn", None])
def test_a_broken_pack_breaks_what_rests_on_it(broken: bytes | None) -> None:
    log = memory_log()
    records = publish(log, *range(6))
    key = pack_key(records[3].packs[0].digest)
    log.store.delete(key)
    if broken is not None:
        log.store.put_if_absent(key, broken)
    broken_names = faults(log)
    assert sorted(broken_names) == ["version 3", "version 4", "version 5"]
    assert all(key in fault for fault in broken_names.values())
    publish(WeightLog(log.store), 6)
    assert sorted(faults(log)) == ["version 3", "version 4", "version 5"], "what comes after stands on its own"


def test_a_version_that_a_link_still_leads_to_is_a_detour() -> None:
    log = memory_log()
    records = publish(log, *range(6), options=replace(VERIFY_OPTIONS, compact=True))
    log.store.delete(*(pack_key(pack.digest) for pack in records[4].packs))
    checks = list(verify(WeightLog(log.store)))
    assert [check.name for check in checks if check.fault] == ["version 4"]
    assert [check.name for check in checks if check.detour] == ["version 4"]


def test_gaps_and_damaged_records_are_named() -> None:
    log = memory_log()
    publish(log, *range(8))
    log.store.delete(commit_key(1))
    log.store.renew(commit_key(6), b"{}")
    broken_names = faults(log)
    assert sorted(broken_names) == [f"version {n}" for n in (2, 3, 4, 5, 6, 7)]
    assert "rests on version 1" in broken_names["version 5"]
    assert "commits/00000006.json is damaged" in broken_names["version 7"]


def test_damaged_links_are_named() -> None:
    log = memory_log()
    publish(log, *range(9), options=replace(VERIFY_OPTIONS, compact=True))
    log.store.renew(link_key(0, 4), b"torn")
    (link,) = [link for link in WeightLog(log.store).links() if link.target == 8]
    log.store.delete(*(pack_key(pack.digest) for pack in link.packs))
    broken_names = faults(log)
    assert "links/00000000-00000004.json is damaged" in broken_names["0 → 4"]
    assert "is not in memory" in broken_names["4 → 8"]
    assert set(broken_names) >= {"0 → 4", "4 → 8"}


def test_a_record_that_lies_about_the_state_is_found_out() -> None:
    log, forged = memory_log(), memory_log()
    for record in publish(log, 0, 1, 2):
        for key in [pack_key(pack.digest) for pack in record.packs] + [layout_key(record.layout)]:
            data = log.store.get(key)
            assert data is not None
            forged.store.put_if_absent(key, data)
        forged.commit(replace(record, digest="0" * 32) if record.version == 1 else record)
    broken_names = faults(forged)
    assert (
        "gives the state" in broken_names["version 1"]
        and "its commit record says 000000000000" in broken_names["version 1"]
    )
    assert sorted(broken_names) == ["version 1", "version 2"]
