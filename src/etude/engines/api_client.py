"""The HTTP client of a third-party engine server: JSON in, JSON or a stream of events out, errors by kind.

Owns the attribution of errors to client or server, and the limits of a server: one token id outside the vocabulary ends
vLLM's engine process (seen in 0.32 without a tokenizer), so no such request may ever reach it. The engine kinds own the
paths and their meaning. There are no retries here: étude's own engine restarts by itself, a third-party server is
restarted by its owner.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, final

import aiohttp
import orjson

from etude.errors import EngineBusy, EngineUnavailable
from etude.protocols import SamplingParams
from etude.types import TokenIds

ANSWER_TIMEOUT_S = 600.0
"""Time limit of a completion, which may be long and queued behind many others."""
LOAD_S = 600.0
"""Time limit of a weight update, without the time for reading weights: draining takes as long as the longest
completion.
"""
CONTROL_TIMEOUT_S = 10.0
"""Time limit of a call that neither samples nor loads."""
CONNECT_TIMEOUT_S = 5.0
"""Time limit for a connection: a machine that does not accept one in this time is down."""
CLIENT_ERRORS = frozenset({400, 404, 413, 422})
"""Statuses that mean, for every engine, that the request was wrong."""
MESSAGE_CHARS = 500
"""Longest part of an engine's own message in an error, in characters."""
STREAM_END = b"[DONE]"
"""Last event of a stream, which is not JSON."""


@final
class ApiClient:
    """An HTTP client of one server. The connector of ``http`` must allow a connection for each call in flight."""

    def __init__(self, name: str, base_url: str, http: aiohttp.ClientSession) -> None:
        """``name`` is the server's name in messages, e.g. ``vLLM``."""
        self.name = name
        self._base_url = base_url.rstrip("/")
        self._http = http

    async def get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """The JSON at ``path``; raises as :meth:`post` does."""
        return self._json(await self.text(path, timeout_s))

    async def text(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        """The raw bytes at ``path``; raises as :meth:`post` does."""
        async with self._answer("GET", path, None, timeout_s) as response:
            return await response.read()

    async def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """The JSON answer to ``body``, ``None`` for an empty one.

        Raises ``ValueError`` with the server's message if it refuses the request, :class:`~etude.errors.EngineBusy` if
        it is overloaded, and :class:`~etude.errors.EngineUnavailable` for any other failure.
        """
        async with self._answer("POST", path, body, timeout_s) as response:
            return self._json(await response.read())

    async def order(self, path: str, body: Mapping[str, Any], timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Post ``body`` and ignore the answer, a text for people; raises as :meth:`post` does."""
        async with self._answer("POST", path, body, timeout_s) as response:
            await response.read()

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The JSON of each server-sent event, as it arrives; closing the iterator closes the connection, which cancels
        the request. Raises as :meth:`post` does, also if the stream breaks off early.
        """
        async with self._answer("POST", path, body, ANSWER_TIMEOUT_S) as response:
            async for event in event_data(response.content.iter_any()):
                if event == STREAM_END:
                    return
                yield self._json(event)
        raise EngineUnavailable(f"{self.name} at {self._base_url} broke off its answer")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {
            "connection": "close"
        }  # a server drops the connection after an error, which a client notices too late
        headers |= {"content-type": "application/json"} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        url = self._base_url + path
        request = self._http.request(method, url, data=data, headers=headers, timeout=timeout)
        async with answering(request, f"{self.name} at {url}", self._error) as response:
            yield response

    def _error(self, url: str, status: int, answer: bytes) -> Exception:
        words = f"{self.name} at {url} answered {status}: {answer.decode(errors='replace')[:MESSAGE_CHARS]}"
        return ValueError(words) if status in CLIENT_ERRORS else unavailable(status, words)

    def _json(self, answer: bytes) -> Any:
        if not answer.strip():
            return None
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise EngineUnavailable(f"the answer of {self.name} cannot be read: {error}") from error


@asynccontextmanager
async def answering(
    request: AbstractAsyncContextManager[aiohttp.ClientResponse],
    name: str,
    error_of: Callable[[str, int, bytes], Exception],
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request and open its response, status 200; any other raises ``error_of`` (URL, status, body).

    A missing or interrupted answer raises :class:`~etude.errors.EngineUnavailable`.
    """
    try:
        async with request as response:
            if response.status != 200:
                words = await response.read()
                response.close()  # uvicorn closes after its own errors: the next call must not reuse this connection
                raise error_of(str(response.url), response.status, words)
            yield response
    except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"no answer from {name}: {type(error).__name__}: {error}") from error


def unavailable(status: int, words: str) -> EngineUnavailable:
    """The error for a response that is the engine's fault, not the request's."""
    return EngineBusy(words) if status == 429 else EngineUnavailable(words)


async def event_data(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, independent of the boundaries of the received chunks. aiohttp limits lines to 128
    KiB; the last event of a completion with routes is longer.
    """
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield b"\n".join(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Timeouts and size limits of requests to one engine."""

    vocab_size: int
    max_length: int
    """Tokens of one sequence, prompt and completion."""
    load_s: float = LOAD_S
    """Time limit for the server to load weights, including the wait for running requests."""

    def check(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a request that could never be served, with the offending value."""
        if len(prompt_ids) == 0 or min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            raise ValueError(f"prompt ids must be in 0 … {self.vocab_size - 1} and not empty")
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens={params.max_tokens}: expected at least 1")
        if len(prompt_ids) + params.max_tokens > self.max_length:
            raise ValueError(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} exceed {self.max_length}"
            )
        if outside := [token for token in params.stop_ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"stop id {outside[0]} is not in 0 … {self.vocab_size - 1}")
