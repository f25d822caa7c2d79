"""Everything published is proven, and what is broken is named."""

from dataclasses import replace

import pytest

from etude.types import WeightVersion
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.records import commit_key, layout_key, link_key, pack_key
from etude.weights.store import ObjectStore
from etude.weights.synthetic_updates import drifting
from etude.weights.verify import verify

PLAIN = PublishOptions(
    codec="gaps", chunk_numbers=512, pack_bytes=1000, encoders=2, uploads=2, anchor_every=0, compact=False
)


def memory_log() -> WeightLog:
    return WeightLog(ObjectStore("memory://"))


def publish(log: WeightLog, *versions: int, options: PublishOptions = PLAIN) -> list[WeightVersion]:
    records = []
    with Publisher(log, options) as publisher:
        for version in versions:
            records.append(publisher.publish(drifting(version), version=version, step=version).result(60))
            publisher.settle()
    return records


def faults(log: WeightLog) -> dict[str, str]:
    return {check.name: check.fault for check in verify(WeightLog(log.store)) if check.fault is not None}


def test_verify_of_a_sound_log_finds_nothing() -> None:
    log = memory_log()
    assert list(verify(log)) == []
    publish(log, *range(6), options=replace(PLAIN, compact=True, anchor_every=3))
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
    found = faults(log)
    assert sorted(found) == ["version 3", "version 4", "version 5"]
    assert all(key in fault for fault in found.values())
    publish(WeightLog(log.store), 6)
    assert sorted(faults(log)) == ["version 3", "version 4", "version 5"], "what comes after stands on its own"


def test_a_version_that_a_link_still_leads_to_is_a_detour() -> None:
    log = memory_log()
    records = publish(log, *range(6), options=replace(PLAIN, compact=True))
    log.store.delete(*(pack_key(pack.digest) for pack in records[4].packs))
    checks = list(verify(WeightLog(log.store)))
    assert [check.name for check in checks if check.fault] == ["version 4"]
    assert [check.name for check in checks if check.detour] == ["version 4"]


def test_gaps_and_damaged_records_are_named() -> None:
    log = memory_log()
    publish(log, *range(8))
    log.store.delete(commit_key(1))
    log.store.renew(commit_key(6), b"{}")
    found = faults(log)
    assert sorted(found) == [f"version {n}" for n in (2, 3, 4, 5, 6, 7)]
    assert "rests on version 1" in found["version 5"]
    assert "commits/00000006.json is damaged" in found["version 7"]


def test_damaged_links_are_named() -> None:
    log = memory_log()
    publish(log, *range(9), options=replace(PLAIN, compact=True))
    log.store.renew(link_key(0, 4), b"torn")
    (link,) = [link for link in WeightLog(log.store).links() if link.target == 8]
    log.store.delete(*(pack_key(pack.digest) for pack in link.packs))
    found = faults(log)
    assert "links/00000000-00000004.json is damaged" in found["0 → 4"]
    assert "is not in memory" in found["4 → 8"]
    assert set(found) >= {"0 → 4", "4 → 8"}


def test_a_record_that_lies_about_the_state_is_found_out() -> None:
    log, forged = memory_log(), memory_log()
    for record in publish(log, 0, 1, 2):
        for key in [pack_key(pack.digest) for pack in record.packs] + [layout_key(record.layouts[0])]:
            data = log.store.get(key)
            assert data is not None
            forged.store.put_if_absent(key, data)
        forged.commit(replace(record, digest="0" * 32) if record.version == 1 else record)
    found = faults(forged)
    assert "gives the state" in found["version 1"] and "its commit record says 000000000000" in found["version 1"]
    assert sorted(found) == ["version 1", "version 2"]
