"""The durable state of a run: which groups exist, what became of them, which step trained on them.

Owns every decision that must survive ``kill -9`` of any process: a task is trained on once an epoch, batches follow
admission order, a group is consumed by exactly one optimiser step, and the dataset cursor commits with it. One
database, shared by all processes of a run; each call is one short transaction (well under a millisecond where it is
embedded), so the calls are synchronous. A call is kept once or not at all, whatever happens to the connection.

Does not own how many groups to admit (:mod:`etude.rollouts.admission`) or what is made of them
(:mod:`etude.trainer.batching`). What is done in each transaction is in :mod:`etude.ledger.changes`.
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
"""Groups that are read together: their turns are on the way at the same time."""
MAX_REPEATS = 10_000
"""Tasks in a row that were all admitted before in their epoch: the family has nothing new to offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDraw:
    """A training task as it is drawn: the ledger admits each pair of these once."""

    task: Task
    epoch: int = 1
    """Time, from 1, that the task is drawn in this run."""
    weight: float = 1.0
    """Importance weight of the task, as of :class:`~etude.types.Group`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """A place in a group that still needs a graded rollout, and the attempt to make next."""

    task: Task
    group_index: int
    slot: int
    attempt: int
    admitted_version: int = 0
    """Every engine served this weight version, or a later one, when the group was admitted: no token may be older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Number of groups of one purpose in each state, and of committed optimiser steps."""

    open: int
    ready: int
    claimed: int
    consumed: int
    dropped: int
    steps_done: int
    drawn: int
    """The dataset cursor: position of the next training task to be drawn."""
    committed: int
    """The dataset cursor of the last committed step: every draw before it was trained on, dropped or passed over. Who
    starts from that step's checkpoint without this ledger goes on here.
    """

    @property
    def complete(self) -> int:
        """Groups whose every slot is graded or lost, trained on or not."""
        return self.ready + self.claimed + self.consumed

    @property
    def usable(self) -> int:
        """Groups that were or will be used: all but the dropped."""
        return self.open + self.complete

    @property
    def admitted(self) -> int:
        """Groups ever admitted."""
        return self.usable + self.dropped


class Ledger(LedgerConnection):
    """One process's connection to the ledger of a run; not to be shared between threads.

    Any call may raise :class:`~etude.ledger.database.LedgerUnavailable`, after trying again for
    ``ledger.retry_timeout_s``; any that writes :class:`~etude.errors.FencedError`, when this connection held a lease
    that another process has now.
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
        """Open the ledger at a path or URL (:mod:`etude.ledger.open`), making it when there is none.

        Turns of rollouts are kept in ``payloads`` and read from there; without these they are kept in the rows, so that
        a ledger is one file. Those that are in rows are read in either case.

        Raises :class:`~etude.errors.RunFolderError` for a place that holds something else.
        """
        config = config or LedgerConfig()
        database = open_database(place, retry_timeout_s=config.retry_timeout_s)
        transactions = Transactions(database, retry_timeout_s=config.retry_timeout_s)
        return cls(transactions, term_s=config.lease_s, clock=clock or SystemClock(), payloads=payloads)

    def admit_group(self, task: Task, purpose: str, size: int, version: int) -> int | None:
        """Open a group of ``size`` slots and return its index; ``None`` if the task was admitted for training before.
        A task for training is admitted in its first epoch.

        ``version`` is the newest weight version that every engine serves at this moment.
        """
        _check_trainable(task, purpose)
        group = changes.new_group(task, size, version, self.leases.worker)
        return self._db.write(lambda db: changes.admit_group(db, task, purpose, group))

    def admit_next(
        self, draw: Callable[[int], TaskDraw], *, size: int, version: int, kept_below: int
    ) -> list[OpenSlot] | None:
        """Admit the next training task that is new in its epoch; return its slots, ``None`` while the window is full.

        ``draw`` gives the task at a position of the training data; it is called outside of the transaction that then
        checks the window, moves the cursor and opens the group, all or nothing. So of several processes none admits
        beyond ``kept_below`` groups, no task is skipped and none drawn twice. ``version`` is the newest weight version
        that every engine serves at this moment. Raises :class:`~etude.errors.ConfigError` when nothing new is drawn.
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
        """Every slot of an open group that is neither graded nor lost, in admission order: what is left to do.

        A connection that holds a lease gets its own groups only, among them those that it takes over now: free ones,
        those of workers whose leases were released, and of those whose holders have been silent for a term of such
        calls.
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
        """Keep an ended rollout; return the attempt its slot needs next, or ``None`` when it needs no more.

        ``turns`` are what ``turns.stow`` made of its turns, which is called here otherwise: what a row names is there.
        With the last slot the group is ready; a training group whose rewards are all alike is dropped instead, for at
        most ``max_resamples`` groups between two batches. An infrastructure failure leaves the slot open. Recording the
        same rollout again changes nothing. Raises ``ValueError`` when the rollout does not fit: no such slot, a slot
        that is graded or lost already, an attempt out of turn, or dropped while its group is not.
        """
        turns = turns or self.turns.stow(rollout)
        row = rows.RolloutRow(encode_rollout(rollout, with_turns=turns is None), turns)
        worker = self.leases.worker
        return self._db.write(lambda db: changes.record(db, rollout, purpose, row, worker, max_resamples))

    def lose_slot(self, purpose: str, index: int, slot: int, reason: str, *, max_resamples: int = 0) -> GroupState:
        """Give up a slot whose attempts are used up; return what its group is now.

        A group is ready when all its slots are graded or lost, and dropped as soon as fewer than
        :func:`~etude.ledger.states.quorum` can still be graded. ``max_resamples`` is as in :meth:`record`.
        Losing a slot again changes nothing. Raises ``ValueError`` for a slot that is not open.
        """
        place, worker = (index, slot), self.leases.worker
        return self._db.write(lambda db: changes.lose_slot(db, purpose, place, reason, worker, max_resamples))

    def drop_group(self, purpose: str, index: int, reason: str) -> None:
        """Give up an open group; later groups move up in the order of batches. ``ValueError`` if it is not open."""
        self._db.write(lambda db: changes.drop_group(db, purpose, index, reason, self.leases.worker))

    def claim_batch(self, step: int, num_groups: int, live_groups: int = 0) -> list[Group] | None:
        """The groups of an optimiser step: the first ``num_groups`` unused ones and the first ``live_groups`` of users'
        sessions, or ``None`` while one is unfinished.

        Strictly in admission order, which is what bounds staleness. A step that claimed its batch before gets the very
        same groups again. A step may claim while the weights of the one before are still being published, not earlier:
        raises ``ValueError`` for any other step than the one after the last claimed, and when two are not committed.
        """
        batch = {TRAIN: num_groups, LIVE: live_groups}
        if not any(batch.values()):
            raise ValueError(f"step {step} cannot claim a batch: it has no group")
        if self._db.read(lambda db: changes.is_waiting(db, step, batch)):
            return None  # the common answer, found without stopping any writer
        places = self._db.write(lambda db: changes.claim_batch(db, step, batch, self._db.lease))
        return None if places is None else self.turns.read_groups(places)

    def batch(self, step: int) -> list[Group]:
        """The groups that a step claimed, as :meth:`claim_batch` gave them to it; none for a step that has not."""
        return self.turns.read_groups(self._db.read(lambda db: rows.groups_of_step(db, step)))

    def commit_step(self, step: int) -> None:
        """Mark a claimed step done, its groups consumed and the dataset cursor committed as far as they reach.

        To be called once the step's weights are published. Raises ``ValueError`` for a step that is not claimed.
        """
        self._db.write(lambda db: changes.commit_step(db, step, self._db.lease))

    def resampled(self, step: int) -> int:
        """Groups without a signal that were dropped between the batch before and that of a claimed step."""
        return self._db.read(lambda db: rows.resampled_before(db, step, changes.NO_SIGNAL))

    def task_outcomes(self, first: int = 0) -> list[TaskOutcome]:
        """The outcome of each training group from index ``first`` on, so far, in admission order."""
        return self._db.read(lambda db: rows.task_outcomes(db, first))

    def progress(self, purpose: str = TRAIN) -> RunProgress:
        """The progress of the groups of a purpose, and of the run's optimiser steps."""
        counts = self._db.read(lambda db: rows.progress_counts(db, purpose))
        zeros = dict.fromkeys((*GroupState, "drawn", "committed"), 0)
        return RunProgress(**{str(name): count for name, count in (zeros | counts).items()})

    def rollout_counts(self, purpose: str) -> dict[RolloutStatus, int]:
        """The number of rollouts of a purpose that ended in each way, every way named."""
        counts = self._db.read(lambda db: rows.rollout_counts(db, purpose))
        return {status: counts.get(status, 0) for status in RolloutStatus}

    def group(self, purpose: str, index: int) -> Group:
        """A group with its graded rollouts in slot order. Raises ``ValueError`` when there is no such group."""
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
    """Small things to remember about a run, by key."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def set(self, key: str, value: str) -> None:
        """Remember a fact, replacing what was known under ``key``."""
        self._db.write(lambda db: rows.set_fact(db, key, value))

    def get(self, key: str) -> str | None:
        """The fact that was last recorded under ``key``."""
        return self._db.read(lambda db: rows.get_fact(db, key))


class Loads:
    """Weights that the trainer is asked to go on with (the fact :data:`~etude.ledger.changes.LOAD`)."""

    def __init__(self, transactions: Transactions) -> None:
        self._db = transactions

    def claim(self, step: int) -> dict[str, Json] | None:
        """The load that a step does instead of training on groups; ``None`` for a step of groups. A step that took one
        before gets the same one again.

        Raises ``ValueError`` for any other step than the one after the last claimed.
        """
        if self._db.read(lambda db: changes.is_load_due(db, step)):
            return self._db.write(lambda db: changes.claim_load(db, step, self._db.lease))
        return None

    def count(self, version: int) -> int:
        """Number of steps up to a published version that claimed no group: they loaded weights and trained on none."""
        return self._db.read(lambda db: rows.steps_without_groups(db, version))


class Leases:
    """The leases of a ledger, as one connection sees them; it holds at most one itself."""

    def __init__(self, transactions: Transactions, *, term_s: float, clock: Clock) -> None:
        self._db = transactions
        self._clock = clock
        self._rival = LeaseWatch(term_s)
        self._others = LeaseWatch(term_s)

    @property
    def worker(self) -> str:
        """The name of the lease that this connection holds; groups that it admits are filled under that name."""
        return ANY_WORKER if self._db.lease is None else self._db.lease.name

    def look(self, name: str) -> Lease:
        """The lease as the ledger has it."""
        return self._db.read(lambda db: rows.lease(db, name))

    def take(self, name: str, holder: str) -> Lease | None:
        """Take a lease; ``None`` while another holder lives, which is known after a term of such calls.

        From then on every write of this connection proves it first. Raises ``ValueError`` when it holds one already.
        """
        if self._db.lease is not None:
            raise ValueError(f"this connection holds the lease {self._db.lease.name!r}: open another one for {name!r}")
        seen = self.look(name)
        silent = name in self._rival.silent([seen], self._clock.now())
        self._db.lease = self._db.write(lambda db: _take(db, seen, holder, silent=silent))
        return self._db.lease

    def beat(self, mine: Lease) -> None:
        """Say that the holder of a lease lives. Raises :class:`~etude.errors.FencedError` when it is lost."""
        self._db.write(lambda db: rows.put_lease(db, leases.beat(rows.lease(db, mine.name), mine)))

    def release(self) -> None:
        """Let go of the lease, so that no successor has to wait for its silence."""
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
    """The slots of a group, whose task is decoded once."""
    return partial(
        OpenSlot,
        task=decode_task(group.task),
        group_index=group.group_index,
        admitted_version=group.admitted_version,
    )
