"""Outages of a run's weight store: waiting and reporting.

Owns how long a process waits, what it says meanwhile and that it stays alive; which calls are tried again is
:mod:`etude.objects`'s.
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
"""Between two tries. In between a pause is as long as the outage so far: it doubles."""

logger = logging.getLogger(__name__)


@final
class StoreOutages(Closing):
    """Blocks all threads of a process while one store is away; once closed, none waits any more.

    Each try that fails is a sign of life (``progress``): what is waited for is known, and told to people once a minute.
    """

    def __init__(
        self,
        store: str,
        max_outage_s: float,
        events: EventLog | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """``max_outage_s`` is for how long the store may be away before :meth:`failed` raises; 0 for no end."""
        self._store = store
        self._max_outage_s = max_outage_s or math.inf
        self._events = events
        self._progress = progress or Heartbeat().beat
        self._changed = Condition()
        self._waiting = 0
        """Calls that have failed and are tried again."""
        self._since_s = 0.0
        """When the first of them failed."""
        self._told_s = -math.inf
        self._closed = False
        self._write(0.0, "")  # the process before this one may have died waiting

    def failed(self, error: InfrastructureError, *, again: bool) -> None:
        """Wait before the next try.

        Raises ``error`` once this is closed, :class:`~etude.errors.UserError` when the outage has taken too long.
        """
        with self._changed:
            now_s = time.monotonic()
            self._waiting += not again
            if self._waiting == 1 and not again:
                self._since_s = now_s
                logger.warning("%s is away and waited for: %s", self._store, error)
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
            f"{self._store} has been away for {away_s:.0f} s (rollouts.max_outage_s = {self._max_outage_s:g}): "
            f"{error}; repair that and resume the run, nothing is lost"
        ) from error

    def succeeded(self) -> None:
        """Take note that a call which had failed was answered: the others that wait try again at once."""
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()
            if not self._waiting:
                logger.warning("%s is back", self._store)
            if not self._waiting and self._told_s > -math.inf:
                self._told_s = -math.inf
                self._write(0.0, "")

    def close(self) -> None:
        """Let those who wait go, with what they met last."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _tell(self, now_s: float, away_s: float, error: InfrastructureError) -> None:
        """Say, now and then, that it is away; one failed try is no outage."""
        if away_s > 0 and now_s - self._told_s >= OUTAGE_TOLD_S:
            self._told_s = now_s
            self._write(away_s, str(error))

    def _write(self, away_s: float, reason: str) -> None:
        if self._events is not None:
            self._events.write(Outage(what=self._store, seconds=away_s, reason=reason))
