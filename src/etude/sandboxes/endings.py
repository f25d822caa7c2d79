"""How several sandboxes end together: each of them, whatever becomes of the others.

Owns no sandbox, but sees to it that none is left that nobody holds.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Protocol, TypeVar


class Ending(Protocol):
    """A sandbox, or a part of its provider."""

    async def close(self) -> None:
        """End it, and wait for that."""
        ...


E = TypeVar("E", bound=Ending)


async def all_or_none(making: Iterable[Awaitable[E]]) -> list[E]:
    """Make all at once; where one fails, or whoever waits is cancelled, give the others up and close what was made."""
    tasks = [asyncio.ensure_future(one) for one in making]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        await close_all(one for one in made if not isinstance(one, BaseException))
        raise


async def close_all(endings: Iterable[Ending]) -> list[BaseException]:
    """Close all at once, and return what went wrong: to be raised when there is nothing more to end."""
    ended = await asyncio.gather(*(one.close() for one in list(endings)), return_exceptions=True)
    return [error for error in ended if error is not None]
