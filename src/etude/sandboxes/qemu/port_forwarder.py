"""The host's end of a virtual machine's tunnels: connections to the places that its spec allows.

The agent names the place that a command requests; connections are made only to allowed places, whatever the agent says.
Owns the connections; :mod:`etude.sandboxes.qemu.guest.tunnels` is the end inside. One task per connection, each with
bounded buffers.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from etude.sandboxes.egress import connect
from etude.sandboxes.qemu.guest.tunnels import CHUNK_BYTES, MAX_TUNNELS, WINDOW_BYTES

CONNECT_TIMEOUT_S = 10.0

Send = Callable[[dict[str, Any], bytes], None]


class PortForwarder:
    """The tunnelled connections of one machine."""

    def __init__(self, allow: Sequence[str], send: Send) -> None:
        self._allow = frozenset(allow)
        self._send = send
        self._open: dict[int, _Forwarder] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, head: dict[str, Any], body: bytes) -> None:
        """Process an agent's message about a tunnel; unknown messages are ignored.

        Raises ``KeyError``, ``TypeError``, ``ValueError`` or ``OverflowError`` for a head without its numbers.
        """
        number = int(head["tunnel"])
        if head["do"] == "open":
            self._start(number, str(head["place"]))
        elif forwarder := self._open.get(number):
            forwarder.receive(head["do"], body, int(head.get("bytes", 0)))

    async def close(self) -> None:
        """Close every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, number: int, place: str) -> None:
        if place not in self._allow or number in self._open or len(self._open) >= MAX_TUNNELS:
            self._send({"do": "shut", "tunnel": number}, b"")
            return
        forwarder = _Forwarder(number, self._send)
        self._open[number] = forwarder
        task = asyncio.create_task(forwarder.run(place))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._forget(number, task))

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        self._open.pop(number, None)
        self._tasks.discard(task)


class _Forwarder:
    """One connection: copies data from the tunnel to the place and back."""

    def __init__(self, number: int, send: Send) -> None:
        self._number = number
        self._send = send
        self._waiting = bytearray()
        self._ahead_bytes = 0
        self._ended = self._broken = False
        self._news = asyncio.Event()
        self._taken = asyncio.Event()

    def receive(self, do: str, body: bytes, count: int) -> None:
        """Handle ``data``, ``end``, ``ack`` or ``shut``."""
        self._waiting += body
        self._ahead_bytes -= count
        self._ended |= do == "end"
        self._broken |= do == "shut" or len(self._waiting) > 2 * WINDOW_BYTES
        self._news.set()
        self._taken.set()

    async def run(self, place: str) -> None:
        """Connect, copy, close."""
        host, _, port = place.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await connect(host, int(port))
        except (OSError, TimeoutError):
            self._send({"do": "shut", "tunnel": self._number}, b"")
            return
        back = asyncio.create_task(self._carry_back(reader))
        try:
            await self._carry_out(writer)
            await back
            writer.close()
            await writer.wait_closed()
        except OSError:
            pass  # one end is gone; the other is notified below
        finally:
            writer.transport.abort()  # do not wait for a peer that does not read
            self._send({"do": "shut", "tunnel": self._number}, b"")
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    async def _carry_out(self, writer: asyncio.StreamWriter) -> None:
        while not self._broken:
            if self._waiting:
                data = bytes(self._waiting)
                self._waiting.clear()
                writer.write(data)
                await writer.drain()
                self._send({"do": "ack", "tunnel": self._number, "bytes": len(data)}, b"")
            elif self._ended:
                writer.write_eof()
                return
            else:
                await self._pause()
        raise ConnectionError("the command hung up")

    async def _carry_back(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK_BYTES):
            self._ahead_bytes += len(data)
            self._send({"do": "data", "tunnel": self._number}, data)
            await self._settle(WINDOW_BYTES)
        self._send({"do": "end", "tunnel": self._number}, b"")
        await self._settle(1)

    async def _settle(self, limit_bytes: int) -> None:
        """Wait until the command has read all but less than ``limit_bytes``."""
        while self._ahead_bytes >= limit_bytes and not self._broken:
            self._taken.clear()
            await self._taken.wait()

    async def _pause(self) -> None:
        self._news.clear()
        await self._news.wait()
