"""A modelled region: engines behind the product's own pool and router, and a way there.

Modelled are the engines, their rates, and the time of the way. Which engine a call goes to, what becomes of a call
whose engine dies, and when an engine counts as dead, is decided by the code of a real gateway.
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
"""Deadline of a model call: as long as the longest turns that were reported."""
RESEND_S = 0.25
"""Between two tries to get through to a region that is cut off."""


@final
class ModelledRegion:
    """Sessions and engines of one region; implements :class:`~etude.rollouts.worker.SessionOpener`."""

    def __init__(
        self, name: str, rates: EngineRates, *, engines: int, rtt_s: float, places: int, processors: Processors
    ) -> None:
        """``places`` are the sessions that it may hold at a time, ``rtt_s`` the round trip from the rollouts, and
        ``processors`` those of its engines.
        """
        self.name = name
        self.engines = [ModelledEngine(rates, processors) for _ in range(engines)]
        self.is_cut = False
        self.stored = 0
        """Newest version in its store: what an engine that starts has."""
        self.rtt_s = rtt_s
        self._places = places
        self.sessions = FakeSessions()
        self.min_versions: dict[str, int | None] = {}
        """Session → the oldest version that may sample in it."""
        by_url = {f"http://{name}-{index}": engine for index, engine in enumerate(self.engines)}
        self.pool = EnginePool(by_url.__getitem__, Router(HealthLimits(max_lag=None)), LoopClock(), seed=0)
        for url in by_url:
            self.pool.add(EngineEntry(name=url, url=url, region=name))
        self.pool.announce(0, digest_of(0))

    @property
    def version(self) -> int:
        """The version that all its engines serve that live; −1 where none does."""
        return min((engine.version for engine in self.engines if not engine.is_down), default=-1)

    @property
    def report(self) -> RegionReport:
        """Its own account of itself."""
        return RegionReport(version=self.version, places=self._places)

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session. Raises :class:`~etude.errors.EngineUnavailable` while the region is cut off."""
        if self.is_cut:
            raise EngineUnavailable(f"no way to {self.name}")
        opened = await self.sessions.open()
        session = replace(opened, session_id=f"{self.name}/{opened.session_id}")
        self.min_versions[session.session_id] = min_version
        return session

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Refused: modelled rollouts do not branch."""
        raise NotImplementedError("modelled rollouts do not branch")

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and hand over its turns."""
        self.min_versions.pop(session_id, None)
        return await self.sessions.close(session_id.partition("/")[2])

    async def discard(self, session_id: str) -> None:
        """End a session."""
        await self.close(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        """Never: who cannot get through tries again."""
        await never()

    async def call(self, session: Session, *, prompt_tokens: int, tokens: int) -> None:
        """One turn of so many tokens. Raises :class:`~etude.errors.SessionLost` where its gateway forgot it."""
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
        """A version is on its way; engines that live serve it when it is there."""
        await asyncio.sleep(arrival_s)
        await self._travel()
        self.stored = max(version, self.stored)
        self.pool.announce(version, digest_of(version))
        for engine in self.engines:
            if not engine.is_down and engine.version < version:
                engine.swap(version)

    async def _travel(self) -> None:
        """Half a round trip; while there is no way, packets are sent again and again."""
        await asyncio.sleep(self.rtt_s / 2)
        while self.is_cut:
            await asyncio.sleep(RESEND_S)
