"""Every SQL statement of the ledger, named.

Owns how rows are found and written. Each function is one statement on an open connection; what is done together, and
whether it may be done at all, is decided in :mod:`etude.ledger.ledger`.
"""

import sqlite3
from typing import Any, NamedTuple

from etude.ledger.states import GROUP_MOVES, GroupState, StepState, move
from etude.types import Rollout, RolloutStatus


class GroupRow(NamedTuple):
    """A group without its rollouts; ``task`` is still encoded."""

    group_index: int
    task: bytes
    size: int
    admitted_version: int
    state: GroupState


class Ending(NamedTuple):
    """Which attempt at which slot ended how."""

    slot: int
    attempt: int
    status: RolloutStatus


GROUP_COLUMNS = "group_index, task, size, admitted_version, state"


def insert_group(db: sqlite3.Connection, purpose: str, task_id: str, group: GroupRow) -> None:
    """Add a group."""
    db.execute(
        f"INSERT INTO groups (purpose, task_id, {GROUP_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (purpose, task_id, *group),
    )


def is_trained_on(db: sqlite3.Connection, task_id: str) -> bool:
    """Whether a task was ever admitted for training; spelled so that the index ``trained_once`` answers it."""
    return bool(_all(db, "SELECT 1 FROM groups WHERE purpose = 'train' AND task_id = ?", task_id))


def next_index(db: sqlite3.Connection, purpose: str) -> int:
    """The index of the next group to be admitted."""
    return int(_one(db, "SELECT coalesce(max(group_index) + 1, 0) FROM groups WHERE purpose = ?", purpose))


def group(db: sqlite3.Connection, purpose: str, index: int) -> GroupRow:
    """One group. Raises ``ValueError`` when there is none."""
    rows = _all(db, f"SELECT {GROUP_COLUMNS} FROM groups WHERE purpose = ? AND group_index = ?", purpose, index)
    if not rows:
        raise ValueError(f"the ledger has no group {index} of purpose {purpose!r}")
    return _group_row(rows[0])


def group_indices(db: sqlite3.Connection, purpose: str) -> list[int]:
    """The indices of all groups in admission order."""
    return [index for (index,) in _all(db, "SELECT group_index FROM groups WHERE purpose = ? ORDER BY 1", purpose)]


def open_groups(db: sqlite3.Connection, purpose: str) -> list[GroupRow]:
    """The groups with unfinished slots, in admission order."""
    sql = f"SELECT {GROUP_COLUMNS} FROM groups WHERE purpose = ? AND state = 'open' ORDER BY group_index"
    return [_group_row(row) for row in _all(db, sql, purpose)]


def unused_groups(db: sqlite3.Connection, purpose: str, limit: int) -> list[tuple[int, GroupState]]:
    """Index and state of the first ``limit`` groups that are open or ready, in admission order."""
    sql = "SELECT group_index, state FROM groups WHERE purpose = ? AND state IN ('open', 'ready') ORDER BY 1 LIMIT ?"
    return [(index, GroupState(state)) for index, state in _all(db, sql, purpose, limit)]


def groups_of_step(db: sqlite3.Connection, step: int) -> list[int]:
    """The groups that a step claimed, in admission order."""
    return [index for (index,) in _all(db, "SELECT group_index FROM groups WHERE step = ? ORDER BY 1", step)]


def move_group(
    db: sqlite3.Connection, purpose: str, index: int, to: GroupState, *, step: int | None = None, reason: str = ""
) -> None:
    """Move a group to another state, noting the step that claims it or why it is dropped; ``ValueError`` if it may not
    go there.
    """
    state = move(GROUP_MOVES, group(db, purpose, index).state, to)
    db.execute(
        "UPDATE groups SET state = ?, step = coalesce(?, step), reason = ? WHERE purpose = ? AND group_index = ?",
        (state, step, reason, purpose, index),
    )


def insert_rollout(db: sqlite3.Connection, purpose: str, rollout: Rollout, record: bytes) -> None:
    """Add an ended rollout."""
    db.execute(
        "INSERT INTO rollouts (rollout_id, purpose, group_index, slot, attempt, status, reward, reason, record)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            rollout.rollout_id,
            purpose,
            rollout.group_index,
            rollout.slot,
            rollout.attempt,
            rollout.status,
            rollout.reward,
            rollout.reason,
            record,
        ),
    )


def has_rollout(db: sqlite3.Connection, rollout_id: str) -> bool:
    """Whether a rollout is recorded."""
    return bool(_all(db, "SELECT 1 FROM rollouts WHERE rollout_id = ?", rollout_id))


def endings(db: sqlite3.Connection, purpose: str, index: int) -> list[Ending]:
    """How the rollouts of a group ended, by slot and attempt."""
    sql = "SELECT slot, attempt, status FROM rollouts WHERE purpose = ? AND group_index = ? ORDER BY slot, attempt"
    return [Ending(slot, attempt, RolloutStatus(status)) for slot, attempt, status in _all(db, sql, purpose, index)]


def graded_records(db: sqlite3.Connection, purpose: str, index: int) -> list[bytes]:
    """The encoded graded rollouts of a group, by slot."""
    sql = "SELECT record FROM rollouts WHERE purpose = ? AND group_index = ? AND status = 'graded' ORDER BY slot"
    return [record for (record,) in _all(db, sql, purpose, index)]


def rewards(db: sqlite3.Connection, purpose: str) -> list[float]:
    """The rewards of all graded rollouts, by group and slot."""
    sql = "SELECT reward FROM rollouts WHERE purpose = ? AND status = 'graded' ORDER BY group_index, slot"
    return [reward for (reward,) in _all(db, sql, purpose)]


def rollout_counts(db: sqlite3.Connection, purpose: str) -> dict[str, int]:
    """Status → number of rollouts; a status that never occurred is absent."""
    return dict(_all(db, "SELECT status, count(*) FROM rollouts WHERE purpose = ? GROUP BY status", purpose))


def progress_counts(db: sqlite3.Connection, purpose: str) -> dict[str, int]:
    """State → number of groups (absent when none), and ``steps_done``; one statement, so one moment."""
    sql = (
        "SELECT state, count(*) FROM groups WHERE purpose = ? GROUP BY state"
        " UNION ALL SELECT 'steps_done', count(*) FROM steps WHERE state = 'done'"
    )
    return dict(_all(db, sql, purpose))


def insert_step(db: sqlite3.Connection, step: int) -> None:
    """Add a claimed step."""
    db.execute("INSERT INTO steps (step, state) VALUES (?, ?)", (step, StepState.CLAIMED))


def set_step_state(db: sqlite3.Connection, step: int, state: StepState) -> None:
    """Change the state of a step."""
    db.execute("UPDATE steps SET state = ? WHERE step = ?", (state, step))


def step_state(db: sqlite3.Connection, step: int) -> StepState | None:
    """Where a step is; ``None`` before it claimed a batch."""
    rows = _all(db, "SELECT state FROM steps WHERE step = ?", step)
    return StepState(rows[0][0]) if rows else None


def last_step(db: sqlite3.Connection) -> int:
    """The newest step that claimed a batch, 0 when none did."""
    return int(_one(db, "SELECT coalesce(max(step), 0) FROM steps"))


def set_fact(db: sqlite3.Connection, key: str, value: str) -> None:
    """Add or replace a fact."""
    db.execute("INSERT OR REPLACE INTO facts (key, value) VALUES (?, ?)", (key, value))


def get_fact(db: sqlite3.Connection, key: str) -> str | None:
    """The value of a fact."""
    rows = _all(db, "SELECT value FROM facts WHERE key = ?", key)
    return str(rows[0][0]) if rows else None


def _all(db: sqlite3.Connection, sql: str, *values: object) -> list[tuple[Any, ...]]:
    return db.execute(sql, values).fetchall()


def _one(db: sqlite3.Connection, sql: str, *values: object) -> Any:
    return _all(db, sql, *values)[0][0]


def _group_row(row: tuple[Any, ...]) -> GroupRow:
    group_index, task, size, admitted_version, state = row
    return GroupRow(group_index, task, size, admitted_version, GroupState(state))
