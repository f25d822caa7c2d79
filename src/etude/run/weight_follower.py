"""The weight follower: updates any kind of engine to the newest version of a log, or to a version that its caller
names, with short pauses.

    log ──fetch, verify──▶ copy on the host ──changes──▶ updater.stage ──▶ swap: the pause

Owns the host copy, the lease on its version, the waiting, and the reaction to a damaged or unavailable log. Each kind
of engine implements its own updater (``engines/kinds.py``).
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import final

from etude.backoff import Backoff
from etude.engines.kinds import Swap, WeightUpdate, WeightUpdater
from etude.engines.scatter import RELOAD_SHARE
from etude.errors import DamagedError, InfrastructureError
from etude.telemetry.events import WeightsSwapped
from etude.telemetry.log import EventLog
from etude.weights.log import WeightLog
from etude.weights.pull import Arrival, ReceiveOptions, Receiver
from etude.weights.replica import PulledWeights

POLL_S = 0.05
"""Seconds between two reads of the next version's commit record."""
LOOK_S = 1.0
"""Pause between two polls for packs of an uncommitted version and for versions after a gap."""
BACKOFF = Backoff(first_s=LOOK_S, longest_s=10.0)
"""Backoff between two attempts to follow a log after a failure."""
RETRY_TIMEOUT_S = 3600.0
"""Time limit of these attempts: a full-snapshot request is answered with the next version, and steps of a large model
take minutes.
"""
LEASE_S = 30.0
"""Seconds between two renewals of the lease on the served version, so that nothing the engine needs is deleted."""

logger = logging.getLogger(__name__)


@final
class WeightFollower:
    """Updates one engine to the newest version of a log, or to the version of ``target``; one call at a time."""

    def __init__(
        self, log: WeightLog, options: ReceiveOptions, target: Callable[[], int | None] = lambda: None
    ) -> None:
        """``target`` returns the version to serve now, which may be an older one; ``None`` for the newest."""
        self._log = log
        self._target = target
        self._receiver = Receiver(log, options)
        self._lease = log.lease(f"engine-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._leased_s: float | None = None

    def start(self) -> PulledWeights:
        """Fetch the initial version of an engine. Blocks while the store is unavailable."""
        self._receiver.advance(self._target())
        pulled = self._receiver.weights()
        self._renew_lease(pulled.version)
        return pulled

    async def follow(self, updater: WeightUpdater, events: EventLog) -> None:
        """Swap in every new version, forever.

        consumes: commit records; produces: swaps; waits for: the version after the one served; woken by: its own
        polling; on shutdown: cancelled between two polls.
        """
        while True:
            stage_s, pause_s = await self.update(updater)
            events.write(WeightsSwapped(version=updater.version, stage_ms=1e3 * stage_s, pause_ms=1e3 * pause_s))
            await asyncio.to_thread(updater.settle)

    async def update(self, updater: WeightUpdater) -> tuple[float, float]:
        """Update an engine to the newest or the target version, once that differs from the served one.

        Returns the seconds of fetching and staging, and the seconds for which the engine paused. While there is no
        undamaged path to the version, or the store is unavailable, the engine serves its current version: the receiver
        has left a full-snapshot request for the publisher. Admission uses the served version, so the staleness bound
        holds and the run slows down automatically. Raises :class:`~etude.errors.DamagedError` after
        ``RETRY_TIMEOUT_S``, and the errors of a swap.
        """
        arrival = await self._next_arrival(updater.version)
        started_s = time.perf_counter()
        swap = await asyncio.to_thread(self._stage, updater, arrival)
        stage_s = arrival.seconds + time.perf_counter() - started_s
        return stage_s, await swap()

    def close(self) -> None:
        """Release the lease and the log."""
        with suppress(InfrastructureError):  # a lease that is not renewed expires
            self._lease.release()
        self._receiver.close()

    def _stage(self, updater: WeightUpdater, arrival: Arrival) -> Swap:
        self._renew_lease(arrival.version)
        is_dense = self._receiver.changed_share(arrival) * RELOAD_SHARE > 1
        changed = None if is_dense else self._receiver.changed(arrival)
        return updater.stage(WeightUpdate(weights=self._receiver.weights(), changed=changed))

    async def _next_arrival(self, served: int) -> Arrival:
        """Wait for a version after ``served`` and update the host copy to the newest version."""
        since_s, delays_s = None, BACKOFF.delays()
        while True:
            try:
                if (target := self._target()) is not None and await self._is_named(target, served):
                    return await asyncio.to_thread(self._receiver.advance, target)
                if target is None and await self._is_behind(served):
                    return await asyncio.to_thread(self._receiver.advance)
                since_s, delays_s = None, BACKOFF.delays()
            except DamagedError as error:
                now_s = time.monotonic()
                if since_s is None:
                    since_s = now_s
                    logger.warning("weight version %d remains served until a newer one is available: %s", served, error)
                elif now_s - since_s > RETRY_TIMEOUT_S:
                    raise
                await asyncio.sleep(next(delays_s))

    async def _is_named(self, target: int, served: int) -> bool:
        """Report whether ``target`` differs from the served version; if not, pause and renew the lease on the served
        one.
        """
        if target != served:
            return True
        with suppress(InfrastructureError):
            await asyncio.to_thread(self._renew_lease, served)
        await asyncio.sleep(POLL_S)
        return False

    async def _is_behind(self, served: int) -> bool:
        """Report whether there is a version after ``served``, after waiting for it for a bounded time."""
        looked_s = time.monotonic()
        while time.monotonic() - looked_s < LOOK_S:
            if await asyncio.to_thread(self._is_committed, served + 1):
                return True
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(self._receiver.prefetch)
        return await asyncio.to_thread(self._log.latest, after=served) != served

    def _is_committed(self, version: int) -> bool:
        """Report whether a version is committed, even with a damaged record: there may be a path to a later version."""
        try:
            return self._log.read(version) is not None
        except DamagedError:
            return True

    def _renew_lease(self, version: int) -> None:
        now_s = time.monotonic()
        if self._leased_s is None or now_s - self._leased_s > LEASE_S:
            self._lease.renew(version)
            self._leased_s = now_s
