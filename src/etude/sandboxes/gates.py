"""A gate that many pass together, or one alone, until it is shut.

Owns who waits for whom. Whoever wants to be alone keeps newcomers out, so that the crowd has an end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from etude.errors import SandboxError


class Gate:
    """Lets callers into one sandbox; those who wait when it is shut get an error. Waits end with what they wait for."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """``check`` raises :class:`~etude.errors.SandboxError` once what is inside is not to be believed, maybe
        before the gate is shut: asked of those who come, and of those who leave.
        """
        self._ask = check
        self._change = asyncio.Condition()
        self._inside = 0
        self._taken = False
        self._shut = False

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Inside along with others. Raises :class:`~etude.errors.SandboxError` once the gate is shut."""
        async with self._change:
            await self._change.wait_for(lambda: self._shut or not self._taken)
            self._check()
            self._inside += 1
        try:
            yield
        except Exception:
            self._ask()
            raise
        else:
            self._ask()
        finally:
            self._inside -= 1
            await asyncio.shield(self._tell())

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Inside with nobody else. Raises :class:`~etude.errors.SandboxError` once the gate is shut."""
        async with self._change:
            await self._change.wait_for(lambda: self._shut or not self._taken)
            self._check()
            self._taken = True
        try:
            async with self._change:
                await self._change.wait_for(lambda: self._shut or not self._inside)
                self._check()
            yield
        finally:
            self._taken = False
            await asyncio.shield(self._tell())

    async def shut(self) -> None:
        """Let nobody in any more; who is inside may finish."""
        self._shut = True
        await self._tell()

    async def _tell(self) -> None:
        async with self._change:
            self._change.notify_all()

    def _check(self) -> None:
        self._ask()
        if self._shut:
            raise SandboxError("the sandbox is closed")
