"""The regions of a run as seen by its rollouts: their gateways, served versions and capacity.

    directories of the regions ──gateways──▶ polls ──versions, slots───▶ table of regions ──▶ sessions, admission

- consumes: the directory of each region every ``DIRECTORY_S``, ``/healthz`` of each gateway every ``POLL_S``
- produces: reports to :class:`~etude.rollouts.regional_sessions.RegionalSessions`
- waits for: nothing; a region that does not answer is unavailable until it answers again
- on shutdown: cancelled

:mod:`etude.fleet.regions` decides by these reports.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import final

import aiohttp

from etude.aio import background_task
from etude.clock import SystemClock
from etude.config.recipe import RunConfig
from etude.errors import EngineUnavailable, InfrastructureError
from etude.fleet.regions import RegionReport, Regions
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.regional_sessions import RegionalSessions
from etude.rollouts.sessions import GatewaySessions
from etude.run.directory import Directory
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.placement import fleet_of
from etude.run.process_name import GATEWAY
from etude.run.region_stores import open_directory
from etude.telemetry.log import EventLog

POLL_S = 0.1
"""Interval at which a region's served weight version is polled."""
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
"""Timeout of one such request: a few intercontinental round trips."""
DIRECTORY_S = 1.0
"""Interval at which a region's directory is read."""
SESSION_S = 10.0
"""Longest time for opening or closing a session in a region: a region that was cut off must not delay rollouts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRegion:
    """One region and its gateways."""

    name: str
    directory: Directory
    gateways: GatewayTable


@final
class ServedRegions:
    """Polls all regions, forever; calling it returns the version at which rollouts may be admitted, −1 before any."""

    def __init__(
        self,
        sessions: RegionalSessions,
        regions: Sequence[FollowedRegion],
        http: aiohttp.ClientSession,
        config: RunConfig,
    ) -> None:
        self._sessions = sessions
        self._http = http
        self._max_running = config.engine.max_running
        self._outage_s = config.rollouts.outage_s
        self._heard_s = time.monotonic()
        self._following = asyncio.create_task(self._follow(regions))

    def __call__(self) -> int:
        """The newest version that a sufficient share of the capacity serves."""
        if self._following.done():
            self._following.result()
        return self._sessions.admitted_version

    async def changed(self, version: int) -> None:
        """Wait until the version differs from ``version``."""
        await self._sessions.version_changed(version)

    async def reach(self, version: int) -> None:
        """Wait until ``version`` is served. Raises :class:`~etude.errors.EngineUnavailable` if no region answers."""
        while self() < version:
            if time.monotonic() - self._heard_s > self._outage_s:
                raise EngineUnavailable(f"no region has named a weight version for {self._outage_s:g} s")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stop polling."""
        self._following.cancel()

    async def _follow(self, regions: Sequence[FollowedRegion]) -> None:
        async with asyncio.TaskGroup() as group:
            for region in regions:
                group.create_task(_follow_directory(region))
                group.create_task(self._follow_versions(region))

    async def _follow_versions(self, region: FollowedRegion) -> None:
        while True:
            urls = region.gateways.urls
            answers = await asyncio.gather(*(self._fetch_report(url) for url in urls))
            for url, answer in zip(urls, answers, strict=True):
                if answer is None:
                    region.gateways.record_silence(url)
                else:
                    region.gateways.record_answer(url, answer.version)
            heard = [answer for answer in answers if answer is not None]
            if heard:
                self._heard_s = time.monotonic()
                # Gateways of a region share its engines: each represents an equal part of its capacity.
                capacity = max(answer.capacity for answer in heard)
                oldest = min(answer.version for answer in heard)
                self._sessions.report(region.name, RegionReport(version=oldest, capacity=capacity))
            elif urls:
                self._sessions.lose(region.name)
            await asyncio.sleep(POLL_S)

    async def _fetch_report(self, url: str) -> RegionReport | None:
        """The oldest version that a gateway's engines serve, and their slots; ``None`` without an answer."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._http.get(f"{url}/healthz", timeout=HEALTH_TIMEOUT) as answer:
                if answer.status == 200:
                    facts = await answer.json()
                    capacity = self._max_running * int(facts["engines"].get("healthy", 0))
                    return RegionReport(version=int(facts["engine"]["version"]), capacity=capacity)
        return None


async def _follow_directory(region: FollowedRegion) -> None:
    """Update the gateways of a region from its directory; they stay the same while that is unavailable."""
    while True:
        with suppress(InfrastructureError):
            urls = await asyncio.to_thread(region.directory.urls, GATEWAY.command)
            region.gateways.follow([*urls.values()])
        await asyncio.sleep(DIRECTORY_S)


@asynccontextmanager
async def open_regions(
    folder: RunFolder, config: RunConfig, http: aiohttp.ClientSession, events: EventLog
) -> AsyncIterator[tuple[RegionalSessions, ServedRegions]]:
    """Sessions in all regions of a run's fleet, and the version that they serve, while the context is open; ``events``
    record the use of regions.
    """
    fleet = fleet_of(folder)
    assert fleet is not None, "a run on one machine has no regions"
    key = folder.key(KeyRole.ADMIN)
    followed = [
        FollowedRegion(
            name=region.name,
            directory=open_directory(folder, "" if region.name == fleet.home else region.name),
            gateways=GatewayTable(()),
        )
        for region in fleet.regions
        if region.engines
    ]
    openers = {each.name: GatewaySessions(each.gateways, key, http, timeout_s=SESSION_S) for each in followed}
    sessions = RegionalSessions(Regions(openers), openers, SystemClock(), events)
    served = ServedRegions(sessions, followed, http, config)
    try:
        async with AsyncExitStack() as stack:
            for opener in openers.values():
                await stack.enter_async_context(background_task(opener.keep_alive()))
            yield sessions, served
    finally:
        served.close()
        sessions.write_events()
