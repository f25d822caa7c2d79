"""The weight version that the gateways of one region say is served.

- consumes: what gateways answer to ``GET /healthz``
- produces: facts for their table, and the version at which rollouts may be admitted
- waits for: each gateway, ``HEALTH_TIMEOUT`` at most, then ``POLL_S``
- woken by: time
- on shutdown: stops asking
"""

import asyncio
import contextlib
import time

import aiohttp

from etude.errors import EngineUnavailable
from etude.rollouts.gateway_table import GatewayTable

POLL_S = 0.05
"""Interval of requests for the served weight version."""
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
"""For one such question."""


class ServedVersion:
    """The lowest weight version that all engines serve, by all gateways that answer; −1 before the first answer.

    Keeps ``table`` informed of which gateways do.
    """

    def __init__(self, table: GatewayTable, http: aiohttp.ClientSession, *, outage_s: float) -> None:
        """``outage_s`` is how long all gateways may be silent while a caller waits."""
        self._table = table
        self._http = http
        self._outage_s = outage_s
        self._heard_s = time.monotonic()
        self._following = asyncio.create_task(self._follow())

    def __call__(self) -> int:
        """The last version heard of: never ahead of the engines, which only move forward."""
        if self._following.done():
            self._following.result()
        return self._table.version

    @property
    def answers(self) -> bool:
        """True if a gateway answered when it was last asked."""
        return self._table.answers

    @property
    def heard_s(self) -> float:
        """When a gateway last answered, or this was made: monotonic seconds."""
        return self._heard_s

    async def reach(self, version: int) -> None:
        """Wait until ``version`` is served. Raises :class:`~etude.errors.EngineUnavailable` when nothing is heard."""
        while self() < version:
            if time.monotonic() - self._heard_s > self._outage_s:
                urls = ", ".join(f"{url}/healthz" for url in self._table.urls)
                raise EngineUnavailable(f"{urls}: no weight version was named for {self._outage_s:g} s")
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stop asking."""
        self._following.cancel()

    async def _follow(self) -> None:
        """Ask every gateway, for ever; while all are down, the last answer stands."""
        async with asyncio.TaskGroup() as group:
            for url in self._table.urls:
                group.create_task(self._follow_one(url))

    async def _follow_one(self, url: str) -> None:
        while True:
            version = await self._ask(url)
            if version is None:
                self._table.silent(url)
            else:
                self._table.heard(url, version)
                self._heard_s = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def _ask(self, url: str) -> int | None:
        """The lowest version that a gateway's engines serve; ``None`` where it does not answer, or has no engine."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._http.get(f"{url}/healthz", timeout=HEALTH_TIMEOUT) as answer:
                if answer.status == 200:
                    return int((await answer.json())["engine"]["version"])
        return None
