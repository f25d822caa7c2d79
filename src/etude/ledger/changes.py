"""Every change of the ledger: what is done together in one transaction, and whether it may be done at all.

Owns the rules that make a run lose and repeat nothing: a task is trained on once an epoch, batches follow admission
order, a group is consumed by exactly one step, a slot is filled by the worker that holds its group. Each function runs
inside of one transaction, with no other writer beside it (:mod:`etude.ledger.transactions`), and may be run again when
that is interrupted. The statements are :mod:`etude.ledger.rows`', the lives of groups and steps
:mod:`etude.ledger.states`'.
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
"""The purpose of simulated groups that are trained on."""
LIVE = "live"
"""The purpose of users' sessions that are trained on, each a group of one. Any other is the label of an evaluation."""
LOAD = "trainer.load"
"""The fact with the weights that the trainer is to go on with, as a JSON object with an ``id`` of its own."""
LOADED = "trainer.loaded"
"""The fact with the last of these that a step took, and that ``step``."""
TRAINER = "trainer"
"""The lease of who may claim batches and commit steps."""
ANY_WORKER = ""
"""The worker of a connection that holds no lease, and of its groups."""


NO_SIGNAL = "no signal: all rewards are alike"
"""The reason for which a group is dropped that another one is sampled for."""


DELETED = "deleted: its user, or the time for which sessions are kept, wanted it gone"
"""The reason for which a live session that was not trained on is dropped later."""
ERASED_TURNS = "erased-turns."
"""Facts under this prefix: digests of objects with turns that no row names any more, and which have yet to go."""
STALE = "stale: the batches that its tokens are fresh enough for are full"
"""The reason for which a live session is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedSession:
    """Result of erasing a live session."""

    is_busy: bool = False
    """True where a step is computing with it: nothing was erased, try again once that is committed."""
    step: int | None = None
    """The step that trained on it, whose weight version has that number; ``None``: none did."""


class LiveAdmission(StrEnum):
    """Result of offering a live session."""

    READY = "ready"
    """Its group is there, and waits for its batch."""
    STALE = "stale"
    """Its group is there, dropped: no batch will have it."""
    QUARANTINED = "quarantined"
    """Its group is there, dropped because of its user."""
    DUPLICATE = "duplicate"
    """It was offered before: nothing changed."""


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


def admit_live(
    db: Database,
    group: rows.GroupRow,
    rollout: Rollout,
    turns: PayloadRef | None,
    observed: bytes,
    kept_below: int,
) -> LiveAdmission:
    """Add the group of a live session with its one rollout, whose id is the session's: ready, or dropped at once as
    stale or because its rollout is quarantined, which would take a place in a batch and teach nothing.

    ``turns`` is the object that has its turns. The rollout of a dropped one is not written down: the session itself is
    the product's to keep.
    """
    session, observation = rollout.rollout_id, rollout.observation
    assert observation is not None, f"rollout {session} is of no live session"
    if rows.is_admitted(db, session):
        return LiveAdmission.DUPLICATE
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


def erase_live(db: Database, session_id: str) -> ErasedSession:
    """Remove what a live session left: rollout, observation, and a group that no batch has. Of one that a step trained
    on the group stays, which says that and has no content.

    Nothing changes while a step is computing with it, which may have to be done again from the same bytes.
    """
    placed = rows.live_group(db, session_id)
    if placed is None:
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


def is_waiting(db: Database, step: int, num_groups: Mapping[str, int]) -> bool:
    """Return true if it is the turn of a step, and its batch is not complete."""
    claimed = rows.step_state(db, step) is StepState.CLAIMED
    return not claimed and not _why_not(db, step) and _next_batch(db, num_groups) is None


def claim_batch(
    db: Database, step: int, num_groups: Mapping[str, int], own_lease: Lease | None
) -> list[tuple[str, int]] | None:
    """Give a step its groups, a fixed number of each purpose, or the ones that it has; ``None`` while incomplete."""
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
    """Return true if a step is one that loads weights, or is to become one: found without stopping any writer."""
    wish, loaded = _load_fact(db, LOAD), _load_fact(db, LOADED)
    return wish is not None and (loaded is None or loaded["id"] != wish["id"] or loaded["step"] == step)


def claim_load(db: Database, step: int, own_lease: Lease | None) -> dict[str, Json] | None:
    """Make a step one that loads weights and trains on no group, if that is asked for; return what it loads.

    A step that took a load gets the same one again; ``None`` for one that is, or may become, a step of groups.
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


def _next_batch(db: Database, num_groups: Mapping[str, int]) -> dict[str, int] | None:
    """Purpose → the last of its first unused groups in admission order; ``None`` while one of all is not ready."""
    last: dict[str, int] = {}
    for purpose, number in num_groups.items():
        unused = rows.unused_groups(db, purpose, number)
        if len(unused) < number or any(state is not GroupState.READY for _, state in unused):
            return None
        if unused:
            last[purpose] = unused[-1][0]
    return last


def _check_trainer(db: Database, own_lease: Lease | None) -> None:
    """Only the holder of the lease may train; while it is free, every process may."""
    lease = rows.lease(db, TRAINER)
    if not lease.is_free and (own_lease is None or own_lease.name != TRAINER):
        raise FencedError(f"{lease.holder} holds the right to train: stop that process first")
