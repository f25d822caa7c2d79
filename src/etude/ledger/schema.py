"""The shape of ``ledger.db`` and how it is opened.

Owns the tables, the connection's settings and the check that a file is a ledger at all. Does not own what the rows
mean (:mod:`etude.ledger.states`) or who changes them (:mod:`etude.ledger.ledger`).
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from etude.errors import RunFolderError

APPLICATION_ID = int.from_bytes(b"etud", "big")
"""Marks an SQLite file as ours, so that a stranger's database is never written to."""
SCHEMA_VERSION = 2
"""``user_version`` of the tables below and the records in them; a file with another one is refused."""
BUSY_TIMEOUT_S = 30.0
"""How long a call waits for another process's transaction; those take about a millisecond."""

TABLES = (
    """
    CREATE TABLE groups (
        purpose TEXT NOT NULL,              -- 'train', or the label of an evaluation
        group_index INTEGER NOT NULL,       -- admission order within the purpose, from 0
        task_id TEXT NOT NULL,
        task BLOB NOT NULL,
        size INTEGER NOT NULL,
        admitted_version INTEGER NOT NULL,
        state TEXT NOT NULL,                -- states.GroupState
        reason TEXT NOT NULL DEFAULT '',    -- why it was dropped
        step INTEGER REFERENCES steps,      -- the optimiser step that claimed it
        PRIMARY KEY (purpose, group_index)
    )
    """,
    "CREATE UNIQUE INDEX trained_once ON groups (task_id) WHERE purpose = 'train'",
    "CREATE INDEX groups_by_state ON groups (purpose, state, group_index)",
    "CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL",
    """
    CREATE TABLE rollouts (                 -- ended ones only; what is in flight is implied by what is missing
        rollout_id TEXT PRIMARY KEY,
        purpose TEXT NOT NULL,
        group_index INTEGER NOT NULL,
        slot INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        status TEXT NOT NULL,               -- types.RolloutStatus
        reward REAL,
        reason TEXT NOT NULL,
        record BLOB NOT NULL,               -- records.encode_rollout
        UNIQUE (purpose, group_index, slot, attempt),
        FOREIGN KEY (purpose, group_index) REFERENCES groups
    )
    """,
    "CREATE INDEX rollouts_by_status ON rollouts (purpose, status, group_index, slot, reward)",
    """
    CREATE TABLE steps (
        step INTEGER PRIMARY KEY,           -- from 1
        state TEXT NOT NULL                 -- states.StepState
    )
    """,
    """
    CREATE TABLE facts (
        key TEXT PRIMARY KEY,
        value TEXT NOT NULL
    )
    """,
)


def connect(path: Path) -> sqlite3.Connection:
    """Open a ledger file, creating it when there is none; several processes may do so at once.

    Raises :class:`~etude.errors.RunFolderError` when the folder is missing or the file is not a ledger of this version.
    """
    if not path.parent.is_dir():
        raise RunFolderError(f"no folder {str(path.parent)!r} to keep a ledger in: create it first")
    try:
        if not path.exists():
            _create(path)
        return _opened(path)
    except sqlite3.DatabaseError as error:
        raise RunFolderError(f"{str(path)!r} cannot be opened as a ledger: {error}") from error


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, and no other writer in between: the lock is taken at the start, so reads inside stay true."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _create(path: Path) -> None:
    """Make a whole ledger under another name, then link it: nobody ever sees half of one, and the first one stays.

    SQLite itself cannot promise that: a change to WAL fails at once when another process has the file open.
    """
    draft = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        with closing(_connected(draft)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            for statement in TABLES:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _opened(path: Path) -> sqlite3.Connection:
    db = _connected(path)
    try:
        _check_ours(db, path)
        # A killed process loses nothing under NORMAL. A power cut may lose the last commits, but never part of one.
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        db.close()
        raise
    return db


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _check_ours(db: sqlite3.Connection, path: Path) -> None:
    (owner,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if owner != APPLICATION_ID:
        raise RunFolderError(f"{str(path)!r} is not a ledger of étude: choose a different run folder")
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{str(path)!r} is a ledger of version {version}, this étude reads {SCHEMA_VERSION}: "
            f"use the étude that wrote it, or start a new run folder"
        )
