"""Every change of the ledger: what is done together in one transaction, and whether it may be done at all.

Owns the rules that make a run lose and repeat nothing: a task is trained on once an epoch, batches follow admission
order, a group is consumed by exactly one step, a slot is filled by the worker that holds its group. Each function runs
inside of one transaction, with no other writer beside it (:mod:`etude.ledger.transactions`), and may be run again when
that is interrupted. The statements are :mod:`etude.ledger.rows`', the lives of groups and steps
:mod:`etude.ledger.states`'.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from etude.errors import FencedError
from etude.ledger import leases, rows
from etude.ledger.database import Database
from etude.ledger.leases import Lease
from etude.ledger.records import encode_task
from etude.ledger.states import STEP_MOVES, EndedAttempt, GroupSlots, GroupState, StepState, move
from etude.types import Rollout, RolloutStatus, Task

TRAIN = "train"
"""The purpose of groups that are trained on; any other purpose is the label of an evaluation."""
TRAINER = "trainer"
"""The lease of who may claim batches and commit steps."""
ANY_WORKER = ""
"""The worker of a connection that holds no lease, and of its groups."""


NO_SIGNAL = "no signal: all rewards are alike"
"""The reason for which a group is dropped that another one is sampled for."""


class NotAdmitted(StrEnum):
    """Reason for which a drawn task is not admitted now."""

    FULL = "full"
    """The window is: nothing changed."""
    MOVED = "moved"
    """Another process drew in the meantime: nothing changed."""
    TRAINED = "known"
    """It was admitted in this epoch before; the cursor is past it."""


def admit_group(db: Database, task: Task, purpose: str, group: rows.GroupRow) -> int | None:
    """Add an open group; ``None`` when its task may not be admitted again in that epoch."""
    if purpose == TRAIN and rows.is_trained_on(db, task.task_id, group.epoch):
        return None
    index = rows.next_index(db, purpose)
    rows.insert_group(db, purpose, task.task_id, group._replace(group_index=index))
    return index


def admit_drawn(db: Database, task: Task, group: rows.GroupRow, kept_below: int) -> int | NotAdmitted:
    """Admit for training the task that lies at ``group.position``: window, cursor and group in one."""
    if rows.usable_groups(db, TRAIN) >= kept_below:
        return NotAdmitted.FULL
    cursor = rows.cursor(db, TRAIN)
    if cursor.drawn != group.position:
        return NotAdmitted.MOVED
    rows.set_cursor(db, TRAIN, cursor._replace(drawn=cursor.drawn + 1))
    index = admit_group(db, task, TRAIN, group)
    return NotAdmitted.TRAINED if index is None else index


def new_group(task: Task, size: int, version: int, worker: str) -> rows.GroupRow:
    """A group that is about to be admitted, in its first epoch; its index is found when it is."""
    return rows.GroupRow(-1, encode_task(task), size, version, GroupState.OPEN, worker, None, 1)


def record(
    db: Database, rollout: Rollout, purpose: str, row: rows.RolloutRow, worker: str, max_resamples: int = 0
) -> int | None:
    """Add an ended rollout, unless it is there; the attempt that its slot needs next, if any."""
    group = _mine(db, purpose, rollout.group_index, worker)
    slots = rows.slots(db, purpose, group)
    if not slots.has(rollout.rollout_id):
        _check_fits(rollout, group, slots)
        rows.insert_rollout(db, purpose, rollout, row)
        slots = slots.after(EndedAttempt(rollout.slot, rollout.attempt, rollout.status, rollout.rollout_id))
    if group.state is not GroupState.OPEN:
        return None
    state = _settle(db, purpose, group, slots, "", max_resamples)
    return slots.due.get(rollout.slot) if state is GroupState.OPEN else None


def lose_slot(
    db: Database, purpose: str, place: tuple[int, int], reason: str, worker: str, max_resamples: int = 0
) -> GroupState:
    """Give up a slot, named by its group and its number there, unless it is; the state of its group afterwards."""
    index, slot = place
    group = _mine(db, purpose, index, worker)
    slots = rows.slots(db, purpose, group)
    if slot in slots.lost:
        return group.state
    if group.state is not GroupState.OPEN or slot not in slots.due:
        raise ValueError(
            f"slot {slot} of group {index} of {purpose!r} cannot be lost: the group is {group.state!s} and has "
            f"{group.size} slots; it is filled or not one of them"
        )
    rows.insert_lost_slot(db, purpose, index, slot, reason)
    return _settle(db, purpose, group, slots.without(slot), reason, max_resamples)


def drop_group(db: Database, purpose: str, index: int, reason: str, worker: str) -> None:
    """Give up an open group."""
    rows.move_group(db, purpose, _mine(db, purpose, index, worker), GroupState.DROPPED, reason)


def take_over(db: Database, purpose: str, silent: Sequence[Lease], worker: str) -> None:
    """Take the open groups of workers whose leases are free and of those whose holders were found ``silent``.

    A silent holder loses its lease first, unless it has spoken since: what it writes later is refused.
    """
    silent_by_name: Mapping[str, Lease] = {lease.name: lease for lease in silent}
    for other in rows.other_workers(db, purpose, worker):
        lease = rows.lease(db, other)
        if silent_by_name.get(other) == lease:
            lease = leases.relieve(lease)
            rows.put_lease(db, lease)
        if lease.is_free:
            rows.reassign_groups(db, purpose, other, worker)


def is_waiting(db: Database, step: int, num_groups: int) -> bool:
    """Return true if it is the turn of a step, and its batch is not complete."""
    claimed = rows.step_state(db, step) is StepState.CLAIMED
    return not claimed and not _why_not(db, step) and not _next_batch(db, num_groups)


def claim_batch(db: Database, step: int, num_groups: int, own_lease: Lease | None) -> list[int] | None:
    """Give a step its groups, or the ones that it has; ``None`` when they are not complete."""
    _check_trainer(db, own_lease)
    if rows.step_state(db, step) is StepState.CLAIMED:
        return rows.groups_of_step(db, step)
    if why := _why_not(db, step):
        raise ValueError(f"step {step} cannot claim a batch: {why}")
    batch = _next_batch(db, num_groups)
    if not batch:
        return None
    rows.insert_step(db, step)
    rows.claim_groups(db, step, batch[-1])
    return batch


def commit_step(db: Database, step: int, own_lease: Lease | None) -> None:
    """Consume the groups of a step, and commit the cursor as far as everything before it is settled."""
    _check_trainer(db, own_lease)
    state = rows.step_state(db, step)
    if state is None:
        raise ValueError(f"step {step} cannot be committed: it has not claimed a batch")
    rows.set_step_state(db, step, move(STEP_MOVES, state, StepState.DONE))
    rows.consume_groups(db, step)
    cursor, unsettled = rows.cursor(db, TRAIN), rows.first_unsettled(db, TRAIN)
    rows.set_cursor(db, TRAIN, cursor._replace(committed=cursor.drawn if unsettled is None else unsettled))


def _mine(db: Database, purpose: str, index: int, worker: str) -> rows.GroupRow:
    """A group, which is this worker's to fill."""
    group = rows.group(db, purpose, index)
    if group.worker not in (ANY_WORKER, worker):
        raise FencedError(
            f"group {index} of {purpose!r} belongs to {group.worker!r} now, not to {worker or 'no worker'!r}"
        )
    return group


def _settle(
    db: Database, purpose: str, group: rows.GroupRow, slots: GroupSlots, reason: str, max_resamples: int
) -> GroupState:
    """Move an open group on when its slots say so; ``reason`` is why it would be dropped.

    One that is complete and has no signal is dropped, too, so that another one takes its place, but for no more than
    ``max_resamples`` groups between two batches. It is decided here and now: a group that was ready once stays so.
    """
    state = slots.state
    if (
        state is GroupState.READY
        and purpose == TRAIN
        and max_resamples
        and rows.is_without_signal(db, group.group_index)
        and rows.resampled_since_batch(db, NO_SIGNAL) < max_resamples
    ):
        state, reason = GroupState.DROPPED, NO_SIGNAL
    if state is not GroupState.OPEN:
        rows.move_group(db, purpose, group, state, reason if state is GroupState.DROPPED else "")
    return state


def _check_fits(rollout: Rollout, group: rows.GroupRow, slots: GroupSlots) -> None:
    where = (
        f"rollout {rollout.rollout_id} for group {group.group_index}, slot {rollout.slot}, attempt {rollout.attempt}"
    )
    if rollout.status is RolloutStatus.DROPPED and group.state is not GroupState.DROPPED:
        raise ValueError(f"{where} is dropped but its group is {group.state!s}: drop the group first")
    attempt = slots.due.get(rollout.slot)
    if attempt is None:
        raise ValueError(f"{where}: that slot is graded, lost or beyond the group's {group.size} slots")
    if rollout.attempt != attempt:
        raise ValueError(f"{where}: attempt {attempt} is due")


def _why_not(db: Database, step: int) -> str:
    """The reason for which it is not the turn of a step to claim; empty when it is."""
    last = rows.last_step(db)
    if step != last + 1:
        return f"step {last + 1} is next"
    return f"step {last - 1} is not committed" if rows.step_state(db, last - 1) is StepState.CLAIMED else ""


def _next_batch(db: Database, num_groups: int) -> list[int]:
    """The first unused groups in admission order; none while one of them is not ready."""
    unused = rows.unused_groups(db, TRAIN, num_groups)
    complete = len(unused) == num_groups and all(state is GroupState.READY for _, state in unused)
    return [index for index, _ in unused] if complete else []


def _check_trainer(db: Database, own_lease: Lease | None) -> None:
    """Only the holder of the lease may train; while it is free, every process may."""
    lease = rows.lease(db, TRAINER)
    if not lease.is_free and (own_lease is None or own_lease.name != TRAINER):
        raise FencedError(f"{lease.holder} holds the right to train: stop that process first")
