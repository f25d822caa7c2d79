"""An engine over HTTP: client (:class:`HttpEngine`), server (:func:`engine_app`) and their wire format.

    HttpEngine.generate ─▶ encode_request ─▶ POST /generate ─▶ decode_request ─▶ Engine.generate
               Completion ◀─ decode_completion ◀─────────────── encode_completion ◀─┘
    HttpEngine.stream   ─▶ POST /stream    request ─▶ chunks, the last one with the completion: ChunkReader
    HttpEngine.health   ─▶ GET  /health    {"version", "digest", "running", "waiting"}
              Prometheus   GET  /metrics   the same figures

A request is a JSON object. A completion is a safetensors file: arrays, including routes and sampling masks, are sent as
raw bytes, with nothing to unpickle. A stream is lines of JSON, one per chunk; the last line has the size of the
completion file that follows it. If the engine has a key, every request must carry it (``Authorization: Bearer``).
Errors are ``{"error": message}``: 400 for a request that can never be served, 401 for a wrong key, 413 for one that is
too large, 503 with ``Retry-After`` while the engine is not ready, 429 with ``Retry-After`` while it is overloaded. The
engine itself checks token ids and lengths.

Owns the wire format, the retries while an engine restarts, and the kept-alive connections. An answer depends on no
state of the engine between calls, so a call whose answer was lost is simply repeated. Servers of third-party engines
use other protocols: :mod:`etude.engines.api_client`.

A general HTTP client takes 60 to 150 µs of CPU per call, ten times as much as one that knows the form of the answer,
and would be the largest part of a gateway's work. So whole answers use custom connections (:class:`ConnectionPool`),
which support only ``Content-Length``; streams use a general client.
"""

import asyncio
import json
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager, closing
from dataclasses import asdict, fields
from itertools import chain, repeat
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast, final
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import ClientSession, web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from etude.clock import SystemClock
from etude.engines.api_client import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, answering, unavailable
from etude.errors import EngineBusy, EngineUnavailable
from etude.gauges import CONTENT_TYPE, gauge_page
from etude.key_comparison import same_key
from etude.protocols import MAX_SEED, Clock, Completion, Engine, EngineHealth, SamplingParams, TokenChunk
from etude.sockets import alert_connector, make_alert
from etude.types import Finish, SamplingMask, TokenIds

Answer = TypeVar("Answer")
Parsed = TypeVar("Parsed", bound=BaseModel)

PARAMS = tuple(field.name for field in fields(SamplingParams))
"""Names of all sampling parameters, which a request carries."""
MAX_LINE_BYTES = 2**20
"""Longest line of a chunk: far more tokens than any engine returns at once."""
FINISH = "finish"
"""Key of the finish reason, the only field of a completion that is not an array: stored as an index into ``FINISHES``.
"""
FINISHES = tuple(Finish)
WRONG_KEY = (
    "this engine requires its key: a run's processes derive it from the run key (run.key, or ETUDE_RUN_KEY); a gateway "
    "of no run reads it from ETUDE_ENGINE_KEY"
)
"""The answer to a request with a wrong key, or none."""
QUOTED_CHARS = 80
"""Longest part of a refused value in an error, in characters."""
ARRAYS: Mapping[str, tuple[type[np.generic], int]] = MappingProxyType(
    {
        "token_ids": (np.int32, 1),
        "logprobs": (np.float32, 1),
        "versions": (np.int32, 1),
        FINISH: (np.uint8, 1),
        "routes": (np.uint16, 3),
        "kept_offsets": (np.int64, 1),
        "kept_ids": (np.int32, 1),
    }
)
"""Type and number of axes of each array in a completion file."""

NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_SEED)]
NonNegativeInt32 = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _StrictModel(BaseModel):
    """A JSON object with exactly these fields; values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Request(_StrictModel):
    """A request. Missing fields have the defaults of :class:`~etude.protocols.SamplingParams`, which checks the
    others.
    """

    prompt_ids: list[NonNegativeInt]
    session: str
    max_tokens: Annotated[int, Field(ge=1, le=MAX_SEED)]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: NonNegativeInt = 0
    stop_ids: tuple[NonNegativeInt, ...] = ()
    seed: NonNegativeInt | None = None
    sampled_before: NonNegativeInt = 0
    priority: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] = 0
    want_routes: bool = False
    adapter: str = ""


class _ChunkLine(_StrictModel):
    """One chunk of a stream."""

    token_ids: list[NonNegativeInt32]
    logprobs: list[float]
    versions: list[NonNegativeInt32]
    masks: list[list[NonNegativeInt32]] | None = None
    """The sampling mask of each token, if the engine sends it with the chunk."""
    completion_bytes: NonNegativeInt
    """Size of the completion that follows; 0 for none."""


def encode_request(prompt_ids: TokenIds, params: SamplingParams, session: str) -> bytes:
    """The body of ``POST /generate`` and ``POST /stream``."""
    fields = {"prompt_ids": prompt_ids, "session": session} | {name: getattr(params, name) for name in PARAMS}
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_request(body: bytes) -> tuple[list[int], SamplingParams, str]:
    """Prompt ids, sampling parameters and session of a request. Raises ``ValueError`` naming the field at fault."""
    request = _parse(_Request, body)
    return request.prompt_ids, SamplingParams(**{name: getattr(request, name) for name in PARAMS}), request.session


def encode_completion(completion: Completion) -> bytes:
    """A completion as a safetensors file."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "versions": completion.versions,
        FINISH: np.array([FINISHES.index(completion.finish)], np.uint8),
    }
    if completion.routes is not None:
        arrays["routes"] = completion.routes
    if completion.sampling_mask is not None:
        arrays |= {"kept_offsets": completion.sampling_mask.offsets, "kept_ids": completion.sampling_mask.token_ids}
    # For a non-contiguous array, safetensors would write the gaps, too.
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_completion(data: bytes) -> Completion:
    """Decode a completion from :func:`encode_completion`. Raises ``ValueError`` on anything else."""
    try:
        arrays = load(data)
        _check_kinds(arrays)
        mask = None
        if "kept_ids" in arrays:
            mask = SamplingMask(offsets=arrays["kept_offsets"], token_ids=arrays["kept_ids"])
        completion = Completion(
            token_ids=arrays["token_ids"],
            logprobs=arrays["logprobs"],
            versions=arrays["versions"],
            finish=FINISHES[int(arrays[FINISH][0])],
            routes=arrays.get("routes"),
            sampling_mask=mask,
        )
    except (SafetensorError, KeyError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _check_tokens(completion)
    if mask is not None and len(mask) != len(completion.token_ids):
        raise ValueError(f"{len(mask)} sampling masks of {len(completion.token_ids)} tokens")
    return completion


def encode_chunk(chunk: TokenChunk) -> bytes:
    """Encode a chunk as one line of a stream; the last one is followed by the encoded completion."""
    tail = b"" if chunk.completion is None else encode_completion(chunk.completion)
    line: dict[str, Any] = {
        "token_ids": chunk.token_ids,
        "logprobs": chunk.logprobs,
        "versions": chunk.versions,
        "completion_bytes": len(tail),
    }
    if chunk.sampling_mask is not None:
        line["masks"] = [*chunk.sampling_mask]
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" + tail


@final
class ChunkReader:
    """Parses streamed chunks, whatever the boundaries of the received bytes; merges those that arrive as one."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._masks: list[list[int]] = []
        self._tail_bytes = 0
        """Size of the completion that is expected next; 0 while lines are expected."""
        self._is_done = False

    def feed(self, data: bytes) -> TokenChunk | None:
        """Add received bytes; returns the chunk that they complete, if any. Raises ``ValueError`` if they are not a
        stream of chunks.
        """
        self._rest += data
        if self._is_done:
            self._check_end(0)
            return None
        while not self._tail_bytes and (end := self._rest.find(b"\n")) >= 0:
            self._take(bytes(self._rest[:end]))
            del self._rest[: end + 1]
        if not self._tail_bytes:
            if len(self._rest) > MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
            return self._chunk(None) if self._token_ids else None
        if len(self._rest) < self._tail_bytes:
            return None
        self._check_end(self._tail_bytes)
        completion = decode_completion(bytes(self._rest))
        self._is_done = True
        self._rest.clear()
        return self._chunk(completion)

    def _check_end(self, size: int) -> None:
        """Check that the stream ends with its completion."""
        if len(self._rest) > size:
            raise ValueError(f"{len(self._rest) - size} bytes more behind the completion of a stream")

    def _take(self, line: bytes) -> None:
        chunk = _parse(_ChunkLine, line)
        if not len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions):
            lengths = [len(chunk.token_ids), len(chunk.logprobs), len(chunk.versions)]
            raise ValueError(f"{lengths} token ids, log probabilities and versions: expected as many of each")
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._versions += chunk.versions
        self._masks += chunk.masks or ()
        self._tail_bytes = chunk.completion_bytes

    def _chunk(self, completion: Completion | None) -> TokenChunk:
        with np.errstate(over="ignore"):  # infinite values are refused
            chunk = TokenChunk(
                token_ids=np.array(self._token_ids, np.int32),
                logprobs=np.array(self._logprobs, np.float32),
                versions=np.array(self._versions, np.int32),
                sampling_mask=self._mask(),
                completion=completion,
            )
        _check_tokens(chunk)
        self._token_ids, self._logprobs, self._versions, self._masks = [], [], [], []
        return chunk

    def _mask(self) -> SamplingMask | None:
        """The mask of the chunk's tokens, if each token has one."""
        if not self._masks:
            return None
        if len(self._masks) != len(self._token_ids):
            raise ValueError(f"{len(self._masks)} sampling masks of {len(self._token_ids)} tokens")
        return SamplingMask.of_rows([np.array(row, np.int32) for row in self._masks])


def _check_kinds(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    for name, array in arrays.items():
        dtype, axes = ARRAYS[name]
        if array.dtype != dtype or array.ndim != axes:
            expected = f"{np.dtype(dtype)} with {axes} axes"
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {expected}")


def _check_tokens(sampled: Completion | TokenChunk) -> None:
    lengths = [len(array) for array in (sampled.token_ids, sampled.logprobs, sampled.versions)]
    if len(set(lengths)) != 1:
        raise ValueError(f"{lengths} token ids, log probabilities and versions: expected as many of each")
    if not np.isfinite(sampled.logprobs).all():  # it would poison the loss
        raise ValueError("a log probability is not finite")


def _parse(kind: type[Parsed], text: bytes) -> Parsed:
    """Parse a JSON object of a model class. Raises ``ValueError`` naming the first field at fault."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in first["loc"])
        shown = "" if first["type"] == "missing" else f"={str(first['input'])[:QUOTED_CHARS]}"
        expected = f": expected {sorted(kind.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise ValueError(f"{path or 'the body'}{shown}: {first['msg']}{expected}") from None


MAX_BODY_BYTES = 16 * 2**20
"""Limit of a request body: a longer one is refused unread. Twice the size of a prompt of a million tokens."""
RETRY_AFTER_S = 1
"""Value of ``Retry-After`` while the engine is not ready."""
BINARY = "application/octet-stream"
BUSY, UNAVAILABLE = 429, 503


def engine_app(engine: Engine, key: str = "", routes: Iterable[web.RouteDef] = ()) -> web.Application:
    """A web application that serves ``engine`` to clients with ``key``, or to all clients if it is empty. ``routes``
    are additional routes of this engine.
    """

    async def generate(request: web.Request) -> web.StreamResponse:
        prompt_ids, params, session = decode_request(await request.read())
        completion = await engine.generate(prompt_ids, params, session=session)
        return web.Response(body=encode_completion(completion), content_type=BINARY)

    async def stream(request: web.Request) -> web.StreamResponse:
        prompt_ids, params, session = decode_request(await request.read())
        response = web.StreamResponse(headers={"Content-Type": BINARY})
        async with aclosing(engine.stream(prompt_ids, params, session=session)) as chunks:
            await _send(chunks, response, request)
        return response

    async def health(_request: web.Request) -> web.StreamResponse:
        return web.json_response(asdict(await engine.health()))

    async def metrics(_request: web.Request) -> web.StreamResponse:
        state = await engine.health()
        values = {
            "etude_served_version": state.version,
            "etude_served_running": state.running,
            "etude_served_waiting": state.waiting,
        }
        return web.Response(body=gauge_page(values), headers={"Content-Type": CONTENT_TYPE})

    middlewares = [_requiring(key), _errors_as_responses] if key else [_errors_as_responses]
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    app.router.add_post("/generate", generate)
    app.router.add_post("/stream", stream)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_routes(routes)
    return app


async def _send(chunks: AsyncIterator[TokenChunk], response: web.StreamResponse, request: web.Request) -> None:
    """Write chunks as they arrive. An error before the first chunk still has its own status."""
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(encode_chunk(chunk))
    except EngineUnavailable as error:
        if response.prepared:  # too late for a status: close the connection, which ends the stream
            raise ConnectionAbortedError(f"a stream ended early: {error}") from error
        raise
    await response.write_eof()


def _requiring(key: str) -> Middleware:
    """Reject requests without the key, by a constant-time comparison."""
    expected = f"Bearer {key}"

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not same_key(request.headers.get("Authorization", ""), expected):
            return _error_response(401, WRONG_KEY)
        return await handler(request)

    return check


@web.middleware
async def _errors_as_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors to responses."""
    try:
        return await handler(request)
    except ValueError as error:
        return _error_response(400, str(error))
    except EngineBusy as error:
        return _error_response(BUSY, str(error))
    except EngineUnavailable as error:
        return _error_response(UNAVAILABLE, str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return _error_response(413, error.text or "")


def _error_response(status: int, message: str) -> web.Response:
    response = web.Response(status=status, body=orjson.dumps({"error": message}), content_type="application/json")
    if status in (BUSY, UNAVAILABLE):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


RETRY_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses between tries; the last one repeats. Short, because an engine on the same machine restarts in seconds."""
HEALTH_TIMEOUT_S = 5.0
"""Time limit of a health check: an engine that does not answer in this time is unhealthy."""

GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)

SYSTEM_CLOCK = SystemClock()


@asynccontextmanager
async def http_engines(timeout_s: float, *, key: str = "") -> AsyncIterator[Callable[[str], "HttpEngine"]]:
    """Make engine clients by URL, with no limit on calls in flight; they are closed with the context. All engines use
    ``key``.
    """
    async with ClientSession(connector=alert_connector()) as http:
        with ExitStack() as engines:
            yield lambda url: engines.enter_context(closing(HttpEngine(url, http, timeout_s, key=key)))


class HttpEngine:
    """Talks to one engine process; implements :class:`~etude.protocols.Engine`.

    ``timeout_s`` is the longest outage of an engine before a call gives up. The creator closes the client. The
    connector of ``http`` must allow a connection for each stream in flight (aiohttp's default is 100).
    """

    def __init__(
        self,
        base_url: str,
        http: aiohttp.ClientSession,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
        *,
        key: str = "",
    ) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._base_url = base_url.rstrip("/")
        self._http = http
        self._timeout_s = timeout_s
        self._clock = clock
        self._connections = ConnectionPool(base_url, self._headers, connect_s=CONNECT_TIMEOUT_S)

    def close(self) -> None:
        """Close idle connections; the caller closes ``http``."""
        self._connections.close()

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion, with retries while the engine is down. Raises ``ValueError`` with the engine's message
        if it refuses the request, and :class:`~etude.errors.EngineUnavailable` once its outages during the call exceed
        ``timeout_s`` in total.
        """
        body = encode_request(prompt_ids, params, session)
        down_s = 0.0
        for pause_s in _pauses_s():
            asked_at = self._clock.now()
            try:
                return _decoded(decode_completion, await self._post("/generate", body))
            except EngineUnavailable:
                # Time spent on an answer that was then lost is not an outage: the engine was up.
                down_s += min(self._clock.now() - asked_at, CONNECT_TIMEOUT_S) + pause_s
                if down_s > self._timeout_s:
                    raise
            await self._clock.sleep(pause_s)
        raise AssertionError("the pauses are endless")

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and yield its chunks as they arrive. A broken stream is not resumed: raises like
        :meth:`generate`, at the first failure.
        """
        body = encode_request(prompt_ids, params, session)
        async with self._request("POST", "/stream", body, GENERATE_TIMEOUT) as response:
            reader = ChunkReader()
            async for data in response.content.iter_any():
                chunk = _decoded(reader.feed, data)
                if chunk is None:
                    continue
                if chunk.completion is not None:
                    await response.content.read()  # read to the end, so that the connection can be reused
                    yield chunk
                    return
                yield chunk
            raise EngineUnavailable(f"the engine at {self._base_url} broke off its stream")

    async def health(self) -> EngineHealth:
        """Request the health once. Raises :class:`~etude.errors.EngineUnavailable` at once if there is no answer."""
        async with self._request("GET", "/health", None, HEALTH_TIMEOUT) as response:
            return _health(await response.read())

    async def _post(self, path: str, body: bytes) -> bytes:
        """Make one call; any result except an answer or a refusal means that the engine is unavailable."""
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
        """A response with status 200, while it is read."""
        url = self._base_url + path
        request = self._http.request(method, url, data=body, headers=self._headers, timeout=timeout)
        return answering(request, f"the engine at {url}", _refused)


def _refused(url: str, status: int, answer: bytes) -> Exception:
    """The error for an answer that is not a completion."""
    if status in (400, 413):
        return ValueError(_error_message(answer))
    return unavailable(status, f"the engine at {url} answered {status}: {_error_message(answer)}")


def _decoded(decode: Callable[[bytes], Answer], data: bytes) -> Answer:
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
"""A connection that was idle for this long is not reused: servers close idle connections (étude's after 75 s), and a
request sent at that moment is lost.
"""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
MAX_IDLE = 1024
"""Most idle connections."""
MAX_HEAD_BYTES = 64 * 1024
"""Longest head of an answer."""
HEAD_END = b"\r\n\r\n"
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+) *(?:\r\n|$)", re.IGNORECASE)
CONNECTION_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@final
class ConnectionPool:
    """Connections to one server; its creator closes it."""

    def __init__(self, base_url: str, headers: Mapping[str, str] = NO_HEADERS, *, connect_s: float) -> None:
        """Every request has ``headers``; ``connect_s`` is the time limit for opening a connection."""
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\n{lines}Content-Length: ".encode()
        self._connect_s = connect_s
        self._idle: deque[_EngineConnection] = deque()  # most recently used last

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer. Raises ``OSError`` and ``TimeoutError`` if there is none. Cancellation closes
        the connection.
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
        """The most recently used idle connection; closes those that were idle for too long."""
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
        """Close the connection."""
        self.reusable = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it
        make_alert(transport.get_extra_info("socket"))

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop."""
        self._fail(f"the connection was lost: {error or 'the server closed it'}")

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._answer is None:
            self._fail("the server sent data without a request")
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
        """Read status and length once the head is complete; the bytes after it begin the body."""
        data = b"".join(self._parts)
        end = data.find(HEAD_END)
        if end < 0:
            self._parts = [data]
            if len(data) > MAX_HEAD_BYTES:
                self._fail("the answer has too long a head")
            return
        head, body = data[:end], data[end + len(HEAD_END) :]
        status, length = STATUS_LINE.match(head), CONTENT_LENGTH.search(head)
        if status is None or length is None:
            self._fail("the answer is not HTTP with a length")
            return
        self.reusable = CONNECTION_CLOSE.search(head) is None
        self._parts, self._missing, self._status = [body], int(length[1]) - len(body), int(status[1])

    def _fail(self, why: str) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))
        self._transport.close()
