"""QEMU's own language, QMP: one command after the other over a socket, each with a deadline.

Owns the socket and the errors. What is asked for is :mod:`etude.sandboxes.qemu.machine`'s.
"""

import asyncio
import socket
from typing import Self

import orjson

from etude.errors import SandboxError

TIMEOUT_S = 60.0
"""For QEMU to do what it is told."""
LINE_LIMIT_BYTES = 1 << 20
"""Of what QEMU says at a time."""


class Control:
    """A way to tell one QEMU process what to do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, channel: socket.socket) -> Self:
        """Greet the process at the other end. Raises :class:`~etude.errors.SandboxError` when it does not answer."""
        control = cls(*await asyncio.open_connection(sock=channel, limit=LINE_LIMIT_BYTES))
        try:
            await control.ask("qmp_capabilities")
        except BaseException:
            control.close()
            raise
        return control

    async def ask(self, command: str, **arguments: object) -> object:
        """Have something done and return what it gives. Raises :class:`~etude.errors.SandboxError`."""
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    self._writer.write(orjson.dumps({"execute": command, "arguments": arguments}) + b"\n")
                    await self._writer.drain()
                    return await self._result()
            except TimeoutError:
                raise SandboxError(f"QEMU did not do {command!r} within {TIMEOUT_S} s") from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise SandboxError(f"QEMU did not do {command!r}: {error}") from error

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def _result(self) -> object:
        """What a command gives; news that nobody asked for is skipped."""
        while line := await self._reader.readline():
            answer = orjson.loads(line)
            if "error" in answer:
                raise ValueError(answer["error"]["desc"])
            if "return" in answer:
                return answer["return"]
        raise ValueError("it ended")
