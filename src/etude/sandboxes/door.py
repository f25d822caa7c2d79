"""The outer half of a bubble's door: a Unix socket that leads to one address and nowhere else.

    bubble ──▶ doorway ──▶ this socket ──TCP, TLS for https──▶ gateway

Owns connections, not what is said over them; whoever may use the gateway has a key. States: new ──open──▶ open
──close──▶ closed. Waits for the gateway with a deadline; on close every connection is cut.
"""

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
"""For the gateway to accept; a caller that is cut off asks again."""
MAX_CONNECTIONS = 1024
"""At a time, over all bubbles; one more is cut off at once."""
COPY_BYTES = 1 << 16


class Door:
    """Carries bytes between a Unix socket and the host and port of one URL."""

    def __init__(self, url: str) -> None:
        """``url`` is ``http`` or ``https``; its path is the caller's business. Raises ``ValueError`` for any other."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a door leads to an http or https address, not to {url!r}")
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self.port = parts.port or (443 if self._tls else 80)
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()

    async def open(self, socket: Path, *, owner: int | None) -> None:
        """Listen at ``socket``, for user ``owner`` alone (``None``: this process's own)."""
        self._server = await asyncio.start_unix_server(self._accept, socket, limit=COPY_BYTES)
        if owner is not None:
            os.chown(socket, owner, owner)
        os.chmod(socket, 0o600)  # noqa: PTH101 - of a path, but nothing to wait for

    async def close(self) -> None:
        """Cut every connection and stop listening; calling it twice is harmless."""
        if self._server is not None:
            self._server.close()
            for task in self._carrying:
                task.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._carrying) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both ways until both have ended; trouble on either cuts both."""
        ends = [writer]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                answers, beyond = await asyncio.open_connection(self._host, self.port, ssl=self._tls or None)
            ends.append(beyond)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, beyond))
                both.create_task(_copy(answers, writer))
        except (OSError, ExceptionGroup):
            pass  # the caller sees its connection end; it knows what it wanted
        except asyncio.CancelledError:
            for end in ends:
                end.transport.abort()
            raise
        finally:
            for end in ends:
                end.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy to the end of ``source`` and pass that on. Raises ``OSError`` when either is broken."""
    while data := await source.read(COPY_BYTES):
        sink.write(data)
        await sink.drain()
    if not sink.can_write_eof():
        raise ConnectionAbortedError("TLS cannot be ended one way: who asked over it is gone")
    sink.write_eof()
