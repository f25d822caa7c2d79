"""Weight versions that the regions of a run serve, and sessions in them: gateways of each region, a table over all.

    gateways of a region ──polls──▶ ServedVersion ──▶ Regions ──heard──▶ admission
                                                         └──choose──▶ RegionalSessions ──▶ GatewaySessions of a region

A run whose gateways are all in one region needs none of it. Owns which gateways belong to which region, and when a
region is reported or lost; deciding is :mod:`etude.fleet.regions`'s.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from typing import TypeAlias, final

from etude.errors import EngineUnavailable
from etude.fleet.regions import RegionReport
from etude.rollouts.gateway_table import UNHEARD, GatewayTable
from etude.rollouts.regional_sessions import RegionalSessions
from etude.run.endpoints import Endpoints
from etude.run.process_name import ENGINE, GATEWAY
from etude.run.served_version import POLL_S, ServedVersion
from etude.telemetry.events import RegionServed
from etude.telemetry.log import EventLog

FRESH_S = 1.0
"""Age up to which an answer of a gateway says how its region is now."""
REPORT_S = 10.0
"""Between two events that say how regions are used."""
ROOM = 2.0
"""Sessions that a region takes at most, as a multiple of its engines' share of all: others' share while those are away.
"""


@final
class ServedRegions:
    """The weight version at which rollouts of several regions are admitted; −1 before the first answer."""

    def __init__(
        self,
        sessions: RegionalSessions,
        served: Mapping[str, ServedVersion],
        places: Mapping[str, int],
        *,
        events: EventLog,
        outage_s: float,
    ) -> None:
        """``served`` and ``places`` are by region; ``outage_s`` is how long all may be silent while a caller waits."""
        self._sessions = sessions
        self._served = dict(served)
        self._places = dict(places)
        self._events = events
        self._outage_s = outage_s
        self._reported: dict[str, tuple[int, int]] = {}  # region → sessions and bytes, as of the last event
        self._following = asyncio.create_task(self._follow())

    def __call__(self) -> int:
        """The version heard of; sessions that ask for it go where it is served."""
        if self._following.done():
            self._following.result()
        return self._sessions.heard

    async def reach(self, version: int) -> None:
        """Wait until ``version`` is served. Raises :class:`~etude.errors.EngineUnavailable` when nothing is heard."""
        while self() < version:
            heard_s = max(served.heard_s for served in self._served.values())
            if time.monotonic() - heard_s > self._outage_s:
                regions = ", ".join(self._served)
                raise EngineUnavailable(f"no gateway of {regions} has named a weight version for {self._outage_s:g} s")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stop asking."""
        self._following.cancel()
        self._write_events()
        for served in self._served.values():
            served.close()

    async def _follow(self) -> None:
        """Report regions, for ever: those whose gateways have just answered."""
        reported_s = time.monotonic()
        while True:
            if time.monotonic() - reported_s >= REPORT_S:
                reported_s = time.monotonic()
                self._write_events()
            for region, served in self._served.items():
                version = served()
                if not served.answers:
                    self._sessions.lose(region)
                elif version != UNHEARD and time.monotonic() - served.heard_s < FRESH_S:
                    self._sessions.report(region, RegionReport(version=version, places=self._places[region]))
            await asyncio.sleep(POLL_S)

    def _write_events(self) -> None:
        """Write down, for people, how each region is used."""
        for view in self._sessions.views():
            size_bytes = self._sessions.payload_bytes[view.name]
            given, reported_bytes = self._reported.get(view.name, (0, 0))
            self._reported[view.name] = view.given, size_bytes
            self._events.write(
                RegionServed(
                    region=view.name,
                    version=view.version,
                    open=view.open,
                    sessions=view.given - given,
                    payload_bytes=size_bytes - reported_bytes,
                    is_away=view.is_away,
                )
            )


Served: TypeAlias = ServedVersion | ServedRegions
"""The versions that a run serves, in one region or several."""


def gateways_by_region(endpoints: Endpoints) -> dict[str, GatewayTable]:
    """The gateways of each region of a run; that of the trainer has an empty name."""
    urls: dict[str, list[str]] = {}
    for name, url in endpoints.urls(GATEWAY.command).items():
        urls.setdefault(name.region, []).append(url)
    return {region: GatewayTable(of_region) for region, of_region in urls.items()}


def places_by_region(endpoints: Endpoints, regions: Mapping[str, GatewayTable], concurrency: int) -> dict[str, int]:
    """Sessions that each region may hold of ``concurrency`` in all, by its engines; one that names none counts as one
    engine.
    """
    names = list(endpoints.urls(ENGINE.command))
    engines = {region: max(1, sum(name.region == region for name in names)) for region in regions}
    return {region: math.ceil(ROOM * concurrency * count / sum(engines.values())) for region, count in engines.items()}
