"""Read access to a feedback store: sessions, their states and their signals.

Owns the queries of people. The database is opened read-only: a reader neither waits for nor blocks a writer. The
outcome of a session is in the ledger (:meth:`etude.ledger.archive.Archive.observed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from etude.feedback.schema import FEEDBACK
from etude.feedback.store import RETRY_TIMEOUT_S, SESSION_COLUMNS, all_signals_of, json_rows, session_of
from etude.ledger.database import Database, Row
from etude.ledger.open import open_database
from etude.ledger.transactions import LedgerConnection, Transactions
from etude.types import LiveSession, Signal

STATE = """
    CASE WHEN ended_at IS NULL THEN 'open' WHEN closed_at IS NULL THEN 'ended'
    WHEN taken_at IS NULL THEN 'closed' ELSE 'taken' END
"""
"""SQL expression for the state of a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session with its state and signals, for display."""

    session: LiveSession
    state: str
    """``open``, ``ended``, ``closed`` or ``taken``."""
    result: str
    """Outcome once it was taken; empty before."""
    signals: tuple[tuple[Signal, bool], ...]
    """Signals in the order of receipt, each with true if it was late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalCount:
    """Statistics of all signals of one kind."""

    kind: str
    number: int
    late: int
    unmatched: int
    """Signals whose session has not arrived."""
    mean: float


class SessionArchive(LedgerConnection):
    """The sessions of a feedback store, for one thread."""

    @classmethod
    def open(cls, place: Path | str, *, retry_timeout_s: float = RETRY_TIMEOUT_S) -> Self:
        """Open the store at a path or URL. Raises :class:`~etude.errors.RunFolderError` if there is none."""
        database = open_database(place, retry_timeout_s=retry_timeout_s, tables=FEEDBACK, read_only=True)
        return cls(Transactions(database, retry_timeout_s=retry_timeout_s))

    def states(self) -> dict[str, int]:
        """State → number of sessions."""
        sql = f"SELECT {STATE}, count(*) FROM sessions GROUP BY 1"
        return dict(self._db.read(lambda db: db.execute(sql)))

    def counts(self) -> dict[str, int]:
        """The same counts as :meth:`~etude.feedback.store.FeedbackStore.counts`."""
        return dict(self._db.read(lambda db: db.execute("SELECT name, number FROM counts ORDER BY name")))

    def signal_counts(self) -> list[SignalCount]:
        """Statistics of all stored signals, by kind."""
        sql = "SELECT kind, count(*), sum(late), sum(CASE WHEN session_id IS NULL THEN 1 ELSE 0 END), avg(value)"
        rows = self._db.read(lambda db: db.execute(f"{sql} FROM signals GROUP BY kind ORDER BY kind"))
        return [
            SignalCount(kind=kind, number=number, late=int(late), unmatched=int(unmatched), mean=float(mean))
            for kind, number, late, unmatched, mean in rows
        ]

    def newest(self, limit: int, offset: int = 0) -> list[SessionRecord]:
        """Sessions with their signals, the most recently opened first."""
        return self._db.read(partial(_newest, limit, offset))

    def session(self, session_id: str) -> SessionRecord | None:
        """One session with its signals; ``None`` if there is none with this id."""
        return self._db.read(partial(_one, session_id))

    def ends(self, session_ids: Sequence[str]) -> dict[str, float]:
        """Session id → time of its end, for stored sessions that have ended."""
        sql = """
            SELECT s.session_id, s.ended_at FROM json_each(?) AS r JOIN sessions AS s ON s.session_id = r.value->>0
            WHERE s.ended_at IS NOT NULL
        """
        ids = json_rows([[session_id] for session_id in session_ids])
        return dict(self._db.read(lambda db: db.execute(sql, ids)))


def _newest(limit: int, offset: int, db: Database) -> list[SessionRecord]:
    sql = (
        f"SELECT {SESSION_COLUMNS}, {STATE}, result FROM sessions ORDER BY opened_at DESC, session_id LIMIT ? OFFSET ?"
    )
    return _records(db, db.execute(sql, limit, offset))


def _one(session_id: str, db: Database) -> SessionRecord | None:
    sql = f"SELECT {SESSION_COLUMNS}, {STATE}, result FROM sessions WHERE session_id = ?"
    return next(iter(_records(db, db.execute(sql, session_id))), None)


def _records(db: Database, rows: Sequence[Row]) -> list[SessionRecord]:
    sessions = [(session_of(tuple(columns)), state, result) for *columns, state, result in rows]
    ids = json_rows([[session.session_id] for session, _, _ in sessions])
    signals = all_signals_of(db, ids, {session.session_id: session.user for session, _, _ in sessions})
    return [
        SessionRecord(
            session=session,
            state=state,
            result=result,
            signals=tuple(sorted(signals.get(session.session_id, ()), key=lambda pair: pair[0].received_at)),
        )
        for session, state, result in sessions
    ]
