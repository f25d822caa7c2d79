"""An engine behind HTTP: the client of :mod:`etude.engines.native.server`.

Owns the retries while an engine restarts; the wire format is engines/http/wire.py's. An engine keeps nothing
between two calls that an answer depends on, so a call whose answer was lost is simply made again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing
from itertools import chain, repeat
from typing import TypeVar

import aiohttp
import orjson
from aiohttp import ClientSession, TCPConnector

from etude.clock import SystemClock
from etude.engines.http.connection_pool import Lines
from etude.engines.http.exchange import answering, unavailable
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
        self._lines = Lines(base_url, connect_s=CONNECT_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections that nobody uses; ``http`` stays the caller's."""
        self._lines.close()

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
        """Sample one completion and hand out its pieces as they come; a stream that breaks is not taken up again.

        Raises like :meth:`generate`, at the first trouble.
        """
        body = encode_request(prompt_ids, params, session)
        async with self._exchange("POST", "/stream", body, GENERATE_TIMEOUT) as response:
            reader = ChunkReader()
            async for data in response.content.iter_any():
                piece = _readable(reader.feed, data)
                if piece is None:
                    continue
                if piece.completion is not None:
                    await response.content.read()  # to its end, or the connection could not be used again
                    yield piece
                    return
                yield piece
            raise EngineUnavailable(f"the engine at {self._base_url} broke off its stream")

    async def health(self) -> EngineHealth:
        """Ask once. Raises :class:`~etude.errors.EngineUnavailable` at once if there is no answer."""
        async with self._exchange("GET", "/health", None, HEALTH_TIMEOUT) as response:
            return _health(await response.read())

    async def _whole(self, path: str, body: bytes) -> bytes:
        """One short exchange; everything but an answer or a refusal is an unavailable engine."""
        url = self._base_url + path
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, answer = await self._lines.post(path, body)
        except (OSError, TimeoutError) as error:
            raise EngineUnavailable(f"no answer from the engine at {url}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise _refused(url, status, answer)
        return answer

    def _exchange(
        self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """An answer with status 200, being read."""
        url = self._base_url + path
        request = self._http.request(method, url, data=body, timeout=timeout)
        return answering(request, f"the engine at {url}", _refused)


def _refused(url: str, status: int, answer: bytes) -> Exception:
    """What an answer that is no completion means."""
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
