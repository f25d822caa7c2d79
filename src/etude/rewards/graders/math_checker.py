"""Comparison of mathematical answers in a worker process that is killed if it does not respond.

    MathChecker.is_equal ──▶ [right, given] ──▶ worker process ──▶ right, wrong, unreadable

- consumes: pairs of answers, one at a time
- waits for: the worker to start, and its verdict on each pair; each with a deadline
- on shutdown: the worker is killed

The worker itself limits each comparison (:mod:`etude.rewards.graders.math_worker`). The deadlines here are for a worker
that hangs or dies, which is not the answer's fault: :class:`~etude.errors.InfrastructureError`.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import orjson

from etude.errors import InfrastructureError
from etude.rewards.graders import math_worker

PROGRAM = (sys.executable, "-I", str(Path(math_worker.__file__)))
"""Isolated (``-I``, empty environment): neither a recipe's modules nor variables change its imports."""
START_S = 300.0
"""Timeout, in seconds, for loading sympy and math-verify, even on a busy machine."""
ANSWER_S = math_worker.LONGEST_S + 30.0
"""Timeout of the verdict on one pair, in seconds."""
LONGEST_ANSWER = 1_000
"""Maximum length of an answer, in characters; a longer one is never right."""


class MathChecker:
    """Client of one worker process, which starts at the first comparison."""

    def __init__(self) -> None:
        self._worker: Process | None = None
        self._turn = asyncio.Lock()

    async def is_equal(self, right: str, given: str) -> bool:
        """True if two answers are the same number, set, interval, expression, …

        An answer that cannot be parsed, or that exceeds the limits, is not equal. Raises
        :class:`~etude.errors.InfrastructureError` if the worker does not respond.
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
                await self._stop()  # its next output could be the verdict on this pair
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
