"""The weight follower: keeps any kind of engine on the newest version of a log, or on one that is named to it, with
short pauses.

    log ──fetch, verify──▶ copy on the host ──what changed──▶ updater.stage ──▶ swap: the pause

Owns the copy, the lease on it, the waiting, and what is done about a log that cannot be followed. How an engine takes
an update is its kind's business (``engines/kinds.py``).
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
"""Seconds between two looks for packs of a version that is not committed yet, and for versions behind a gap."""
BACKOFF = Backoff(first_s=LOOK_S, longest_s=10.0)
"""Between two tries to follow a log that cannot be followed."""
RETRY_TIMEOUT_S = 3600.0
"""Bound of these tries: a full-snapshot request is answered with the next version, and the steps of a large model take
minutes.
"""
LEASE_S = 30.0
"""Seconds between two renewals of the lease on the served version, so that nothing the engine needs is collected."""

logger = logging.getLogger(__name__)


@final
class WeightFollower:
    """Updates one engine to the newest version of a log, or to the one that ``target`` names; one call at a time."""

    def __init__(
        self, log: WeightLog, options: ReceiveOptions, target: Callable[[], int | None] = lambda: None
    ) -> None:
        """``target`` gives the version to serve now, older ones too; ``None`` for the newest there is."""
        self._log = log
        self._target = target
        self._receiver = Receiver(log, options)
        self._lease = log.lease(f"engine-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._leased_s: float | None = None

    def start(self) -> PulledWeights:
        """Fetch the version to open an engine with. May block for as long as the store is away."""
        self._receiver.advance(self._target())
        pulled = self._receiver.weights()
        self._renew_lease(pulled.version)
        return pulled

    async def follow(self, updater: WeightUpdater, events: EventLog) -> None:
        """Swap every new version in, for ever.

        consumes: commit records; produces: swaps; waits for: the version after the one served; woken by: its own
        polling; on shutdown: cancelled between two polls.
        """
        while True:
            stage_s, pause_s = await self.update(updater)
            events.write(WeightsSwapped(version=updater.version, stage_ms=1e3 * stage_s, pause_ms=1e3 * pause_s))
            await asyncio.to_thread(updater.settle)

    async def update(self, updater: WeightUpdater) -> tuple[float, float]:
        """Move an engine to the newest version, or the one that is named, once that is another than what it serves.

        Returns the seconds in which that was fetched and staged, and those for which the engine paused. While no sound
        way leads on, as while the store is away and waited for, the engine serves what it has: the receiver has left a
        full-snapshot request for the publisher. Admission counts the version that is served, so the bound of staleness
        holds and the run slows down by itself. Raises the damage after ``RETRY_TIMEOUT_S``, and what a swap raises.
        """
        arrival = await self._next_arrival(updater.version)
        started_s = time.perf_counter()
        swap = await asyncio.to_thread(self._stage, updater, arrival)
        stage_s = arrival.seconds + time.perf_counter() - started_s
        return stage_s, await swap()

    def close(self) -> None:
        """Let go of the log."""
        with suppress(InfrastructureError):  # a lease that is not renewed ends by itself
            self._lease.release()
        self._receiver.close()

    def _stage(self, updater: WeightUpdater, arrival: Arrival) -> Swap:
        self._renew_lease(arrival.version)
        is_dense = self._receiver.changed_share(arrival) * RELOAD_SHARE > 1
        changed = None if is_dense else self._receiver.changed(arrival)
        return updater.stage(WeightUpdate(weights=self._receiver.weights(), changed=changed))

    async def _next_arrival(self, served: int) -> Arrival:
        """Wait for a version after ``served`` and bring the copy on the host to the newest there is."""
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
                    logger.warning("weight version %d is served on until a newer one can be had: %s", served, error)
                elif now_s - since_s > RETRY_TIMEOUT_S:
                    raise
                await asyncio.sleep(next(delays_s))

    async def _is_named(self, target: int, served: int) -> bool:
        """Report whether another version is named than the one served; else pause, and keep what is served leased."""
        if target != served:
            return True
        with suppress(InfrastructureError):
            await asyncio.to_thread(self._renew_lease, served)
        await asyncio.sleep(POLL_S)
        return False

    async def _is_behind(self, served: int) -> bool:
        """Report whether there is a version after ``served``, after waiting for it as long as that alone pays."""
        looked_s = time.monotonic()
        while time.monotonic() - looked_s < LOOK_S:
            if await asyncio.to_thread(self._is_committed, served + 1):
                return True
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(self._receiver.prefetch)
        return await asyncio.to_thread(self._log.latest, after=served) != served

    def _is_committed(self, version: int) -> bool:
        """Report whether a version is there, be its record damaged: then there may be a way to a later one."""
        try:
            return self._log.read(version) is not None
        except DamagedError:
            return True

    def _renew_lease(self, version: int) -> None:
        now_s = time.monotonic()
        if self._leased_s is None or now_s - self._leased_s > LEASE_S:
            self._lease.renew(version)
            self._leased_s = now_s
