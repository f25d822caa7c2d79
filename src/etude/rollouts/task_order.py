"""Order in which training tasks are drawn: epochs, each in an order of its own.

    position      0 … N − 1    N … 2N − 1    2N …
    epoch             1             2          3 …        each a permutation of the family's N tasks

Pure: the seed, the epoch and the number of tasks decide the order, so a process that is started again, and any other
one, draws the same task at the same position. Where the position is, the ledger knows, which also admits each task once
an epoch. If tasks are added to a folder in the middle of a run, the epochs go on with them: what the current one has
had is passed over.
"""

from random import Random

from etude.ledger.ledger import TaskDraw
from etude.protocols import TaskFamily
from etude.types import Split


class TaskOrder:
    """The training tasks of a family, epoch after epoch; of an endless family one epoch without end."""

    def __init__(self, family: TaskFamily, *, seed: int) -> None:
        self._family = family
        self._size = family.size(Split.TRAIN)
        self._seed = seed
        self._shuffled: tuple[int, list[int]] = (0, [])
        """The epoch that was asked for last, and its order."""

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
