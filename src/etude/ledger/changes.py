"""Every change of the ledger, each one transaction with the checks that permit it.

Owns the rules that prevent a run from losing or repeating work: a task is trained on once per epoch, batches follow
admission order, a group is consumed by exactly one step, and a slot is filled by the worker that owns its group. Each
function runs inside one transaction, without a concurrent writer (:mod:`etude.ledger.transactions`), and may run again
if that is interrupted. SQL statements are in :mod:`etude.ledger.rows`, life cycles of groups and steps in
:mod:`etude.ledger.states`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from etude.errors import FencedError
from etude.ledger import leases, rows
from etude.ledger.database import Database
from etude.ledger.leases import Lease
from etude.ledger.records import encode_rollout, encode_task
from etude.ledger.states import ERASURE_MOVES, STEP_MOVES, EndedAttempt, GroupSlots, GroupState, StepState, move
from etude.types import Json, PayloadRef, Rollout, RolloutStatus, Task

TRAIN = "train"
"""Purpose of simulated groups for training."""
LIVE = "live"
"""Purpose of users' sessions for training, each a group of one. Any other purpose is the label of an evaluation."""
LOAD = "trainer.load"
"""Key of the fact with the weights that the trainer must load next: a JSON object with its own ``id``."""
LOADED = "trainer.loaded"
"""Key of the fact with the last load that a step took, and that ``step``."""
TRAINER = "trainer"
"""Lease that permits claiming batches and committing steps."""
ANY_WORKER = ""
"""Worker of a connection without a lease, and of its groups."""


NO_SIGNAL = "no signal: all rewards are alike"
"""Reason to drop a group and sample another one instead."""


DELETED = "deleted: its user, or the time for which sessions are kept, wanted it gone"
"""Reason to drop a live session later, before it is trained on."""
ERASED_TURNS = "erased-turns."
"""Prefix of facts with digests of turn objects that no row references and that must still be deleted."""
REFUSED_SESSION = "refused-session."
"""Prefix of facts with ids of live sessions that were deleted before they were offered."""
STALE = "stale: the batches that its tokens are fresh enough for are full"
"""Reason to drop a live session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedSession:
    """Result of erasing a live session."""

    is_busy: bool = False
    """True if a running step uses it: nothing was erased; retry after that step's commit."""
    step: int | None = None
    """The step that claimed it, also the number of its weight version; ``None``: no step."""


class LiveAdmission(StrEnum):
    """Result of an offer of a live session."""

    READY = "ready"
    """Its group was added and waits for a batch."""
    STALE = "stale"
    """Its group was added as dropped: no batch will use it."""
    QUARANTINED = "quarantined"
    """Its group was added as dropped because its rollout is quarantined."""
    DUPLICATE = "duplicate"
    """It was offered before: nothing changed."""
    DELETED = "deleted"
    """Its deletion was requested, and carried out, while it was being scored: nothing of it is stored."""


class NotAdmitted(StrEnum):
    """Reason why a drawn task is not admitted now."""

    FULL = "full"
    """The window is full: nothing changed."""
    MOVED = "moved"
    """Another process drew in the meantime: nothing changed."""
    TRAINED = "known"
    """It was already admitted in this epoch; the cursor has moved past it."""


def admit_group(db: Database, task: Task, purpose: str, group: rows.GroupRow) -> int | None:
    """Add an open group; ``None`` if its task was already admitted for training in that epoch."""
    if purpose == TRAIN and rows.is_trained_on(db, task.task_id, group.epoch):
        return None
    index = rows.next_index(db, purpose)
    rows.insert_group(db, purpose, task.task_id, group._replace(group_index=index))
    return index


def admit_drawn(db: Database, task: Task, group: rows.GroupRow, kept_below: int) -> int | NotAdmitted:
    """Admit the training task at ``group.position``: check the window, move the cursor, add the group."""
    if rows.usable_groups(db, TRAIN) >= kept_below:
        return NotAdmitted.FULL
    cursor = rows.cursor(db, TRAIN)
    if cursor.drawn != group.position:
        return NotAdmitted.MOVED
    rows.set_cursor(db, TRAIN, cursor._replace(drawn=cursor.drawn + 1))
    index = admit_group(db, task, TRAIN, group)
    return NotAdmitted.TRAINED if index is None else index


def admit_live(
    db: Database,
    group: rows.GroupRow,
    rollout: Rollout,
    turns: PayloadRef | None,
    observed: bytes,
    kept_below: int,
) -> LiveAdmission:
    """Add the group of a live session with its one rollout, which has the session's id.

    The group is ready, or dropped at once if it is stale or its rollout is quarantined: such a rollout would use a
    place in a batch without effect. ``turns`` is the object with its turns. The rollout of a dropped group is not
    recorded: the product stores the session itself.
    """
    session, observation = rollout.rollout_id, rollout.observation
    assert observation is not None, f"rollout {session} is of no live session"
    if rows.is_admitted(db, session):
        return LiveAdmission.DUPLICATE
    if rows.get_fact(db, f"{REFUSED_SESSION}{session}") is not None:
        return LiveAdmission.DELETED
    outcome, reason = LiveAdmission.READY, ""
    if rollout.verdict is not None and rollout.is_quarantined:
        outcome, reason = LiveAdmission.QUARANTINED, f"quarantined: {rollout.verdict.reason}"
    elif rows.usable_groups(db, LIVE) >= kept_below:
        outcome, reason = LiveAdmission.STALE, STALE
    state, index = GroupState.DROPPED if reason else GroupState.READY, rows.next_index(db, LIVE)
    rows.insert_group(db, LIVE, session, group._replace(group_index=index, state=state))
    rows.insert_observed(db, session, index, observation.user, observation.day, observed)
    if reason:
        rows.set_reason(db, LIVE, index, reason)
        return outcome
    placed = replace(rollout, group_index=index)
    row = rows.RolloutRow(encode_rollout(placed, with_turns=turns is None), turns)
    rows.insert_rollout(db, LIVE, placed, row)
    return outcome


def erase_live(db: Database, session_id: str, *, is_requested: bool = False) -> ErasedSession:
    """Erase a live session's rollout and observation, and drop its group if no batch has it. If a step trained on it,
    the group stays as a record of that, without content.

    Nothing changes while a running step uses it, because that step may have to be repeated with the same bytes. With
    ``is_requested`` a session that was not offered yet is refused when it is: another process may be scoring it.
    """
    placed = rows.live_group(db, session_id)
    if placed is None:
        if is_requested:
            rows.set_fact(db, f"{REFUSED_SESSION}{session_id}", "")
        return ErasedSession()
    group, step = placed
    if group.state is GroupState.CLAIMED:
        return ErasedSession(is_busy=True, step=step)
    turns = rows.erase_rollout(db, session_id)
    if group.state is GroupState.READY:
        rows.move_group(db, LIVE, group, GroupState.DROPPED, DELETED, ERASURE_MOVES)
    if turns is not None:
        rows.set_fact(db, f"{ERASED_TURNS}{turns}", session_id)
    return ErasedSession(step=step)


def new_group(task: Task, size: int, version: int, worker: str) -> rows.GroupRow:
    """A group to admit, in its first epoch; the admission assigns its index."""
    return rows.GroupRow(-1, encode_task(task), size, version, GroupState.OPEN, worker, None, 1)


def record(
    db: Database, rollout: Rollout, purpose: str, row: rows.RolloutRow, worker: str, max_resamples: int = 0
) -> int | None:
    """Add an ended rollout unless it exists; return the attempt that its slot needs next, if any."""
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
    """Give up the slot at ``place`` (group, slot) unless it is lost already; return the state of its group."""
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
    """Take over the open groups of workers whose leases are free or whose holders are ``silent``.

    A silent holder first loses its lease, unless it sent a heartbeat since; its later writes are then rejected.
    """
    silent_by_name: Mapping[str, Lease] = {lease.name: lease for lease in silent}
    for other in rows.other_workers(db, purpose, worker):
        lease = rows.lease(db, other)
        if silent_by_name.get(other) == lease:
            lease = leases.relieve(lease)
            rows.put_lease(db, lease)
        if lease.is_free:
            rows.reassign_groups(db, purpose, other, worker)


def is_waiting(db: Database, step: int, num_groups: Mapping[str, int]) -> bool:
    """Return true if a step is next to claim, but its batch is not complete."""
    claimed = rows.step_state(db, step) is StepState.CLAIMED
    return not claimed and not _why_not(db, step) and _next_batch(db, num_groups) is None


def claim_batch(
    db: Database, step: int, num_groups: Mapping[str, int], own_lease: Lease | None
) -> list[tuple[str, int]] | None:
    """Claim a step's groups, a fixed number per purpose, or return those it claimed before; ``None`` if incomplete."""
    _check_trainer(db, own_lease)
    if rows.step_state(db, step) is StepState.CLAIMED:
        return rows.groups_of_step(db, step)
    if why := _why_not(db, step):
        raise ValueError(f"step {step} cannot claim a batch: {why}")
    last = _next_batch(db, num_groups)
    if last is None:
        return None
    rows.insert_step(db, step)
    for purpose, index in last.items():
        rows.claim_groups(db, step, purpose, index)
    return rows.groups_of_step(db, step)


def is_load_due(db: Database, step: int) -> bool:
    """Return true if a step loads weights or must do so; the check does not block writers."""
    wish, loaded = _load_fact(db, LOAD), _load_fact(db, LOADED)
    return wish is not None and (loaded is None or loaded["id"] != wish["id"] or loaded["step"] == step)


def claim_load(db: Database, step: int, own_lease: Lease | None) -> dict[str, Json] | None:
    """Make a step load weights and train on no group, if a load is requested; return that load.

    A step that took a load gets the same one again; ``None`` for a step that trains, or may train, on groups.
    """
    loaded = _load_fact(db, LOADED)
    state = rows.step_state(db, step)
    if state is StepState.CLAIMED:
        return loaded if loaded is not None and loaded["step"] == step else None
    wish = _load_fact(db, LOAD)
    if wish is None or (loaded is not None and loaded["id"] == wish["id"]):
        return None
    _check_trainer(db, own_lease)
    if why := _why_not(db, step):
        raise ValueError(f"step {step} cannot load weights: {why}")
    rows.insert_step(db, step)
    taken = wish | {"step": step}
    rows.set_fact(db, LOADED, json.dumps(taken))
    return taken


def _load_fact(db: Database, key: str) -> dict[str, Json] | None:
    value = rows.get_fact(db, key)
    return None if value is None else dict(json.loads(value))


def commit_step(db: Database, step: int, own_lease: Lease | None) -> None:
    """Consume the groups of a step, and commit the cursor up to the first unsettled group."""
    _check_trainer(db, own_lease)
    state = rows.step_state(db, step)
    if state is None:
        raise ValueError(f"step {step} cannot be committed: it has not claimed a batch")
    rows.set_step_state(db, step, move(STEP_MOVES, state, StepState.DONE))
    rows.consume_groups(db, step)
    cursor, unsettled = rows.cursor(db, TRAIN), rows.first_unsettled(db, TRAIN)
    rows.set_cursor(db, TRAIN, cursor._replace(committed=cursor.drawn if unsettled is None else unsettled))


def _mine(db: Database, purpose: str, index: int, worker: str) -> rows.GroupRow:
    """The group if this worker may fill it. Raises :class:`~etude.errors.FencedError` otherwise."""
    group = rows.group(db, purpose, index)
    if group.worker not in (ANY_WORKER, worker):
        raise FencedError(
            f"group {index} of {purpose!r} belongs to {group.worker!r} now, not to {worker or 'no worker'!r}"
        )
    return group


def _settle(
    db: Database, purpose: str, group: rows.GroupRow, slots: GroupSlots, reason: str, max_resamples: int
) -> GroupState:
    """Update an open group's state from its slots; ``reason`` is recorded if it is dropped.

    A complete training group without a signal is also dropped, so that another one replaces it, but at most
    ``max_resamples`` groups between two batches. This decision is made only here: a ready group stays ready.
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
    """The reason why a step is not next to claim; empty if it is."""
    last = rows.last_step(db)
    if step != last + 1:
        return f"step {last + 1} is next"
    return f"step {last - 1} is not committed" if rows.step_state(db, last - 1) is StepState.CLAIMED else ""


def _next_batch(db: Database, num_groups: Mapping[str, int]) -> dict[str, int] | None:
    """Purpose → index of the batch's last group in admission order; ``None`` while any group of it is not ready."""
    last: dict[str, int] = {}
    for purpose, number in num_groups.items():
        unused = rows.unused_groups(db, purpose, number)
        if len(unused) < number or any(state is not GroupState.READY for _, state in unused):
            return None
        if unused:
            last[purpose] = unused[-1][0]
    return last


def _check_trainer(db: Database, own_lease: Lease | None) -> None:
    """Raise an error if another process holds the trainer's lease; while it is free, any process may train."""
    lease = rows.lease(db, TRAINER)
    if not lease.is_free and (own_lease is None or own_lease.name != TRAINER):
        raise FencedError(f"{lease.holder} holds the right to train: stop that process first")
