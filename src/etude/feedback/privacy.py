"""Privacy rights of the users of live sessions: deletion on request, a retention limit, and an audit log of both.

    request_deletion ─▶ open request ─▶ its sessions, one by one: ledger, payloads, then here ─▶ done, versions named
                                        (:mod:`etude.run.erasure`, even if processes die)

A request is on disk before any deletion starts, and stays open until all is deleted: a session that a running step uses
has to wait for that step. Training on a session cannot be undone in the weights; so a request names the weight versions
trained on its sessions, from which all later versions descend.

The audit log records who did what and when. It has ids and pseudonyms, no content, and is kept after the deletion.

Owns these rows of the feedback store. Does not own the ledger's data: :meth:`~etude.ledger.live.LiveGroups.erase`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from etude.ledger.database import Database, Row
from etude.ledger.transactions import Transactions

MAX_AUDIT = 100_000
"""Maximum entries per read, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionRequest:
    """A request to delete the data of a user or of one session; all times are the server's."""

    request_id: int
    user: str
    """Pseudonym; empty if the request is for a session."""
    session_id: str
    """Empty if the request is for a user."""
    requested_at: float
    requested_by: str
    """Name of the process, or the key, that requested it."""
    done_at: float | None
    """``None`` while data remain to delete."""
    sessions: int
    """Sessions deleted so far."""
    versions: tuple[int, ...]
    """Weight versions of the steps that trained on a batch with one of these sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action on the stored data of users."""

    at: float
    actor: str
    """A key's id, or the command or process."""
    action: str
    """``delete``, ``deleted``, ``expired`` or ``export``."""
    subject: str
    """Session id or pseudonym."""
    detail: str = ""


class PrivacyRecords:
    """Requests for deletion and the audit log, on a feedback store's connection."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def request_deletion(self, *, user: str = "", session_id: str = "", actor: str, now: float) -> DeletionRequest:
        """Record a request for either a user or a session. Open sessions of the user end."""
        if bool(user) == bool(session_id):
            raise ValueError(f"user={user!r}, session_id={session_id!r}: expected one of them")
        request_id = self._db.write(partial(request_deletion, user, session_id, actor, now))
        return next(one for one in self.requests() if one.request_id == request_id)

    def requests(self, *, is_open: bool = False) -> list[DeletionRequest]:
        """All requests, or only open ones, the oldest first."""
        where = "WHERE done_at IS NULL" if is_open else ""
        sql = f"SELECT {COLUMNS} FROM deletions {where} ORDER BY request_id"
        return [_read(row) for row in self._db.read(lambda db: db.execute(sql))]

    def sessions_of(self, request: DeletionRequest) -> list[str]:
        """Ids of a request's sessions: the named one, or the user's sessions in this store."""
        if request.session_id:
            return [request.session_id]
        sql = "SELECT session_id FROM sessions WHERE pseudonym = ? ORDER BY session_id"
        return [one for (one,) in self._db.read(lambda db: db.execute(sql, request.user))]

    def session_is_gone(self, request: DeletionRequest, session_id: str, version: int | None) -> None:
        """Delete a session here after its deletion elsewhere; record that, and the version trained on it."""
        self._db.write(partial(_gone, request.request_id, session_id, version))

    def finish(self, request: DeletionRequest, now: float) -> None:
        """Mark a request as done; delete also its user's signals that have no session."""
        self._db.write(partial(_finish, request, now))

    def expired(self, ended_before: float, limit: int) -> list[str]:
        """Sessions that ended before a time, the oldest first."""
        sql = "SELECT session_id FROM sessions WHERE ended_at < ? ORDER BY ended_at, session_id LIMIT ?"
        return [one for (one,) in self._db.read(lambda db: db.execute(sql, ended_before, limit))]

    def forget_expired(self, session_id: str, now: float) -> None:
        """Delete a session whose retention time is over."""
        self._db.write(partial(_expire, session_id, now))

    def audit(self, entry: AuditEntry) -> None:
        """Record an action."""
        self._db.write(partial(_audit, entry))

    def audit_log(self, limit: int = MAX_AUDIT) -> list[AuditEntry]:
        """The newest entries, oldest first."""
        sql = "SELECT at, actor, action, subject, detail FROM audit ORDER BY entry DESC LIMIT ?"
        rows = self._db.read(lambda db: db.execute(sql, limit))
        return [
            AuditEntry(at=at, actor=by, action=what, subject=of, detail=more) for at, by, what, of, more in rows[::-1]
        ]


COLUMNS = "request_id, pseudonym, session_id, requested_at, requested_by, done_at, sessions, versions"


def forget_sessions(session_ids: Sequence[str], db: Database) -> None:
    """Delete all rows of these sessions, as a part of a transaction; their payloads are swept later."""
    for session_id in session_ids:
        for table in ("signals", "turns", "sessions"):
            db.execute(f"DELETE FROM {table} WHERE session_id = ?", session_id)


def _read(row: Row) -> DeletionRequest:
    request_id, user, session_id, requested_at, requested_by, done_at, sessions, versions = row
    return DeletionRequest(
        request_id=request_id,
        user=user,
        session_id=session_id,
        requested_at=requested_at,
        requested_by=requested_by,
        done_at=done_at,
        sessions=sessions,
        versions=tuple(map(int, versions.split())),
    )


def request_deletion(user: str, session_id: str, actor: str, now: float, db: Database) -> int:
    """Do what :meth:`PrivacyRecords.request_deletion` does, as a part of a transaction; return the request's id."""
    ((last,),) = db.execute("SELECT coalesce(max(request_id), 0) FROM deletions")
    sql = f"INSERT INTO deletions ({COLUMNS}) VALUES (?, ?, ?, ?, ?, NULL, 0, '')"
    db.execute(sql, last + 1, user, session_id, now, actor)
    ending = "UPDATE sessions SET ended_at = ? WHERE ended_at IS NULL AND (session_id = ? OR pseudonym = ?)"
    db.execute(ending, now, session_id, user or None)
    _audit(AuditEntry(at=now, actor=actor, action="delete", subject=user or session_id), db)
    return int(last) + 1


def _gone(request_id: int, session_id: str, version: int | None, db: Database) -> None:
    forget_sessions([session_id], db)
    ((text,),) = db.execute("SELECT versions FROM deletions WHERE request_id = ?", request_id)
    versions = sorted({*map(int, text.split()), *([] if version is None else [version])})
    sql = "UPDATE deletions SET sessions = sessions + 1, versions = ? WHERE request_id = ?"
    db.execute(sql, " ".join(map(str, versions)), request_id)


def _finish(request: DeletionRequest, now: float, db: Database) -> None:
    if request.user:
        db.execute("DELETE FROM signals WHERE pseudonym = ?", request.user)
    sql = "UPDATE deletions SET done_at = ? WHERE request_id = ? AND done_at IS NULL RETURNING sessions, versions"
    for sessions, versions in db.execute(sql, now, request.request_id):
        detail = f"{sessions} sessions; trained on in versions: {versions or 'none'}"
        subject = request.user or request.session_id
        _audit(AuditEntry(at=now, actor=request.requested_by, action="deleted", subject=subject, detail=detail), db)


def _expire(session_id: str, now: float, db: Database) -> None:
    forget_sessions([session_id], db)
    _audit(AuditEntry(at=now, actor="feedback", action="expired", subject=session_id), db)


def _audit(entry: AuditEntry, db: Database) -> None:
    ((last,),) = db.execute("SELECT coalesce(max(entry), 0) FROM audit")
    sql = "INSERT INTO audit (entry, at, actor, action, subject, detail) VALUES (?, ?, ?, ?, ?, ?)"
    db.execute(sql, last + 1, entry.at, entry.actor, entry.action, entry.subject, entry.detail)
