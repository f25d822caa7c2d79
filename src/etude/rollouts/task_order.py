"""Order in which training tasks are drawn: epochs, each in its own order.

    position      0 … N − 1    N … 2N − 1    2N …
    epoch             1             2          3 …        each a permutation of the family's N tasks

Pure: seed, epoch and number of tasks determine the order, so any process, also after a restart, draws the same task at
the same position. The ledger stores the position and admits each task once per epoch. If tasks are added to a folder
during a run, the epochs continue with them: tasks that the current epoch already had are skipped.
"""

from random import Random

from etude.ledger.ledger import TaskDraw
from etude.protocols import TaskFamily
from etude.types import Split


class TaskOrder:
    """The training tasks of a family, epoch after epoch; for an infinite family, one infinite epoch."""

    def __init__(self, family: TaskFamily, *, seed: int) -> None:
        self._family = family
        self._size = family.size(Split.TRAIN)
        self._seed = seed
        self._shuffled: tuple[int, list[int]] = (0, [])
        """The most recently used epoch and its order."""

    def draw(self, position: int) -> TaskDraw:
        """The task at a position of the training data, from 0, and the epoch that it is drawn in."""
        if self._size is None:
            return TaskDraw(task=self._family.task(Split.TRAIN, position))
        turn, place = divmod(position, self._size)
        return TaskDraw(task=self._family.task(Split.TRAIN, self._order(turn + 1)[place]), epoch=turn + 1)

    def _order(self, epoch: int) -> list[int]:
        if self._shuffled[0] != epoch:
            assert self._size is not None
            order = list(range(self._size))
            Random(f"epoch|{self._seed}|{epoch}").shuffle(order)
            self._shuffled = epoch, order
        return self._shuffled[1]
