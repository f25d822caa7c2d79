"""The HTTP client of an engine: implements the engine protocol over :mod:`etude.engines.http.server`.

Owns the retries while an engine restarts, and the kept-alive connections; the wire format is ``wire.py``'s. An engine
keeps nothing between two calls that an answer depends on, so a call whose answer was lost is simply made again.

A general HTTP client takes 60 to 150 µs of CPU for a call, ten times what it takes where the form of the answer is
known, and that would be the largest part of a gateway's work. So whole answers come over connections of our own, which
understand a ``Content-Length`` and nothing else; streams go over a general client.
"""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from itertools import chain, repeat
from typing import TypeVar, cast, final
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import ClientSession, TCPConnector

from etude.clock import SystemClock
from etude.engines.http.api_client import answering, unavailable
from etude.engines.http.wire import ChunkReader, decode_completion, encode_request
from etude.errors import EngineUnavailable
from etude.protocols import Clock, Completion, EngineHealth, SamplingParams, TokenChunk
from etude.types import TokenIds

Answer = TypeVar("Answer")

RETRY_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Between two tries; the last one repeats. Short, because an engine on the same machine restarts in seconds."""
ANSWER_TIMEOUT_S = 600.0
"""An engine that took a request may be this long silent: it may be sampling a long completion behind many others."""
CONNECT_TIMEOUT_S = 5.0
"""A machine that does not take a connection in this time is down."""
HEALTH_TIMEOUT_S = 5.0
"""An engine that cannot say its version in this time is not healthy."""

GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)

SYSTEM_CLOCK = SystemClock()


@asynccontextmanager
async def http_engines(timeout_s: float) -> AsyncIterator[Callable[[str], "HttpEngine"]]:
    """Makes clients by URL, for as many calls in flight as there are; they are closed with the context."""
    async with ClientSession(connector=TCPConnector(limit=0)) as http:
        with ExitStack() as engines:
            yield lambda url: engines.enter_context(closing(HttpEngine(url, http, timeout_s)))


class HttpEngine:
    """Talks to one engine process; implements :class:`~etude.protocols.Engine`.

    ``timeout_s`` is how long an engine may be down before a call gives up. To be closed by who made it. The connector
    of ``http`` must allow as many connections as there may be streams in flight (aiohttp allows 100 unless told
    otherwise).
    """

    def __init__(
        self, base_url: str, http: aiohttp.ClientSession, timeout_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._http = http
        self._timeout_s = timeout_s
        self._clock = clock
        self._connections = ConnectionPool(base_url, connect_s=CONNECT_TIMEOUT_S)

    def close(self) -> None:
        """Close idle connections; ``http`` stays the caller's."""
        self._connections.close()

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion, trying again while the engine is down.

        Raises ``ValueError`` with the engine's words if it refuses the request, and
        :class:`~etude.errors.EngineUnavailable` once its outages during the call come to more than ``timeout_s``.
        """
        body = encode_request(prompt_ids, params, session)
        down_s = 0.0
        for pause_s in _pauses_s():
            asked_at = self._clock.now()
            try:
                return _readable(decode_completion, await self._whole("/generate", body))
            except EngineUnavailable:
                # Time spent on an answer that was then lost is no outage: the engine was up, and is to be had again.
                down_s += min(self._clock.now() - asked_at, CONNECT_TIMEOUT_S) + pause_s
                if down_s > self._timeout_s:
                    raise
            await self._clock.sleep(pause_s)
        raise AssertionError("the pauses are endless")

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and hand out its chunks as they come; a stream that breaks is not taken up again.

        Raises like :meth:`generate`, at the first trouble.
        """
        body = encode_request(prompt_ids, params, session)
        async with self._request("POST", "/stream", body, GENERATE_TIMEOUT) as response:
            reader = ChunkReader()
            async for data in response.content.iter_any():
                chunk = _readable(reader.feed, data)
                if chunk is None:
                    continue
                if chunk.completion is not None:
                    await response.content.read()  # to its end, or the connection could not be used again
                    yield chunk
                    return
                yield chunk
            raise EngineUnavailable(f"the engine at {self._base_url} broke off its stream")

    async def health(self) -> EngineHealth:
        """Ask once. Raises :class:`~etude.errors.EngineUnavailable` at once if there is no answer."""
        async with self._request("GET", "/health", None, HEALTH_TIMEOUT) as response:
            return _health(await response.read())

    async def _whole(self, path: str, body: bytes) -> bytes:
        """One short exchange; everything but an answer or a refusal is an unavailable engine."""
        url = self._base_url + path
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, answer = await self._connections.post(path, body)
        except (OSError, TimeoutError) as error:
            raise EngineUnavailable(f"no answer from the engine at {url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise _refused(url, status, answer)
        return answer

    def _request(
        self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """An answer with status 200, being read."""
        url = self._base_url + path
        request = self._http.request(method, url, data=body, timeout=timeout)
        return answering(request, f"the engine at {url}", _refused)


def _refused(url: str, status: int, answer: bytes) -> Exception:
    """The error for an answer that is no completion."""
    if status in (400, 413):
        return ValueError(_error_message(answer))
    return unavailable(status, f"the engine at {url} answered {status}: {_error_message(answer)}")


def _readable(decode: Callable[[bytes], Answer], data: bytes) -> Answer:
    try:
        return decode(data)
    except ValueError as error:
        raise EngineUnavailable(f"the engine's answer cannot be read: {error}") from error


def _pauses_s() -> Iterator[float]:
    return chain(RETRY_PAUSES_S, repeat(RETRY_PAUSES_S[-1]))


def _health(answer: bytes) -> EngineHealth:
    try:
        fields = orjson.loads(answer)
        numbers = {name: int(fields[name]) for name in ("version", "running", "waiting")}
        return EngineHealth(digest=str(fields["digest"]), **numbers)
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise EngineUnavailable(f"the engine's health cannot be read: {type(error).__name__}: {error}") from error


def _error_message(answer: bytes) -> str:
    try:
        return str(orjson.loads(answer)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer.decode(errors="replace")[:200]


IDLE_S = 10.0
"""A connection that was silent for so long is not used again: servers close theirs after a while (ours after 75 s),
and a request that meets such an end is lost.
"""
MAX_IDLE = 1024
"""Connections kept for later."""
MAX_HEAD_BYTES = 64 * 1024
"""Longest head of an answer."""
HEAD_END = b"\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+) *(?:\r\n|$)", re.IGNORECASE)
LAST = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@final
class ConnectionPool:
    """Connections to one server; to be closed by who made it."""

    def __init__(self, base_url: str, *, connect_s: float) -> None:
        """``connect_s`` is how long a connection may take to be made."""
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode()
        self._head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: ".encode()
        self._connect_s = connect_s
        self._idle: deque[_EngineConnection] = deque()  # the last used one last

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer. Raises ``OSError`` and ``TimeoutError`` when there is none.

        Being cancelled hangs up.
        """
        connection = self._free() or await self._connect()
        try:
            answer = await connection.send(
                b"POST %b%b%b%d\r\n\r\n%b" % (self._prefix, path.encode(), self._head, len(body), body)
            )
        except BaseException:
            connection.close()
            raise
        if connection.reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        """Close idle connections; the others close with their client."""
        while self._idle:
            self._idle.pop().close()

    def _free(self) -> "_EngineConnection | None":
        """The connection that was used last; those that were idle for too long are closed."""
        oldest_at = asyncio.get_running_loop().time() - IDLE_S
        while self._idle and self._idle[0].used_at < oldest_at:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> "_EngineConnection":
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(_EngineConnection, self._host, self._port, ssl=self._tls)
        return connection


@final
class _EngineConnection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        """True while another request may follow."""
        self.used_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._missing = 0
        self._status = 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a request, wait for its answer."""
        self._parts.clear()
        self._status = 0
        self._answer = self._loop.create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None
            self.used_at = self._loop.time()

    def close(self) -> None:
        """Hang up."""
        self.reusable = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by descent

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        self._fail(f"the connection was lost: {error or 'the server closed it'}")

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._answer is None:
            self._fail("the server spoke without being asked")
            return
        self._parts.append(data)
        if self._status:
            self._missing -= len(data)
        else:
            self._read_head()
        if self._missing < 0:
            self._fail("the answer is longer than it says")
        elif self._status and not self._missing and not self._answer.done():
            self._answer.set_result((self._status, b"".join(self._parts)))

    def _read_head(self) -> None:
        """Status and length, as soon as the head is whole; what follows it is the beginning of the body."""
        data = b"".join(self._parts)
        end = data.find(HEAD_END)
        if end < 0:
            self._parts = [data]
            if len(data) > MAX_HEAD_BYTES:
                self._fail("the answer has too long a head")
            return
        head, body = data[:end], data[end + len(HEAD_END) :]
        status, length = STATUS.match(head), LENGTH.search(head)
        if status is None or length is None:
            self._fail("the answer is not HTTP with a length")
            return
        self.reusable = LAST.search(head) is None
        self._parts, self._missing, self._status = [body], int(length[1]) - len(body), int(status[1])

    def _fail(self, why: str) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))
        self._transport.close()
