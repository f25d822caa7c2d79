"""Work that goes on together and ends together."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


async def together(works: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """All of their results; when one fails, the others are cancelled and waited for, and its error is raised.

    ``asyncio.gather`` leaves them running, with things that whoever started them goes on to close.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def alongside(work: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Let something go on while the context is open; it has ended when the context is left.

    What it returns or raises is had by waiting for the task, inside. A task group would wrap what is raised there.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
