"""Connection limits of HTTP servers: idle time, number, and logging of malformed requests.

    accept ──▶ NEW ──a whole request──▶ BUSY ──answered──▶ IDLE ──the next──▶ BUSY
                └──────── IDLE_S over, or its slot is needed ──┴──▶ closed

These are the limits that aiohttp leaves to its user: a caller without a key must not hold connections forever, exhaust
the file descriptors of the process, or get its request, which may contain a key, into a log. Every server of étude
listens through :class:`LimitedSite`.

The number of connections follows from the limit on open files: the kernel assigns the lowest free descriptor, so the
descriptor of a new connection shows how many files of any kind are open.
"""

import asyncio
import logging
import resource
import socket
import ssl
import sys
from contextlib import suppress
from functools import partial
from typing import Any, final

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError

from etude.errors import trace_of
from etude.gateway.http.app import SERVER

IDLE_S = 75.0
"""Longest time of a connection without a request: before the headers of its first request are complete, or after an
answer. It is nginx's value; our clients and common proxies close an idle connection sooner, so that no request hits a
closing connection.
"""
STALLED_S = 60.0
"""Longest time in which the other side acknowledges no sent data before the kernel drops the connection."""
HANDSHAKE_S = 10.0
"""Longest time for the TLS handshake."""
BACKLOG = 128
"""Backlog of connections that the kernel accepts: this many may arrive at once."""
RESERVE = 256
"""File descriptors reserved for everything else, including connections to engines: twice the backlog, at most half of
all.
"""
ROOM = 2
"""Idle connections closed for a new one: one for itself, and one for the connection to an engine that it may need."""
REPORT_S = 60.0
"""Shortest interval between log lines with the number of malformed requests."""
MALFORMED = (HttpProcessingError, web.RequestPayloadError)
"""Errors of aiohttp for requests that are not HTTP, and for bodies whose encoding contradicts their headers."""

logger = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Raise this process's limit of open files to its hard limit; the usual 1,024 is for ``select``."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connection_limit(files: int) -> int:
    """Number of open files, of at most ``files``, above which a new connection replaces an idle one."""
    return sys.maxsize if files == resource.RLIM_INFINITY else files - min(RESERVE, files // 2)


@final
class Connections:
    """The idle connections of a process, in the order in which they are closed; shared by all its servers.

    Connections without any request are closed first, then those idle longest. Busy connections are never closed.
    """

    def __init__(self, limit: int | None = None, *, idle_s: float = IDLE_S, stalled_s: float = STALLED_S) -> None:
        """``limit`` is :func:`connection_limit` of this process by default."""
        self.limit = connection_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) if limit is None else limit
        self.idle_s = idle_s
        self.stalled_s = stalled_s
        self.malformed = 0
        """Number of requests that were not HTTP."""
        self._new: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._reported_s: float | None = None

    def add(self, connection: "Connection", files: int) -> None:
        """Add a new connection while ``files`` are open. At the limit idle ones are closed to make room, or else the
        new one.
        """
        if files >= self.limit:
            idle = [*self._new, *self._idle][:ROOM]
            for one in idle or [connection]:
                one.force_close()
                self.remove(one)
            if not idle:
                return
        self._new[connection] = None

    def watch(self, server: web.Server) -> None:
        """Mark connections as busy from the moment at which ``server`` has a whole request."""
        read = server.request_factory

        def begin(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            self.remove(protocol)
            return read(message, payload, protocol, writer, task)

        server.request_factory = begin

    def end(self, connection: "Connection") -> None:
        """Mark a connection as idle after its answer."""
        if connection.transport is not None:  # otherwise it was lost meanwhile
            self._idle[connection] = None

    def remove(self, connection: "Connection") -> None:
        """Remove a connection that is closed or busy."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)

    def count_malformed(self, now_s: float) -> None:
        """Count one malformed request, and log the number unless that was done recently."""
        self.malformed += 1
        if self._reported_s is None or now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            logger.warning("%d malformed HTTP requests so far; what they say is not logged", self.malformed)


@final
class Connection(web.RequestHandler):
    """One connection, whose requests go to ``server``."""

    __slots__ = ("_connections",)

    def __init__(self, server: web.Server, connections: Connections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=connections.idle_s,  # for the first request, from the start of the connection
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # none is what it takes for none
        )
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start as aiohttp does, if there is room."""
        super().connection_made(transport)
        taken = transport.get_extra_info("socket")
        if sys.platform == "linux":
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * self._connections.stalled_s))
        self._connections.add(self, taken.fileno())

    def connection_lost(self, exc: BaseException | None) -> None:
        """End as aiohttp does."""
        self._connections.remove(self)
        super().connection_lost(exc)

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Called after every answer; handlers write the access log themselves."""
        self._connections.end(self)

    def log_exception(self, *args: Any, exc_info: BaseException | None = None, **others: Any) -> None:
        """Log an error without its message, which may quote a request; log nothing for a body that was not read."""
        if not isinstance(exc_info, MALFORMED):
            logger.error("a connection failed: %s", "for no reason" if exc_info is None else trace_of(exc_info))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a malformed request or a failed handler; it ends the connection."""
        if isinstance(exc, MALFORMED):
            status = 400
            self._connections.count_malformed(asyncio.get_running_loop().time())
            text = f"malformed request: {type(exc).__name__}"
        else:
            logger.error("a request failed: %s", "too late" if exc is None else trace_of(exc))
            text = "the server failed"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun, there cannot be another one")
        response = web.Response(status=status, text=text, headers=dict([SERVER]))
        response.force_close()
        return response


@final
class LimitedSite(web.BaseSite):
    """A listening address of a runner's server; its connections are counted in ``connections``."""

    def __init__(
        self,
        runner: web.BaseRunner,
        address: tuple[str, int] | socket.socket,
        connections: Connections,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        """``address`` may be a socket that is bound already."""
        self._socket = address if isinstance(address, socket.socket) else None
        self._address: tuple[str, int] = address.getsockname()[:2] if isinstance(address, socket.socket) else address
        self._connections = connections

    @property
    def name(self) -> str:
        """Its address."""
        host, port = self._address
        return f"{'http' if self._ssl_context is None else 'https'}://{host}:{port}"

    async def start(self) -> None:
        """Listen. Raises ``OSError`` if the address is not available."""
        await super().start()
        server, connections = self._runner.server, self._connections
        assert server is not None, "the runner was set up"
        listen = partial(
            asyncio.get_running_loop().create_server,
            lambda: Connection(server, connections),
            ssl=self._ssl_context,
            ssl_handshake_timeout=None if self._ssl_context is None else HANDSHAKE_S,
            backlog=self._backlog,
        )
        if self._socket is not None:
            self._server = await listen(sock=self._socket)
        else:
            host, port = self._address
            self._server = await listen(host=host, port=port, reuse_address=True)
