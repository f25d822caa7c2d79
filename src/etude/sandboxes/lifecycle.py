"""The lifecycle of sandboxes: make all or none, close all, lock the calls of one.

Owns no sandbox, but ensures that none is left without an owner.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from etude.errors import SandboxError


class Closable(Protocol):
    """A sandbox, or a part of its provider."""

    async def close(self) -> None:
        """End it, and wait until it has ended."""
        ...


C = TypeVar("C", bound=Closable)


async def all_or_none(makers: Iterable[Awaitable[C]]) -> list[C]:
    """Make several sandboxes concurrently; if one fails, or the caller is cancelled, close those that were made."""
    tasks = [asyncio.ensure_future(maker) for maker in makers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        await close_all(one for one in made if not isinstance(one, BaseException))
        raise


async def close_all(closables: Iterable[Closable]) -> list[BaseException]:
    """Close all concurrently, and return their errors, to be raised when everything is closed."""
    ended = await asyncio.gather(*(one.close() for one in list(closables)), return_exceptions=True)
    return [error for error in ended if error is not None]


class SharedLock:
    """A readers-writer lock of one sandbox that can be closed permanently; waiting callers then get an error.

    A caller that waits for exclusive use blocks new callers, so that it is not starved.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called on entry and exit. It raises :class:`~etude.errors.SandboxError` once results of the
        sandbox are no longer trustworthy, possibly before the lock is closed.
        """
        self._check_sandbox = check
        self._change = asyncio.Condition()
        self._shared = 0
        self._is_exclusive = False
        self._is_closed = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Use the sandbox along with others. Raises :class:`~etude.errors.SandboxError` once the lock is closed."""
        async with self._change:
            await self._change.wait_for(lambda: self._is_closed or not self._is_exclusive)
            self._check()
            self._shared += 1
        try:
            yield
        except Exception:
            self._check_sandbox()
            raise
        else:
            self._check_sandbox()
        finally:
            self._shared -= 1
            await asyncio.shield(self._notify())

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Use the sandbox alone. Raises :class:`~etude.errors.SandboxError` once the lock is closed."""
        async with self._change:
            await self._change.wait_for(lambda: self._is_closed or not self._is_exclusive)
            self._check()
            self._is_exclusive = True
        try:
            async with self._change:
                await self._change.wait_for(lambda: self._is_closed or not self._shared)
                self._check()
            yield
        finally:
            self._is_exclusive = False
            await asyncio.shield(self._notify())

    async def close(self) -> None:
        """Admit no more callers; those inside may finish."""
        self._is_closed = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._change:
            self._change.notify_all()

    def _check(self) -> None:
        self._check_sandbox()
        if self._is_closed:
            raise SandboxError("the sandbox is closed")
