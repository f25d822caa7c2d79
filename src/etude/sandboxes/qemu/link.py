"""The host's end of the agent's protocol: requests with deadlines, answers, and tunnels to allowed places.

    ask ──request──▶ port ──▶ agent ──answer──▶ the caller             tunnels: etude.sandboxes.qemu.port_forwarder

Owns the socket. Reads until the machine disconnects or sends an invalid message; then all pending and later callers get
a :class:`~etude.errors.SandboxError`. Any number of requests may be in progress.
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import AgentFault, SandboxError
from etude.sandboxes.qemu.guest.agent import TUNNEL_WORDS
from etude.sandboxes.qemu.guest.frames import MESSAGE_LIMIT_BYTES, FrameError, GuestMessage, Inbox, Outbox
from etude.sandboxes.qemu.port_forwarder import PortForwarder

CHUNK_BYTES = 256 << 10
LARGE_BYTES = 1 << 20
"""Larger bodies are sent one at a time: the agent buffers incomplete bodies in memory."""
OPEN_LIMIT = 1000
"""Maximum number of requests without an answer."""


class GuestLink:
    """Sends requests to a guest agent over one socket."""

    def __init__(self, *, next_id: int = 1, allow: Sequence[str] = ()) -> None:
        """``next_id`` exceeds all ids that the agent has received, ``allow`` lists the permitted
        tunnel destinations.
        """
        self.next_id = next_id
        self._port: socket.socket | None = None
        self._outbox = Outbox()
        self._has_output = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[GuestMessage]] = {}
        self._large = asyncio.Lock()
        self._forwarders = PortForwarder(allow, lambda head, body: self.enqueue(GuestMessage(head, body)))
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._error = ""

    def open(self, port: socket.socket) -> None:
        """Start to read and write, over a socket that the link then owns."""
        port.setblocking(False)
        self._port = port
        self._tasks = (asyncio.create_task(self._read(port)), asyncio.create_task(self._write(port)))

    async def ask(self, do: str, head: Mapping[str, Any], body: bytes = b"", *, timeout_s: float) -> GuestMessage:
        """Send a request to the agent.

        Raises :class:`~etude.errors.SandboxError` if there is no answer or the request failed, ``ValueError`` if the
        agent reports a caller's error.
        """
        if len(body) > MESSAGE_LIMIT_BYTES - LARGE_BYTES:
            raise ValueError(f"{len(body)} bytes are more than a virtual machine takes at a time: use several files")
        if self._error or len(self._waiting) >= OPEN_LIMIT:
            raise SandboxError(self._error or f"{OPEN_LIMIT} questions wait for a virtual machine's answer already")
        number, self.next_id = self.next_id, self.next_id + 1
        future: asyncio.Future[GuestMessage] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(GuestMessage({"do": do, "id": number, **head}, body))
                answer = await future
        except TimeoutError:
            raise SandboxError(f"the virtual machine did not answer {do!r} within {timeout_s} s") from None
        except asyncio.CancelledError:
            if do == "exec":
                self.enqueue(GuestMessage({"do": "kill", "id": 0, "command": number}))
            raise
        finally:
            self._waiting.pop(number, None)
        return _judge(answer)

    def enqueue(self, message: GuestMessage) -> None:
        """Send a message that has no answer."""
        self._outbox.add(message)
        self._has_output.set()

    async def drain(self) -> None:
        """Wait until all messages are sent."""
        while self._outbox and not self._error:
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """Disconnect."""
        self._fail("the virtual machine is closed")
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            if self._port is not None:
                self._port.close()
            await self._forwarders.close()

    async def _send(self, message: GuestMessage) -> None:
        if len(message.body) < LARGE_BYTES:
            self.enqueue(message)
            return
        async with self._large:
            self.enqueue(message)
            await self.drain()

    async def _read(self, port: socket.socket) -> None:
        inbox, loop = Inbox(), asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(port, CHUNK_BYTES):
                for message in inbox.feed(data):
                    self._receive(message)
        except (OSError, FrameError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._fail(f"the virtual machine talks nonsense: {error!r}")
        else:
            self._fail("the virtual machine ended")

    async def _write(self, port: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._has_output.wait()
                while self._outbox:
                    await loop.sock_sendall(port, self._outbox.next_frame())
                self._has_output.clear()
        except OSError as error:
            self._fail(f"the virtual machine hung up: {error}")

    def _receive(self, message: GuestMessage) -> None:
        head = message.head
        if head.get("do") == "open" or head.get("do") in TUNNEL_WORDS:
            self._forwarders.receive(head, message.body)
        else:
            future = self._waiting.get(head["re"])
            if future is not None and not future.done():
                future.set_result(message)

    def _fail(self, reason: str) -> None:
        self._error = self._error or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError(self._error))


def _judge(answer: GuestMessage) -> GuestMessage:
    error = answer.head.get("error")
    if error is None:
        return answer
    kind, words = error
    raise {"value": ValueError, "agent": AgentFault}.get(kind, SandboxError)(str(words))
