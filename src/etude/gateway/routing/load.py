"""How many calls are in flight, and the end of a gateway: no new ones, then none.

Owns the count and the wait for it to reach zero.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final


@final
class Load:
    """The model calls of one gateway that are in progress."""

    def __init__(self) -> None:
        self.inflight = 0
        self.draining = False
        """Whether new calls are turned away."""
        self._idle = asyncio.Event()

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call, from its first check to its last byte."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1
            if self.draining and not self.inflight:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Turn new calls away and wait until none is left, at most ``seconds``."""
        self.draining = True
        if not self.inflight:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
