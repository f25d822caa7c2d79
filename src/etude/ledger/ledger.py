"""The durable state of a run: which groups exist, what became of them, which step trained on them.

Owns every decision that must survive ``kill -9`` of any process: a prompt is trained once, batches follow admission
order, a group is consumed by exactly one optimiser step. One SQLite file, shared by all processes of a run; each call
is one short transaction (well under a millisecond), so the calls are synchronous.

Does not own how many groups to admit (:mod:`etude.rollouts.admission`) or what is made of them
(:mod:`etude.trajectories`).
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from etude.ledger import rows
from etude.ledger.records import decode_rollout, encode_rollout
from etude.ledger.schema import connect, transaction
from etude.ledger.states import STEP_MOVES, GroupState, StepState, move
from etude.ledger.tasks import decode_task, encode_task
from etude.types import Group, Rollout, RolloutStatus, Split, Task

TRAIN = "train"
"""The purpose of groups that are trained on; any other purpose is the label of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """A place in a group that still needs a graded rollout, and the attempt to make next."""

    task: Task
    group_index: int
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How many groups of one purpose are in each state, and how many optimiser steps are committed."""

    open: int
    ready: int
    claimed: int
    consumed: int
    dropped: int
    steps_done: int

    @property
    def complete(self) -> int:
        """Groups whose every slot is graded, trained on or not."""
        return self.ready + self.claimed + self.consumed

    @property
    def kept(self) -> int:
        """Groups that were or will be used: all but the dropped."""
        return self.open + self.complete

    @property
    def admitted(self) -> int:
        """Groups ever admitted."""
        return self.kept + self.dropped


class Ledger:
    """One process's door to the ledger of a run; not to be shared between threads."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open ``ledger.db``, creating it when missing. Raises :class:`~etude.errors.RunFolderError`."""
        return cls(connect(path))

    def close(self) -> None:
        """Close the file. What was committed is safe even without."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def admit_group(self, task: Task, purpose: str, size: int, version: int) -> int | None:
        """Open a group of ``size`` slots and return its index; ``None`` if the task was admitted for training before.

        ``version`` is the newest weight version that every engine serves at this moment.
        """
        if purpose == TRAIN and task.split is not Split.TRAIN:
            raise ValueError(f"task {task.task_id} is of split {task.split!s}: nothing held out is ever trained on")
        with transaction(self._db):
            if purpose == TRAIN and rows.is_trained_on(self._db, task.task_id):
                return None
            index = rows.next_index(self._db, purpose)
            group = rows.GroupRow(index, encode_task(task), size, version, GroupState.OPEN)
            rows.insert_group(self._db, purpose, task.task_id, group)
        return index

    def record(self, rollout: Rollout, purpose: str) -> int | None:
        """Keep an ended rollout; return the attempt its slot needs next, or ``None`` when it needs no more.

        The last graded slot makes the group ready. An infrastructure failure leaves the slot open. Recording the same
        rollout again changes nothing. Raises ``ValueError`` when the rollout does not fit: no such slot, a slot that
        is graded already, an attempt out of turn, or dropped while its group is not.
        """
        index = rollout.group_index
        with transaction(self._db):
            group = rows.group(self._db, purpose, index)
            if not rows.has_rollout(self._db, rollout.rollout_id):
                _check_fits(rollout, group, rows.endings(self._db, purpose, index))
                rows.insert_rollout(self._db, purpose, rollout, encode_rollout(rollout))
            if group.state is not GroupState.OPEN:
                return None
            attempts = _attempts_due(group.size, rows.endings(self._db, purpose, index))
            if not attempts:
                rows.move_group(self._db, purpose, index, GroupState.READY)
            return attempts.get(rollout.slot)

    def drop_group(self, purpose: str, index: int, reason: str) -> None:
        """Give up an open group; later groups move up in the order of batches. ``ValueError`` if it is not open."""
        with transaction(self._db):
            rows.move_group(self._db, purpose, index, GroupState.DROPPED, reason=reason)

    def open_slots(self, purpose: str) -> list[OpenSlot]:
        """Every slot without a graded rollout in an open group, in admission order: what a crash left to do."""
        return [
            OpenSlot(task=task, group_index=group.group_index, slot=slot, attempt=attempt)
            for group in rows.open_groups(self._db, purpose)
            for task in (decode_task(group.task),)
            for slot, attempt in _attempts_due(group.size, rows.endings(self._db, purpose, group.group_index)).items()
        ]

    def claim_batch(self, step: int, num_groups: int) -> list[Group] | None:
        """The groups of an optimiser step: the first ``num_groups`` unused ones, or ``None`` while one is unfinished.

        Strictly in admission order, which is what bounds staleness. A step that claimed its batch before gets the very
        same groups again. A step may claim while the weights of the one before are still being published, not earlier:
        raises ``ValueError`` for any other step than the one after the last claimed, and when two are not committed.
        """
        with transaction(self._db):
            if rows.step_state(self._db, step) is not StepState.CLAIMED:
                _check_next(self._db, step)
                unused = rows.unused_groups(self._db, TRAIN, num_groups)
                if len(unused) < num_groups or any(state is not GroupState.READY for _, state in unused):
                    return None
                rows.insert_step(self._db, step)
                for index, _ in unused:
                    rows.move_group(self._db, TRAIN, index, GroupState.CLAIMED, step=step)
        return [self.group(TRAIN, index) for index in rows.groups_of_step(self._db, step)]

    def commit_step(self, step: int) -> None:
        """Mark a claimed step done and its groups consumed. Raises ``ValueError`` for a step that is not claimed."""
        with transaction(self._db):
            state = rows.step_state(self._db, step)
            if state is None:
                raise ValueError(f"step {step} cannot be committed: it has not claimed a batch")
            rows.set_step_state(self._db, step, move(STEP_MOVES, state, StepState.DONE))
            for index in rows.groups_of_step(self._db, step):
                rows.move_group(self._db, TRAIN, index, GroupState.CONSUMED)

    def progress(self, purpose: str = TRAIN) -> Progress:
        """How far the groups of a purpose are, and the run's optimiser steps."""
        counts = rows.progress_counts(self._db, purpose)
        states = {state.value: counts.get(state, 0) for state in GroupState}
        return Progress(**states, steps_done=counts["steps_done"])

    def rollout_counts(self, purpose: str) -> dict[RolloutStatus, int]:
        """How many rollouts of a purpose ended in each way, every way named."""
        counts = rows.rollout_counts(self._db, purpose)
        return {status: counts.get(status, 0) for status in RolloutStatus}

    def group(self, purpose: str, index: int) -> Group:
        """A group with its graded rollouts in slot order. Raises ``ValueError`` when there is no such group."""
        group = rows.group(self._db, purpose, index)
        rollouts = tuple(decode_rollout(record) for record in rows.graded_records(self._db, purpose, index))
        return Group(
            index=index, task=decode_task(group.task), admitted_version=group.admitted_version, rollouts=rollouts
        )

    def groups(self, purpose: str) -> Iterator[Group]:
        """Every group of a purpose in admission order, whatever its state, read one at a time."""
        return (self.group(purpose, index) for index in rows.group_indices(self._db, purpose))

    def rewards(self, purpose: str) -> list[float]:
        """The reward of every graded rollout of a purpose, by group and slot."""
        return rows.rewards(self._db, purpose)

    def set_fact(self, key: str, value: str) -> None:
        """Remember a small fact about the run, replacing what was known under ``key``."""
        rows.set_fact(self._db, key, value)

    def get_fact(self, key: str) -> str | None:
        """What was last remembered under ``key``."""
        return rows.get_fact(self._db, key)


def _check_fits(rollout: Rollout, group: rows.GroupRow, endings: Sequence[rows.Ending]) -> None:
    where = (
        f"rollout {rollout.rollout_id} for group {group.group_index}, slot {rollout.slot}, attempt {rollout.attempt}"
    )
    if rollout.status is RolloutStatus.DROPPED and group.state is not GroupState.DROPPED:
        raise ValueError(f"{where} is dropped but its group is {group.state!s}: drop the group first")
    due = _attempts_due(group.size, endings).get(rollout.slot)
    if due is None:
        raise ValueError(f"{where}: that slot is graded or beyond the group's {group.size} slots")
    if rollout.attempt != due:
        raise ValueError(f"{where}: attempt {due} is due")


def _attempts_due(size: int, endings: Sequence[rows.Ending]) -> dict[int, int]:
    """Slot → its next attempt, for the slots without a graded rollout."""
    graded = {ending.slot for ending in endings if ending.status is RolloutStatus.GRADED}
    made = Counter(ending.slot for ending in endings)
    return {slot: made[slot] for slot in range(size) if slot not in graded}


def _check_next(db: sqlite3.Connection, step: int) -> None:
    last = rows.last_step(db)
    if step != last + 1:
        raise ValueError(f"step {step} cannot claim a batch: step {last + 1} is next")
    if rows.step_state(db, last - 1) is StepState.CLAIMED:
        raise ValueError(f"step {step} cannot claim a batch: step {last - 1} is not committed")
