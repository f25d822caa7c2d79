"""Kept-alive connections for short exchanges: whole requests, whole answers, nothing in between.

A general HTTP client takes 60 to 150 µs of CPU for an exchange, ten times what it takes where the form of the answer is
known, and that would be the largest part of a gateway's work. Owns connections and the bytes on them; what they mean is
the caller's business. Understands answers with a ``Content-Length``, anything else is an error: streams go over a
general client.
"""

import asyncio
import re
import ssl
from collections import deque
from typing import cast, final
from urllib.parse import urlsplit

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
class Lines:
    """Connections to one server; to be closed by who made it."""

    def __init__(self, base_url: str, *, connect_s: float) -> None:
        """``connect_s`` is how long a connection may take to be made."""
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode()
        self._head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: ".encode()
        self._connect_s = connect_s
        self._idle: deque[_Line] = deque()  # the last used one last

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer. Raises ``OSError`` and ``TimeoutError`` when there is none.

        Being cancelled hangs up.
        """
        line = self._free() or await self._connect()
        try:
            answer = await line.exchange(
                b"POST %b%b%b%d\r\n\r\n%b" % (self._prefix, path.encode(), self._head, len(body), body)
            )
        except BaseException:
            line.close()
            raise
        if line.reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(line)
        else:
            line.close()
        return answer

    def close(self) -> None:
        """Close the connections that nobody uses; the others close with their exchange."""
        while self._idle:
            self._idle.pop().close()

    def _free(self) -> "_Line | None":
        """The line that was used last; those that were idle for too long are closed."""
        oldest_at = asyncio.get_running_loop().time() - IDLE_S
        while self._idle and self._idle[0].used_at < oldest_at:
            self._idle.popleft().close()
        while self._idle:
            line = self._idle.pop()
            if line.reusable:
                return line
        return None

    async def _connect(self) -> "_Line":
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, line = await loop.create_connection(_Line, self._host, self._port, ssl=self._tls)
        return line


@final
class _Line(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        """Whether another exchange may follow."""
        self.used_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._missing = 0
        self._status = 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def exchange(self, request: bytes) -> tuple[int, bytes]:
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
