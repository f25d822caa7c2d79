"""Signals on their way to the product's ``POST /feedback``.

Each has an id of its own, so that one which is sent again, because the answer got lost, is not counted again.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self, final

import aiohttp
from backend import Work
from population import Signal

from etude.errors import EngineUnavailable

TRIES, PAUSE_S = 4, 1.0
"""Times that a report is sent, and the pause between two of them."""


@final
class FeedbackReports:
    """Sends signals to one product; implements :class:`~simulation.Reports`."""

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{url.rstrip('/')}/feedback"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._http = http

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, key: str) -> AsyncIterator[Self]:
        """A client of the product at ``url``."""
        async with aiohttp.ClientSession() as http:
            yield cls(url, key, http)

    async def send(self, work: Work, user: str, signals: Sequence[Signal]) -> None:
        """Report what ``user`` said about a session."""
        events = [
            {
                "event_id": secrets.token_hex(12),
                "session": work.session_id,
                "kind": signal.kind,
                "value": signal.value,
                "user": user,
                "sent_at": time.time(),
            }
            for signal in signals
        ]
        status = 0
        for _ in range(TRIES):
            async with self._http.post(self._url, json=events, headers=self._headers) as answer:
                status = answer.status
                if status == 202:
                    return
            await asyncio.sleep(PAUSE_S)
        raise EngineUnavailable(f"{self._url} answered {status} to signals")
