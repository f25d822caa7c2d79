"""Sessions in several regions: each is opened where the table of regions says, and ended where it was opened.

    open(min_version) ──▶ Regions.choose ──▶ the region's own sessions        none may have it yet: wait for a change

- consumes: reports of regions (:meth:`RegionalSessions.report`, :meth:`RegionalSessions.lose`)
- produces: sessions, each of one region; events that say how regions are used
- waits for: a region that may have the session, as long as the caller waits
- woken by: a report that changes something, a session that ends, a region that is lost; every ``LOOK_S`` while one has
  no place or its region is away, as waits end by time alone
- on shutdown: nothing is left to do; sessions are their openers'

The decision is :mod:`etude.fleet.regions`'s. A region that cannot be reached is left out, and the session opened
elsewhere; it is back with its next report. A session there soon begins again elsewhere, as long as there are places
that nobody needs: steps wait for it. Where there are none, to begin again takes a place from others, and it is waited
for as long as it had been open: then waiting has cost what beginning again would have (ski rental: at most twice the
cost of who knew the outage's end).
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
"""Between two events that say how regions are used."""
LOOK_S = 0.5
"""Longest pause before a session that no region may have is asked for again."""
LEAST_WAIT_S = 3.0
"""Shortest outage of a region for which a session is given up."""


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
        """``events`` is where the use of regions is written down, for people."""
        self._regions = regions
        self._openers = dict(openers)
        self._clock = clock
        self._region_of: dict[str, str] = {}  # session → region, of those that are open
        self._opened_s: dict[str, float] = {}
        self._lost_s: dict[str, float] = {}  # region → since when it is out of reach
        self._moving = 0  # sessions that were given up and have not been opened elsewhere yet
        self._events = events
        self._written_s = clock.now()
        self._written: dict[str, tuple[int, int]] = {}  # region → sessions and bytes, as of its last event
        self._shared: dict[str, int] = {}  # session → turns that are its parent's, of those that forked
        self._payload_bytes: Counter[str] = Counter()
        self._versions: dict[str, RegionReport] = {}
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def heard(self) -> int:
        """The weight version at which rollouts may be admitted."""
        return self._regions.heard

    async def version_changed(self, version: int) -> None:
        """Wait until rollouts may be admitted at another version than ``version``."""
        while self.heard == version:
            await self._changed.wait()

    def report(self, region: str, report: RegionReport) -> None:
        """A region said how it is."""
        now = self._clock.now()
        self._lost_s.pop(region, None)
        self._regions.report(region, report, now)
        if now - self._written_s >= WRITE_S:
            self.write_events()
        if self._versions.get(region) != report:
            self._versions[region] = report
            self._wake()

    def lose(self, region: str) -> None:
        """A region could not be reached."""
        self._regions.lose(region)
        if region not in self._lost_s:
            self._lost_s[region] = self._clock.now()
            self._lost.set()
            self._lost = asyncio.Event()
        if self._versions.pop(region, None) is not None:
            self._wake()

    def write_events(self) -> None:
        """Write down how each region was used since the last time."""
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
        """Start a session in a region that serves ``min_version``; waits until one may have it."""
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
        """Start a session that begins as another one, in its region. Raises as the region's sessions do."""
        region = self._require(session_id)
        session, turns = await self._openers[region].fork(session_id)
        self._regions.add(region)
        self._region_of[session.session_id] = region
        self._opened_s[session.session_id] = self._opened_s[session_id]
        self._shared[session.session_id] = turns
        return session, turns

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and hand over its turns. Raises as the region's sessions do; its place is free either way."""
        region, shared = self._require(session_id), self._shared.get(session_id, 0)
        try:
            turns = await self._openers[region].close(session_id)
        finally:
            self._ended(session_id)
        self._payload_bytes[region] += sum(turn.payload.size_bytes for turn in turns[shared:] if turn.payload)
        return turns

    async def discard(self, session_id: str) -> None:
        """End a session without its turns; one of a region out of reach expires there by itself, and nobody waits for
        that. Raises like :meth:`close`.
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
        """Raise :class:`~etude.errors.SessionLost` once its region has been away for so long that it is better begun
        again elsewhere.
        """
        region, opened_s = self._require(session_id), self._opened_s[session_id]
        while True:
            while region not in self._lost_s:
                await self._lost.wait()
            now_s, lost_s = self._clock.now(), self._lost_s[region]
            away_s, is_old = now_s - lost_s, now_s - lost_s <= lost_s - opened_s
            if away_s > LEAST_WAIT_S and not (is_old and self._regions.free_places(now_s) <= self._moving):
                self._moving += 1
                raise SessionLost(f"region {region} has been out of reach for {away_s:.0f} s: begun again elsewhere")
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
        """Let all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
