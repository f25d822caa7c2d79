"""Processors that the parts of a machine share: a clock that slows down while more of them compute than there are.

    work that each part gets done in a second = min(1, processors / parts that compute)

All parts get equally much done, so one clock of work is enough for any number of them: who computes ends when it has
gone on by what there was to do.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import final

ROUNDING_S = 1e-9


@final
class Work:
    """Something that is called when so much work is done."""

    __slots__ = ("callback", "is_cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Call nothing."""
        self.is_cancelled = True


@final
class Processors:
    """Processors of one machine, in the time of the running loop."""

    def __init__(self, cores: float = math.inf) -> None:
        """``cores`` is infinite where each part has a processor of its own: then work passes like time."""
        self._cores = cores
        self._busy = 0
        self._done_s = 0.0
        self._at_s = 0.0
        self._ends: list[tuple[float, int, Work]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def done_s(self) -> float:
        """Seconds of work that each part could do so far."""
        now_s = asyncio.get_running_loop().time()
        self._done_s += (now_s - self._at_s) * self._pace
        self._at_s = now_s
        return self._done_s

    def occupy(self) -> None:
        """Let one more part compute, until :meth:`release`."""
        self._change(1)

    def release(self) -> None:
        """Let one fewer compute."""
        self._change(-1)

    def call_at(self, done_s: float, callback: Callable[[], None]) -> Work:
        """Call back as soon as :meth:`done_s` is so much."""
        work = Work(callback)
        heapq.heappush(self._ends, (done_s, next(self._numbers), work))
        self._set_timer()
        return work

    async def compute(self, seconds: float) -> None:
        """Do the work of so many seconds."""
        if seconds <= 0:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.occupy()
        work = self.call_at(self.done_s() + seconds, partial(_end, ended))
        try:
            await ended
        finally:
            work.cancel()
            self.release()

    @property
    def _pace(self) -> float:
        return min(1.0, self._cores / self._busy) if self._busy else 1.0

    def _change(self, by: int) -> None:
        self.done_s()
        before = self._pace
        self._busy += by
        if self._pace != before:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2].is_cancelled:
            heapq.heappop(self._ends)
        if self._ends:
            left_s = max(0.0, self._ends[0][0] - self.done_s()) / self._pace
            self._timer = asyncio.get_running_loop().call_at(self._at_s + left_s, self._call_back)

    def _call_back(self) -> None:
        done_s = self.done_s()
        while self._ends and self._ends[0][0] <= done_s + ROUNDING_S:
            _, _, work = heapq.heappop(self._ends)
            if not work.is_cancelled:
                work.callback()
        self._set_timer()


def _end(waiting: "asyncio.Future[None]") -> None:
    """Wake who computes, unless it has given up."""
    if not waiting.done():
        waiting.set_result(None)
