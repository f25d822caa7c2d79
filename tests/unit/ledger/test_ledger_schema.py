"""Ledgers of older versions are migrated; other projects' databases and newer ledgers are left alone."""

import sqlite3
import threading
from pathlib import Path

import pytest

from etude.errors import RunFolderError
from etude.ledger.archive import Archive, Search
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.ledger.records import encode_rollout, encode_task
from etude.ledger.schema import NEWEST
from ledgers import new_task, rollout, task

VERSION_2 = """
PRAGMA journal_mode = WAL;
CREATE TABLE groups (
    purpose TEXT NOT NULL,
    group_index INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    task BLOB NOT NULL,
    size INTEGER NOT NULL,
    admitted_version INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    step INTEGER REFERENCES steps,
    PRIMARY KEY (purpose, group_index)
);
CREATE UNIQUE INDEX trained_once ON groups (task_id) WHERE purpose = 'train';
CREATE INDEX groups_by_state ON groups (purpose, state, group_index);
CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY,
    purpose TEXT NOT NULL,
    group_index INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL,
    reward REAL,
    reason TEXT NOT NULL,
    record BLOB NOT NULL,
    UNIQUE (purpose, group_index, slot, attempt),
    FOREIGN KEY (purpose, group_index) REFERENCES groups
);
CREATE INDEX rollouts_by_status ON rollouts (purpose, status, group_index, slot, reward);
CREATE TABLE steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
PRAGMA application_id = 1702131044;
PRAGMA user_version = 2;
"""
"""What étude made when its ledgers were of version 2."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run of version 2: a consumed group, a claimed one, one that lacks a rollout; five tasks drawn."""
    path = tmp_path / "ledger.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(VERSION_2)
    db.executemany("INSERT INTO steps VALUES (?, ?)", [(1, "done"), (2, "claimed")])
    for index, (state, step) in enumerate([("consumed", 1), ("claimed", 2), ("open", None)]):
        group = (TRAIN, index, str(index), encode_task(task(index)), 2, 0, state, "", step)
        db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", group)
        for slot in range(1 if state == "open" else 2):
            done = rollout(index, slot)
            values = (done.rollout_id, TRAIN, index, slot, 0, done.status, done.reward, "", encode_rollout(done))
            db.execute("INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    db.execute("INSERT INTO facts VALUES ('rollouts.next-task', '5'), ('eval-before', 'done')")
    db.close()
    return path


def test_a_run_of_version_2_goes_on_where_it_was(old: Path) -> None:
    with Ledger.open(old) as ledger:
        progress = ledger.progress()
        assert (progress.consumed, progress.claimed, progress.open, progress.steps_done) == (1, 1, 1, 1)
        assert (progress.drawn, progress.committed) == (5, 0)
        assert ledger.facts.get("eval-before") == "done"
        assert [group.index for group in ledger.claim_batch(2, 1) or []] == [1]
        ledger.commit_step(2)
        assert ledger.progress().committed == 2  # the open group was drawn there or later
        (slot,) = ledger.open_slots(TRAIN)
        ledger.record(rollout(slot.group_index, slot.slot), TRAIN)
        (drawn,) = ledger.admit_next(new_task, size=1, version=0, kept_below=9) or []
        assert drawn.task.task_id == "5"
        assert [group.epoch for group in ledger.groups(TRAIN)] == [1, 1, 1, 1]
        again = TaskDraw(task=task(5), epoch=2)
        assert ledger.admit_next(lambda _: again, size=1, version=0, kept_below=9)
        ledger.drop_group(TRAIN, 4, "infra")
        assert ledger.claim_batch(3, 1)
        ledger.commit_step(3)
        assert ledger.progress().committed == 5


def test_rollouts_of_an_older_etude_are_catalogued_by_how_they_ended(old: Path) -> None:
    Ledger.open(old).close()
    with Archive.open(old) as archive:
        matches = archive.find(Search(reward=(">=", 1.0), limit=2))
        assert [(rollout.group, rollout.slot, rollout.traits) for rollout in matches] == [(2, 0, None), (1, 1, None)]
        assert [census.unlisted for census in archive.census()] == [5]
        assert archive.find(Search(has_summary=True)) == []
        assert len(archive.rollout(matches[0].rollout_id)[1].turns) == 1


def test_a_reader_does_not_change_an_older_ledger_and_creates_none(old: Path) -> None:
    before = old.read_bytes()
    with pytest.raises(RunFolderError, match=r"ledger of version 2, which an older étude wrote.*etude run --resume"):
        Archive.open(old)
    assert old.read_bytes() == before
    missing = old.with_name("missing.db")
    with pytest.raises(RunFolderError, match=r"no ledger at .*missing\.db', nothing has been recorded"):
        Archive.open(missing)
    assert not missing.exists()


def test_processes_may_migrate_one_ledger_at_the_same_time(old: Path) -> None:
    openers = [threading.Thread(target=lambda: Ledger.open(old).close()) for _ in range(6)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    with Ledger.open(old) as ledger:
        assert ledger.progress().drawn == 5


def test_a_migration_that_fails_leaves_the_version_before_it(old: Path) -> None:
    db = sqlite3.connect(old, isolation_level=None)
    db.execute("CREATE TABLE leases (surprise TEXT)")
    with pytest.raises(RunFolderError, match=r"cannot be opened as a ledger: table leases already exists"):
        Ledger.open(old)
    assert db.execute("PRAGMA user_version").fetchone() == (3,)
    db.execute("DROP TABLE leases")
    db.close()
    with Ledger.open(old) as ledger:
        assert ledger.progress().drawn == 5


def test_foreign_newer_older_and_broken_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    foreign, newer, older, broken = (tmp_path / f"{name}.db" for name in ("foreign", "newer", "older", "broken"))
    database = sqlite3.connect(foreign)
    database.execute("CREATE TABLE songs (name TEXT)")
    database.close()
    for path, version in ((newer, 99), (older, 1)):
        Ledger.open(path).close()
        database = sqlite3.connect(path)
        database.execute(f"PRAGMA user_version = {version}")
        database.close()
    broken.write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    for path, why in [
        (foreign, "not a ledger of étude"),
        (newer, rf"newer\.db' is a ledger of version 99, this étude reads 2 to {NEWEST}"),
        (older, "is a ledger of version 1"),
        (broken, "not a database"),
        (tmp_path / "missing" / "ledger.db", "create it first"),
    ]:
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(RunFolderError, match=why):
            Ledger.open(path)
        assert (path.read_bytes() if path.exists() else None) == before
