"""Outages of a run's weight store: waiting and reporting.

This module decides how long a process waits, and reports the outage and heartbeats meanwhile; :mod:`etude.objects`
decides which calls are retried.
"""

import logging
import math
import time
from collections.abc import Callable
from threading import Condition
from typing import final

from etude.closing import Closing
from etude.errors import InfrastructureError, UserError
from etude.run.heartbeat import Heartbeat
from etude.telemetry.events import OUTAGE_TOLD_S, Outage
from etude.telemetry.log import EventLog

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Shortest and longest pause between two attempts. Between these limits a pause is as long as the outage so far, so it
doubles.
"""

logger = logging.getLogger(__name__)


@final
class StoreOutages(Closing):
    """Blocks all threads of a process while a store is unavailable; after closing, no thread waits.

    Each failed attempt counts as a heartbeat (``progress``), since the cause of the wait is known; it is reported once
    a minute.
    """

    def __init__(
        self,
        store: str,
        max_outage_s: float,
        events: EventLog | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """``max_outage_s`` is the longest outage before :meth:`failed` raises; 0 for no limit."""
        self._store = store
        self._max_outage_s = max_outage_s or math.inf
        self._events = events
        self._progress = progress or Heartbeat().beat
        self._changed = Condition()
        self._waiting = 0
        """Number of failed calls being retried."""
        self._since_s = 0.0
        """Time of the first failure."""
        self._told_s = -math.inf
        self._closed = False
        self._write(0.0, "")  # the previous process may have died while waiting

    def failed(self, error: InfrastructureError, *, again: bool) -> None:
        """Wait before the next attempt; ``again`` is true if the same call has failed before.

        Raises ``error`` once this is closed, :class:`~etude.errors.UserError` if the outage has lasted too long.
        """
        with self._changed:
            now_s = time.monotonic()
            self._waiting += not again
            if self._waiting == 1 and not again:
                self._since_s = now_s
                logger.warning("%s is unavailable, waiting for it: %s", self._store, error)
            away_s = now_s - self._since_s
            if not self._closed and away_s < self._max_outage_s:
                self._tell(now_s, away_s, error)
                self._progress()
                pause_s = min(max(away_s, FIRST_PAUSE_S), LONGEST_PAUSE_S, self._max_outage_s - away_s)
                self._changed.wait(pause_s)
                return
            self._waiting -= 1
        if self._closed:
            raise error
        raise UserError(
            f"{self._store} has been unavailable for {away_s:.0f} s (rollouts.max_outage_s = {self._max_outage_s:g}): "
            f"{error}; repair that and resume the run, nothing is lost"
        ) from error

    def succeeded(self) -> None:
        """Record that a retried call succeeded: all waiting calls retry at once."""
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()
            if not self._waiting:
                logger.warning("%s is available again", self._store)
            if not self._waiting and self._told_s > -math.inf:
                self._told_s = -math.inf
                self._write(0.0, "")

    def close(self) -> None:
        """Release waiting calls with their last error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _tell(self, now_s: float, away_s: float, error: InfrastructureError) -> None:
        """Report the outage at intervals; a single failed attempt is not an outage."""
        if away_s > 0 and now_s - self._told_s >= OUTAGE_TOLD_S:
            self._told_s = now_s
            self._write(away_s, str(error))

    def _write(self, away_s: float, reason: str) -> None:
        if self._events is not None:
            self._events.write(Outage(what=self._store, seconds=away_s, reason=reason))
