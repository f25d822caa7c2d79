"""Read access to a ledger: search among a hundred thousand rollouts, and read one.

Owns the queries of people during a run. The database is opened read-only, without a lease or a lock: a reader neither
waits for nor blocks a writer. Does not own a rollout's use in training (:mod:`etude.run.rollout_reader`) or its display
(:mod:`etude.dashboard.rollout_text`).

**Cost.** A search reads only ``catalogue``, which has a row of about a hundred bytes per rollout, and no record. The
order ``NEWEST`` reads an index backwards up to the limit; any other order, and every count, reads the rows of the
purpose once. For rollouts from an older étude, the catalogue has no tokens, turns, versions, summaries or hints, so
conditions on these do not match them (``Census.unlisted`` counts them). Only :meth:`Archive.rollout` and
:meth:`Archive.group` decode records, and only the requested ones.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeAlias, get_args

from etude.config.recipe import LedgerConfig
from etude.errors import ConfigError, DamagedError, UserError
from etude.ledger import rows
from etude.ledger.changes import TRAIN
from etude.ledger.database import Database, Row, Value
from etude.ledger.open import open_database
from etude.ledger.payloads import Payloads
from etude.ledger.record_index import RecordIndex
from etude.ledger.records import decode_observed, decode_rollout, decode_task
from etude.ledger.states import GroupState
from etude.ledger.transactions import LedgerConnection, Transactions
from etude.types import Disposition, Group, ObservedSession, Rollout, RolloutStatus, Task

ALIKE_CHARACTERS = 60
"""Length of the prefix by which reasons are grouped."""
Comparison: TypeAlias = Literal["<", "<=", "=", ">=", ">", "!="]
"""Comparison of a reward with a bound."""
COMPARISON = re.compile(rf"\s*({'|'.join(sorted(get_args(Comparison), key=len, reverse=True))})\s*(\S+)\s*")


def parse_comparison(text: str) -> tuple[Comparison, float]:
    """Parse ``>=0.5`` into a comparison and a bound. Raises :class:`~etude.errors.ConfigError`."""
    match = COMPARISON.fullmatch(text)
    try:
        if match:
            comparison: Comparison = next(each for each in get_args(Comparison) if each == match[1])
            return comparison, float(match[2])
    except ValueError:
        pass
    raise ConfigError(f"reward {text!r}: expected a comparison with a number, such as '>=0.5', '<0' or '=1'")


class RolloutOutcome(StrEnum):
    """Outcome of a rollout, as a search names it."""

    GRADED = "graded"
    """It has a reward; includes quarantined rollouts."""
    FAILED = "failed"
    """A machine failed; the slot was tried again."""
    DROPPED = "dropped"
    QUARANTINED = "quarantined"
    """Graded, but excluded from training."""


class Order(StrEnum):
    """Order of the results."""

    NEWEST = "newest"
    """The group admitted last is first."""
    REWARD = "reward"
    """The highest reward is first."""
    TOKENS = "tokens"
    """The most sampled tokens are first."""
    TURNS = "turns"
    STALENESS = "staleness"
    """The oldest token relative to its optimiser step is first; rollouts that no step has claimed are last."""
    SECONDS = "seconds"
    """The longest duration is first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Conditions on rollouts; all must hold, and an omitted one matches every rollout."""

    purpose: str = TRAIN
    group: int | None = None
    slot: int | None = None
    reward: tuple[Comparison, float] | None = None
    outcome: RolloutOutcome | None = None
    reason: str = ""
    """Substring of the end reason or of the verdict's cause; case-insensitive."""
    version: int | None = None
    """Weight version from that of the oldest token to that of the newest."""
    task: str = ""
    """Substring of the task's id or template; case-insensitive."""
    has_summary: bool = False
    has_hint: bool = False
    hacked: bool = False
    """True: only rollouts whose verdict counts them as a hack, rewarded or not."""
    order: Order = Order.NEWEST
    is_reversed: bool = False
    """Reverse the order; rollouts without a value stay last."""
    offset: int = 0
    """Number of results to skip."""
    limit: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutMatch:
    """A search result: the data about a rollout that needs no read of its record."""

    rollout_id: str
    purpose: str
    group: int
    slot: int
    attempt: int
    task_id: str
    status: RolloutStatus
    reward: float | None
    reason: str
    step: int | None
    """The optimiser step that claimed its group."""
    disposition: Disposition | None
    """``None`` if no check for cheating ran."""
    cause: str
    """The reason; empty if kept."""
    traits: "Traits | None"
    """``None`` if an older étude recorded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of a rollout's turns, from the catalogue."""

    turns: int
    summaries: int
    hints: int
    prompt_tokens: int
    """Prompt tokens of all turns; a shared prefix is counted each time."""
    sampled_tokens: int
    first_version: int | None
    """Oldest weight version that sampled a token; ``None`` if no token was sampled."""
    last_version: int | None
    seconds: float


TRAITS = tuple(field.name for field in fields(Traits))
"""Field names in the order of the selected columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Contents of a ledger for one purpose."""

    purpose: str
    groups: Mapping[GroupState, int]
    outcomes: Mapping[RolloutOutcome, int]
    mean_reward: float | None
    summaries: int
    """Rollouts with at least one."""
    hints: int
    """Rollouts with at least one."""
    versions: tuple[int, int] | None
    """The oldest and the newest weight version that sampled a token."""
    unlisted: int
    """Rollouts from an older étude: the catalogue has only their outcome."""


class Archive(LedgerConnection):
    """One reader's connection to a ledger; not to be shared between threads.

    Any call may raise :class:`~etude.ledger.database.LedgerUnavailable` after retries for ``ledger.retry_timeout_s``,
    and :class:`~etude.errors.DamagedError` for a record that cannot be read or whose turns are missing.
    """

    def __init__(
        self, transactions: Transactions, payloads: Payloads | None = None, index: RecordIndex | None = None
    ) -> None:
        super().__init__(transactions)
        self._payloads = payloads
        self._index = index or RecordIndex()

    @classmethod
    def open(
        cls,
        place: Path | str,
        config: LedgerConfig | None = None,
        *,
        payloads: Payloads | None = None,
        index: RecordIndex | None = None,
    ) -> Self:
        """Open the ledger at a path or URL (:mod:`etude.ledger.open`) read-only. Turns that are objects are read from
        ``payloads``; ``index`` is a cache that readers of the same ledger share.

        Raises :class:`~etude.errors.RunFolderError` for a place without a ledger, and for the ledger of an older
        étude, which a writing process must migrate.
        """
        retry_timeout_s = (config or LedgerConfig()).retry_timeout_s
        database = open_database(place, retry_timeout_s=retry_timeout_s, read_only=True)
        return cls(Transactions(database, retry_timeout_s=retry_timeout_s), payloads, index)

    def steps_done(self) -> int:
        """Committed optimiser steps."""
        return self._db.read(_steps_done)

    def census(self) -> list[Census]:
        """The contents of each purpose, training first."""
        return sorted(self._db.read(_census), key=lambda census: (census.purpose != TRAIN, census.purpose))

    def reasons(self, purpose: str, limit: int) -> list[tuple[RolloutStatus, str, int]]:
        """The most frequent reasons why rollouts of a purpose ended: status, reason, count.

        Reasons are grouped by their first ``ALIKE_CHARACTERS``: the rest may be specific to one failure.
        """
        return self._db.read(lambda db: _reasons(db, purpose, limit))

    def find(self, search: Search) -> list[RolloutMatch]:
        """The rollouts that a search matches, in its order."""
        return self._db.read(lambda db: _find(db, search, self._index))

    def count(self, search: Search) -> int:
        """The number of rollouts that a search matches, regardless of its offset and limit."""
        return self._db.read(lambda db: _count(db, search, self._index))

    def templates(self, purpose: str, groups: Collection[int]) -> Mapping[int, str]:
        """Group index → template of its task, for some groups of a purpose."""
        return self._db.read(lambda db: self._index.templates(db, purpose, groups))

    def rollout(self, rollout_id: str) -> tuple[RolloutMatch, Rollout]:
        """A rollout, by its id or a unique prefix of it. Raises :class:`~etude.errors.UserError`."""
        match, row = self._db.read(lambda db: _rollout(db, rollout_id))
        return match, whole_rollout(row, self._payloads)

    def group(self, purpose: str, index: int) -> Group:
        """A group with its graded rollouts in slot order. Raises ``ValueError`` if there is no such group."""
        (group,) = whole_groups([self._db.read(lambda db: read_group(db, purpose, index))], self._payloads)
        return group

    def tasks(self, purpose: str) -> list[Task]:
        """The tasks of a purpose's groups, in order, without reading rollouts."""
        sql = "SELECT task FROM groups WHERE purpose = ? ORDER BY group_index"
        return [decode_task(record) for (record,) in self._db.read(lambda db: db.execute(sql, purpose))]

    def state_of(self, purpose: str, index: int) -> GroupState:
        """The state of a group. Raises ``ValueError`` if there is no such group."""
        return self._db.read(lambda db: rows.group(db, purpose, index)).state

    def step_of(self, purpose: str, index: int) -> int | None:
        """The optimiser step that claimed a group."""
        sql = "SELECT step FROM groups WHERE purpose = ? AND group_index = ?"
        return next((step for (step,) in self._db.read(lambda db: db.execute(sql, purpose, index))), None)

    def admitted(self, purpose: str) -> int:
        """The number of groups ever admitted for a purpose."""
        return self._db.read(lambda db: rows.next_index(db, purpose))

    def epoch(self) -> int:
        """The newest epoch with a group admitted for training; 0 without any."""
        return self._db.read(rows.last_epoch)

    def fact(self, key: str) -> str | None:
        """The fact that the run last recorded under ``key``."""
        return self._db.read(lambda db: rows.get_fact(db, key))

    def observed(self, session_ids: Sequence[str]) -> dict[str, ObservedSession]:
        """Session id → observed live session, for those that were offered to the ledger."""
        sql = "SELECT o.record FROM json_each(?) AS r JOIN observations AS o ON o.session_id = r.value->>0"
        ids = json.dumps([[session_id] for session_id in session_ids])
        sessions = (decode_observed(record) for (record,) in self._db.read(lambda db: db.execute(sql, ids)))
        return {session.session_id: session for session in sessions}

    def drops(self, purpose: str) -> dict[str, int]:
        """Reason → number of dropped groups of a purpose."""
        sql = "SELECT reason, count(*) FROM groups WHERE purpose = ? AND state = ? GROUP BY reason"
        return dict(self._db.read(lambda db: db.execute(sql, purpose, str(GroupState.DROPPED))))

    def drop_reason(self, purpose: str, task_id: str) -> str:
        """The reason why the last group of a task was dropped; empty if it was not."""
        sql = "SELECT reason FROM groups WHERE purpose = ? AND task_id = ? ORDER BY group_index DESC LIMIT 1"
        return next((str(reason) for (reason,) in self._db.read(lambda db: db.execute(sql, purpose, task_id))), "")


class StoredGroup(NamedTuple):
    """The rows of a group."""

    group: rows.GroupRow
    rollouts: Sequence[rows.RolloutRow]
    """Graded rollouts, in slot order."""
    lost: int
    """Number of lost slots."""


def read_group(db: Database, purpose: str, index: int) -> StoredGroup:
    """The rows of a group. Raises ``ValueError`` if there is no such group."""
    group = rows.group(db, purpose, index)
    return StoredGroup(group, rows.graded_rollouts(db, purpose, index), lost=len(rows.slots(db, purpose, group).lost))


def whole_groups(stored: Sequence[StoredGroup], payloads: Payloads | None) -> list[Group]:
    """Groups with their graded rollouts. Raises like :func:`whole_rollout`."""
    of_all = [row for each in stored for row in each.rollouts]
    if payloads is None:
        rollouts = iter([whole_rollout(row, None) for row in of_all])
    else:
        rollouts = iter(payloads.at_once(lambda row: whole_rollout(row, payloads), of_all))
    return [
        Group(
            index=group.group_index,
            task=decode_task(group.task),
            admitted_version=group.admitted_version,
            rollouts=tuple(next(rollouts) for _ in graded),
            lost=lost,
            epoch=group.epoch,
            weight=group.weight,
        )
        for group, graded, lost in stored
    ]


def whole_rollout(row: rows.RolloutRow, payloads: Payloads | None) -> Rollout:
    """A rollout with its turns. Raises :class:`~etude.errors.DamagedError` naming a missing object."""
    if row.turns is None:
        return decode_rollout(row.record)
    if payloads is None:
        raise DamagedError(
            f"the turns of a rollout are the object {row.turns.digest} in payloads/ of its run, which is not there: "
            f"restore that folder from a copy of the run"
        )
    return decode_rollout(row.record, payloads.fetch_turns(row.turns))


def _steps_done(db: Database) -> int:
    ((done,),) = db.execute("SELECT count(*) FROM steps WHERE state = 'done'")
    return int(done)


def _census(db: Database) -> list[Census]:
    groups: dict[str, dict[GroupState, int]] = {}
    for purpose, state, number in db.execute("SELECT purpose, state, count(*) FROM groups GROUP BY purpose, state"):
        groups.setdefault(purpose, {})[GroupState(state)] = number
    sql = (
        "SELECT purpose, status, count(*), avg(reward), sum(CASE WHEN disposition = 'quarantine' THEN 1 ELSE 0 END),"
        " sum(CASE WHEN summaries > 0 THEN 1 ELSE 0 END), sum(CASE WHEN hints > 0 THEN 1 ELSE 0 END),"
        " min(first_version), max(last_version), sum(CASE WHEN turns IS NULL THEN 1 ELSE 0 END)"
        " FROM catalogue GROUP BY purpose, status"
    )
    ended: dict[str, dict[RolloutStatus, _GroupTally]] = {}
    for purpose, status, *counts in db.execute(sql):
        ended.setdefault(purpose, {})[RolloutStatus(status)] = _GroupTally(*counts)
    return [_census_of(purpose, states, ended.get(purpose, {})) for purpose, states in groups.items()]


class _GroupTally(NamedTuple):
    """Counts in the catalogue for one purpose and status."""

    rollouts: int = 0
    mean_reward: float | None = None
    quarantined: int = 0
    summaries: int = 0
    hints: int = 0
    first_version: int | None = None
    last_version: int | None = None
    unlisted: int = 0


def _census_of(purpose: str, groups: Mapping[GroupState, int], ended: Mapping[RolloutStatus, _GroupTally]) -> Census:
    graded, failed, dropped = (ended.get(status, _GroupTally()) for status in RolloutStatus)
    first, last = graded.first_version, graded.last_version
    return Census(
        purpose=purpose,
        groups=groups,
        outcomes={
            RolloutOutcome.GRADED: graded.rollouts,
            RolloutOutcome.FAILED: failed.rollouts,
            RolloutOutcome.DROPPED: dropped.rollouts,
            RolloutOutcome.QUARANTINED: int(graded.quarantined),
        },
        mean_reward=graded.mean_reward,
        summaries=int(graded.summaries),
        hints=int(graded.hints),
        versions=None if first is None or last is None else (first, last),
        unlisted=sum(int(tally.unlisted) for tally in ended.values()),
    )


def _reasons(db: Database, purpose: str, limit: int) -> list[tuple[RolloutStatus, str, int]]:
    sql = (
        f"SELECT status, substr(reason, 1, {ALIKE_CHARACTERS}), count(*) FROM catalogue WHERE purpose = ? GROUP BY 1, 2"
        " ORDER BY 3 DESC, 1, 2 LIMIT ?"
    )
    return [(RolloutStatus(status), reason, number) for status, reason, number in db.execute(sql, purpose, limit)]


_COLUMNS = (
    "c.rollout_id, c.purpose, c.group_index, c.slot, c.attempt, g.task_id, c.status, c.reward, c.reason, g.step,"
    " c.disposition, c.cause, c.turns, c.summaries, c.hints, c.prompt_tokens, c.sampled_tokens, c.first_version,"
    " c.last_version, c.seconds"
)
_FROM = "FROM catalogue c JOIN groups g ON g.purpose = c.purpose AND g.group_index = c.group_index"
_OUTCOMES: Mapping[RolloutOutcome, str] = {
    RolloutOutcome.GRADED: "c.status = 'graded'",
    RolloutOutcome.FAILED: "c.status = 'failed_infra'",
    RolloutOutcome.DROPPED: "c.status = 'dropped'",
    RolloutOutcome.QUARANTINED: "c.disposition = 'quarantine'",
}
_FIRST: Mapping[Order, str] = {
    Order.NEWEST: "",
    Order.REWARD: "c.reward",
    Order.TOKENS: "c.sampled_tokens",
    Order.TURNS: "c.turns",
    Order.STALENESS: "g.step - c.first_version",
    Order.SECONDS: "c.seconds",
}
"""Order → SQL expression, largest first; ties are ordered by newest."""
_NEWEST = ("c.group_index", "c.slot", "c.attempt")


def _conditions(db: Database, search: Search, index: RecordIndex) -> tuple[str, list[Value]]:
    """A search as an SQL condition and its values."""
    given: list[tuple[str, Value | None]] = [
        ("c.purpose = ?", search.purpose),
        ("c.group_index = ?", search.group),
        ("c.slot = ?", search.slot),
        ("c.first_version <= ?", search.version),
        ("c.last_version >= ?", search.version),
    ]
    if search.reward is not None:
        comparison, bound = search.reward
        given.append((f"c.reward {'<>' if comparison == '!=' else comparison} ?", bound))
    if search.reason:
        pattern = f"%{_escaped(search.reason.lower())}%"
        given.append(("lower(c.reason || ' ' || c.cause) LIKE ? ESCAPE '!'", pattern))
    if search.task:
        groups = json.dumps([[number] for number in index.groups_like(db, search.purpose, search.task)])
        given.append(("c.group_index IN (SELECT CAST(value->>0 AS INTEGER) FROM json_each(?))", groups))
    if search.hacked:
        rollout_ids = json.dumps([[rollout_id] for rollout_id in index.hacked(db, search.purpose)])
        given.append(("c.rollout_id IN (SELECT value->>0 FROM json_each(?))", rollout_ids))
    conditions = [(sql, value) for sql, value in given if value is not None]
    fixed = [_OUTCOMES[search.outcome]] if search.outcome else []
    fixed += ["c.summaries > 0"] * search.has_summary + ["c.hints > 0"] * search.has_hint
    return " AND ".join([*(sql for sql, _ in conditions), *fixed]), [value for _, value in conditions]


def _escaped(text: str) -> str:
    """Text with the special characters of SQL patterns escaped."""
    return "".join(f"!{letter}" if letter in "!%_" else letter for letter in text)


def _find(db: Database, search: Search, index: RecordIndex) -> list[RolloutMatch]:
    conditions, values = _conditions(db, search, index)
    first, way = _FIRST[search.order], "ASC" if search.is_reversed else "DESC"
    terms = [f"CASE WHEN {first} IS NULL THEN 1 ELSE 0 END", f"{first} {way}"] if first else []
    order = ", ".join([*terms, *(f"{name} {'DESC' if first else way}" for name in _NEWEST)])
    source = _FROM if search.order is Order.STALENESS else "FROM catalogue c"
    # The inner query sorts small rows; only the selected ones are read whole.
    sql = (
        f"SELECT {_COLUMNS} {_FROM} WHERE c.rollout_id IN"
        f" (SELECT c.rollout_id {source} WHERE {conditions} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}"
    )
    return [_match(row) for row in db.execute(sql, *values, search.limit, search.offset)]


def _count(db: Database, search: Search, index: RecordIndex) -> int:
    conditions, values = _conditions(db, search, index)
    ((number,),) = db.execute(f"SELECT count(*) FROM catalogue c WHERE {conditions}", *values)
    return int(number)


def _match(row: Row) -> RolloutMatch:
    rollout_id, purpose, group, slot, attempt, task_id, status, reward, reason, step, disposition, cause, *traits = row
    return RolloutMatch(
        rollout_id=rollout_id,
        purpose=purpose,
        group=group,
        slot=slot,
        attempt=attempt,
        task_id=task_id,
        status=RolloutStatus(status),
        reward=reward,
        reason=reason,
        step=step,
        disposition=None if disposition is None else Disposition(disposition),
        cause=cause,
        traits=None if traits[0] is None else Traits(**dict(zip(TRAITS, traits, strict=True))),
    )


def _rollout(db: Database, id_or_prefix: str) -> tuple[RolloutMatch, rows.RolloutRow]:
    rollout_id = _identified(db, id_or_prefix)
    (match,) = db.execute(f"SELECT {_COLUMNS} {_FROM} WHERE c.rollout_id = ?", rollout_id)
    (row,) = db.execute(f"SELECT {rows.RECORD_COLUMNS} FROM rollouts WHERE rollout_id = ?", rollout_id)
    return _match(match), rows.rollout_row(row)


def _identified(db: Database, id_or_prefix: str) -> str:
    """The full id for an id or a unique prefix."""
    if db.execute("SELECT 1 FROM catalogue WHERE rollout_id = ?", id_or_prefix):
        return id_or_prefix
    pattern = f"{_escaped(id_or_prefix)}%"
    sql = "SELECT rollout_id FROM catalogue WHERE rollout_id LIKE ? ESCAPE '!' ORDER BY 1 LIMIT 2"
    begun = [rollout_id for (rollout_id,) in db.execute(sql, pattern)] if id_or_prefix else []
    if not begun:
        raise UserError(
            f"the ledger has no rollout {id_or_prefix!r}: `etude show RUN --limit 20` lists the newest with their ids"
        )
    if len(begun) > 1:
        raise UserError(f"{id_or_prefix!r} begins several ids, {begun[0]} and {begun[1]} among them: say more of it")
    return str(begun[0])
