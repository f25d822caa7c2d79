"""Waiting for what must come, however much the machine has to do."""

import asyncio
import time
from collections.abc import Callable

WAIT_S = 30.0
"""Far beyond what anything waited for here takes; only what never comes meets it."""


async def until(met: Callable[[], bool], *, every_s: float = 0.005) -> None:
    """Wait for something that another task, thread or process does.

    Raises:
        TimeoutError: when it does not come.
    """
    async with asyncio.timeout(WAIT_S):
        while not met():
            await asyncio.sleep(every_s)


def wait_until(
    met: Callable[[], bool], *, fault: Callable[[], str] = str, every_s: float = 0.005, timeout_s: float = WAIT_S
) -> None:
    """The same without an event loop; ``fault`` describes the state after a timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < deadline_s, fault()
        time.sleep(every_s)
