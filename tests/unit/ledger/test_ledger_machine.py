"""Whatever happens in whatever order, and whoever is killed in between: no group is lost, none is trained twice."""

import shutil
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.ledger.ledger import TRAIN, Ledger
from etude.types import Case, Finish, FunctionChecks, Rollout, RolloutStatus, Split, Task, Turn

ONE = np.ones(1, np.int32)
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=ONE, finish=Finish.STOP)
CHECKS = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=0),))
GROUP_SIZE = 2


def task(name: str) -> Task:
    return Task(task_id=name, family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=CHECKS)


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger at random and compares it with what a perfect memory would say."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.generations = count(1)
        self.path = self.folder / "ledger.db"
        self.ledger = Ledger.open(self.path)
        self.names: set[int] = set()
        self.due: dict[int, dict[int, int]] = {}  # open group → slot → its next attempt
        self.waiting: list[int] = []  # kept groups that no step has claimed, in admission order
        self.dropped: set[int] = set()
        self.claimed: list[int] = []
        self.consumed: list[int] = []
        self.steps_done = 0

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)

    @rule(names=st.lists(st.integers(0, 30), min_size=1, max_size=4))
    def admit(self, names: list[int]) -> None:
        for name in names:
            index = self.ledger.admit_group(task(str(name)), TRAIN, GROUP_SIZE, self.steps_done)
            assert index == (None if name in self.names else len(self.names))
            self.names.add(name)
            if index is not None:
                self.due[index] = dict.fromkeys(range(GROUP_SIZE), 0)
                self.waiting.append(index)

    @precondition(lambda self: self.due)
    @rule(data=st.data(), fails=st.booleans())
    def record(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.due)))
        self.end(index, data.draw(st.sampled_from(sorted(self.due[index]))), fails=fails)

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.due)))
        for slot in sorted(self.due[index]):
            self.end(index, slot, fails=False)

    def end(self, index: int, slot: int, *, fails: bool) -> None:
        attempt = self.due[index][slot]
        rollout = Rollout(
            rollout_id=f"{index}.{slot}.{attempt}",
            group_index=index,
            slot=slot,
            attempt=attempt,
            status=RolloutStatus.FAILED_INFRA if fails else RolloutStatus.GRADED,
            reward=None if fails else 1.0,
            turns=(TURN,),
        )
        for _ in range(2):  # the second time, as after a lost reply, changes nothing
            assert self.ledger.record(rollout, TRAIN) == (attempt + 1 if fails else None)
        if fails:
            self.due[index][slot] += 1
            return
        del self.due[index][slot]
        if not self.due[index]:
            del self.due[index]

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.due)))
        self.ledger.drop_group(TRAIN, index, "infra")
        del self.due[index]
        self.waiting.remove(index)
        self.dropped.add(index)

    @rule(size=st.integers(1, 3))
    def claim(self, size: int) -> None:
        groups = self.ledger.claim_batch(self.steps_done + 1, size)
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
        self.ledger.commit_step(self.steps_done)
        self.consumed += self.claimed
        self.claimed = []

    @rule()
    def kill(self) -> None:
        """Go on with the files as they lie on disk while the ledger is open, as after ``kill -9``."""
        folder = self.folder / str(next(self.generations))
        folder.mkdir()
        for file in self.path.parent.glob("ledger.db*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, folder)
        self.ledger.close()
        self.path = folder / "ledger.db"
        self.ledger = Ledger.open(self.path)

    @invariant()
    def every_group_is_in_exactly_one_place(self) -> None:
        progress = self.ledger.progress()
        assert progress.open == len(self.due)
        assert progress.ready == len(self.waiting) - len(self.due)
        assert progress.claimed == len(self.claimed)
        assert progress.consumed == len(self.consumed)
        assert progress.dropped == len(self.dropped)
        assert progress.steps_done == self.steps_done
        places = [*self.waiting, *self.claimed, *self.consumed, *self.dropped]
        assert sorted(places) == list(range(progress.admitted))

    @invariant()
    def groups_are_consumed_in_admission_order(self) -> None:
        assert self.consumed == sorted(self.consumed)

    @invariant()
    def what_is_left_to_do_is_known(self) -> None:
        left = {(slot.group_index, slot.slot): slot.attempt for slot in self.ledger.open_slots(TRAIN)}
        assert left == {(index, slot): attempt for index, due in self.due.items() for slot, attempt in due.items()}


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
