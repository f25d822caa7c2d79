"""Comparison of answers as mathematics, in a process that is killed when it does not answer.

    MathChecker.is_equal ──▶ [right, given] ──▶ worker process ──▶ right, wrong, unreadable

- consumes: pairs of answers, one at a time
- waits for: the worker to be ready, for a word on each pair; each with a deadline
- on shutdown: the worker is killed

The limits of a single comparison are the worker's (:mod:`etude.rewards.graders.math_worker`); the deadlines here are
for a worker that hangs or died itself, which is no fault of an answer: :class:`~etude.errors.InfrastructureError`.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import orjson

from etude.errors import InfrastructureError
from etude.rewards.graders import math_worker

PROGRAM = (sys.executable, "-I", str(Path(math_worker.__file__)))
"""Apart from this process: no module of a recipe, no variable decides what it imports."""
START_S = 300.0
"""For sympy and math-verify to be loaded: seconds, on an idle machine."""
ANSWER_S = math_worker.LONGEST_S + 30.0
"""For a word on one pair."""
LONGEST_ANSWER = 1_000
"""Characters of an answer that is read at all."""


class MathChecker:
    """Asks one worker, which is started when it is first needed."""

    def __init__(self) -> None:
        self._worker: Process | None = None
        self._turn = asyncio.Lock()

    async def is_equal(self, right: str, given: str) -> bool:
        """True if two answers are the same number, set, interval, expression, …

        What cannot be read, or not within the limits, is not equal. Raises
        :class:`~etude.errors.InfrastructureError` when the worker does not answer.
        """
        if len(given) > LONGEST_ANSWER:
            return False
        async with self._turn:
            try:
                worker = self._worker or await self._start()
                assert worker.stdin is not None
                worker.stdin.write(orjson.dumps([right, given]) + b"\n")
                return await self._word(worker, ANSWER_S) == "right"
            except BaseException:
                await self._stop()  # what it would say next might be about this pair
                raise

    async def close(self) -> None:
        """Kill the worker; calling it twice is harmless."""
        async with self._turn:
            await self._stop()

    async def _start(self) -> Process:
        self._worker = await asyncio.create_subprocess_exec(*PROGRAM, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env={})
        await self._word(self._worker, START_S)
        return self._worker

    async def _word(self, worker: Process, seconds: float) -> str:
        assert worker.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await worker.stdout.readline()
        except TimeoutError as error:
            raise InfrastructureError(f"the process that compares answers was silent for {seconds:g} s") from error
        if not line:
            raise InfrastructureError("the process that compares answers ended: is math-verify installed whole?")
        return line.decode().strip()

    async def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
