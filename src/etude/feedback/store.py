"""The feedback store: live sessions, their turns and signals, until they are joined and given to the sink.

    gateway   keep ─▶ a turn, and its session with the first      end ─▶ no call follows: the window starts
    product   report ─▶ signals, each event once
    process   close_windows ─▶ closed() ─▶ joined sessions ─▶ taken
    feedback

    session   open ──▶ ended ──▶ closed ──▶ taken                 each move is one transaction

Owns the stored data and the transactions that change them; :mod:`etude.feedback.join` owns the match of an event with
its session and the time window. Uses the ledger's databases (SQLite, PostgreSQL): all writing transactions are serial,
a signal is either read by the join or reported as late, never lost, and acknowledged data are on disk.

All input passes :meth:`FeedbackStore.keep` or :meth:`FeedbackStore.report`, and no answer is written before the
:class:`Filter` has seen it: redaction belongs there.

The ids or signals of a batch are passed as one JSON array, which the database unpacks: one statement per batch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import orjson

from etude.feedback.follow_up import FollowUpRule
from etude.feedback.join import UNMATCHED, EventResult, LiveTurn, MatchedSession, join, result_of
from etude.feedback.privacy import PrivacyRecords, forget_sessions, request_deletion
from etude.feedback.schema import FEEDBACK
from etude.feedback.signals import Event
from etude.feedback.turns import decode_records, encode_turn
from etude.ledger.database import Database, Row
from etude.ledger.open import open_database
from etude.ledger.transactions import LedgerConnection, Transactions
from etude.ledger.turns import decode_turns
from etude.types import JoinedSession, Json, LiveAnswer, LiveSession, PayloadRef, Signal, SignalKind

REDACTED = "session_redacted"
"""Name of the count of sessions that are not stored because the model's output had sensitive data."""
MAX_UNMATCHED = 10_000
"""Maximum signals of one product that wait for their sessions; further ones without a session are not stored."""
RETRY_TIMEOUT_S = 60.0
"""Maximum time of retries of the database, as for the ledger."""


Filter = Callable[[LiveAnswer], LiveAnswer | None]
"""Function that gets every answer before storage and returns the part to store; ``None``: nothing of its session."""


def unchanged(answer: LiveAnswer) -> LiveAnswer:
    """The filter that changes nothing."""
    return answer


class FeedbackStore(LedgerConnection):
    """One connection to the feedback store of a run; not to be shared between threads.

    Every time is the server's clock, in seconds since 1970. Any call may raise
    :class:`~etude.ledger.database.LedgerUnavailable`.
    """

    def __init__(self, transactions: Transactions, *, window_s: float, keep_filter: Filter = unchanged) -> None:
        super().__init__(transactions)
        self.window_s = window_s
        self.privacy = PrivacyRecords(transactions)
        """Deletion requests and the audit log."""
        self._filter = keep_filter

    @classmethod
    def open(
        cls,
        place: Path | str,
        *,
        window_s: float,
        keep_filter: Filter = unchanged,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
    ) -> Self:
        """Open the store at a path or URL (:mod:`etude.ledger.open`); create it if there is none."""
        database = open_database(place, retry_timeout_s=retry_timeout_s, tables=FEEDBACK)
        transactions = Transactions(database, retry_timeout_s=retry_timeout_s)
        return cls(transactions, window_s=window_s, keep_filter=keep_filter)

    def all_or_each(self, works: "Sequence[Work]") -> list[object]:
        """Run several works in one transaction; return the result or the exception of each.

        If one fails, all are run one by one, so that it does not affect the others.
        """
        if len(works) > 1:
            try:
                return self._db.write(lambda db: [work(db) for work in works])
            except Exception:  # noqa: BLE001 - each is tried by itself, and raises what it has to
                pass
        return [self._tried(work) for work in works]

    def _tried(self, work: "Work") -> object:
        try:
            return self._db.write(work)
        except Exception as error:  # noqa: BLE001 - its owner gets it
            return error

    # ── from the gateway

    def keeping(self, answer: LiveAnswer, gateway: str, now: float) -> Callable[[Database], None]:
        """The work that stores an answer: its turns, with the first also its session; matches waiting signals."""
        allowed = self._filter(answer)
        return partial(_withhold, answer.session) if allowed is None else partial(_keep, allowed, gateway, now)

    def keep(self, answer: LiveAnswer, gateway: str, now: float) -> None:
        """Store an answer."""
        self._db.write(self.keeping(answer, gateway, now))

    def end(self, session_ids: Sequence[str], now: float) -> None:
        """End sessions: no turn follows, and their windows start. Sessions that ended before are unchanged."""
        self._db.write(partial(end_sessions, session_ids, now))

    def end_all_of(self, gateway: str, now: float) -> int:
        """End the sessions that a gateway with this name left open; return their number."""
        return self._db.write(partial(end_all_of, gateway, now))

    def end_idle(self, used_before: float, now: float) -> int:
        """End the open sessions without a turn since ``used_before``, those of dead gateways; return their number."""
        sql = "UPDATE sessions SET ended_at = ? WHERE ended_at IS NULL AND used_at < ? RETURNING 1"
        return len(self._db.write(lambda db: db.execute(sql, now, used_before)))

    def withdraw(self, session_id: str) -> None:
        """Delete a session whose user withdrew consent, with its turns and signals."""
        self._db.write(partial(forget_sessions, [session_id]))

    def withdraw_named(self, owner: str, name: str, user: str, now: float) -> bool:
        """Delete the newest session that ``owner`` has of a user, a pseudonym, under a name or id; false without one.
        If it was handed on already, its deletion is requested (:class:`~etude.feedback.privacy.PrivacyRecords`).
        """
        return self._db.write(partial(withdraw_named, owner, name, user, now))

    # ── from products

    def reporting(
        self, owner: str, events: Sequence[Event], clock: Callable[[], float]
    ) -> Callable[[Database], list[EventResult]]:
        """The work that stores events of ``owner``, the id of a production key; its result is their outcomes."""
        return partial(_report, owner, events, clock, self.window_s)

    def report(self, owner: str, events: Sequence[Event], clock: Callable[[], float]) -> list[EventResult]:
        """Store events; return the outcome of each, in order, once they are on disk."""
        return self._db.write(self.reporting(owner, events, clock))

    def status(self, owner: str, name: str) -> "SessionStatus | None":
        """The state of a session of ``owner``, by its id or name; ``None`` if there is none."""
        return self._db.read(partial(read_status, owner, name, self.window_s))

    def sessions_of_user(self, user: str) -> list[dict[str, Json]]:
        """All stored data of a user, by pseudonym, for that person to read: each session with the user's messages and
        its signals.
        """
        return self._db.read(partial(_sessions_of_user, user))

    # ── to learning

    def close_windows(self, now: float, limit: int) -> int:
        """Close expired windows, the earliest ended first; return their number. From then on, new signals for these
        sessions are late, and their earlier signals are final.
        """
        sql = """
            UPDATE sessions SET closed_at = ? WHERE session_id IN (
                SELECT session_id FROM sessions WHERE closed_at IS NULL AND ended_at <= ?
                ORDER BY ended_at, session_id LIMIT ?
            ) RETURNING 1
        """
        return len(self._db.write(lambda db: db.execute(sql, now, now - self.window_s, limit)))

    def closed(self, limit: int, follow_up: FollowUpRule | None = None) -> tuple[list[JoinedSession], Counter[str]]:
        """The first closed sessions that are not yet taken, joined, and the number of omitted signals by reason.

        Raises :class:`~etude.feedback.turns.DamagedSession` for turns that cannot be read.
        """
        return self._db.read(partial(_closed, limit, self.window_s, follow_up))

    def taken(self, results: Mapping[str, str], left_out: Mapping[str, int], now: float) -> int:
        """Record that sessions were taken, with the result of each. Counts the results and the omitted signals, and
        returns how many sessions were not recorded before.
        """
        return self._db.write(partial(_taken, results, left_out, now))

    def give_up_unmatched(self, received_before: float) -> int:
        """Delete and count the signals received before then that have no session; return their number."""
        return self._db.write(partial(_give_up_unmatched, received_before))

    def counts(self) -> dict[str, int]:
        """Numbers of events by outcome, of sessions by result, and of omitted signals by reason."""
        return dict(self._db.read(lambda db: db.execute("SELECT name, number FROM counts ORDER BY name")))

    def payloads(self) -> list[PayloadRef]:
        """The payloads that turns of sessions not yet taken reference; a sweep must keep them."""
        return self._db.read(_payloads)


Work = Callable[[Database], object]
"""A part of a transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    """State of a session, for its product."""

    session: LiveSession
    closes_at: float | None
    """Time at which its window is over; ``None`` while the session is open."""
    result: str
    """Outcome once its window was over; empty before."""
    signals: Mapping[str, int]
    """Kind → number of signals."""


SESSION_COLUMNS = (
    "session_id, owner, name, pseudonym, template, region, opened_at, ended_at, arm, first_version, last_version, turns"
)


def session_of(row: Row) -> LiveSession:
    """A session from its :data:`SESSION_COLUMNS`."""
    return LiveSession(
        session_id=row[0],
        owner=row[1],
        name=row[2],
        user=row[3],
        template=row[4],
        region=row[5],
        consent=True,
        opened_at=row[6],
        ended_at=row[7],
        arm=row[8],
        first_version=row[9],
        last_version=row[10],
        turns=row[11],
    )


def end_sessions(session_ids: Sequence[str], now: float, db: Database) -> None:
    """End these sessions, as a part of a transaction: no turn follows."""
    sql = """
        UPDATE sessions SET ended_at = ?
        WHERE session_id IN (SELECT value->>0 FROM json_each(?)) AND ended_at IS NULL
    """
    db.execute(sql, now, json_rows([[session_id] for session_id in session_ids]))


def withdraw_named(owner: str, name: str, user: str, now: float, db: Database) -> bool:
    """Do what :meth:`FeedbackStore.withdraw_named` does, as a part of a transaction."""
    sql = """
        SELECT session_id, closed_at FROM sessions WHERE owner = ? AND pseudonym = ? AND (session_id = ? OR name = ?)
        ORDER BY opened_at DESC, session_id LIMIT 1
    """
    for session_id, closed_at in db.execute(sql, owner, user, name, name):
        if closed_at is None:
            forget_sessions([session_id], db)
        else:
            request_deletion("", session_id, owner, now, db)
        return True
    return False


def _withhold(session: LiveSession, db: Database) -> None:
    """Delete a session and count it as redacted."""
    forget_sessions([session.session_id], db)
    add_counts(db, {REDACTED: 1})


def end_all_of(gateway: str, now: float, db: Database) -> int:
    """End the sessions that a gateway left open, as a part of a transaction; return their number."""
    sql = "UPDATE sessions SET ended_at = ? WHERE gateway = ? AND ended_at IS NULL RETURNING 1"
    return len(db.execute(sql, now, gateway))


def _keep(new: LiveAnswer, gateway: str, now: float, db: Database) -> None:
    session, versions = new.session, [int(one) for turn in new.turns for one in turn.versions]
    oldest, newest = min(versions, default=None), max(versions, default=None)
    if new.first == 0:
        sql = f"""
            INSERT INTO sessions ({SESSION_COLUMNS}, gateway, used_at)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id) DO NOTHING
        """
        row = (session.session_id, session.owner, session.name, session.user, session.template, session.region)
        db.execute(sql, *row, session.opened_at, None, session.arm, oldest, newest, len(new.turns), gateway, now)
        _match(db, "name", (session.name, session.session_id), session, None)
    else:
        sql = """
            UPDATE sessions SET used_at = ?, turns = CASE WHEN turns > ? THEN turns ELSE ? END,
                first_version = CASE WHEN first_version < ? THEN first_version ELSE ? END,
                last_version = CASE WHEN last_version > ? THEN last_version ELSE ? END
            WHERE session_id = ? RETURNING 1
        """
        count = new.first + len(new.turns)
        if not db.execute(sql, now, count, count, oldest, oldest, newest, newest, session.session_id):
            return  # it was deleted in the meantime, and stays deleted
    for index, turn in enumerate(new.turns, new.first):
        record, shared = encode_turn(turn, new.earlier)
        sql = """
            INSERT INTO turns (session_id, turn, completion, follows, shared, message, record)
            VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id, turn) DO NOTHING
        """
        message = new.message.replace("\0", "")  # a character that PostgreSQL has no text with
        db.execute(sql, session.session_id, index, new.completion, new.follows, shared, message, record)
    _match(db, "completion", (new.completion,), session, new.first)


def _match(db: Database, column: str, names: Sequence[str], session: LiveSession, turn: int | None) -> None:
    """Assign waiting signals to a session or one of its turns."""
    named = [name for name in names if name]  # one of the columns is empty in each row
    sql = f"""
        UPDATE signals SET session_id = ?, turn = coalesce(turn, ?)
        WHERE session_id IS NULL AND owner = ? AND {column} IN ({", ".join("?" * len(named))})
    """
    db.execute(sql, session.session_id, turn, session.owner, *named)


def _report(
    owner: str, events: Sequence[Event], clock: Callable[[], float], window_s: float, db: Database
) -> list[EventResult]:
    now = clock()  # after the lock is taken, so that windows close in the order of this time
    places = _places(db, owner, events)
    targets = [places.get(event.completion or event.session) for event in events]
    outcomes = [result_of(place, now, window_s) for place in targets]
    waiting = sum(one is EventResult.UNKNOWN_SESSION for one in outcomes)
    has_room = not waiting or _unmatched(db, owner) + waiting <= MAX_UNMATCHED
    rows = [
        _signal_row(owner, event, place, now, late=result is EventResult.LATE)
        for event, place, result in zip(events, targets, outcomes, strict=True)
        if place is not None or has_room
    ]
    fresh = _insert_signals(db, rows)
    for index, event in enumerate(events):
        if event.event_id in fresh:
            fresh.discard(event.event_id)  # the same id later in the list is a duplicate
        elif targets[index] is not None or has_room:
            outcomes[index] = EventResult.DUPLICATE
    add_counts(db, Counter(outcomes))
    return outcomes


NO_ROWS = "[]"
SESSIONS_NAMED = """
    SELECT r.value->>0, s.session_id, NULL, s.ended_at, s.closed_at FROM json_each(?) AS r JOIN sessions AS s
    ON s.session_id = coalesce(
        (SELECT session_id FROM sessions WHERE session_id = r.value->>0 AND owner = ?),
        (SELECT session_id FROM sessions WHERE owner = ? AND name = r.value->>0
         ORDER BY opened_at DESC, session_id LIMIT 1)
    )
"""
"""The newest session with a name, which a product may reuse; an id has precedence over a name."""
TURNS_ANSWERED = """
    SELECT r.value->>0, t.session_id, t.turn, s.ended_at, s.closed_at FROM json_each(?) AS r
    JOIN turns AS t ON t.completion = r.value->>0 JOIN sessions AS s ON s.session_id = t.session_id
    WHERE s.owner = ? ORDER BY t.turn DESC
"""
"""The turns of an answer, the first of several replies last, so that it counts."""


def _places(db: Database, owner: str, events: Sequence[Event]) -> dict[str, MatchedSession]:
    """Name, id or completion in an event → its session."""
    sessions = json_rows([[one] for one in {event.session for event in events if event.session}])
    completions = json_rows([[one] for one in {event.completion for event in events if event.completion}])
    rows = [
        *(db.execute(SESSIONS_NAMED, sessions, owner, owner) if sessions != NO_ROWS else ()),
        *(db.execute(TURNS_ANSWERED, completions, owner) if completions != NO_ROWS else ()),
    ]
    return {
        name: MatchedSession(session_id=session_id, turn=turn, ended_at=ended_at, is_closed=closed_at is not None)
        for name, session_id, turn, ended_at, closed_at in rows
    }


def _unmatched(db: Database, owner: str) -> int:
    ((count,),) = db.execute("SELECT count(*) FROM signals WHERE owner = ? AND session_id IS NULL", owner)
    return int(count)


def _signal_row(owner: str, event: Event, place: MatchedSession | None, now: float, *, late: bool) -> list[object]:
    turn = event.turn if place is None or event.turn is not None else place.turn
    start, end = event.span or (None, None)
    return [
        owner,
        event.event_id,
        None if place is None else place.session_id,
        event.session,
        event.completion,
        event.kind.value,
        event.value,
        turn,
        start,
        end,
        event.user,
        event.sent_at,
        now,
        int(late),
    ]


SIGNAL_TYPES = (
    *(("owner", "TEXT"), ("event_id", "TEXT"), ("session_id", "TEXT"), ("name", "TEXT"), ("completion", "TEXT")),
    *(("kind", "TEXT"), ("value", "REAL"), ("turn", "INTEGER"), ("span_start", "INTEGER"), ("span_end", "INTEGER")),
    *(("pseudonym", "TEXT"), ("sent_at", "REAL"), ("received_at", "REAL"), ("late", "INTEGER")),
)
"""Column → type, in the order of a row."""
SIGNAL_COLUMNS = ", ".join(column for column, _ in SIGNAL_TYPES)
INSERT_SIGNALS = f"""
    INSERT INTO signals ({SIGNAL_COLUMNS})
    SELECT {", ".join(f"CAST(value->>{index} AS {kind})" for index, (_, kind) in enumerate(SIGNAL_TYPES))}
    FROM json_each(?) WHERE true ON CONFLICT (owner, event_id) DO NOTHING RETURNING event_id
"""


def _insert_signals(db: Database, rows: Sequence[Sequence[object]]) -> set[str]:
    """Add the signals that are new; return their event ids."""
    return {event_id for (event_id,) in db.execute(INSERT_SIGNALS, json_rows(rows))} if rows else set()


def json_rows(rows: object) -> str:
    """Rows as one JSON array, which the database unpacks."""
    return orjson.dumps(rows).decode()


def add_counts(db: Database, counts: Mapping[str, int]) -> None:
    """Add to the counts, as a part of a transaction."""
    sql = """
        INSERT INTO counts (name, number) VALUES (?, ?)
        ON CONFLICT (name) DO UPDATE SET number = counts.number + excluded.number
    """
    for name, number in counts.items():
        if number:
            db.execute(sql, str(name), number)


def read_status(owner: str, name: str, window_s: float, db: Database) -> SessionStatus | None:
    """The state of a session, by its id, or of the newest with this name."""
    sql = f"""
        SELECT {SESSION_COLUMNS}, result FROM sessions WHERE owner = ? AND (session_id = ? OR name = ?)
        ORDER BY CASE WHEN session_id = ? THEN 0 ELSE 1 END, opened_at DESC LIMIT 1
    """
    rows = db.execute(sql, owner, name, name, name)
    if not rows:
        return None
    *columns, result = rows[0]
    session = session_of(tuple(columns))
    kinds = db.execute("SELECT kind, count(*) FROM signals WHERE session_id = ? GROUP BY kind", session.session_id)
    closes_at = None if session.ended_at is None else session.ended_at + window_s
    return SessionStatus(session=session, closes_at=closes_at, result=result, signals=dict(sorted(kinds)))


def _sessions_of_user(user: str, db: Database) -> list[dict[str, Json]]:
    sql = f"SELECT {SESSION_COLUMNS} FROM sessions WHERE pseudonym = ? ORDER BY opened_at, session_id"
    sessions = [session_of(row) for row in db.execute(sql, user)]
    ids = json_rows([[session.session_id] for session in sessions])
    turns, signals = _turns_of(db, ids), _signals_of(db, ids, {one.session_id: one.user for one in sessions})
    return [
        {
            **asdict(session),
            "messages": [one.message for one in turns.get(session.session_id, ())],
            "signals": [asdict(one) for one in signals.get(session.session_id, ())],
        }
        for session in sessions
    ]


def _closed(
    limit: int, window_s: float, follow_up: FollowUpRule | None, db: Database
) -> tuple[list[JoinedSession], Counter[str]]:
    sql = f"""
        SELECT {SESSION_COLUMNS} FROM sessions WHERE closed_at IS NOT NULL AND taken_at IS NULL
        ORDER BY ended_at, session_id LIMIT ?
    """
    sessions = [session_of(row) for row in db.execute(sql, limit)]
    ids = json_rows([[session.session_id] for session in sessions])
    turns, signals = _turns_of(db, ids), _signals_of(db, ids, {one.session_id: one.user for one in sessions})
    joined, left_out = [], Counter[str]()
    for session in sessions:
        own = turns.get(session.session_id)
        if own is None:
            continue  # it was deleted in the meantime
        one, missing = join(
            replace(session, turns=len(own)),
            own,
            signals.get(session.session_id, ()),
            window_s=window_s,
            follow_up=follow_up,
        )
        joined.append(one)
        left_out += missing
    return joined, left_out


def _turns_of(db: Database, ids: str) -> dict[str, list[LiveTurn]]:
    sql = """
        SELECT t.session_id, t.turn, t.completion, t.follows, t.shared, t.message, t.record
        FROM json_each(?) AS r JOIN turns AS t ON t.session_id = r.value->>0 ORDER BY t.session_id, t.turn
    """
    rows: dict[str, list[Row]] = {}
    for row in db.execute(sql, ids):
        rows.setdefault(row[0], []).append(row[1:])
    return {session_id: _live_turns(session_id, own) for session_id, own in rows.items()}


def _live_turns(session_id: str, rows: Sequence[Row]) -> list[LiveTurn]:
    """The turns of a session up to the first that could not be stored: later ones may continue that one."""
    whole = [row[1:] for index, row in enumerate(rows) if row[0] == index]
    turns = decode_records([(record, follows, shared) for _, follows, shared, _, record in whole], session_id)
    return [
        LiveTurn(turn=turn, completion=completion, follows=follows, message=message)
        for turn, (completion, follows, _, message, _) in zip(turns, whole, strict=True)
    ]


def _signals_of(db: Database, ids: str, users: Mapping[str, str]) -> dict[str, list[Signal]]:
    """Session id → its signals received in time."""
    signals = all_signals_of(db, ids, users)
    return {session_id: [signal for signal, is_late in own if not is_late] for session_id, own in signals.items()}


def all_signals_of(db: Database, ids: str, users: Mapping[str, str]) -> dict[str, list[tuple[Signal, bool]]]:
    """Session id → its signals, each with true if it was late; ``ids`` is from :func:`json_rows`."""
    sql = """
        SELECT s.session_id, s.event_id, s.kind, s.value, s.turn, s.span_start, s.span_end, s.pseudonym, s.sent_at,
            s.received_at, s.late FROM json_each(?) AS r JOIN signals AS s ON s.session_id = r.value->>0
    """
    signals: dict[str, list[tuple[Signal, bool]]] = {}
    for session_id, event_id, kind, value, turn, start, end, user, sent_at, received_at, late in db.execute(sql, ids):
        signal = Signal(
            event_id=event_id,
            session_id=session_id,
            kind=SignalKind(kind),
            value=value,
            turn=turn,
            span=None if start is None else (start, end),
            user=user or users[session_id],
            sent_at=sent_at,
            received_at=received_at,
        )
        signals.setdefault(session_id, []).append((signal, bool(late)))
    return signals


def _taken(results: Mapping[str, str], left_out: Mapping[str, int], now: float, db: Database) -> int:
    sql = """
        UPDATE sessions SET taken_at = ?, result = r.result
        FROM (SELECT value->>0 AS session_id, value->>1 AS result FROM json_each(?)) AS r
        WHERE sessions.session_id = r.session_id AND taken_at IS NULL RETURNING sessions.result
    """
    fresh = [result for (result,) in db.execute(sql, now, json_rows([*results.items()]))]
    if fresh:
        add_counts(db, Counter(f"session_{result}" for result in fresh))
        add_counts(db, {f"left_out_{reason}": number for reason, number in left_out.items()})
    return len(fresh)


def _give_up_unmatched(received_before: float, db: Database) -> int:
    sql = "DELETE FROM signals WHERE session_id IS NULL AND received_at < ? RETURNING 1"
    given_up = len(db.execute(sql, received_before))
    add_counts(db, {f"left_out_{UNMATCHED}": given_up})
    return given_up


def _payloads(db: Database) -> list[PayloadRef]:
    sql = """
        SELECT t.record FROM turns AS t JOIN sessions AS s ON s.session_id = t.session_id WHERE s.taken_at IS NULL
    """
    refs = (decode_turns(record)[0].payload for (record,) in db.execute(sql))
    return [ref for ref in refs if ref is not None]
