"""A process of a simulated run under a supervisor, which starts it again as often as it dies."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TypeAlias, final

from bench.simulation.connections import Life
from etude.errors import FencedError, InfrastructureError

RESTART_S = 0.5
"""Until a process that ended with an error is started again."""
Main: TypeAlias = Callable[[Life], Coroutine[None, None, None]]


@final
class SimulatedProcess:
    """A process that is started again whenever it dies, and the supervisor that does that."""

    def __init__(self, name: str, main: Main) -> None:
        self.name = name
        self.life = Life()
        self.restarts = 0
        self.pause_s = RESTART_S
        """Until it is started again, if it is killed."""
        self.left_open: list[str] = []
        """Sessions that it left open although it ended by itself."""
        self.is_lost = False
        """True once it is gone for good."""
        self.is_silent = False
        """True while its signs of life get lost."""
        self._main = main

    def kill(self, pause_s: float) -> None:
        """``kill -9``."""
        self.pause_s = pause_s
        self.life.dead.set()

    async def supervise(self) -> None:
        """Restart it until it ends by itself. Raises its bugs, and errors of the user."""
        while not await self._live():
            if self.is_lost:
                return
            self.restarts += 1
            await asyncio.sleep(self.pause_s)
            self.pause_s, self.life = RESTART_S, Life()

    async def _live(self) -> bool:
        """Return true once it ended by itself."""
        life = self.life
        working, dying = asyncio.ensure_future(self._main(life)), asyncio.ensure_future(life.dead.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, dying):
                task.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)
        if life.dead.is_set():
            return False
        self.left_open += sorted(life.opened)
        with suppress(InfrastructureError, FencedError):
            working.result()
            return True
        return False
