"""Sessions of a gateway over HTTP.

POST   /sessions         admin key   → {"session_id", "api_key", "base_url", "turns"}    base_url: below the gateway's
         {"fork_of": session_id}: one that begins as another one, with its turns so far
DELETE /sessions/{id}    admin key   → its turns as :mod:`etude.ledger.turns` writes them, application/octet-stream

Owns the retries while a gateway restarts. Repeating either is safe: a session whose opening was lost on its way expires
in the gateway, and one that was closed but whose turns were lost is lost.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, repeat

import aiohttp
import orjson

from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.ledger.turns import decode_turns
from etude.protocols import Session
from etude.types import Turn

REASON_CHARS = 200
"""Length of an error body that is quoted."""
BUSY = (429, 502, 503, 504)
"""Statuses that mean: later."""
RETRY_PAUSES_S = (0.1, 0.2, 0.4, 0.8)
"""Between two tries; the last one repeats."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""The deadline is ours."""


class GatewaySessions:
    """Opens and closes sessions of one gateway; ``http`` belongs to the caller.

    ``timeout_s`` is how long either may take while the gateway is down or busy: longer than a restart, or each restart
    would use up the attempts of every rollout that starts meanwhile.
    """

    def __init__(self, base_url: str, admin_key: str, http: aiohttp.ClientSession, *, timeout_s: float = 30.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._http = http
        self._timeout_s = timeout_s

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session. Raises :class:`~etude.errors.EngineUnavailable`."""
        return self._session(orjson.loads(await self._call("POST", "/sessions")))

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Start a session that begins as another one, and with how many turns. Its first calls must be that one's.

        Raises :class:`~etude.errors.SessionLost` when that is not known (any more), ``EngineUnavailable``.
        """
        fields = orjson.loads(await self._call("POST", "/sessions", {"fork_of": session_id}))
        return self._session(fields), int(fields["turns"])

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and fetch its turns. Raises :class:`~etude.errors.SessionLost`, ``EngineUnavailable``."""
        data = await self._call("DELETE", f"/sessions/{session_id}")
        try:
            return decode_turns(data)
        except ValueError as error:
            raise SessionLost(f"the turns of session {session_id} came damaged: {error}") from error

    async def discard(self, session_id: str) -> None:
        """End a session without its turns; requested once, since one that is left over expires.

        Raises like :meth:`close`.
        """
        answer = await self._attempt("DELETE", f"{self._base_url}/sessions/{session_id}", None)
        if isinstance(answer, EngineUnavailable):
            raise answer

    def _session(self, fields: Mapping[str, str]) -> Session:
        base_url = self._base_url + fields["base_url"]
        return Session(session_id=fields["session_id"], base_url=base_url, api_key=fields["api_key"])

    async def _call(self, method: str, path: str, body: Mapping[str, str] | None = None) -> bytes:
        trouble = EngineUnavailable(f"{method} {self._base_url}{path}: no answer within {self._timeout_s:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                for pause_s in chain(RETRY_PAUSES_S, repeat(RETRY_PAUSES_S[-1])):
                    answer = await self._attempt(method, self._base_url + path, body)
                    if not isinstance(answer, EngineUnavailable):
                        return answer
                    trouble = answer
                    await asyncio.sleep(pause_s)
        raise trouble

    async def _attempt(self, method: str, url: str, body: Mapping[str, str] | None) -> bytes | EngineUnavailable:
        """One exchange; returns trouble that may pass, raises any other."""
        try:
            async with self._http.request(
                method, url, headers=self._headers, json=body, timeout=NO_TIMEOUT
            ) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            return EngineUnavailable(f"{method} {url}: {type(error).__name__}: {error}")
        if status == 200:
            return answer
        message = f"{method} {url} → {status}: {answer[:REASON_CHARS].decode(errors='replace')}"
        if status in BUSY:
            return EngineUnavailable(message)
        if status == 404:
            raise SessionLost(message)
        if status in (401, 403):
            raise ConfigError(f"{message}; gateway and rollouts must be started with the same admin key")
        raise EngineUnavailable(message)
