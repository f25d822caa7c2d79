"""Heartbeats: a process of a run reports progress, and its supervisor notices when that stops.

    main loop ──beat──▶ time of a file ──look──▶ silence ──too long──▶ killed, started again

Owns the first end. A beat comes from the loop that does the work, never from a thread of its own, which would live on
while that is stuck; while a store is waited for, from each try to reach it. What becomes of a silent process is
:mod:`etude.fleet.restarts`'s.
"""

import asyncio
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import final

HEARTBEAT_VARIABLE = "ETUDE_HEARTBEAT"
"""Environment variable that names the file whose time tells of the last beat; ranks of one process share it."""
BEAT_S = 1.0
"""A file is touched at most so often."""


@final
class Heartbeat:
    """Sends the heartbeats of this process; without a supervisor nobody reads them."""

    def __init__(self) -> None:
        file = os.environ.get(HEARTBEAT_VARIABLE)
        self._file = None if file is None else Path(file)
        self._beaten_s = -math.inf

    def beat(self) -> None:
        """Say that something was done; cheap enough for every turn of a loop."""
        now_s = time.monotonic()
        if self._file is not None and now_s - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            with suppress(OSError):  # a disk in trouble is reported by what writes to it
                os.utime(self._file)

    async def keep(self) -> None:
        """Beat for as long as the event loop turns, for ever."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)
