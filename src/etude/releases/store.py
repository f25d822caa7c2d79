"""Releases in the ledger's database: their states, all moves with evidence, and users' requests.

    releases             version, digest, state, …            one row per release
    release_moves        from, to, why, evidence as JSON, by  one row per move, immutable
    release_requests     approve, rollback, propose; by, when one row per request, with its outcome: the audit
    arm_sessions         label, user, metric → value          one row per ended user session, for A/B tests

The moves of one decision and the trainer's load that belongs to it are one transaction, so a process that dies between
two decisions continues from this state. Opening the store creates the tables; a run without releases has none.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np

from etude.config.recipe import LedgerConfig
from etude.errors import RunFolderError
from etude.ledger import rows
from etude.ledger.changes import LOAD, LOADED
from etude.ledger.database import Database, Row
from etude.ledger.open import is_url, open_database
from etude.ledger.states import StepState
from etude.ledger.transactions import LedgerConnection, Transactions
from etude.releases.controller import LoadFacts, ReleaseDecision, ReleaseMove
from etude.releases.experiment import ArmCounts, UserSums
from etude.releases.states import Release, ReleaseState, move_release
from etude.types import Json

TABLES = (
    """
    CREATE TABLE IF NOT EXISTS releases (
        version INTEGER PRIMARY KEY,
        digest TEXT NOT NULL,
        state TEXT NOT NULL,                -- states.ReleaseState
        stage INTEGER NOT NULL,
        since REAL NOT NULL,
        replaces INTEGER,
        loaded TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS release_moves (
        number INTEGER PRIMARY KEY,         -- from 1
        version INTEGER NOT NULL,
        from_state TEXT NOT NULL,           -- empty for a version that became a candidate
        to_state TEXT NOT NULL,
        stage INTEGER NOT NULL,
        moved_at REAL NOT NULL,             -- seconds since 1970
        moved_by TEXT NOT NULL,             -- a person; empty for the controller
        reason TEXT NOT NULL,
        evidence TEXT NOT NULL              -- JSON
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS release_requests (
        number INTEGER PRIMARY KEY,         -- from 1
        kind TEXT NOT NULL,                 -- RequestKind
        version INTEGER,                    -- that is approved, or meant to be taken back
        checkpoint TEXT NOT NULL,           -- of a proposal
        asked_by TEXT NOT NULL,
        asked_at REAL NOT NULL,
        outcome TEXT NOT NULL               -- empty while it is open
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS arm_sessions (
        session_id TEXT PRIMARY KEY,
        label TEXT NOT NULL,                -- routing_table.Assignment.label
        pseudonym TEXT NOT NULL,            -- of the user
        metrics TEXT NOT NULL               -- JSON: metric → value
    )
    """,
    "CREATE INDEX IF NOT EXISTS arm_sessions_by_label ON arm_sessions (label)",
)


LAST_TABLE = "arm_sessions"
TABLE_NAMES = {
    False: "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?",
    True: "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema() AND tablename = ?",
}
"""Query for the existence of a table; the key is true for a database server."""


class RequestKind(StrEnum):
    """Kind of a user's request."""

    APPROVE = "approve"
    ROLLBACK = "rollback"
    PROPOSE = "propose"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """A user's request."""

    kind: RequestKind
    by: str
    at: float
    version: int | None = None
    """The version to approve or to roll back; ``None``: the one that is due."""
    checkpoint: str = ""
    """The proposed folder."""
    number: int = 0
    outcome: str = ""
    """Empty while it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMove:
    """A recorded move."""

    version: int
    from_state: str
    to_state: str
    stage: int
    at: float
    by: str
    reason: str
    evidence: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSession:
    """An ended session of a user, as counted in tests."""

    session_id: str
    label: str
    """Arm and generation of the routing table, :attr:`etude.routing_table.Assignment.label`."""
    user: str
    """Pseudonym."""
    metrics: Mapping[str, float]


class ReleaseStore(LedgerConnection):
    """One process's access to the releases of a run; not to be shared between threads."""

    @classmethod
    def open(cls, place: Path | str, config: LedgerConfig | None = None, *, read_only: bool = False) -> Self:
        """Open the releases in the ledger's database at a path or URL; with ``read_only`` nothing is written, and
        :class:`~etude.errors.RunFolderError` is raised if there are no tables yet.

        Raises as :meth:`etude.ledger.ledger.Ledger.open` does.
        """
        config = config or LedgerConfig()
        database = open_database(place, retry_timeout_s=config.retry_timeout_s, read_only=read_only)
        transactions = Transactions(database, retry_timeout_s=config.retry_timeout_s)
        if not read_only:
            transactions.write(_make_tables)
        elif not transactions.read(lambda db: db.execute(TABLE_NAMES[is_url(place)], LAST_TABLE))[0][0]:
            transactions.close()
            raise RunFolderError(f"{database.name} has no releases: no process of its run has been that far")
        return cls(transactions)

    def releases(self) -> tuple[Release, ...]:
        """All releases, by version."""
        names = "version, digest, state, stage, since, replaces, loaded"
        selected = self._db.read(lambda db: db.execute(f"SELECT {names} FROM releases ORDER BY version"))
        return tuple(_release(row) for row in selected)

    def moves(self, version: int | None = None) -> tuple[RecordedMove, ...]:
        """All moves in their order, or those of one version."""
        names = "version, from_state, to_state, stage, moved_at, moved_by, reason, evidence"
        selected = self._db.read(lambda db: db.execute(f"SELECT {names} FROM release_moves ORDER BY number"))
        return tuple(_move(row) for row in selected if version in (None, row[0]))

    def apply(self, decision: ReleaseDecision, at: float, request: int | None = None) -> None:
        """Record the moves of a decision, request its load, and close the ``request`` that it answers, all or nothing.

        Raises ``ValueError`` for a decision based on outdated states.
        """
        self._db.write(lambda db: _apply(db, decision, at, request))

    def add_session(self, session_id: str, label: str, user: str, metrics: Mapping[str, float]) -> None:
        """Count an ended session of a user in the arm ``label``; repeating it has no effect."""
        sql = (
            "INSERT INTO arm_sessions (session_id, label, pseudonym, metrics) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (session_id) DO NOTHING"
        )
        self._db.write(lambda db: db.execute(sql, session_id, label, user or session_id, json.dumps(dict(metrics))))

    def forget_session(self, session_id: str) -> None:
        """Delete a session from the counts of tests."""
        self._db.write(lambda db: db.execute("DELETE FROM arm_sessions WHERE session_id = ?", session_id))

    def counts(self, label: str) -> ArmCounts:
        """Users and ended sessions of a label: the protocol :class:`~etude.releases.experiment.ArmMetrics`."""
        sql = "SELECT count(DISTINCT pseudonym), count(*) FROM arm_sessions WHERE label = ?"
        ((users, sessions),) = self._db.read(lambda db: db.execute(sql, label))
        return ArmCounts(users=users, sessions=sessions)

    def sums(self, label: str, metric: str) -> UserSums:
        """One metric of these sessions, user by user."""
        sql = "SELECT pseudonym, metrics FROM arm_sessions WHERE label = ?"
        totals, sessions = Counter[str](), Counter[str]()
        for user, metrics in self._db.read(lambda db: db.execute(sql, label)):
            value = json.loads(metrics).get(metric)
            if value is not None:
                totals[user] += value
                sessions[user] += 1
        users = list(sessions)
        return UserSums(
            totals_U=np.array([totals[user] for user in users], np.float64),
            sessions_U=np.array([sessions[user] for user in users], np.float64),
        )

    def sessions(self, labels: Sequence[str]) -> tuple[ArmSession, ...]:
        """The sessions of some labels, in no order."""
        marks = ", ".join("?" * len(labels))
        sql = f"SELECT session_id, label, pseudonym, metrics FROM arm_sessions WHERE label IN ({marks})"
        selected = self._db.read(lambda db: db.execute(sql, *labels))
        return tuple(
            ArmSession(session_id=session_id, label=label, user=user, metrics=json.loads(metrics))
            for session_id, label, user, metrics in selected
        )

    def ask(self, request: ReleaseRequest) -> int:
        """Store a user's request; returns its number."""
        return self._db.write(lambda db: _insert_request(db, request))

    def requests(self, *, is_open: bool = False) -> tuple[ReleaseRequest, ...]:
        """All requests in their order, or those that are open."""
        names = "number, kind, version, checkpoint, asked_by, asked_at, outcome"
        selected = self._db.read(lambda db: db.execute(f"SELECT {names} FROM release_requests ORDER BY number"))
        return tuple(request for row in selected if not (request := _request(row)).outcome or not is_open)

    def close_request(self, number: int, outcome: str) -> None:
        """Record the outcome of a request."""
        self._db.write(lambda db: _close(db, number, outcome))

    def load_checkpoint(self, number: int, checkpoint: str) -> None:
        """Request the trainer to load a checkpoint for the proposal ``number``, and close the proposal."""

        def propose(db: Database) -> None:
            rows.set_fact(db, LOAD, json.dumps({"id": f"proposal-{number}", "checkpoint": checkpoint}))
            _close(db, number, "the trainer loads it")

        self._db.write(propose)

    def loads(self) -> LoadFacts:
        """Loads of the trainer: the pending one, and the result of the last one."""
        return self._db.read(_loads)


def _make_tables(db: Database) -> None:
    for table in TABLES:
        db.execute(table)


def _apply(db: Database, decision: ReleaseDecision, at: float, request: int | None) -> None:
    if request is not None:
        _close(db, request, "; ".join(f"version {move.release.version} is {move.to!s}" for move in decision.moves))
    for move in decision.moves:
        state = _state(db, move.release.version)
        if state != ("" if move.is_new else move.release.state):
            raise ValueError(f"release {move.release.version} is {state or 'unknown'} now, not {move.release.state!s}")
        to = move.to if move.is_new else move_release(move.release.state, move.to)
        _put(db, replace(move.release, state=to, stage=move.stage, since=at))
        _record(db, move, at)
    if decision.load is not None:
        number = _next(db, "release_moves") - 1  # the number of its move is a unique id
        rows.set_fact(db, LOAD, json.dumps({"id": f"move-{number}", "version": decision.load}))


def _state(db: Database, version: int) -> str:
    selected = db.execute("SELECT state FROM releases WHERE version = ?", version)
    return str(selected[0][0]) if selected else ""


def _put(db: Database, release: Release) -> None:
    db.execute(
        "INSERT INTO releases (version, digest, state, stage, since, replaces, loaded) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (version) DO UPDATE SET state = excluded.state, stage = excluded.stage, since = excluded.since",
        release.version,
        release.digest,
        str(release.state),
        release.stage,
        release.since,
        release.replaces,
        release.loaded,
    )


def _record(db: Database, move: ReleaseMove, at: float) -> None:
    db.execute(
        "INSERT INTO release_moves (number, version, from_state, to_state, stage, moved_at, moved_by, reason, evidence)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        _next(db, "release_moves"),
        move.release.version,
        "" if move.is_new else str(move.release.state),
        str(move.to),
        move.stage,
        at,
        move.by,
        move.reason,
        json.dumps(finite(dict(move.evidence))),
    )


def _insert_request(db: Database, request: ReleaseRequest) -> int:
    number = _next(db, "release_requests")
    db.execute(
        "INSERT INTO release_requests (number, kind, version, checkpoint, asked_by, asked_at, outcome)"
        " VALUES (?, ?, ?, ?, ?, ?, '')",
        number,
        str(request.kind),
        request.version,
        request.checkpoint,
        request.by,
        request.at,
    )
    return number


def _close(db: Database, number: int, outcome: str) -> None:
    db.execute("UPDATE release_requests SET outcome = ? WHERE number = ? AND outcome = ''", outcome, number)


def _next(db: Database, table: str) -> int:
    return int(db.execute(f"SELECT coalesce(max(number), 0) + 1 FROM {table}")[0][0])


def _loads(db: Database) -> LoadFacts:
    facts = [rows.get_fact(db, key) for key in (LOAD, LOADED)]
    wish, loaded = (None if text is None else json.loads(text) for text in facts)
    if loaded is None:
        return LoadFacts(pending=wish is not None)
    is_done = rows.step_state(db, loaded["step"]) is StepState.DONE
    return LoadFacts(
        pending=not is_done or wish is None or wish["id"] != loaded["id"],
        version=loaded["step"] if is_done else None,
        checkpoint=loaded.get("checkpoint", "") if is_done else "",
    )


def _release(row: Row) -> Release:
    version, digest, state, stage, since, replaces, loaded = row
    return Release(
        version=version,
        digest=digest,
        state=ReleaseState(state),
        stage=stage,
        since=since,
        replaces=replaces,
        loaded=loaded,
    )


def _move(row: Row) -> RecordedMove:
    version, from_state, to_state, stage, at, by, reason, evidence = row
    return RecordedMove(
        version=version,
        from_state=from_state,
        to_state=to_state,
        stage=stage,
        at=at,
        by=by,
        reason=reason,
        evidence=json.loads(evidence),
    )


def _request(row: Row) -> ReleaseRequest:
    number, kind, version, checkpoint, by, at, outcome = row
    return ReleaseRequest(
        number=number,
        kind=RequestKind(kind),
        version=version,
        checkpoint=checkpoint,
        by=by,
        at=at,
        outcome=outcome,
    )


def finite(value: Json) -> Json:
    """The value with non-finite numbers, such as the end of an unbounded interval, as ``null``."""
    match value:
        case dict():
            return {key: finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
    return value
