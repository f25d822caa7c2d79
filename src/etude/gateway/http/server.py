"""HTTP in and out: the one file that knows which web server carries the gateway.

Owns bytes on a connection: bodies with a limit and a deadline, whole answers, streams of server-sent events. Knows no
route and no key (:mod:`etude.gateway.http.app`).

aiohttp's low-level server: with the same client behind it, neither its router nor a raw ASGI server is measurably
faster or slower, and this one cancels a handler whose caller hung up at no cost, which ASGI does not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from etude.gateway.api.calls import Refusal

BODY_S = 60.0
"""How long a body may take to arrive after its headers: a large one over a slow line, but nobody holds a connection."""
JSON, EVENTS = "application/json", "text/event-stream"
SERVER = ("Server", "etude")
"""No version: it would only help who looks for holes."""

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: Headers = ()


class Visitor(Protocol):
    """One request, and the way back to who made it."""

    @property
    def method(self) -> str:
        """``GET``, ``POST``, …"""
        ...

    @property
    def path(self) -> str:
        """As it was sent, percent signs and all, without the query."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in any case."""
        ...

    async def read(self) -> bytes:
        """The body. Raises :class:`~etude.gateway.api.calls.Refusal`: 413 if it is too large, 408 if it does not
        come.
        """
        ...

    async def open(self, headers: Headers) -> None:
        """Begin a stream of server-sent events with status 200."""
        ...

    async def write(self, data: bytes) -> None:
        """Send events; waits for a caller that reads slowly. Raises ``ConnectionError`` if it is gone."""
        ...


Handle = Callable[[Visitor], Awaitable[Reply | None]]
"""Answers one request: by a reply, or by ``None`` if it was streamed. Cancelled when the caller hangs up."""


def door(handle: Handle, *, max_body_bytes: int, body_s: float = BODY_S) -> web.Server:
    """A web server around ``handle``, to be made in the event loop that will run it.

    A body may be as large as ``max_body_bytes`` and take ``body_s`` seconds.
    """
    loop = asyncio.get_running_loop()

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        visitor = HttpVisitor(request, body_s)
        reply = await handle(visitor)
        return visitor.stream if reply is None else _response(reply)

    def request_of(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body_bytes)

    return web.Server(serve, request_factory=request_of, handler_cancellation=True)


@final
class HttpVisitor:
    """A :class:`Visitor` over aiohttp."""

    def __init__(self, request: web.BaseRequest, body_s: float) -> None:
        self._request = request
        self._body_s = body_s
        self.stream = web.StreamResponse()
        """What was opened."""
        self.method = request.method
        self.path = request.raw_path.partition("?")[0]
        self.headers: Mapping[str, str] = request.headers

    async def read(self) -> bytes:
        """As the protocol says."""
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
            raise Refusal(408, "body_timeout", f"the body did not arrive within {self._body_s:g} s") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise Refusal(400, "invalid_request", f"the body is not encoded as its headers say: {error}") from error

    async def open(self, headers: Headers) -> None:
        """As the protocol says."""
        self.stream.headers.extend((*headers, ("Content-Type", EVENTS), ("Cache-Control", "no-store"), SERVER))
        await self.stream.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """As the protocol says."""
        await self.stream.write(data)

    async def _invite(self) -> None:
        """Tell a caller that waits for it to send its body; curl does with large ones."""
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            writer = self._request.writer
            await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            writer.output_size = 0  # nothing of the answer was sent yet


def _response(reply: Reply) -> web.Response:
    response = web.Response(body=reply.body, status=reply.status)
    response.headers.extend((*reply.headers, ("Content-Type", reply.content_type), SERVER))
    return response


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "request_too_large", f"the body is larger than {limit} bytes: send less at a time")
