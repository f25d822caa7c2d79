"""A model of shared processors: work slows down if more processes compute than there are processors.

    work of a process per second = min(1, processors / (processes + running commands))
    work of a command per second = the same · running commands / commands

Trainer and engines are one process each. There may be hundreds of agents' commands and graders; at most one per
processor runs at a time, in turns, so that they do not starve trainer and engines. All computations of a kind progress
equally, so one clock of work per kind is enough: a computation ends when the clock has advanced by its work.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import final

ROUNDING_S = 1e-9
"""Tolerance of sums of times."""


@final
class WorkTimer:
    """A callback that is due when a given amount of work is done."""

    __slots__ = ("callback", "is_cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the callback."""
        self.is_cancelled = True


@final
class _WorkClock:
    """The work that each computation of a kind has done so far, and the timers that wait for it."""

    __slots__ = ("busy", "done_s", "ends")

    def __init__(self) -> None:
        self.busy = 0
        self.done_s = 0.0
        self.ends: list[tuple[float, int, WorkTimer]] = []

    def left_s(self) -> float:
        """Work until the next timer."""
        while self.ends and self.ends[0][2].is_cancelled:
            heapq.heappop(self.ends)
        return max(0.0, self.ends[0][0] - self.done_s) if self.ends else math.inf

    def call_back(self) -> None:
        """Call back every timer that is due."""
        while self.ends and self.ends[0][0] <= self.done_s + ROUNDING_S:
            _, _, work = heapq.heappop(self.ends)
            if not work.is_cancelled:
                work.callback()


@final
class Processors:
    """Processors of one machine, in the time of the running event loop."""

    def __init__(self, cores: float = math.inf) -> None:
        """With infinite ``cores`` each computation has its own processor, and work passes like time."""
        self._cores = cores
        self._processes, self._commands = _WorkClock(), _WorkClock()
        self._at_s = 0.0
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def done_s(self) -> float:
        """Seconds of work that a process could do so far."""
        now_s = asyncio.get_running_loop().time()
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        process, command = self._paces
        self._processes.done_s += elapsed_s * process
        self._commands.done_s += elapsed_s * command
        return self._processes.done_s

    def occupy(self) -> None:
        """Start one more process, until :meth:`release`."""
        self._change(self._processes, 1)

    def release(self) -> None:
        """Stop one process."""
        self._change(self._processes, -1)

    def call_at(self, done_s: float, callback: Callable[[], None]) -> WorkTimer:
        """Call back as soon as :meth:`done_s` reaches ``done_s``."""
        return self._call_at(self._processes, done_s, callback)

    async def compute(self, seconds: float) -> None:
        """Do ``seconds`` of work as one process."""
        await self._do(self._processes, seconds)

    async def run(self, seconds: float) -> None:
        """Do ``seconds`` of work as one command."""
        await self._do(self._commands, seconds)

    @property
    def _paces(self) -> tuple[float, float]:
        """Work per second of a process, and of a command."""
        processes, commands = self._processes.busy, self._commands.busy
        running = min(commands, self._cores)
        process = min(1.0, self._cores / (processes + running)) if processes or commands else 1.0
        return process, process * running / commands if commands else process

    async def _do(self, clock: _WorkClock, seconds: float) -> None:
        if seconds <= 0:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._change(clock, 1)
        work = self._call_at(clock, clock.done_s + seconds, partial(_end, ended))
        try:
            await ended
        finally:
            work.cancel()
            self._change(clock, -1)

    def _call_at(self, clock: _WorkClock, done_s: float, callback: Callable[[], None]) -> WorkTimer:
        self.done_s()
        work = WorkTimer(callback)
        heapq.heappush(clock.ends, (done_s, next(self._numbers), work))
        self._set_timer()
        return work

    def _change(self, clock: _WorkClock, by: int) -> None:
        self.done_s()
        before = self._paces
        clock.busy += by
        if self._paces != before:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        process, command = self._paces
        left_s = min(self._processes.left_s() / process, self._commands.left_s() / command)
        if math.isfinite(left_s):
            self._timer = asyncio.get_running_loop().call_at(self._at_s + left_s, self._call_back)

    def _call_back(self) -> None:
        self.done_s()
        self._processes.call_back()
        self._commands.call_back()
        self._set_timer()


def _end(waiting: "asyncio.Future[None]") -> None:
    """End a computation, unless it was cancelled."""
    if not waiting.done():
        waiting.set_result(None)
