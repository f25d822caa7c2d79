"""Structured asyncio: groups of coroutines, background tasks, tasks that are restarted."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NoReturn, TypeAlias, TypeVar

from etude.errors import EtudeError, InfrastructureError, trace_of

T = TypeVar("T")
Work: TypeAlias = Callable[[], Coroutine[None, None, None]]
"""Starts a background task."""

MAX_FAILURES, FAILURES_WINDOW_S = 5, 120.0
"""More failures of one background task than this within this time are not bad luck."""
RESTART_S = 1.0
"""Pause before a background task is started again."""

logger = logging.getLogger(__name__)


async def gather_or_cancel(works: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Gather the results of coroutines; when one fails, cancel the others, wait for them, raise its error.

    ``asyncio.gather`` leaves them running, with resources that the caller goes on to close.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def background_task(work: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run a background task while the context is open; cancel it and wait for it when the context is left.

    What it returns or raises is had by waiting for the task, inside. A task group would wrap what is raised there.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def never() -> NoReturn:
    """Wait until cancelled."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the future has no waiter")


async def supervised(name: str, work: Work, *, pause_s: float = RESTART_S) -> None:
    """Run a background task that has no end; one that fails unexpectedly is reported and started again.

    Raises :class:`~etude.errors.InfrastructureError` naming it when that does not help, and at once what it raises on
    purpose.
    """
    loop, failed = asyncio.get_running_loop(), list[float]()
    while True:
        try:
            return await work()
        except EtudeError:
            raise
        except Exception as error:
            now_s = loop.time()
            failed = [*(at for at in failed if now_s - at < FAILURES_WINDOW_S), now_s]
            logger.error("background task %r failed: %s", name, trace_of(error))
            if len(failed) > MAX_FAILURES:
                raise InfrastructureError(
                    f"background task {name!r} failed {len(failed)} times in {FAILURES_WINDOW_S:g} s, last with "
                    f"{type(error).__name__}"
                ) from error
        await asyncio.sleep(pause_s)


def without_event_loop(call: Callable[[], T]) -> T:
    """Call here, or in a thread where this one runs an event loop, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
