"""Draws of training tasks by their past outcomes: the ledger's facts for the selection.

    ledger: groups, rewards ──▶ facts of each task ──▶ TaskSelection ──▶ TaskDraw: task, time that it comes, weight

All state is in the ledger: ended groups are folded once, in admission order, and those after the oldest open one again
at each draw. So a restarted process, or another one with the same ledger, draws the same tasks. As always, a group is
admitted once per (task, epoch); here the epoch of a task counts, from 1, the draws of *this* task.
"""

from collections import Counter
from collections.abc import Mapping

from etude.ledger.ledger import Ledger, TaskDraw
from etude.ledger.rows import TaskOutcome
from etude.protocols import TaskFamily
from etude.rollouts.task_selection import TaskFacts, TaskSelection
from etude.types import Split


class SelectedTasks:
    """The training tasks of a finite family, in the order of a selection."""

    def __init__(self, family: TaskFamily, selection: TaskSelection, ledger: Ledger) -> None:
        self._family = family
        self._selection = selection
        self._ledger = ledger
        tasks = (family.task(Split.TRAIN, index).task_id for index in range(selection.size))
        self._indices: Mapping[str, int] = {task_id: index for index, task_id in enumerate(tasks)}
        self._facts = TaskFacts.none(selection.size)
        self._times = Counter[int]()
        self._next = 0
        """Index of the first group that is not in ``_facts``."""

    def draw(self, position: int) -> TaskDraw:
        """The task at a position of the training data, from 0, by the current state of the ledger."""
        outcomes = self._ledger.task_outcomes(self._next)
        for settled in outcomes:
            if settled.is_open:
                break
            self._fold(self._facts, self._times, settled)
            self._next = settled.group_index + 1
        facts, times = self._facts.copy(), self._times.copy()
        for outcome in outcomes:
            if outcome.group_index >= self._next:
                self._fold(facts, times, outcome)
        choice = self._selection.choose(facts, position)
        task = self._family.task(Split.TRAIN, choice.index)
        index = self._indices[task.task_id]  # for a task in two rows, the row that counts
        return TaskDraw(task=task, epoch=times[index] + 1, weight=choice.weight)

    def _fold(self, facts: TaskFacts, times: Counter[int], outcome: TaskOutcome) -> None:
        index = self._indices.get(outcome.task_id)
        if index is None:  # the task is no longer in the folder
            return
        times[index] += 1
        if not outcome.is_open and outcome.graded:
            self._selection.observe(facts, index, outcome.position, graded=outcome.graded, passed=outcome.passed)
