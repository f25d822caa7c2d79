"""Epochs: every task once in each, in an order of its own that a restart does not change."""

from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.ledger.ledger import TRAIN, Ledger
from etude.rollouts.task_order import TaskOrder
from etude.types import Split, Task
from ledgers import task


@dataclass(frozen=True)
class Numbers:
    """A family of ``tasks`` tasks, or of unlimited tasks."""

    tasks: int | None

    def size(self, split: Split) -> int | None:
        return self.tasks

    def task(self, split: Split, index: int) -> Task:
        assert self.tasks is None or index < self.tasks
        return task(index, split)


def draws(tasks: int | None, *, seed: int, count: int) -> list[tuple[int, int]]:
    """Number and epoch of the first tasks."""
    order = TaskOrder(Numbers(tasks), seed=seed)
    return [(int(drawn.task.task_id), drawn.epoch) for drawn in map(order.draw, range(count))]


@given(tasks=st.integers(1, 40), seed=st.integers(0, 9), epochs=st.integers(1, 4))
def test_an_epoch_has_every_task_once(tasks: int, seed: int, epochs: int) -> None:
    drawn = draws(tasks, seed=seed, count=epochs * tasks)
    assert sorted(drawn) == [(number, epoch) for number in range(tasks) for epoch in range(1, epochs + 1)]
    assert [epoch for _, epoch in drawn] == [1 + place // tasks for place in range(len(drawn))]


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = {tuple(draws(12, seed=seed, count=36)[start : start + 12]) for seed in (0, 1) for start in (0, 12, 24)}
    assert len({tuple(number for number, _ in order) for order in orders}) == 6


@given(positions=st.lists(st.integers(0, 100), min_size=1))
def test_a_position_has_the_same_task_whatever_was_drawn_before(positions: list[int]) -> None:
    order = TaskOrder(Numbers(7), seed=3)
    for position in positions:
        assert order.draw(position) == TaskOrder(Numbers(7), seed=3).draw(position)


def test_an_endless_family_is_one_epoch_in_its_own_order() -> None:
    assert draws(None, seed=5, count=100) == [(number, 1) for number in range(100)]


def test_a_folder_may_grow_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """The current epoch continues with the new tasks, and no task is admitted twice in it."""
    with Ledger.open(tmp_path / "ledger.db") as ledger:

        def admit(tasks: int, count: int) -> list[tuple[int, int]]:
            order = TaskOrder(Numbers(tasks), seed=0)
            slots = [ledger.admit_next(order.draw, size=1, version=0, kept_below=99) or [] for _ in range(count)]
            groups = [ledger.group(TRAIN, slot.group_index) for (slot,) in slots]
            return [(int(group.task.task_id), group.epoch) for group in groups]

        first, second = admit(4, 6), admit(8, 8)
        assert [epoch for _, epoch in first] == [1, 1, 1, 1, 2, 2]
        assert len({*first, *second}) == 14
        assert {number for number, _ in second} >= {4, 5, 6, 7}
