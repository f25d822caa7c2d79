"""Processors that the parts of a machine share: clocks that slow down while more computes than there are processors.

    work that a process gets done in a second = min(1, processors / (processes + commands that run))
    work that a command gets done in a second = the same · commands that run / commands

Trainer and engines are a process each. Agents' commands and graders come by the hundred; as many of them as there are
processors run at a time, in turns, so that they do not crowd out trainer and engines. All of a kind get equally much
done, so a clock of work for each kind is enough: who computes ends when it has gone on by what there was to do.
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
class WorkTimer:
    """Something that is called when so much work is done."""

    __slots__ = ("callback", "is_cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Call nothing."""
        self.is_cancelled = True


@final
class _WorkClock:
    """The work that each of a kind could do so far, and who waits for how much of it."""

    __slots__ = ("busy", "done_s", "ends")

    def __init__(self) -> None:
        self.busy = 0
        self.done_s = 0.0
        self.ends: list[tuple[float, int, WorkTimer]] = []

    def left_s(self) -> float:
        """Work until the next end."""
        while self.ends and self.ends[0][2].is_cancelled:
            heapq.heappop(self.ends)
        return max(0.0, self.ends[0][0] - self.done_s) if self.ends else math.inf

    def call_back(self) -> None:
        """Call all that is at its end."""
        while self.ends and self.ends[0][0] <= self.done_s + ROUNDING_S:
            _, _, work = heapq.heappop(self.ends)
            if not work.is_cancelled:
                work.callback()


@final
class Processors:
    """Processors of one machine, in the time of the running loop."""

    def __init__(self, cores: float = math.inf) -> None:
        """``cores`` is infinite where all have a processor of their own: then work passes like time."""
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
        """Let one more process compute, until :meth:`release`."""
        self._change(self._processes, 1)

    def release(self) -> None:
        """Let one fewer compute."""
        self._change(self._processes, -1)

    def call_at(self, done_s: float, callback: Callable[[], None]) -> WorkTimer:
        """Call back as soon as :meth:`done_s` is so much."""
        return self._call_at(self._processes, done_s, callback)

    async def compute(self, seconds: float) -> None:
        """Do the work of so many seconds, as a process of one's own."""
        await self._do(self._processes, seconds)

    async def run(self, seconds: float) -> None:
        """Do the work of so many seconds, as a command."""
        await self._do(self._commands, seconds)

    @property
    def _paces(self) -> tuple[float, float]:
        """Work that a process, and a command, gets done in a second."""
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
    """Wake who computes, unless it has given up."""
    if not waiting.done():
        waiting.set_result(None)
