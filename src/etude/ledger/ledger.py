"""The durable state of a run: its groups, their outcomes, and the steps that trained on them.

Owns every decision that must survive ``kill -9`` of any process: a task is trained on once per epoch, batches follow
admission order, a group is consumed by exactly one optimiser step, and the dataset cursor commits with it. All
processes of a run share one database. Each call is one short transaction (well under a millisecond if embedded), so
calls are synchronous. A call takes effect once or not at all, even if the connection fails.

Does not own the number of groups to admit (:mod:`etude.rollouts.admission`) or their use in training
(:mod:`etude.trainer.batching`). The content of each transaction is in :mod:`etude.ledger.changes`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from etude.clock import SystemClock
from etude.config.recipe import LedgerConfig
from etude.errors import ConfigError
from etude.ledger import changes, leases, rows
from etude.ledger.changes import ANY_WORKER, NotAdmitted
from etude.ledger.changes import LIVE as LIVE
from etude.ledger.changes import TRAIN as TRAIN
from etude.ledger.database import Database
from etude.ledger.leases import Lease, LeaseWatch
from etude.ledger.live import LiveGroups
from etude.ledger.open import open_database
from etude.ledger.payloads import Payloads
from etude.ledger.records import decode_task, encode_rollout
from etude.ledger.rows import TaskOutcome
from etude.ledger.states import GroupState
from etude.ledger.stored_turns import StoredTurns, few
from etude.ledger.transactions import LedgerConnection, Transactions
from etude.protocols import Clock
from etude.types import Group, Json, PayloadRef, Rollout, RolloutStatus, Split, Task

READ_AT_ONCE = 16
"""Groups that are read together: their turns are fetched concurrently."""
MAX_REPEATS = 10_000
"""Maximum consecutive tasks that were admitted before in their epoch; then the family has no new tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDraw:
    """A drawn training task; the ledger admits each pair of task and epoch once."""

    task: Task
    epoch: int = 1
    """Count, from 1, of the draws of this task in this run."""
    weight: float = 1.0
    """Importance weight of the task, as of :class:`~etude.types.Group`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """A slot of a group that needs a graded rollout, and its next attempt."""

    task: Task
    group_index: int
    slot: int
    attempt: int
    admitted_version: int = 0
    """Weight version that every engine served, or a later one, at the group's admission: no token may be older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Number of groups of one purpose per state, and of committed optimiser steps."""

    open: int
    ready: int
    claimed: int
    consumed: int
    dropped: int
    steps_done: int
    drawn: int
    """The dataset cursor: position of the next training task to draw."""
    committed: int
    """The dataset cursor of the last committed step: every earlier draw was trained on, dropped or skipped. A run from
    that step's checkpoint without this ledger continues here.
    """

    @property
    def complete(self) -> int:
        """Groups whose every slot is graded or lost, trained on or not."""
        return self.ready + self.claimed + self.consumed

    @property
    def usable(self) -> int:
        """Groups that were or will be used: all except dropped ones."""
        return self.open + self.complete

    @property
    def admitted(self) -> int:
        """Groups ever admitted."""
        return self.usable + self.dropped


class Ledger(LedgerConnection):
    """One process's connection to the ledger of a run; not to be shared between threads.

    Any call may raise :class:`~etude.ledger.database.LedgerUnavailable` after retries for ``ledger.retry_timeout_s``;
    any write may raise :class:`~etude.errors.FencedError` if this connection held a lease and lost it.
    """

    def __init__(
        self, transactions: Transactions, *, term_s: float, clock: Clock, payloads: Payloads | None = None
    ) -> None:
        super().__init__(transactions)
        self.name = transactions.name
        """Name in messages; it has no secrets."""
        self.facts = Facts(transactions)
        self.loads = Loads(transactions)
        self.leases = Leases(transactions, term_s=term_s, clock=clock)
        self.turns = StoredTurns(transactions, payloads)
        self.live = LiveGroups(transactions, self.turns)

    @classmethod
    def open(
        cls,
        place: Path | str,
        config: LedgerConfig | None = None,
        clock: Clock | None = None,
        *,
        payloads: Payloads | None = None,
    ) -> Self:
        """Open the ledger at a path or URL (:mod:`etude.ledger.open`); create it if there is none.

        Turns of rollouts are stored in ``payloads``; without it, they are stored in the rows, so that a ledger is one
        file. Turns in rows are readable in either case.

        Raises :class:`~etude.errors.RunFolderError` for a place that contains something else.
        """
        config = config or LedgerConfig()
        database = open_database(place, retry_timeout_s=config.retry_timeout_s)
        transactions = Transactions(database, retry_timeout_s=config.retry_timeout_s)
        return cls(transactions, term_s=config.lease_s, clock=clock or SystemClock(), payloads=payloads)

    def admit_group(self, task: Task, purpose: str, size: int, version: int) -> int | None:
        """Open a group of ``size`` slots, in the first epoch, and return its index; ``None`` if the task was already
        admitted for training.

        ``version`` is the newest weight version that every engine serves at this moment.
        """
        _check_trainable(task, purpose)
        group = changes.new_group(task, size, version, self.leases.worker)
        return self._db.write(lambda db: changes.admit_group(db, task, purpose, group))

    def admit_next(
        self, draw: Callable[[int], TaskDraw], *, size: int, version: int, kept_below: int
    ) -> list[OpenSlot] | None:
        """Admit the next training task that is new in its epoch; return its slots, or ``None`` if the window is full.

        ``draw`` gives the task at a position of the training data. It is called outside the transaction, which then
        checks the window, moves the cursor and opens the group, all or nothing. So several processes together never
        admit beyond ``kept_below`` groups, skip a task or draw one twice. ``version`` is the newest weight version
        that every engine serves at this moment. Raises :class:`~etude.errors.ConfigError` if there is no new task.
        """
        for _ in range(MAX_REPEATS):
            position = self._db.read(lambda db: rows.cursor(db, TRAIN)).drawn
            drawn = draw(position)
            _check_trainable(drawn.task, TRAIN)
            group = changes.new_group(drawn.task, size, version, self.leases.worker)._replace(
                position=position, epoch=drawn.epoch, weight=drawn.weight
            )
            admitted = self._db.write(partial(_admit, drawn.task, group, kept_below))
            if admitted is NotAdmitted.FULL:
                return None
            if not isinstance(admitted, NotAdmitted):
                opened = partial(OpenSlot, task=drawn.task, group_index=admitted, attempt=0, admitted_version=version)
                return [opened(slot=slot) for slot in range(size)]
        raise ConfigError(
            f"the last {MAX_REPEATS} training tasks were all drawn before: the family, which makes tasks for as long "
            f"as it is asked, has no others; lower trainer.steps or rollouts.groups_per_step, or widen [tasks]"
        )

    def open_slots(self, purpose: str) -> list[OpenSlot]:
        """Every slot of an open group that is neither graded nor lost, in admission order: the remaining work.

        A connection that holds a lease gets only its own groups and those without a worker. It first takes over the
        groups of workers whose leases are free or whose holders were silent for a term of such calls.
        """
        worker = self.leases.worker
        if worker != ANY_WORKER:
            others = self._db.read(lambda db: rows.other_workers(db, purpose, worker))
            silent = self.leases.silent(others)
            if others:
                self._db.write(lambda db: changes.take_over(db, purpose, silent, worker))
        return self._db.read(lambda db: _open_slots(db, purpose, worker))

    def record(
        self, rollout: Rollout, purpose: str, turns: PayloadRef | None = None, *, max_resamples: int = 0
    ) -> int | None:
        """Record an ended rollout; return the attempt that its slot needs next, or ``None`` if it needs no more.

        ``turns`` is the result of ``turns.store``, otherwise called here, so that a row's object always exists.
        The last slot makes the group ready; a training group whose rewards are all alike is dropped instead, at most
        ``max_resamples`` groups between two batches. An infrastructure failure leaves the slot open. Recording the same
        rollout again changes nothing. Raises ``ValueError`` if the rollout does not fit: no such slot, a slot that is
        already graded or lost, an attempt that is not due, or a dropped rollout of a group that is not dropped.
        """
        turns = turns or self.turns.store(rollout)
        row = rows.RolloutRow(encode_rollout(rollout, with_turns=turns is None), turns)
        worker = self.leases.worker
        return self._db.write(lambda db: changes.record(db, rollout, purpose, row, worker, max_resamples))

    def lose_slot(self, purpose: str, index: int, slot: int, reason: str, *, max_resamples: int = 0) -> GroupState:
        """Give up a slot that has no attempts left; return the new state of its group.

        A group is ready when all its slots are graded or lost, and dropped as soon as fewer than
        :func:`~etude.ledger.states.quorum` can still be graded. ``max_resamples`` is as in :meth:`record`.
        Losing a slot again changes nothing. Raises ``ValueError`` for a slot that is not open.
        """
        place, worker = (index, slot), self.leases.worker
        return self._db.write(lambda db: changes.lose_slot(db, purpose, place, reason, worker, max_resamples))

    def drop_group(self, purpose: str, index: int, reason: str) -> None:
        """Drop an open group; later groups move up in the order of batches. ``ValueError`` if it is not open."""
        self._db.write(lambda db: changes.drop_group(db, purpose, index, reason, self.leases.worker))

    def claim_batch(self, step: int, num_groups: int, live_groups: int = 0) -> list[Group] | None:
        """The groups of an optimiser step: the first ``num_groups`` unused ones and the first ``live_groups`` of users'
        sessions, or ``None`` while one is unfinished.

        The strict admission order bounds staleness. A step that claimed its batch before gets the same groups again. A
        step may claim while the previous step's weights are still being published, but not earlier: raises
        ``ValueError`` for any step other than the one after the last claimed, and if two would be uncommitted.
        """
        batch = {TRAIN: num_groups, LIVE: live_groups}
        if not any(batch.values()):
            raise ValueError(f"step {step} cannot claim a batch: it has no group")
        if self._db.read(lambda db: changes.is_waiting(db, step, batch)):
            return None  # the common case, which does not block writers
        places = self._db.write(lambda db: changes.claim_batch(db, step, batch, self._db.lease))
        return None if places is None else self.turns.read_groups(places)

    def batch(self, step: int) -> list[Group]:
        """The groups that a step claimed with :meth:`claim_batch`; none if it has not claimed."""
        return self.turns.read_groups(self._db.read(lambda db: rows.groups_of_step(db, step)))

    def commit_step(self, step: int) -> None:
        """Mark a claimed step as done and its groups as consumed, and commit the dataset cursor.

        Call it once the step's weights are published. Raises ``ValueError`` for a step that is not claimed.
        """
        self._db.write(lambda db: changes.commit_step(db, step, self._db.lease))

    def resampled(self, step: int) -> int:
        """The number of groups without a signal that were dropped between the previous batch and that of a claimed
        step.
        """
        return self._db.read(lambda db: rows.resampled_before(db, step, changes.NO_SIGNAL))

    def task_outcomes(self, first: int = 0) -> list[TaskOutcome]:
        """The current outcome of each training group from index ``first`` on, in admission order."""
        return self._db.read(lambda db: rows.task_outcomes(db, first))

    def progress(self, purpose: str = TRAIN) -> RunProgress:
        """The progress of the groups of a purpose, and of the run's optimiser steps."""
        counts = self._db.read(lambda db: rows.progress_counts(db, purpose))
        zeros = dict.fromkeys((*GroupState, "drawn", "committed"), 0)
        return RunProgress(**{str(name): count for name, count in (zeros | counts).items()})

    def rollout_counts(self, purpose: str) -> dict[RolloutStatus, int]:
        """Status → number of rollouts of a purpose, zeros included."""
        counts = self._db.read(lambda db: rows.rollout_counts(db, purpose))
        return {status: counts.get(status, 0) for status in RolloutStatus}

    def group(self, purpose: str, index: int) -> Group:
        """A group with its graded rollouts in slot order. Raises ``ValueError`` if there is no such group."""
        (group,) = self.turns.read_groups([(purpose, index)])
        return group

    def groups(self, purpose: str, states: Collection[GroupState] = tuple(GroupState)) -> Iterator[Group]:
        """Every group of a purpose that is in one of ``states``, in admission order, read a few at a time."""
        indices = self._db.read(lambda db: rows.group_indices(db, purpose, states))
        return (
            group
            for some in few(indices, READ_AT_ONCE)
            for group in self.turns.read_groups([(purpose, index) for index in some])
        )

    def rewards(self, purpose: str) -> list[float]:
        """The reward of every graded rollout of a purpose, by group and slot."""
        return self._db.read(lambda db: rows.rewards(db, purpose))


class Facts:
    """Small values that a run records, by key."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def set(self, key: str, value: str) -> None:
        """Record a fact; replaces the previous value of ``key``."""
        self._db.write(lambda db: rows.set_fact(db, key, value))

    def get(self, key: str) -> str | None:
        """The fact last recorded under ``key``."""
        return self._db.read(lambda db: rows.get_fact(db, key))


class Loads:
    """Weights that the trainer is requested to load (the fact :data:`~etude.ledger.changes.LOAD`)."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def claim(self, step: int) -> dict[str, Json] | None:
        """The load that a step performs instead of training; ``None`` for a step that trains on groups. A step that
        took a load gets the same one again.

        Raises ``ValueError`` for any step other than the one after the last claimed.
        """
        if self._db.read(lambda db: changes.is_load_due(db, step)):
            return self._db.write(lambda db: changes.claim_load(db, step, self._db.lease))
        return None

    def count(self, version: int) -> int:
        """The number of steps up to a published version that loaded weights and trained on no group."""
        return self._db.read(lambda db: rows.steps_without_groups(db, version))


class Leases:
    """The leases of a ledger for one connection, which holds at most one."""

    def __init__(self, transactions: Transactions, *, term_s: float, clock: Clock) -> None:
        self._db = transactions
        self._clock = clock
        self._rival = LeaseWatch(term_s)
        self._others = LeaseWatch(term_s)

    @property
    def worker(self) -> str:
        """The name of this connection's lease, which is the worker of the groups that it admits."""
        return ANY_WORKER if self._db.lease is None else self._db.lease.name

    def look(self, name: str) -> Lease:
        """The lease as recorded in the ledger."""
        return self._db.read(lambda db: rows.lease(db, name))

    def take(self, name: str, holder: str) -> Lease | None:
        """Take a lease; ``None`` if another holder has it, until that holder was silent for a term of such calls.

        Every later write of this connection checks it first. Raises ``ValueError`` if the connection already holds one.
        """
        if self._db.lease is not None:
            raise ValueError(f"this connection holds the lease {self._db.lease.name!r}: open another one for {name!r}")
        seen = self.look(name)
        silent = name in self._rival.silent([seen], self._clock.now())
        self._db.lease = self._db.write(lambda db: _take(db, seen, holder, silent=silent))
        return self._db.lease

    def beat(self, mine: Lease) -> None:
        """Send a heartbeat for a lease. Raises :class:`~etude.errors.FencedError` if it is lost."""
        self._db.write(lambda db: rows.put_lease(db, leases.beat(rows.lease(db, mine.name), mine)))

    def release(self) -> None:
        """Release the lease, so that a successor does not have to wait for a term."""
        mine = self._db.lease
        if mine is not None:
            self._db.write(lambda db: rows.put_lease(db, leases.release(mine)))
            self._db.lease = None

    def silent(self, names: Sequence[str]) -> list[Lease]:
        """The named leases whose holders were silent for a term of such calls."""
        seen = [self.look(name) for name in names if name != ANY_WORKER]
        silent = self._others.silent(seen, self._clock.now())
        return [lease for lease in seen if lease.name in silent]


def _take(db: Database, seen: Lease, holder: str, *, silent: bool) -> Lease | None:
    lease = rows.lease(db, seen.name)
    taken = leases.take(lease, holder, silent=silent and lease == seen)
    if taken is not None:
        rows.put_lease(db, taken)
    return taken


def _check_trainable(task: Task, purpose: str) -> None:
    if purpose == TRAIN and task.split is not Split.TRAIN:
        raise ValueError(f"task {task.task_id} is of split {task.split!s}: nothing held out is ever trained on")


def _admit(task: Task, group: rows.GroupRow, kept_below: int, db: Database) -> int | NotAdmitted:
    return changes.admit_drawn(db, task, group, kept_below)


def _open_slots(db: Database, purpose: str, worker: str) -> list[OpenSlot]:
    return [
        opened(slot=slot, attempt=attempt)
        for group in rows.open_groups(db, purpose)
        if worker in (ANY_WORKER, group.worker)
        for opened in (_opening(group),)
        for slot, attempt in rows.slots(db, purpose, group).due.items()
    ]


def _opening(group: rows.GroupRow) -> Callable[..., OpenSlot]:
    """A constructor for the slots of a group; it decodes the task once."""
    return partial(
        OpenSlot,
        task=decode_task(group.task),
        group_index=group.group_index,
        admitted_version=group.admitted_version,
    )
