"""Every SQL statement of the ledger, named.

Owns the queries and writes of rows. Each function is one or a few statements on an open connection;
:mod:`etude.ledger.changes` combines them into transactions and checks if these are permitted.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from etude.ledger.database import Database, Row
from etude.ledger.leases import Lease
from etude.ledger.states import GROUP_MOVES, EndedAttempt, GroupSlots, GroupState, StepState, move
from etude.types import PayloadRef, Rollout, RolloutStatus, TurnKind


class GroupRow(NamedTuple):
    """A group without its rollouts; ``task`` is still encoded."""

    group_index: int
    task: bytes
    size: int
    admitted_version: int
    state: GroupState
    worker: str
    """The lease under which its slots are filled; empty: free."""
    position: int | None
    """Position of its task in the training data; ``None``: the task was not drawn."""
    epoch: int
    """Count, from 1, of its task's admissions; 1 for an evaluation."""
    weight: float = 1.0
    """Importance weight of its task."""


class RolloutRow(NamedTuple):
    """A rollout as stored in a row."""

    record: bytes
    """Encoded rollout (:mod:`etude.ledger.records`)."""
    turns: PayloadRef | None
    """The object with its turns; ``None`` if they are in the record."""


class TaskOutcome(NamedTuple):
    """The current outcome of one training group."""

    group_index: int
    task_id: str
    position: int
    """Position of its task in the training data."""
    is_open: bool
    graded: int
    """Rollouts that have a reward and are not quarantined."""
    passed: float
    """Sum of their rewards, each limited to 0 … 1."""


class DataCursor(NamedTuple):
    """Cursor into the training data of a purpose."""

    drawn: int
    """Position of the next draw."""
    committed: int
    """Position before which every draw was trained on in a committed step, dropped for a reason or skipped."""


GROUP_COLUMNS = "group_index, task, size, admitted_version, state, seat, position, epoch, weight"
RECORD_COLUMNS = "record, turns_digest, turns_bytes"
COMPARED = "status = 'graded' AND (disposition IS NULL OR disposition <> 'quarantine')"
"""Condition on the catalogue: rollouts whose rewards are compared with each other."""


def insert_group(db: Database, purpose: str, task_id: str, group: GroupRow) -> None:
    """Add a group."""
    sql = f"INSERT INTO groups (purpose, task_id, {GROUP_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    db.execute(sql, purpose, task_id, *group)


def is_trained_on(db: Database, task_id: str, epoch: int) -> bool:
    """Return true if a task was admitted for training in an epoch; the query uses the index ``trained_once``."""
    sql = "SELECT 1 FROM groups WHERE purpose = 'train' AND task_id = ? AND epoch = ?"
    return bool(db.execute(sql, task_id, epoch))


def is_admitted(db: Database, session_id: str) -> bool:
    """Return true if a session's group was admitted, or dropped at once; the query uses the index ``live_once``."""
    return bool(db.execute("SELECT 1 FROM groups WHERE purpose = 'live' AND task_id = ?", session_id))


def live_group(db: Database, session_id: str) -> tuple[GroupRow, int | None] | None:
    """The group of a live session and the step that claimed it; ``None`` if the session was never offered."""
    sql = f"SELECT step, {GROUP_COLUMNS} FROM groups WHERE purpose = 'live' AND task_id = ?"
    rows = db.execute(sql, session_id)
    return (_group_row(rows[0][1:]), rows[0][0]) if rows else None


def erase_rollout(db: Database, rollout_id: str) -> str | None:
    """Remove a live session except its group; return the digest of its turns if they are an object."""
    rows = db.execute("SELECT turns_digest FROM rollouts WHERE rollout_id = ?", rollout_id)
    db.execute("DELETE FROM catalogue WHERE rollout_id = ?", rollout_id)
    db.execute("DELETE FROM rollouts WHERE rollout_id = ?", rollout_id)
    db.execute("DELETE FROM observations WHERE session_id = ?", rollout_id)
    return rows[0][0] if rows else None


def sessions_of_user(db: Database, user: str) -> list[str]:
    """The live sessions of a user, by pseudonym."""
    return [one for (one,) in db.execute("SELECT session_id FROM observations WHERE user_id = ?", user)]


def insert_observed(db: Database, session_id: str, index: int, user: str, day: int, record: bytes) -> None:
    """Add the observation of a live session."""
    sql = "INSERT INTO observations (session_id, group_index, user_id, day, record) VALUES (?, ?, ?, ?, ?)"
    db.execute(sql, session_id, index, user, day, record)


def observed_records(db: Database, limit: int, before_step: int | None) -> list[bytes]:
    """The newest observations, oldest first: of all sessions, or of those that earlier steps claimed."""
    claimed = " JOIN groups g ON g.purpose = 'live' AND g.group_index = o.group_index AND g.step < ?"
    sql = f"SELECT o.record FROM observations o{claimed if before_step else ''} ORDER BY o.group_index DESC LIMIT ?"
    return [record for (record,) in db.execute(sql, *([before_step] if before_step else []), limit)][::-1]


def last_epoch(db: Database) -> int:
    """The newest epoch with a group admitted for training; 0 without any."""
    ((epoch,),) = db.execute("SELECT coalesce(max(epoch), 0) FROM groups WHERE purpose = 'train'")
    return int(epoch)


def next_index(db: Database, purpose: str) -> int:
    """The index of the next group to admit."""
    ((index,),) = db.execute("SELECT coalesce(max(group_index) + 1, 0) FROM groups WHERE purpose = ?", purpose)
    return int(index)


def group(db: Database, purpose: str, index: int) -> GroupRow:
    """One group. Raises ``ValueError`` if there is none."""
    rows = db.execute(f"SELECT {GROUP_COLUMNS} FROM groups WHERE purpose = ? AND group_index = ?", purpose, index)
    if not rows:
        raise ValueError(f"the ledger has no group {index} of purpose {purpose!r}")
    return _group_row(rows[0])


def group_indices(db: Database, purpose: str, states: Collection[GroupState]) -> list[int]:
    """The indices of all groups in some states, in admission order."""
    marks = ", ".join("?" * len(states))
    sql = f"SELECT group_index FROM groups WHERE purpose = ? AND state IN ({marks}) ORDER BY 1"
    return [index for (index,) in db.execute(sql, purpose, *states)]


def open_groups(db: Database, purpose: str) -> list[GroupRow]:
    """The groups with unfinished slots, in admission order."""
    sql = f"SELECT {GROUP_COLUMNS} FROM groups WHERE purpose = ? AND state = 'open' ORDER BY group_index"
    return [_group_row(row) for row in db.execute(sql, purpose)]


def unused_groups(db: Database, purpose: str, limit: int) -> list[tuple[int, GroupState]]:
    """Index and state of the first ``limit`` groups that are open or ready, in admission order."""
    sql = "SELECT group_index, state FROM groups WHERE purpose = ? AND state IN ('open', 'ready') ORDER BY 1 LIMIT ?"
    return [(index, GroupState(state)) for index, state in db.execute(sql, purpose, limit)]


def groups_of_step(db: Database, step: int) -> list[tuple[str, int]]:
    """Purpose and index of the groups that a step claimed: simulated ones, then live ones, in admission order."""
    sql = "SELECT purpose, group_index FROM groups WHERE step = ? ORDER BY purpose DESC, group_index"
    return [(purpose, index) for purpose, index in db.execute(sql, step)]


def steps_without_groups(db: Database, last: int) -> int:
    """Number of steps up to ``last`` that claimed no group."""
    sql = "SELECT count(*) FROM steps s WHERE s.step <= ? AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.step = s.step)"
    ((count,),) = db.execute(sql, last)
    return int(count)


def move_group(
    db: Database,
    purpose: str,
    group: GroupRow,
    to: GroupState,
    reason: str = "",
    moves: Mapping[GroupState, frozenset[GroupState]] = GROUP_MOVES,
) -> None:
    """Move a group to another state and set its drop reason; ``ValueError`` if ``moves`` has no such move."""
    state = move(moves, group.state, to)
    sql = "UPDATE groups SET state = ?, reason = ? WHERE purpose = ? AND group_index = ?"
    db.execute(sql, state, reason, purpose, group.group_index)


def set_reason(db: Database, purpose: str, index: int, reason: str) -> None:
    """Set the reason why a group is dropped."""
    db.execute("UPDATE groups SET reason = ? WHERE purpose = ? AND group_index = ?", reason, purpose, index)


def claim_groups(db: Database, step: int, purpose: str, last: int) -> None:
    """Claim all ready groups of a purpose up to index ``last`` for a step."""
    state = move(GROUP_MOVES, GroupState.READY, GroupState.CLAIMED)
    sql = "UPDATE groups SET state = ?, step = ? WHERE purpose = ? AND state = 'ready' AND group_index <= ?"
    db.execute(sql, state, step, purpose, last)


def consume_groups(db: Database, step: int) -> None:
    """Mark all groups that a step claimed as consumed."""
    state = move(GROUP_MOVES, GroupState.CLAIMED, GroupState.CONSUMED)
    db.execute("UPDATE groups SET state = ? WHERE step = ? AND state = 'claimed'", state, step)


def insert_rollout(db: Database, purpose: str, rollout: Rollout, row: RolloutRow) -> None:
    """Add an ended rollout."""
    db.execute(
        "INSERT INTO rollouts (rollout_id, purpose, group_index, slot, attempt, status, reward, reason, record,"
        " turns_digest, turns_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rollout.rollout_id,
        purpose,
        rollout.group_index,
        rollout.slot,
        rollout.attempt,
        rollout.status,
        rollout.reward,
        rollout.reason,
        row.record,
        None if row.turns is None else row.turns.digest,
        None if row.turns is None else row.turns.size_bytes,
    )
    _catalogue(db, purpose, rollout)


def _catalogue(db: Database, purpose: str, rollout: Rollout) -> None:
    """Add the searchable values of a rollout to the catalogue, so that no search has to read records."""
    sampled = [turn.versions for turn in rollout.turns if len(turn.versions)]
    db.execute(
        "INSERT INTO catalogue (rollout_id, purpose, group_index, slot, attempt, status, reward, reason, disposition,"
        " cause, turns, summaries, hints, prompt_tokens, sampled_tokens, first_version, last_version, seconds)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rollout.rollout_id,
        purpose,
        rollout.group_index,
        rollout.slot,
        rollout.attempt,
        rollout.status,
        rollout.reward,
        rollout.reason,
        None if rollout.verdict is None else rollout.verdict.disposition,
        "" if rollout.verdict is None else rollout.verdict.reason,
        len(rollout.turns),
        sum(turn.kind is TurnKind.SUMMARY for turn in rollout.turns),
        len(rollout.hints),
        sum(len(turn.prompt_ids) for turn in rollout.turns),
        sum(len(versions) for versions in sampled),
        min((int(versions.min()) for versions in sampled), default=None),
        max((int(versions.max()) for versions in sampled), default=None),
        rollout.seconds,
    )


def slots(db: Database, purpose: str, group: GroupRow) -> GroupSlots:
    """The slots of a group, with the rollouts that ended."""
    sql = (
        "SELECT slot, attempt, status, rollout_id FROM rollouts WHERE purpose = ? AND group_index = ?"
        " UNION ALL SELECT slot, 0, 'lost', '' FROM lost_slots WHERE purpose = ? AND group_index = ? ORDER BY 1, 2"
    )
    ended = db.execute(sql, purpose, group.group_index, purpose, group.group_index)
    return GroupSlots(
        size=group.size,
        endings=tuple(
            EndedAttempt(slot, attempt, RolloutStatus(status), rollout_id)
            for slot, attempt, status, rollout_id in ended
            if status != "lost"
        ),
        lost=frozenset(slot for slot, _, status, _ in ended if status == "lost"),
    )


def graded_rollouts(db: Database, purpose: str, index: int) -> list[RolloutRow]:
    """The graded rollouts of a group, by slot."""
    sql = (
        f"SELECT {RECORD_COLUMNS} FROM rollouts"
        " WHERE purpose = ? AND group_index = ? AND status = 'graded' ORDER BY slot"
    )
    return [rollout_row(row) for row in db.execute(sql, purpose, index)]


def rollout_row(row: Row) -> RolloutRow:
    """The selected ``RECORD_COLUMNS`` of a rollout."""
    record, digest, size_bytes = row
    return RolloutRow(record, None if digest is None else PayloadRef(digest=digest, size_bytes=size_bytes))


def named_turns(db: Database, digests: Sequence[str]) -> set[str]:
    """The digests of turns, among ``digests``, that a rollout refers to."""
    sql = f"SELECT DISTINCT turns_digest FROM rollouts WHERE turns_digest IN ({', '.join('?' * len(digests))})"
    return {digest for (digest,) in db.execute(sql, *digests)} if digests else set()


def insert_lost_slot(db: Database, purpose: str, index: int, slot: int, reason: str) -> None:
    """Add a slot that has no attempts left."""
    sql = "INSERT INTO lost_slots (purpose, group_index, slot, reason) VALUES (?, ?, ?, ?)"
    db.execute(sql, purpose, index, slot, reason)


def rewards(db: Database, purpose: str) -> list[float]:
    """The rewards of all graded rollouts, by group and slot."""
    sql = "SELECT reward FROM rollouts WHERE purpose = ? AND status = 'graded' ORDER BY group_index, slot"
    return [reward for (reward,) in db.execute(sql, purpose)]


def rollout_counts(db: Database, purpose: str) -> dict[str, int]:
    """Status → number of rollouts; a status that never occurred is absent."""
    return dict(db.execute("SELECT status, count(*) FROM rollouts WHERE purpose = ? GROUP BY status", purpose))


def progress_counts(db: Database, purpose: str) -> dict[str, int]:
    """State → number of groups (absent if none), ``steps_done``, and the cursor as ``drawn`` and ``committed``
    (absent if nothing was drawn); a single statement, so a consistent snapshot. Consumed groups, nearly all of a long
    run, are not counted one by one: they are the rest of all indices.
    """
    sql = (
        "SELECT state, count(*) FROM groups"
        " WHERE purpose = ? AND state IN ('open', 'ready', 'claimed', 'dropped') GROUP BY state"
        " UNION ALL SELECT 'consumed', coalesce(max(group_index) + 1, 0) FROM groups WHERE purpose = ?"
        " UNION ALL SELECT 'steps_done', count(*) FROM steps WHERE state = 'done'"
        " UNION ALL SELECT 'drawn', drawn FROM cursors WHERE purpose = ?"
        " UNION ALL SELECT 'committed', committed FROM cursors WHERE purpose = ?"
    )
    counts: dict[str, int] = dict(db.execute(sql, purpose, purpose, purpose, purpose))
    counts["consumed"] -= sum(counts.get(state, 0) for state in GroupState if state is not GroupState.CONSUMED)
    return counts


def usable_groups(db: Database, purpose: str) -> int:
    """The number of groups ever admitted, without dropped ones; the query stays fast in a long run."""
    ((dropped,),) = db.execute("SELECT count(*) FROM groups WHERE purpose = ? AND state = 'dropped'", purpose)
    return next_index(db, purpose) - int(dropped)


def is_without_signal(db: Database, index: int) -> bool:
    """Return true if all rewards of a training group are alike, or too few to be compared."""
    sql = "SELECT count(*), min(reward), max(reward) FROM catalogue WHERE purpose = 'train' AND group_index = ?"
    ((count, lowest, highest),) = db.execute(f"{sql} AND {COMPARED}", index)
    return int(count) < 2 or lowest == highest


def resampled_since_batch(db: Database, reason: str) -> int:
    """Number of training groups dropped for a ``reason`` after the last one that a step claimed."""
    sql = (
        "SELECT count(*) FROM groups WHERE purpose = 'train' AND state = 'dropped' AND reason = ? AND group_index >"
        " (SELECT coalesce(max(group_index), -1) FROM groups WHERE purpose = 'train' AND step IS NOT NULL)"
    )
    ((count,),) = db.execute(sql, reason)
    return int(count)


def resampled_before(db: Database, step: int, reason: str) -> int:
    """Number of training groups dropped for a ``reason`` between the last groups of earlier steps and of ``step``."""
    sql = (
        "SELECT count(*) FROM groups WHERE purpose = 'train' AND state = 'dropped' AND reason = ? AND group_index >"
        " (SELECT coalesce(max(group_index), -1) FROM groups WHERE purpose = 'train' AND step < ?) AND group_index <"
        " (SELECT coalesce(max(group_index), -1) FROM groups WHERE purpose = 'train' AND step = ?)"
    )
    ((count,),) = db.execute(sql, reason, step, step)
    return int(count)


def task_outcomes(db: Database, first: int) -> list[TaskOutcome]:
    """The outcomes of the training groups from index ``first`` on, in admission order."""
    rated = "CASE WHEN c.reward < 0 THEN 0.0 WHEN c.reward > 1 THEN 1.0 ELSE c.reward END"
    compared = COMPARED.replace("status", "c.status").replace("disposition", "c.disposition")
    sql = (
        f"SELECT g.group_index, g.task_id, coalesce(g.position, g.group_index), g.state, count(c.reward),"
        f" coalesce(sum({rated}), 0.0) FROM groups g LEFT JOIN catalogue c"
        f" ON c.purpose = 'train' AND c.group_index = g.group_index AND {compared}"
        " WHERE g.purpose = 'train' AND g.group_index >= ?"
        " GROUP BY g.group_index, g.task_id, g.position, g.state ORDER BY 1"
    )
    return [
        TaskOutcome(int(index), task_id, int(position), state == GroupState.OPEN, int(graded), float(passed))
        for index, task_id, position, state, graded, passed in db.execute(sql, first)
    ]


def cursor(db: Database, purpose: str) -> DataCursor:
    """The cursor into the training data; (0, 0) if nothing was drawn."""
    rows = db.execute("SELECT drawn, committed FROM cursors WHERE purpose = ?", purpose)
    return DataCursor(*rows[0]) if rows else DataCursor(0, 0)


def set_cursor(db: Database, purpose: str, cursor: DataCursor) -> None:
    """Set the cursor into the training data."""
    sql = (
        "INSERT INTO cursors (purpose, drawn, committed) VALUES (?, ?, ?)"
        " ON CONFLICT (purpose) DO UPDATE SET drawn = excluded.drawn, committed = excluded.committed"
    )
    db.execute(sql, purpose, *cursor)


def first_unsettled(db: Database, purpose: str) -> int | None:
    """The lowest position of a group that is neither consumed nor dropped; ``None`` if there is no such group."""
    sql = "SELECT min(position) FROM groups WHERE purpose = ? AND state IN ('open', 'ready', 'claimed')"
    ((position,),) = db.execute(sql, purpose)
    return None if position is None else int(position)


def lease(db: Database, name: str) -> Lease:
    """The row of a lease; a lease that was never taken is free."""
    rows = db.execute("SELECT holder, token, beats FROM leases WHERE name = ?", name)
    if not rows:
        return Lease(name=name)
    holder, token, beats = rows[0]
    return Lease(name=name, holder=holder, token=token, beats=beats)


def put_lease(db: Database, lease: Lease) -> None:
    """Add or replace the row of a lease."""
    sql = (
        "INSERT INTO leases (name, holder, token, beats) VALUES (?, ?, ?, ?) ON CONFLICT (name)"
        " DO UPDATE SET holder = excluded.holder, token = excluded.token, beats = excluded.beats"
    )
    db.execute(sql, lease.name, lease.holder, lease.token, lease.beats)


def other_workers(db: Database, purpose: str, mine: str) -> list[str]:
    """Names of the workers other than ``mine`` that fill open groups of a purpose."""
    sql = "SELECT DISTINCT seat FROM groups WHERE purpose = ? AND state = 'open' AND seat <> ?"
    return [worker for (worker,) in db.execute(sql, purpose, mine)]


def reassign_groups(db: Database, purpose: str, worker: str, to: str) -> None:
    """Assign the open groups of a worker to another one."""
    sql = "UPDATE groups SET seat = ? WHERE purpose = ? AND state = 'open' AND seat = ?"
    db.execute(sql, to, purpose, worker)


def insert_step(db: Database, step: int) -> None:
    """Add a claimed step."""
    db.execute("INSERT INTO steps (step, state) VALUES (?, ?)", step, StepState.CLAIMED)


def set_step_state(db: Database, step: int, state: StepState) -> None:
    """Change the state of a step."""
    db.execute("UPDATE steps SET state = ? WHERE step = ?", state, step)


def step_state(db: Database, step: int) -> StepState | None:
    """The state of a step; ``None`` before its claim."""
    rows = db.execute("SELECT state FROM steps WHERE step = ?", step)
    return StepState(rows[0][0]) if rows else None


def last_step(db: Database) -> int:
    """The newest step that claimed a batch; 0 without any."""
    ((step,),) = db.execute("SELECT coalesce(max(step), 0) FROM steps")
    return int(step)


def set_fact(db: Database, key: str, value: str) -> None:
    """Add or replace a fact."""
    sql = "INSERT INTO facts (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    db.execute(sql, key, value)


def facts_under(db: Database, prefix: str) -> list[str]:
    """The keys that start with ``prefix``, without it; ``prefix`` must not contain LIKE's special characters."""
    return [key.removeprefix(prefix) for (key,) in db.execute("SELECT key FROM facts WHERE key LIKE ?", f"{prefix}%")]


def remove_fact(db: Database, key: str) -> None:
    """Delete a fact."""
    db.execute("DELETE FROM facts WHERE key = ?", key)


def get_fact(db: Database, key: str) -> str | None:
    """The value of a fact."""
    rows = db.execute("SELECT value FROM facts WHERE key = ?", key)
    return str(rows[0][0]) if rows else None


def _group_row(row: Row) -> GroupRow:
    group_index, task, size, admitted_version, state, *others = row
    return GroupRow(group_index, task, size, admitted_version, GroupState(state), *others)
