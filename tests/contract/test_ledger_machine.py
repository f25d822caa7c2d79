"""A ledger under random operations and crashes: no group is lost, and none is trained twice.

Two rollouts processes and two trainers share a ledger. Each may be killed at any point and started again. It may also
be taken for dead while it only slept; when it wakes, none of its writes is accepted.
"""

import os
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from etude.clock import VirtualClock
from etude.config.recipe import LedgerConfig
from etude.errors import FencedError
from etude.ledger.changes import TRAINER
from etude.ledger.leases import BEATS_PER_TERM
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.ledger.states import GroupState, quorum
from ledgers import NewPlace, new_task, rollout, task

GROUP_SIZE = 3
WORKERS = ("rollouts-0", "rollouts-1")
SOME = settings(
    max_examples=100 if os.environ.get("ETUDE_LONG") else 10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
CONFIG = LedgerConfig(lease_s=20.0)


def draw(position: int) -> TaskDraw:
    """Training data in which every task comes twice in a row; after six tasks they repeat, in the next epoch."""
    epoch, place = divmod(position, 12)
    return TaskDraw(task=task(place // 2), epoch=epoch + 1)


class LedgerMachine(RuleBasedStateMachine):
    """Calls the ledgers of several processes at random, and compares them with a model in memory."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.clock = VirtualClock()
        self.names = count()
        self.zombies: list[Ledger] = []
        self.reader = Ledger.open(place, CONFIG)
        self.ledgers = {worker: self.started(worker) for worker in WORKERS}
        self.trainer = self.started(TRAINER)
        self.due: dict[int, dict[int, int]] = {}  # open group → slot → its next attempt
        self.graded: dict[int, int] = {}
        self.worker: dict[int, str] = {}
        self.waiting: list[int] = []  # kept groups that no step has claimed, in admission order
        self.position: list[int] = []
        self.dropped: set[int] = set()
        self.claimed: list[int] = []
        self.consumed: list[int] = []
        self.steps_done = self.drawn = self.committed = 0

    def started(self, lease: str) -> Ledger:
        """A process that takes the lease of a predecessor that is known to be dead."""
        ledger = Ledger.open(self.place, CONFIG, self.clock)
        assert ledger.leases.take(lease, f"host:{lease}") is not None
        return ledger

    def teardown(self) -> None:
        for ledger in (self.reader, self.trainer, *self.ledgers.values(), *self.zombies):
            ledger.close()

    @rule(worker=st.sampled_from(WORKERS), window=st.integers(1, 6))
    def admit(self, worker: str, window: int) -> None:
        stored = len(self.position) - len(self.dropped)
        admitted = self.ledgers[worker].admit_next(
            draw, size=GROUP_SIZE, version=0, kept_below=len(self.consumed) + window
        )
        if stored >= len(self.consumed) + window:
            assert admitted is None
            return
        index = len(self.position)
        assert admitted is not None
        assert [(slot.group_index, slot.slot, slot.attempt) for slot in admitted] == [
            (index, slot, 0) for slot in range(GROUP_SIZE)
        ]
        self.position.append(self.drawn + self.drawn % 2)
        self.drawn = self.position[-1] + 1
        self.due[index], self.graded[index], self.worker[index] = dict.fromkeys(range(GROUP_SIZE), 0), 0, worker
        self.waiting.append(index)

    @precondition(lambda self: self.due)
    @rule(data=st.data(), end=st.sampled_from(["graded", "graded", "failed", "lost"]))
    def end(self, data: st.DataObject, end: str) -> None:
        index = data.draw(st.sampled_from(sorted(self.due)))
        self.end_slot(index, data.draw(st.sampled_from(sorted(self.due[index]))), end)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.due)))
        for slot in sorted(self.due[index]):
            self.end_slot(index, slot, "graded")

    def end_slot(self, index: int, slot: int, end: str) -> None:
        ledger, due = self.ledgers[self.worker[index]], self.due[index]
        attempt = due[slot]
        if end != "lost":
            done = rollout(index, slot, attempt, reward=1.0 if end == "graded" else None)
            for _ in range(2):  # the second time, as after a lost reply, changes nothing
                assert ledger.record(done, TRAIN) == (attempt + 1 if end == "failed" else None)
        if end == "failed":
            due[slot] += 1
            return
        del due[slot]
        self.graded[index] += end == "graded"
        hopeless = self.graded[index] + len(due) < quorum(GROUP_SIZE)
        if end == "lost":
            state = ledger.lose_slot(TRAIN, index, slot, "infra")
            assert state is (GroupState.DROPPED if hopeless else GroupState.OPEN if due else GroupState.READY)
        if hopeless:
            self.waiting.remove(index)
            self.dropped.add(index)
        if hopeless or not due:
            del self.due[index]

    @rule(size=st.integers(1, 3))
    def claim(self, size: int) -> None:
        groups = self.trainer.claim_batch(self.steps_done + 1, size)
        indices = None if groups is None else [group.index for group in groups]
        if self.claimed:
            assert indices == self.claimed
            return
        heads = self.waiting[:size]
        if len(heads) < size or any(index in self.due for index in heads):
            assert indices is None
            return
        assert indices == heads
        self.claimed, self.waiting = heads, self.waiting[size:]

    @precondition(lambda self: self.claimed)
    @rule()
    def commit(self) -> None:
        self.steps_done += 1
        self.trainer.commit_step(self.steps_done)
        self.consumed += self.claimed
        self.claimed = []
        self.committed = min((self.position[index] for index in self.waiting), default=self.drawn)

    @rule()
    def restart_trainer(self) -> None:
        self.zombies.append(self.trainer)
        self.trainer = self.started(TRAINER)

    @rule(worker=st.sampled_from(WORKERS))
    def restart_rollouts(self, worker: str) -> None:
        self.zombies.append(self.ledgers[worker])
        self.ledgers[worker] = self.started(worker)
        left = {(slot.group_index, slot.slot): slot.attempt for slot in self.ledgers[worker].open_slots(TRAIN)}
        assert left.keys() >= {
            (index, slot) for index, due in self.due.items() if self.worker[index] == worker for slot in due
        }

    @rule(heir=st.sampled_from(WORKERS))
    def silence(self, heir: str) -> None:
        """One process sleeps for longer than its lease, the other one takes over its groups, and the first wakes."""
        (other,) = set(WORKERS) - {heir}
        for _ in range(BEATS_PER_TERM + 2):
            self.clock.advance(CONFIG.lease_s)  # however long it is: only what the heir watched counts
            admitted = self.ledgers[heir].open_slots(TRAIN)
        assert {slot.group_index for slot in admitted} == set(self.due)
        robbed = any(self.worker[index] == other for index in self.due)
        self.worker |= dict.fromkeys(self.due, heir)
        if robbed:
            self.zombies.append(self.ledgers[other])
            self.ledgers[other] = self.started(other)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), act=st.integers(0, 4))
    def a_zombie_wakes(self, data: st.DataObject, act: int) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        attempts: list[Callable[[], object]] = [
            lambda: zombie.admit_next(new_task, size=1, version=0, kept_below=10**6),
            lambda: zombie.record(rollout(0, 0, name=f"z{next(self.names)}"), TRAIN),
            lambda: zombie.lose_slot(TRAIN, 0, 0, "infra"),
            lambda: zombie.drop_group(TRAIN, 0, "infra"),
            lambda: zombie.commit_step(self.steps_done + 1),
        ]
        with pytest.raises(FencedError):
            attempts[act]()

    @invariant()
    def every_group_is_in_exactly_one_place(self) -> None:
        progress = self.reader.progress()
        assert progress.open == len(self.due)
        assert progress.ready == len(self.waiting) - len(self.due)
        assert progress.claimed == len(self.claimed)
        assert progress.consumed == len(self.consumed)
        assert progress.dropped == len(self.dropped)
        assert progress.steps_done == self.steps_done
        assert (progress.drawn, progress.committed) == (self.drawn, self.committed)
        places = [*self.waiting, *self.claimed, *self.consumed, *self.dropped]
        assert sorted(places) == list(range(progress.admitted))

    @invariant()
    def groups_are_consumed_in_admission_order(self) -> None:
        assert self.consumed == sorted(self.consumed)

    @invariant()
    def what_is_left_to_do_is_known(self) -> None:
        left = {(slot.group_index, slot.slot): slot.attempt for slot in self.reader.open_slots(TRAIN)}
        assert left == {(index, slot): attempt for index, due in self.due.items() for slot, attempt in due.items()}


@pytest.mark.timeout(1200)
def test_nothing_is_lost_or_trained_twice(new_place: NewPlace) -> None:
    class Somewhere(LedgerMachine):
        def __init__(self) -> None:
            super().__init__(new_place())

    run_state_machine_as_test(Somewhere, settings=SOME)
