"""Turns as objects beside a ledger, in a folder and in a bucket: after any crash, every row's object exists."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etude.errors import DamagedError
from etude.ledger.archive import Archive
from etude.ledger.ledger import TRAIN, Ledger
from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore
from ledgers import TURN, fill, rollout, task


@pytest.fixture
def store(request: pytest.FixtureRequest, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Objects for a ledger: a folder beside SQLite, a bucket for PostgreSQL."""
    if not place.startswith("postgresql"):
        return ObjectStore(str(tmp_path / "payloads"), syncs=True)
    variables = {"AWS_ENDPOINT": request.getfixturevalue("endpoint"), "AWS_ALLOW_HTTP": "true"}
    variables |= {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bucket = ObjectStore("s3://bucket/turns-of-ledgers")
    bucket.delete(*bucket.list(""))
    return bucket


@pytest.fixture
def ledger(place: str, store: ObjectStore) -> Iterator[Ledger]:
    with Ledger.open(place, payloads=Payloads(store)) as opened:
        yield opened


def test_turns_are_read_by_the_digest_that_the_row_has(ledger: Ledger, place: str, store: ObjectStore) -> None:
    for number in range(3):
        fill(ledger, str(number))
    keys = store.list("turns")
    assert len(keys) == 6
    with Archive.open(place, payloads=Payloads(store)) as archive:
        for group in (ledger.group(TRAIN, 1), archive.group(TRAIN, 1), (ledger.claim_batch(1, 3) or [])[1]):
            assert [one.rollout_id for one in group.rollouts] == ["1.0.0", "1.1.0"]
            assert np.array_equal(group.rollouts[1].turns[0].logprobs, TURN.logprobs)
        assert len(archive.rollout("2.1.0")[1].turns) == 1
    assert ledger.turns.named([Path(key).stem for key in keys]) == {Path(key).stem for key in keys}


def test_turns_that_are_not_there_are_named(ledger: Ledger, place: str, store: ObjectStore) -> None:
    fill(ledger, "a")
    lost, damaged = store.list("turns")
    store.delete(lost)
    with pytest.raises(DamagedError, match=f"payload {store.url}/{lost} is missing; restore it from a copy"):
        ledger.claim_batch(1, 1)
    store.renew(lost, b"something else")
    with Archive.open(place, payloads=Payloads(store)) as archive:
        with pytest.raises(DamagedError, match=f"{lost} does not match its name"):
            archive.group(TRAIN, 0)
        assert archive.rollout(next(name for name in ("0.0.0", "0.1.0") if is_of(store, damaged, name)))
    with Ledger.open(place) as without, pytest.raises(DamagedError, match="payloads/ of its run, which is not there"):
        without.group(TRAIN, 0)


def is_of(store: ObjectStore, key: str, rollout_id: str) -> bool:
    """Return true if an object holds the turns of a rollout."""
    ref = Payloads(ObjectStore("memory://")).store_turns([TURN], rollout_id)
    return ref.digest in key and store.exists(key)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from ledgers import rollout
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore

with Ledger.open(sys.argv[1], payloads=Payloads(ObjectStore(sys.argv[2], syncs=True))) as ledger:
    assert ledger.turns.store(rollout(1, 0)) is not None
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_crash_between_object_and_row_leaves_an_open_slot_and_an_object_to_sweep(
    ledger: Ledger, place: str, store: ObjectStore
) -> None:
    fill(ledger, "whole")
    assert ledger.admit_group(task("killed"), TRAIN, 1, 0) == 1
    support = str(Path(__file__).parents[1] / "support")
    process = subprocess.run([sys.executable, "-c", KILLED, place, store.url, support], check=False)
    assert process.returncode == -signal.SIGKILL
    assert [slot.group_index for slot in ledger.open_slots(TRAIN)] == [1]
    assert len(store.list("turns")) == 3
    assert sweep(ledger, store, older_than_s=3600.0) == 0
    assert sweep(ledger, store, older_than_s=-60.0) == 1
    assert len(ledger.group(TRAIN, 0).rollouts) == 2
    ledger.record(rollout(1, 0), TRAIN)
    assert len(ledger.group(TRAIN, 1).rollouts) == 1


def sweep(ledger: Ledger, store: ObjectStore, *, older_than_s: float) -> int:
    return Payloads(store).sweep(list, ledger.turns.named, older_than_s=older_than_s)


def test_what_no_row_names_any_more_is_deleted_for_good(ledger: Ledger, store: ObjectStore) -> None:
    assert ledger.admit_group(task("a"), TRAIN, 2, 0) == 0
    first = rollout(0, 0)
    turns = ledger.turns.store(first)
    assert turns is not None
    ledger.record(first, TRAIN, turns)
    ledger.record(replace(first, rollout_id="copy", slot=1), TRAIN, turns)
    payloads = Payloads(store)
    assert not payloads.delete(turns.digest, ledger.turns.named)
    assert len(store.list("turns")) == 1
    assert payloads.delete(turns.digest, lambda digests: [])
    assert store.list("") == []


def test_a_ledger_without_payloads_is_one_file_and_is_read_with_payloads_as_well(
    place: str, store: ObjectStore
) -> None:
    with Ledger.open(place) as alone:
        fill(alone, "a")
    with Ledger.open(place, payloads=Payloads(store)) as ledger:
        fill(ledger, "b")
        assert [len(group.rollouts[0].turns) for group in ledger.groups(TRAIN)] == [1, 1]
    assert len(store.list("turns")) == 2
