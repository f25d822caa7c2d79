"""Heartbeats: a process of a run reports progress, and its supervisor notices when that stops.

    main loop ──beat──▶ time of a file ──look──▶ silence ──too long──▶ killed, restarted

This module sends the beats. A beat comes from the loop that does the work, never from a separate thread, which would
continue while the loop is stuck; during a wait for a store, each attempt to reach it is a beat.
:mod:`etude.fleet.restarts` handles a silent process.
"""

import asyncio
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import final

HEARTBEAT_VARIABLE = "ETUDE_HEARTBEAT"
"""Environment variable with the file whose modification time is the last beat; ranks of one process share it."""
BEAT_S = 1.0
"""Shortest interval between two touches of the file."""


@final
class Heartbeat:
    """Sends the heartbeats of this process; without a supervisor they are not read."""

    def __init__(self) -> None:
        file = os.environ.get(HEARTBEAT_VARIABLE)
        self._file = None if file is None else Path(file)
        self._beaten_s = -math.inf

    def beat(self) -> None:
        """Report progress; cheap enough for every iteration of a loop."""
        now_s = time.monotonic()
        if self._file is not None and now_s - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            with suppress(OSError):  # a failing disk is reported by the code that writes to it
                os.utime(self._file)

    async def keep(self) -> None:
        """Beat as long as the event loop runs, forever."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)
