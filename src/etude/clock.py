"""Time as an argument: the only module that reads the system's clocks.

Pure cores receive ``now``; shells receive a :class:`~etude.protocols.Clock`. All values are seconds. ``now()`` is the
machine's monotonic clock and is comparable between processes of one machine (Linux ``CLOCK_MONOTONIC``).
"""

import asyncio
import time
from datetime import UTC, datetime


class SystemClock:
    """The machine's own clock."""

    now = staticmethod(time.monotonic)
    """Monotonic seconds, comparable between processes of this machine, not across reboots."""

    async def sleep(self, seconds: float) -> None:
        """Give way to other tasks for ``seconds``."""
        await asyncio.sleep(seconds)


class VirtualClock:
    """A clock that moves only when it is set, for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds``, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds!r})")
        self._now_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Advance at once and let other tasks run."""
        self.advance(seconds)
        await asyncio.sleep(0)


def unix_s() -> float:
    """The time of day in seconds since 1970, for records; it may jump, so never measure durations with it."""
    return time.time()


def date_utc(at: float | None = None) -> str:
    """The date and time in UTC, to the second, as ISO 8601 (for records that people read): now, or at some seconds
    since 1970.
    """
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return moment.isoformat(timespec="seconds")
