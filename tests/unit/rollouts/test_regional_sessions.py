"""Sessions in regions: opened where they may be, ended where they were opened, and counted."""

import asyncio
from asyncio import timeout
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from etude.aio import never
from etude.errors import EngineUnavailable, SessionLost
from etude.fleet.regions import RegionReport, Regions
from etude.protocols import Session
from etude.rollouts.fake import FakeSessions, LoopClock, run_virtually
from etude.rollouts.regional_sessions import RegionalSessions
from etude.telemetry.events import RegionServed
from etude.telemetry.log import EventLog, EventReader
from etude.types import Finish, PayloadRef, Turn

ONE = np.ones(1, np.int32)
TURN = Turn(
    prompt_ids=ONE,
    completion_ids=ONE,
    logprobs=-ONE.astype(np.float32),
    versions=ONE,
    finish=Finish.STOP,
    payload=PayloadRef(digest="ab" * 32, size_bytes=100),
)


@dataclass
class Gateway:
    """The sessions of one region, which may not be reached."""

    region: str
    inner: FakeSessions = field(default_factory=FakeSessions)
    is_away: bool = False

    async def open(self, *, min_version: int | None = None) -> Session:
        if self.is_away:
            raise EngineUnavailable("no way there")
        session = await self.inner.open()
        self.inner.capture(session, TURN)
        return self._named(session)

    async def fork(self, session_id: str) -> tuple[Session, int]:
        session, turns = await self.inner.fork(session_id.partition("/")[2])
        return self._named(session), turns

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        return await self.inner.close(session_id.partition("/")[2])

    async def discard(self, session_id: str) -> None:
        if self.is_away:
            await never()
        await self.inner.discard(session_id.partition("/")[2])

    async def lost(self, session_id: str) -> NoReturn:
        await never()

    def _named(self, session: Session) -> Session:
        return replace(session, session_id=f"{self.region}/{session.session_id}")


Use = Callable[[RegionalSessions, dict[str, Gateway]], Awaitable[None]]


def over_two_regions(folder: Path, use: Use) -> list[RegionServed]:
    """Use sessions in two regions that serve version 1; returns the events."""

    async def run() -> None:
        gateways = {name: Gateway(name) for name in ("home", "eu")}
        with EventLog(folder / "events", "rollouts") as events:
            sessions = RegionalSessions(Regions(gateways), gateways, LoopClock(), events)
            for name in gateways:
                sessions.report(name, RegionReport(version=1, capacity=4))
            await use(sessions, gateways)
            sessions.write_events()

    run_virtually(run())
    events = [logged.event for logged in EventReader(folder / "events").new()]
    return [event for event in events if isinstance(event, RegionServed)]


def test_sessions_end_where_they_were_opened_and_are_counted_there(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        first, second = [await sessions.open(min_version=1) for _ in range(2)]
        fork, shared = await sessions.fork(first.session_id)
        assert shared == 1
        assert [len(gateway.inner) for gateway in gateways.values()].count(2) == 1
        for session in (first, fork):
            assert await sessions.close(session.session_id) == (TURN,)
        await sessions.discard(second.session_id)
        assert not any(len(gateway.inner) for gateway in gateways.values())
        with pytest.raises(SessionLost, match="in any region"):
            await sessions.close(first.session_id)

    events = over_two_regions(tmp_path, use)
    assert sorted((event.sessions, event.open, event.payload_bytes) for event in events) == [(1, 0, 0), (2, 0, 100)], (
        "what a fork shares with its parent is stored once"
    )


def test_a_region_that_cannot_be_reached_is_left_out_until_it_reports(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        gateways["eu"].is_away = True
        for _ in range(4):
            assert (await sessions.open(min_version=1)).session_id.startswith("home/")
        gateways["eu"].is_away = False
        sessions.report("eu", RegionReport(version=1, capacity=4))
        assert (await sessions.open(min_version=1)).session_id.startswith("eu/")

    events = over_two_regions(tmp_path, use)
    assert {event.region: event.open for event in events} == {"home": 4, "eu": 1}


def test_a_session_out_of_reach_is_let_go_of_at_once(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        session = await sessions.open(min_version=1)
        region = session.session_id.partition("/")[0]
        gateways[region].is_away = True
        sessions.lose(region)
        began_s = LoopClock().now()
        await sessions.discard(session.session_id)
        assert LoopClock().now() - began_s < 0.1
        with pytest.raises(SessionLost, match="in any region"):
            await sessions.close(session.session_id)

    over_two_regions(tmp_path, use)


def test_a_session_waits_for_a_region_that_serves_its_version(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        with pytest.raises(TimeoutError):
            async with timeout(1.0):
                await sessions.open(min_version=2)
        assert sessions.admitted_version == 1
        sessions.report("eu", RegionReport(version=2, capacity=4))
        assert sessions.admitted_version == 2
        assert (await sessions.open(min_version=2)).session_id.startswith("eu/")

    over_two_regions(tmp_path, use)


def test_sessions_begin_again_where_places_are_free_and_no_more_of_them(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        opened = [(await sessions.open(min_version=1)).session_id for _ in range(6)]
        there = [session for session in opened if session.startswith("eu/")]
        assert len(there) == 3, "one place is left elsewhere"
        await asyncio.sleep(100)
        sessions.report("home", RegionReport(version=1, capacity=4))
        sessions.lose("eu")
        waiting = [asyncio.ensure_future(sessions.lost(session)) for session in there]
        for _ in range(5):
            await asyncio.sleep(2)
            sessions.report("home", RegionReport(version=1, capacity=4))
        assert [waits.done() for waits in waiting].count(True) == 1
        assert (await sessions.open(min_version=1)).session_id.startswith("home/")
        await asyncio.sleep(2)
        assert [waits.done() for waits in waiting].count(True) == 1
        for waits in waiting:
            waits.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    over_two_regions(tmp_path, use)


def test_where_none_is_free_a_session_is_waited_for_as_long_as_it_had_been_open(tmp_path: Path) -> None:
    """A young one begins again all the same, an old one is worth waiting for."""

    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        old, _ = [await sessions.open(min_version=1) for _ in range(2)]
        region = old.session_id.partition("/")[0]
        await asyncio.sleep(20)
        for name in gateways:
            sessions.report(name, RegionReport(version=1, capacity=4))
        while not (young := await sessions.open(min_version=1)).session_id.startswith(region):
            pass
        sessions.lose(region)
        for name in gateways:
            if name != region:
                sessions.report(name, RegionReport(version=1, capacity=0))
        began_s, ends = LoopClock().now(), {}
        for name, session in (("young", young), ("old", old)):
            with pytest.raises(SessionLost, match=f"region {region} has been unreachable"):
                await sessions.lost(session.session_id)
            ends[name] = LoopClock().now() - began_s
        assert 3 < ends["young"] < 4 and 20 < ends["old"] < 21
        sessions.report(region, RegionReport(version=1, capacity=4))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await sessions.lost(old.session_id)

    over_two_regions(tmp_path, use)


def test_an_outage_that_ends_costs_no_session(tmp_path: Path) -> None:
    async def use(sessions: RegionalSessions, gateways: dict[str, Gateway]) -> None:
        session = await sessions.open(min_version=1)
        region = session.session_id.partition("/")[0]
        losing = asyncio.ensure_future(sessions.lost(session.session_id))
        for _ in range(5):
            sessions.lose(region)
            await asyncio.sleep(2)
            sessions.report(region, RegionReport(version=1, capacity=4))
            await asyncio.sleep(2)
        assert not losing.done()
        losing.cancel()

    over_two_regions(tmp_path, use)
