"""Sessions of a run's gateways over HTTP.

POST   /sessions         admin key   → {"session_id", "api_key", "base_url", "turns"}    base_url: below the gateway's
         {"min_version": n}: no older weights answer its calls
         {"fork_of": session_id}: a copy of another one, with its turns so far
DELETE /sessions/{id}    admin key   → its turns as :mod:`etude.ledger.turns` writes them, application/octet-stream
GET    base_url/queue_time   its key → counts as a use of the session

A session is opened at the gateway that :class:`~etude.rollouts.gateway_table.GatewayTable` chooses, which alone has its
turns: it is forked and closed there. A gateway drops a session that nobody uses, because its rollouts process may have
died; one that is alive keeps its own (:meth:`GatewaySessions.keep_alive`). This module owns the retries while a gateway
restarts. Repeating a request is safe: a session whose opening answer was lost expires in the gateway, and a session
that was closed but whose turns were lost in transit is lost.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import NamedTuple, NoReturn, TypeAlias

import aiohttp
import orjson

from etude.aio import never
from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.ledger.turns import decode_turns
from etude.protocols import Session
from etude.rollouts.gateway_table import GatewayTable
from etude.types import Turn

Body: TypeAlias = Mapping[str, str | int] | None
"""A JSON object, or nothing."""
REASON_CHARS = 200
"""Maximum quoted length of an error body."""
BUSY = (429, 502, 503, 504)
"""HTTP statuses for which a request is retried."""
RETRY_PAUSES_S = (0.1, 0.2, 0.4, 0.8)
"""Pauses between two attempts; the last one repeats."""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""No timeout of aiohttp: this module sets the deadline."""
ONE_OF_SEVERAL = aiohttp.ClientTimeout(total=10.0)
"""Timeout for opening a session: if one of several gateways hangs, another one is tried."""
KEEP_ALIVE_S = 150.0
"""Interval at which sessions are used to keep them: a gateway drops them after six, so several attempts may fail."""
KEEP_ALIVE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
"""Timeout of one such use."""
KEPT_AT_ONCE = 64
"""Maximum of such uses at a time in one gateway."""


class _KeptSession(NamedTuple):
    """A session and the gateway that has it."""

    session: Session
    gateway: str


class GatewaySessions:
    """Opens and closes sessions of the gateways of ``table``; ``http`` belongs to the caller.

    ``timeout_s`` is the time limit while gateways are down or busy: longer than a restart, as otherwise each restart
    would use up the attempts of every rollout that starts meanwhile. The caller runs :meth:`keep_alive`.
    """

    def __init__(
        self,
        table: GatewayTable,
        admin_key: str,
        http: aiohttp.ClientSession,
        *,
        timeout_s: float = 30.0,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._table = table
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._http = http
        self._timeout_s = timeout_s
        self._open_timeout = ONE_OF_SEVERAL if len(table.urls) > 1 else NO_TIMEOUT
        self._keep_alive_s = keep_alive_s
        self._opened: dict[str, _KeptSession] = {}  # by session id

    async def open(self, *, min_version: int | None = None) -> Session:
        """Start a session whose calls are not answered by weights older than ``min_version``.

        Raises :class:`~etude.errors.EngineUnavailable`.
        """
        tried = set[str]()

        def another() -> str:
            if len(tried) >= len(self._table.urls):
                tried.clear()
            tried.add(url := self._table.choose(avoid=tried))
            return url

        body = None if min_version is None else {"min_version": min_version}
        url, answer = await self._call("POST", another, "/sessions", body, self._open_timeout)
        return self._session(url, orjson.loads(answer))

    async def fork(self, session_id: str) -> tuple[Session, int]:
        """Start a session that copies another one; returns it with the number of copied turns. Its first calls must be
        the same as the original's.

        Raises :class:`~etude.errors.SessionLost` if the original is unknown, perhaps no longer known,
        ``EngineUnavailable``.
        """
        url, answer = await self._call("POST", self._home(session_id), "/sessions", {"fork_of": session_id})
        fields = orjson.loads(answer)
        return self._session(url, fields), int(fields["turns"])

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and fetch its turns. Raises :class:`~etude.errors.SessionLost`, ``EngineUnavailable``."""
        try:
            _, data = await self._call("DELETE", self._home(session_id), f"/sessions/{session_id}")
        finally:
            self._forget(session_id)
        try:
            return decode_turns(data)
        except ValueError as error:
            raise SessionLost(f"the turns of session {session_id} came damaged: {error}") from error

    async def discard(self, session_id: str) -> None:
        """End a session without its turns; requested once, since a leftover session expires.

        Raises like :meth:`close`.
        """
        try:
            answer = await self._attempt("DELETE", self._home(session_id)(), f"/sessions/{session_id}")
        finally:
            self._forget(session_id)
        if isinstance(answer, EngineUnavailable):
            raise answer

    async def lost(self, session_id: str) -> NoReturn:
        """Never returns: a gateway of this machine is restarted and still knows its sessions."""
        await never()

    async def keep_alive(self) -> NoReturn:
        """Use every session that stays open, forever, so that its gateway does not take it for abandoned: a rollout may
        be longer in a command, in its grading or, a fork, in a queue, than a gateway keeps an unused session.

        A session that is closed within one interval costs no request.
        """
        lasting: list[_KeptSession] = []
        while True:
            await asyncio.sleep(self._keep_alive_s)
            by_gateway = defaultdict[str, list[Session]](list)
            for opened in lasting:
                if opened.session.session_id in self._opened:
                    by_gateway[opened.gateway].append(opened.session)
            await asyncio.gather(*map(self._use_all, by_gateway.values()))
            lasting = list(self._opened.values())

    async def _use_all(self, sessions: Sequence[Session]) -> None:
        """Use the sessions of one gateway; one that is silent is left alone until the next time."""
        for first in range(0, len(sessions), KEPT_AT_ONCE):
            answered = await asyncio.gather(*map(self._use, sessions[first : first + KEPT_AT_ONCE]))
            if not any(answered):
                return

    async def _use(self, session: Session) -> bool:
        """Use a session; return whether its gateway answered. A session that is lost is noticed when it is closed."""
        url, headers = f"{session.base_url}/queue_time", {"Authorization": f"Bearer {session.api_key}"}
        with suppress(aiohttp.ClientError, OSError):
            async with self._http.get(url, headers=headers, timeout=KEEP_ALIVE_TIMEOUT):
                return True
        return False

    def _session(self, gateway: str, fields: Mapping[str, str]) -> Session:
        session_id = fields["session_id"]
        session = Session(session_id=session_id, base_url=gateway + fields["base_url"], api_key=fields["api_key"])
        self._opened[session_id] = _KeptSession(session, gateway)
        self._table.opened(gateway)
        return session

    def _home(self, session_id: str) -> Callable[[], str]:
        """The gateway that has a session; for an unknown session, any gateway, which does not know it either."""
        opened = self._opened.get(session_id)
        return self._table.choose if opened is None else lambda: opened.gateway

    def _forget(self, session_id: str) -> None:
        opened = self._opened.pop(session_id, None)
        if opened is not None:
            self._table.closed(opened.gateway)

    async def _call(
        self,
        method: str,
        gateway: Callable[[], str],
        path: str,
        body: Body = None,
        timeout: aiohttp.ClientTimeout = NO_TIMEOUT,
    ) -> tuple[str, bytes]:
        """Send a request; returns the answer and its gateway. ``gateway`` returns the gateway of each attempt."""
        trouble = EngineUnavailable(f"{method} {path}: no answer of a gateway within {self._timeout_s:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                for pause_s in chain(RETRY_PAUSES_S, repeat(RETRY_PAUSES_S[-1])):
                    answer = await self._attempt(method, url := gateway(), path, body, timeout)
                    if not isinstance(answer, EngineUnavailable):
                        return url, answer
                    trouble = answer
                    await asyncio.sleep(pause_s)
        raise trouble

    async def _attempt(
        self, method: str, gateway: str, path: str, body: Body = None, timeout: aiohttp.ClientTimeout = NO_TIMEOUT
    ) -> bytes | EngineUnavailable:
        """Send one request; returns transient errors and raises all others."""
        url = gateway + path
        try:
            async with self._http.request(method, url, headers=self._headers, json=body, timeout=timeout) as response:
                status, answer = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            self._table.record_silence(gateway)
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
