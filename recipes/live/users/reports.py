"""Signals on their way to the product's ``POST /feedback``, by étude's Python client.

Each carries an id of its own, so that one which is sent again is not counted again.
"""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self, final

import aiohttp
from backend import Work
from population import Signal

from etude.errors import EngineUnavailable


@final
class FeedbackReports:
    """Sends signals to one product; implements :class:`~simulation.Reports`."""

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession) -> None:
        self._url, self._key, self._http = url, key, http

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, key: str) -> AsyncIterator[Self]:
        """A client of the product at ``url``."""
        async with aiohttp.ClientSession() as http:
            yield cls(url, key, http)

    async def send(self, work: Work, user: str, signals: Sequence[Signal]) -> None:
        """Report what ``user`` said about a session."""
        body = {
            "events": [
                {
                    "event_id": secrets.token_hex(8),
                    "session": work.session_id,
                    "kind": s.kind,
                    "value": s.value,
                    "user": user,
                    "sent_at": time.time(),
                }
                for s in signals
            ]
        }
        async with self._http.post(
            f"{self._url}/feedback", json=body, headers={"Authorization": f"Bearer {self._key}"}
        ) as r:
            if r.status >= 500:
                raise EngineUnavailable(f"{r.status}")
