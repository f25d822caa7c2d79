"""Jobs of clients and their results: one after another in order of arrival, or beside each other, kept for a while.

    submit ──▶ queue ──▶ one at a time ──▶ result ◀── result(), asked again and again until it is there
    start  ──▶ a task of its own ────────────▲

Owns order and bounds, and that a request which comes twice is done once. What a job does is its maker's.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from etude.errors import EtudeError
from etude.types import Json

MAX_QUEUED = 256
"""Jobs that wait; further ones are refused with 429, and clients try again."""
MAX_RESULTS = 8192
"""Results that are kept; the oldest go first."""
POLL_S = 20.0
"""Longest time that a client waits for a result in one request."""

Result: TypeAlias = dict[str, Json] | bytes
"""JSON, or a protocol buffer."""
Job: TypeAlias = Callable[[], Awaitable[Result]]


class ServerBusy(EtudeError):
    """Everything that a server has is in use; ask again later."""


class Gone(EtudeError):
    """There is nothing of that id (any more)."""


class Jobs:
    """Used by one event loop, of which :meth:`run` is a task."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, asyncio.Future[Result]] = OrderedDict()
        self._queue: asyncio.Queue[tuple[asyncio.Future[Result], Job]] = asyncio.Queue(MAX_QUEUED)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Do what is queued, one job after another, until cancelled."""
        while True:
            await _do(*await self._queue.get())

    def submit(self, request_id: str, job: Job) -> None:
        """Queue a job, once for each id: a client that did not hear the answer asks again. Raises
        :class:`ServerBusy`.
        """
        if request_id in self._results:
            return
        if self._queue.full():
            raise ServerBusy(f"{MAX_QUEUED} jobs wait already")
        self._queue.put_nowait((self._new_result(request_id), job))

    def start(self, request_id: str, job: Job) -> None:
        """Begin a job now, once for each id, beside all others."""
        if request_id in self._results:
            return
        task = asyncio.create_task(_do(self._new_result(request_id), job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def result(self, request_id: str) -> Result | None:
        """The result, or ``None`` if it is not there in ``POLL_S``. Raises what the job raised, and :class:`Gone`."""
        result = self._results.get(request_id)
        if result is None:
            raise Gone(f"there is no result of {request_id!r}")
        done, _ = await asyncio.wait({result}, timeout=POLL_S)
        return result.result() if done else None

    def close(self) -> None:
        """Stop what was started."""
        for task in self._tasks:
            task.cancel()

    def _new_result(self, request_id: str) -> "asyncio.Future[Result]":
        while len(self._results) >= MAX_RESULTS:
            self._results.popitem(last=False)
        self._results[request_id] = result = asyncio.get_running_loop().create_future()
        return result


async def _do(result: "asyncio.Future[Result]", job: Job) -> None:
    """Do a job; what it raises is its result, too."""
    try:
        result.set_result(await job())
    except (EtudeError, ValueError, OSError) as error:
        result.set_exception(error)
        result.exception()  # it is no fault if no one comes for it
