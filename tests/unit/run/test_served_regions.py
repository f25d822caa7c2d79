"""Rollouts over two regions: gateways that answer over HTTP, one of which is cut off and comes back."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.clock import SystemClock
from etude.errors import EngineUnavailable, SessionLost
from etude.fleet.regions import Regions
from etude.rollouts.regional_sessions import RegionalSessions
from etude.rollouts.sessions import GatewaySessions
from etude.run.endpoints import Endpoints
from etude.run.served_regions import ServedRegions, gateways_by_region, places_by_region
from etude.run.served_version import ServedVersion
from etude.telemetry.events import RegionServed
from etude.telemetry.log import EventLog, EventReader
from waiting import until

OUTAGE_S = 0.5


@dataclass
class Gateway:
    """One region's gateway: what it says, and the sessions that were opened at it."""

    region: str
    version: int = 0
    is_away: bool = False
    asked_for: list[int | None] = field(default_factory=list)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"engine": {"version": self.version}}, status=503 if self.is_away else 200)

    async def open(self, request: web.Request) -> web.Response:
        if self.is_away:
            return web.Response(status=502)
        self.asked_for.append((await request.json())["min_version"])
        name = f"{self.region}-{len(self.asked_for)}"
        return web.json_response({"session_id": name, "api_key": "k", "base_url": f"/s/{name}/v1", "turns": 0})

    async def close(self, request: web.Request) -> web.Response:
        return web.Response(status=404)

    def server(self) -> TestServer:
        app = web.Application()
        app.router.add_get("/healthz", self.health)
        app.router.add_post("/sessions", self.open)
        app.router.add_delete("/sessions/{name}", self.close)
        return TestServer(app)


def over_two_regions(
    folder: Path, use: Callable[[RegionalSessions, ServedRegions, Gateway, Gateway], Awaitable[None]]
) -> None:
    async def run() -> None:
        near, far = Gateway(""), Gateway("eu")
        async with near.server() as here, far.server() as there, aiohttp.ClientSession() as http:
            urls = {"gateway": str(here.make_url("/")), "gateway@eu": str(there.make_url("/"))}
            urls |= {"serve": "http://engine", "serve@eu": "http://engine"}
            endpoints = Endpoints(folder / "endpoints.json")
            endpoints.file.write_text(json.dumps({"urls": urls, "public_ports": {}}))
            gateways = gateways_by_region(endpoints)
            openers = {
                name: GatewaySessions(table, "right", http, timeout_s=OUTAGE_S) for name, table in gateways.items()
            }
            table = Regions(gateways)
            sessions = RegionalSessions(table, openers, SystemClock())
            served = {name: ServedVersion(table, http, outage_s=OUTAGE_S) for name, table in gateways.items()}
            places = places_by_region(endpoints, gateways, 8)
            assert places == {"": 8, "eu": 8}
            events = EventLog(folder / "events", "rollouts")
            whole = ServedRegions(sessions, served, places, events=events, outage_s=OUTAGE_S)
            try:
                await until(lambda: all(view.version == 0 for view in table.views(SystemClock().now())))
                await use(sessions, whole, near, far)
            finally:
                whole.close()
                events.close()

    asyncio.run(run())


def test_sessions_are_shared_by_regions_that_serve_their_version(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, served: ServedRegions, near: Gateway, far: Gateway) -> None:
        await served.reach(0)
        opened = [await sessions.open(min_version=0) for _ in range(8)]
        assert Counter(len(gateway.asked_for) for gateway in (near, far)) == {4: 2}
        assert set(near.asked_for + far.asked_for) == {0}
        with pytest.raises(SessionLost):
            await sessions.close(opened[0].session_id)
        with pytest.raises(SessionLost, match="in any region"):
            await sessions.close(opened[0].session_id)
        far.version = near.version = 1
        await served.reach(1)

    over_two_regions(tmp_path, use)
    events = [logged.event for logged in EventReader(tmp_path / "events").new()]
    assert [(event.region, event.sessions) for event in events if isinstance(event, RegionServed)] == [
        ("", 4),
        ("eu", 4),
    ]


def test_a_region_that_is_away_is_left_out_and_comes_back(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, served: ServedRegions, near: Gateway, far: Gateway) -> None:
        await served.reach(0)
        far.is_away = True
        for _ in range(4):  # one of them may find out
            await sessions.open(min_version=0)
        assert (len(near.asked_for), len(far.asked_for)) == (4, 0)
        near.version = 1
        await served.reach(1)
        far.is_away, far.version = False, 1

        async def is_back() -> bool:
            await sessions.open(min_version=1)
            return bool(far.asked_for)

        while not await is_back():
            await asyncio.sleep(0.05)
        near.is_away = far.is_away = True
        with pytest.raises(EngineUnavailable, match="has named a weight version"):
            await served.reach(2)

    over_two_regions(tmp_path, use)
