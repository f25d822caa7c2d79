"""Rollouts in several regions, over real gateways' HTTP: found in the regions' stores, left out while they are away."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.loading import default_recipe
from etude.errors import EngineUnavailable
from etude.ledger.turns import encode_turns
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.followed_regions import open_regions
from etude.run.placement import remember_fleet
from etude.run.process_name import ROLLOUTS, ProcessName
from etude.run.region_stores import open_directory
from etude.telemetry.events import RegionServed
from etude.telemetry.log import EventReader
from waiting import until

REGIONS = ("eu", "us")
PLACES = 2
"""Sessions that a region may hold."""


class FakeGateway:
    """One region's gateway, which can be cut off."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.is_away = False
        self.opened = 0
        self.polls = 0

    def app(self) -> web.Application:
        """The part of its API that rollouts use."""
        app = web.Application()
        app.router.add_get("/healthz", self._health)
        app.router.add_post("/sessions", self._open)
        app.router.add_delete("/sessions/{name}", self._close)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        self.polls += 1
        await self._pass(request)
        return web.json_response({"engine": {"version": self.version, "digest": ""}, "engines": {"healthy": 1}})

    async def _open(self, request: web.Request) -> web.Response:
        await self._pass(request)
        self.opened += 1
        name = f"{id(self)}-{self.opened}"
        return web.json_response({"session_id": name, "api_key": "k", "base_url": f"/s/{name}/v1", "turns": 0})

    async def _close(self, request: web.Request) -> web.Response:
        await self._pass(request)
        return web.Response(body=encode_turns([]))

    async def _pass(self, request: web.Request) -> None:
        if self.is_away and request.transport is not None:
            request.transport.abort()


def fleet_run(path: Path) -> RunFolder:
    folder = RunFolder.create(path / "run", default_recipe([f"engine.max_running={PLACES}", "rollouts.outage_s=0.5"]))
    regions = [RegionConfig(name=name, store=str(path / name), engines=1) for name in REGIONS]
    home = RegionConfig(name="home", store=str(path / "run"))
    remember_fleet(folder, FleetConfig(home="home", regions=(home, *regions)))
    return folder


def test_sessions_are_spread_over_regions_that_serve_the_version_and_a_region_that_is_away_is_left_out(
    tmp_path: Path,
) -> None:
    folder = fleet_run(tmp_path)
    gateways = {name: FakeGateway(version=0) for name in REGIONS}

    async def play() -> None:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            events = stack.enter_context(open_events(folder, ROLLOUTS))
            sessions, served = await stack.enter_async_context(open_regions(folder, folder.config(), http, events))
            assert served() == -1
            for name, gateway in gateways.items():  # they come up after rollouts
                server = TestServer(gateway.app())
                await stack.enter_async_context(server)
                url = f"http://{server.host}:{server.port}"
                open_directory(folder, name).announce(ProcessName(command="gateway", region=name), url)
            await served.reach(0)
            opened = [await sessions.open(min_version=0) for _ in range(2 * PLACES)]
            assert {name: each.opened for name, each in gateways.items()} == dict.fromkeys(REGIONS, PLACES)
            for session in opened:
                assert await sessions.close(session.session_id) == ()
            eu, us = gateways.values()
            us.is_away, polls = True, us.polls
            await until(lambda: us.polls > polls + 1)
            for _ in range(PLACES):
                await sessions.open(min_version=0)
            assert (eu.opened, us.opened) == (2 * PLACES, PLACES)
            us.is_away, us.version = False, 1
            await sessions.open(min_version=1)  # which eu does not serve
            assert us.opened == PLACES + 1

    asyncio.run(play())
    used = [
        each.event for each in EventReader(folder.events, str(ROLLOUTS)).new() if isinstance(each.event, RegionServed)
    ]
    assert {name: sum(event.sessions for event in used if event.region == name) for name in REGIONS} == {
        "eu": 2 * PLACES,
        "us": PLACES + 1,
    }


def test_a_run_whose_regions_never_answer_says_so(tmp_path: Path) -> None:
    folder = fleet_run(tmp_path)

    async def play() -> None:
        config = folder.config()
        with open_events(folder, ROLLOUTS) as events:
            async with aiohttp.ClientSession() as http, open_regions(folder, config, http, events) as (_, served):
                await served.reach(0)

    with pytest.raises(EngineUnavailable, match="no region has named a weight version"):
        asyncio.run(play())
