"""Periodic background work of a process: uploads of what it writes, downloads of what others uploaded."""

from collections.abc import Callable
from threading import Event as Signal
from threading import Thread
from typing import final

from etude.closing import Closing

FIRST_S, LONGEST_S, GROWTH = 2.0, 60.0, 1.05
"""The first and the longest pause, and the growth factor, which bounds the number of objects of a long run."""
CLOSE_S = 5.0
"""Time for the last turn when a process ends."""


@final
class Rounds(Closing):
    """Calls ``turn`` repeatedly on a separate thread, with growing pauses, and once more on closing."""

    def __init__(self, name: str, turn: Callable[[], None], first_s: float = FIRST_S) -> None:
        self._turn = turn
        self._first_s = first_s
        self._closed = Signal()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after a last turn, waiting at most :data:`CLOSE_S`."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        pause_s, is_last = self._first_s, False
        while not is_last:
            is_last = self._closed.wait(pause_s)
            pause_s = min(LONGEST_S, pause_s * GROWTH)
            self._turn()
