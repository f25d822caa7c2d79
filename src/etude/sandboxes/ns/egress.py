"""The outer half of a sandbox's way out: carries connections from its listeners to the places that it may reach.

    command ──▶ listener in the sandbox (etude.sandboxes.ns.network) ──accepted here──▶ host:port

Owns connections, not what is said over them; encryption passes through. The listeners were made inside of the sandbox
and are accepted from outside, so there is no process of ours in there. States: open ──close──▶ closed. Waits for a
place to accept with a deadline; on close every connection is cut.
"""

import asyncio
import functools
import socket
from collections.abc import Sequence

from etude.sandboxes.egress import connect
from etude.sandboxes.ns.network import Place

CONNECT_TIMEOUT_S = 10.0
"""For a place to accept; a caller that is cut off asks again."""
MAX_CONNECTIONS = 64
"""Of one sandbox at a time; one more is cut off at once."""
COPY_BYTES = 1 << 16


class Doors:
    """All ways out of one sandbox."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[None]] = set()

    async def open(self, places: Sequence[Place], listeners: Sequence[int]) -> None:
        """Serve each place's listener, which is ours from now on."""
        for place, descriptor in zip(places, listeners, strict=True):
            accept = functools.partial(self._accept, place)
            listener = socket.socket(fileno=descriptor)
            self._servers.append(await asyncio.start_server(accept, sock=listener, limit=COPY_BYTES))

    async def close(self) -> None:
        """Cut every connection and stop listening; calling it twice is harmless."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def _accept(self, place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._carrying) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(_carry(place, reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)


async def _carry(place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways until both have ended; trouble on either cuts both."""
    ends = [writer]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answers, beyond = await connect(place.host, place.port)
        ends.append(beyond)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, beyond))
            both.create_task(_copy(answers, writer))
    except (OSError, ExceptionGroup):
        writer.transport.abort()  # the caller sees its connection cut; it knows what it wanted
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
    sink.write_eof()
