"""Sessions in several regions: the table of regions selects the region of each session for its whole life.

    open(min_version) ──▶ Regions.choose ──▶ the region's own sessions        no region is eligible: wait for a change

- consumes: reports of regions (:meth:`RegionalSessions.report`, :meth:`RegionalSessions.lose`)
- produces: sessions, each of one region; events that say how regions are used
- waits for: a region that may have the session, as long as the caller waits
- woken by: a report that changes something, a session that ends, a region that is lost; every ``LOOK_S`` while one has
  no place or its region is unavailable, as waits also end by time
- on shutdown: nothing to do; sessions belong to their openers

:mod:`etude.fleet.regions` decides. An unreachable region is excluded until its next report, and sessions are opened
elsewhere. An existing session there is soon restarted elsewhere if there is spare capacity, since steps wait for it.
Without spare capacity, a restart takes a place from others, so the wait lasts as long as the session had been open:
then waiting has cost as much as a restart (ski rental: at most twice the cost with knowledge of the outage's end).
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn, final

from etude.errors import EngineUnavailable, SessionLost
from etude.fleet.regions import RegionReport, Regions
from etude.protocols import Clock, Session
from etude.rollouts.worker import SessionOpener
from etude.telemetry.events import RegionServed
from etude.telemetry.log import EventLog
from etude.types import Turn

WRITE_S = 10.0
"""Interval of events about the use of regions."""
LOOK_S = 0.5
"""Longest pause before the next attempt to open a session without an eligible region."""
LEAST_WAIT_S = 3.0
"""Shortest outage of a region after which a session is given up."""


@final
class RegionalSessions:
    """Opens sessions of ``openers``, by region, as ``regions`` decides; implements :class:`SessionOpener`."""

    def __init__(
        self,
        regions: Regions,
        openers: Mapping[str, SessionOpener],
        clock: Clock,
        events: EventLog | None = None,
    ) -> None:
        """``events`` records the use of regions, for display."""
        self._regions = regions
        self._openers = dict(openers)
        self._clock = clock
        self._region_of: dict[str, str] = {}  # session → region, of those that are open
        self._opened_s: dict[str, float] = {}
        self._lost_s: dict[str, float] = {}  # region → time since which it is unreachable
        self._moving = 0  # sessions given up and not reopened elsewhere yet
        self._events = events
        self._written_s = clock.now()
        self._written: dict[str, tuple[int, int]] = {}  # region → sessions and bytes, as of its last event
        self._shared: dict[str, int] = {}  # forked session → number of its parent's turns
        self._payload_bytes: Counter[str] = Counter()
        self._versions: dict[str, RegionReport] = {}
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def admitted_version(self) -> int:
        """The weight version at which rollouts may be admitted."""
        return self._regions.admitted_version

    async def version_changed(self, version: int) -> None:
        """Wait until rollouts may be admitted at a version other than ``version``."""
        while self.admitted_version == version:
            await self._changed.wait()

    def report(self, region: str, report: RegionReport) -> None:
        """Process the report of a region."""
        now = self._clock.now()
        self._lost_s.pop(region, None)
        self._regions.report(region, report, now)
        if now - self._written_s >= WRITE_S:
            self.write_events()
        if self._versions.get(region) != report:
            self._versions[region] = report
            self._wake()

    def lose(self, region: str) -> None:
        """Record that a region could not be reached."""
        self._regions.lose(region)
        if region not in self._lost_s:
            self._lost_s[region] = self._clock.now()
            self._lost.set()
            self._lost = asyncio.Event()
        if self._versions.pop(region, None) is not None:
            self._wake()

    def write_events(self) -> None:
        """Write events about the use of each region since the last call."""
        if self._events is None:
            return
        self._written_s = self._clock.now()
        for view in self._regions.views(self._written_s):
            size_bytes = self._payload_bytes[view.name]
            given, written_bytes = self._written.get(view.name, (0, 0))
            self._written[view.name] = view.given, size_bytes
            self._events.write(
                RegionServed(
                    region=view.name,
                    version=view.version,
                    open=view.open,
                    sessions=view.given - given,
                    payload_bytes=size_bytes - written_bytes,
                    is_away=view.is_away,
                )
            )

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session in a region that serves ``min_version``; waits until one is eligible."""
        while True:
            region = await self._choose(-1 if min_version is None else min_version)
            try:
                session = await self._openers[region].open(min_version=min_version)
            except EngineUnavailable:
                self._regions.ended(region)
                self.lose(region)
            except BaseException:
                self._regions.ended(region)
                raise
            else:
                self._moving = max(0, self._moving - 1)
                self._region_of[session.session_id] = region
                self._opened_s[session.session_id] = self._clock.now()
                return session

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Start a copy of a session in its region. Raises as the region's sessions do."""
        region = self._require(session_id)
        session, turns = await self._openers[region].fork(session_id)
        self._regions.add(region)
        self._region_of[session.session_id] = region
        self._opened_s[session.session_id] = self._opened_s[session_id]
        self._shared[session.session_id] = turns
        return session, turns

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and return its turns. Raises as the region's sessions do; its place is released in any case."""
        region, shared = self._require(session_id), self._shared.get(session_id, 0)
        try:
            turns = await self._openers[region].close(session_id)
        finally:
            self._ended(session_id)
        self._payload_bytes[region] += sum(turn.payload.size_bytes for turn in turns[shared:] if turn.payload)
        return turns

    async def discard(self, session_id: str) -> None:
        """End a session without its turns; in an unreachable region it expires by itself, without waiting. Raises like
        :meth:`close`.
        """
        region = self._require(session_id)
        timeout_s = 0.0 if region in self._lost_s else None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._openers[region].discard(session_id)
        finally:
            self._ended(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        """Raise :class:`~etude.errors.SessionLost` once its region has been unavailable for so long that a restart
        elsewhere is better.
        """
        region, opened_s = self._require(session_id), self._opened_s[session_id]
        while True:
            while region not in self._lost_s:
                await self._lost.wait()
            now_s, lost_s = self._clock.now(), self._lost_s[region]
            away_s, is_old = now_s - lost_s, now_s - lost_s <= lost_s - opened_s
            if away_s > LEAST_WAIT_S and not (is_old and self._regions.free_places(now_s) <= self._moving):
                self._moving += 1
                raise SessionLost(f"region {region} has been unreachable for {away_s:.0f} s: restarted elsewhere")
            await asyncio.sleep(LOOK_S)

    async def _choose(self, version: int) -> str:
        while (region := self._regions.choose(version, self._clock.now())) is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
        return region

    def _require(self, session_id: str) -> str:
        region = self._region_of.get(session_id)
        if region is None:
            raise SessionLost(f"no session {session_id!r} is open in any region")
        return region

    def _ended(self, session_id: str) -> None:
        self._shared.pop(session_id, None)
        self._opened_s.pop(session_id, None)
        self._regions.ended(self._region_of.pop(session_id))
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting calls."""
        self._changed.set()
        self._changed = asyncio.Event()
