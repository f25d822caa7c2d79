"""HTTP in and out: the one file that knows which web server carries the gateway, and which path means what.

    /v1/chat/completions, …       model calls, by API protocol     /sessions, /keys, /engines     who runs the gateway
    /s/{session}/v1/…             the same, in a session           /healthz /metrics /openapi.json

Owns bytes on a connection (bodies with a limit and a deadline, whole responses, streams of server-sent events) and the
patterns of paths. A session is named in a path by its id, or by its key for tools that take a base URL and nothing
else; which of them it is, is decided in :mod:`etude.gateway.http.auth`. Knows no handler and no key.

aiohttp's low-level server: with the same client behind it, neither its router nor a raw ASGI server is measurably
faster or slower, and this one cancels a handler whose caller hung up at no cost, which ASGI does not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, final
from urllib.parse import unquote

import orjson
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from etude.gateway.api.calls import ApiError
from etude.gateway.api.fields import Fields, read_object
from etude.gateway.request_log import RequestRecord
from etude.types import Json

BODY_S = 60.0
"""Longest time for a body to arrive after its headers: enough for a large one over a slow line."""
MAX_BODY_BYTES = 16 * 2**20
"""Longer requests are refused unread; a context of a million tokens fits."""
JSON, EVENTS = "application/json", "text/event-stream"
SERVER = ("Server", "etude")
"""No version: it would only help attackers."""
SESSION_PREFIX = "/s/"
PARAMETER = "{}"
"""Stands for the last segment of a path."""

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Headers = ()


class HttpRequest(Protocol):
    """One request, and the way back to its caller."""

    @property
    def method(self) -> str:
        """``GET``, ``POST``, …"""
        ...

    @property
    def path(self) -> str:
        """The path as it was sent, percent signs and all, without the query."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in any case."""
        ...

    async def read(self) -> bytes:
        """Read the body. Raises :class:`~etude.gateway.api.calls.ApiError`: 413 if it is too large, 408 if it does not
        come.
        """
        ...

    async def open(self, headers: Headers) -> None:
        """Begin a stream of server-sent events with status 200."""
        ...

    async def write(self, data: bytes) -> None:
        """Send events; waits for a caller that reads slowly. Raises ``ConnectionError`` if it is gone."""
        ...


RequestHandler = Callable[[HttpRequest], Awaitable[HttpResponse | None]]
"""Answers one request: by a response, or by ``None`` if it was streamed. Cancelled when the caller hangs up."""


def http_server(handle: RequestHandler, *, max_body_bytes: int = MAX_BODY_BYTES, body_s: float = BODY_S) -> web.Server:
    """A web server around ``handle``, to be made in the event loop that will run it.

    A body may be as large as ``max_body_bytes`` and take ``body_s`` seconds.
    """
    loop = asyncio.get_running_loop()

    async def serve(received: web.BaseRequest) -> web.StreamResponse:
        request = AiohttpRequest(received, body_s)
        response = await handle(request)
        return request.stream if response is None else _aiohttp_response(response)

    def request_of(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body_bytes)

    return web.Server(serve, request_factory=request_of, handler_cancellation=True)


@final
class AiohttpRequest:
    """An :class:`HttpRequest` over aiohttp."""

    def __init__(self, request: web.BaseRequest, body_s: float) -> None:
        self._request = request
        self._body_s = body_s
        self.stream = web.StreamResponse()
        """The stream of events, once it was opened."""
        self.method = request.method
        self.path = request.raw_path.partition("?")[0]
        self.headers: Mapping[str, str] = request.headers

    async def read(self) -> bytes:
        """See :meth:`HttpRequest.read`."""
        request, limit = self._request, self._request.client_max_size
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        try:
            if request.content.is_eof():
                return await request.read()
            await self._invite()
            async with asyncio.timeout(self._body_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large(limit) from error
        except TimeoutError as error:
            raise ApiError(408, "body_timeout", f"the body did not arrive within {self._body_s:g} s") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise ApiError(400, "invalid_request", f"the body is not encoded as its headers say: {error}") from error

    async def open(self, headers: Headers) -> None:
        """See :meth:`HttpRequest.open`."""
        self.stream.headers.extend((*headers, ("Content-Type", EVENTS), ("Cache-Control", "no-store"), SERVER))
        await self.stream.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """See :meth:`HttpRequest.write`."""
        await self.stream.write(data)

    async def _invite(self) -> None:
        """Tell a caller that waits for it to send its body; curl does with large ones."""
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            writer = self._request.writer
            await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            writer.output_size = 0  # nothing of the response was sent yet


def _aiohttp_response(response: HttpResponse) -> web.Response:
    sent = web.Response(body=response.body, status=response.status)
    sent.headers.extend((*response.headers, ("Content-Type", response.content_type), SERVER))
    return sent


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {limit} bytes: send less at a time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path, taken apart."""

    pattern: str
    """The pattern that matched, for logs: it holds no part that a caller chose."""
    handlers: Mapping[str, "Handler"]
    """Method → handler."""
    session: str | None = None
    """The segment behind ``/s/``."""
    parameter: str = ""
    """The segment that ``{}`` stands for."""

    @property
    def bare_pattern(self) -> str:
        """The pattern without its session."""
        return self.pattern if self.session is None else self.pattern.removeprefix(SESSION_PREFIX + "{session}")

    def handler(self, method: str) -> "Handler":
        """The handler of a method. Raises :class:`~etude.gateway.api.calls.ApiError` with 405."""
        handler = self.handlers.get(method)
        if handler is None:
            allowed = ", ".join(sorted(self.handlers))
            raise ApiError(405, "method_not_allowed", f"{self.pattern} takes {allowed} only", param=allowed)
        return handler


Handler = Callable[[HttpRequest, Route, RequestRecord], Awaitable[HttpResponse | None]]
RouteTable: TypeAlias = Mapping[str, Mapping[str, Handler]]
"""Pattern → method → handler."""


class Routes:
    """Patterns and their handlers. ``below_session`` are those that also exist behind ``/s/{session}``."""

    def __init__(self, table: RouteTable, below_session: RouteTable) -> None:
        everywhere = {**table, **below_session}
        self._all = {pattern: Route(pattern=pattern, handlers=handlers) for pattern, handlers in everywhere.items()}
        self._below_session = below_session

    def match(self, path: str) -> Route | None:
        """The route of a path; ``None`` if there is none."""
        fixed = self._all.get(path)
        if fixed is not None and PARAMETER not in path:
            return fixed
        if path.startswith(SESSION_PREFIX):
            session, _, rest = path[len(SESSION_PREFIX) :].partition("/")
            inner = self.match("/" + rest) if session and not rest.startswith("s/") else None
            if inner is None or inner.pattern not in self._below_session:
                return None
            return replace(inner, pattern=SESSION_PREFIX + "{session}" + inner.pattern, session=unquote(session))
        stem, _, leaf = path.rpartition("/")
        open_ended = self._all.get(f"{stem}/{PARAMETER}") if leaf else None
        return None if open_ended is None else replace(open_ended, parameter=unquote(leaf))


async def read_fields(request: HttpRequest, record: RequestRecord) -> Fields:
    """The fields of a body, which may be empty. Raises :class:`~etude.gateway.api.calls.ApiError`."""
    body = await request.read()
    record.bytes_in = len(body)
    return read_object(body or b"{}")


def json_response(record: RequestRecord, facts: Mapping[str, Json], status: int = 200) -> HttpResponse:
    """A response of JSON, noted in ``record``."""
    return bytes_response(record, orjson.dumps(facts), status=status)


def bytes_response(record: RequestRecord, body: bytes, content_type: str = JSON, *, status: int = 200) -> HttpResponse:
    """A response, noted in ``record``."""
    record.status, record.bytes_out = status, len(body)
    return HttpResponse(body=body, status=status, content_type=content_type)
