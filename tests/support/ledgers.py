"""Building blocks for tests of the ledger: tasks, rollouts, and the possible locations of a ledger."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np

from databases import Server
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.types import Case, Finish, FunctionChecks, Rollout, RolloutStatus, Split, Task, Turn

ONE = np.ones(1, np.int32)
TURN = Turn(prompt_ids=ONE, completion_ids=ONE, logprobs=-ONE.astype(np.float32), versions=ONE, finish=Finish.STOP)
CHECKS = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(1,), expected=2),))

NewPlace = Callable[[], str]
"""Names a place where no ledger is yet."""


def new_places(database: str, folder: Path, server: Server | None) -> NewPlace:
    """Places for ledgers in ``folder``, or in schemas of ``server``."""
    numbers = count()
    if database == "sqlite":
        return lambda: str(folder / f"ledger-{next(numbers)}.db")
    assert server is not None
    return lambda: f"{server.url}#t{abs(hash(folder)):x}_{next(numbers)}"


def task(name: str | int, split: Split = Split.TRAIN) -> Task:
    return Task(task_id=str(name), family="fake", template="t", split=split, prompt="", files={}, checks=CHECKS)


def new_task(position: int) -> TaskDraw:
    """Training data in which every task is new."""
    return TaskDraw(task=task(position))


def rollout(group: int, slot: int, attempt: int = 0, reward: float | None = 1.0, name: str = "") -> Rollout:
    """A graded rollout; without a reward one that failed by infrastructure."""
    return Rollout(
        rollout_id=name or f"{group}.{slot}.{attempt}",
        group_index=group,
        slot=slot,
        attempt=attempt,
        status=RolloutStatus.FAILED_INFRA if reward is None else RolloutStatus.GRADED,
        reward=reward,
        turns=(TURN,),
    )


def fill(ledger: Ledger, name: str, size: int = 2) -> int:
    """Admit a group and grade all of it."""
    index = ledger.admit_group(task(name), TRAIN, size, 0)
    assert index is not None
    for slot in range(size):
        ledger.record(rollout(index, slot, reward=float(slot)), TRAIN)
    return index


@contextmanager
def holding(place: str, name: str, holder: str) -> Iterator[Ledger]:
    """A ledger session with its own lease."""
    with Ledger.open(place) as ledger:
        assert ledger.leases.take(name, holder) is not None
        yield ledger
