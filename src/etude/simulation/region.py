"""A modelled region: engines behind the real engine pool and router, and a network connection.

The engines, their rates and the network delay are modelled. The code of a real gateway decides which engine serves a
call, what happens to the calls of an engine that dies, and when an engine counts as dead.
"""

import asyncio
from dataclasses import replace
from typing import NoReturn, final

import numpy as np

from etude.aio import never
from etude.errors import EngineUnavailable, SessionLost
from etude.fleet.regions import RegionReport
from etude.gateway.routing.pool import CallOptions, EnginePool
from etude.gateway.routing.router import EngineEntry, HealthLimits, Router
from etude.protocols import SamplingParams, Session, turn_of
from etude.rollouts.fake import FakeSessions, LoopClock
from etude.simulation.engine import EngineRates, ModelledEngine, digest_of
from etude.simulation.processors import Processors
from etude.types import Turn

CALL_TIMEOUT_S = 3600.0
"""Timeout of a model call: as long as the longest reported turns."""
RESEND_S = 0.25
"""Delay between attempts to reach a region that is disconnected."""


@final
class ModelledRegion:
    """Sessions and engines of one region; implements :class:`~etude.rollouts.worker.SessionOpener`."""

    def __init__(
        self, name: str, rates: EngineRates, *, engines: int, rtt_s: float, capacity: int, processors: Processors
    ) -> None:
        """``capacity`` is the most concurrent sessions, ``rtt_s`` the round-trip time from the rollouts, and
        ``processors`` those of its engines.
        """
        self.name = name
        self.engines = [ModelledEngine(rates, processors) for _ in range(engines)]
        self.is_disconnected = False
        self.stored = 0
        """Newest version in its store, with which an engine starts."""
        self.rtt_s = rtt_s
        self._capacity = capacity
        self.sessions = FakeSessions()
        self.min_versions: dict[str, int | None] = {}
        """Session → the oldest weight version that may sample in it."""
        by_url = {f"http://{name}-{index}": engine for index, engine in enumerate(self.engines)}
        self.pool = EnginePool(by_url.__getitem__, Router(HealthLimits(max_lag=None)), LoopClock(), seed=0)
        for url in by_url:
            self.pool.add(EngineEntry(name=url, url=url, region=name))
        self.pool.announce(0, digest_of(0))

    @property
    def version(self) -> int:
        """The version that all its running engines serve; −1 if none runs."""
        return min((engine.version for engine in self.engines if not engine.is_down), default=-1)

    @property
    def report(self) -> RegionReport:
        """The region's status report."""
        return RegionReport(version=self.version, capacity=self._capacity)

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session. Raises :class:`~etude.errors.EngineUnavailable` while the region is disconnected."""
        if self.is_disconnected:
            raise EngineUnavailable(f"no way to {self.name}")
        opened = await self.sessions.open()
        session = replace(opened, session_id=f"{self.name}/{opened.session_id}")
        self.min_versions[session.session_id] = min_version
        return session

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Unsupported: modelled rollouts do not branch."""
        raise NotImplementedError("modelled rollouts do not branch")

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and return its turns."""
        self.min_versions.pop(session_id, None)
        self.pool.forget(session_id)
        return await self.sessions.close(session_id.partition("/")[2])

    async def discard(self, session_id: str) -> None:
        """End a session."""
        await self.close(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        """Wait for ever: sessions are never lost, since a disconnected caller retries."""
        await never()

    async def call(self, session: Session, *, prompt_tokens: int, tokens: int) -> None:
        """Sample one turn of ``tokens`` tokens. Raises :class:`~etude.errors.SessionLost` if its gateway forgot it."""
        await self._travel()
        inner = replace(session, session_id=session.session_id.partition("/")[2])
        prompt, params = np.array([prompt_tokens], np.int32), SamplingParams(max_tokens=tokens)
        options = CallOptions(
            min_version=self.min_versions.get(session.session_id), wait_for_version=True, deadline_s=CALL_TIMEOUT_S
        )
        completion = await self.pool.generate(prompt, params, session=session.session_id, options=options)
        await self._travel()
        try:
            self.sessions.capture(inner, turn_of(prompt, params, completion))
        except KeyError:
            raise SessionLost(f"{self.name} no longer knows session {session.session_id!r}") from None

    async def receive(self, version: int, arrival_s: float) -> None:
        """Receive a version after ``arrival_s``; running engines then serve it."""
        await asyncio.sleep(arrival_s)
        await self._travel()
        self.stored = max(version, self.stored)
        self.pool.announce(version, digest_of(version))
        for engine in self.engines:
            if not engine.is_down and engine.version < version:
                engine.swap(version)

    async def _travel(self) -> None:
        """Wait half a round trip, and for the connection: while it is down, packets are retransmitted."""
        await asyncio.sleep(self.rtt_s / 2)
        while self.is_disconnected:
            await asyncio.sleep(RESEND_S)
