"""Output pipes of commands, read as they fill, for as long as any process may write to them.

Owns both ends, and the writing one until a command has its copy of it. What comes after a command has ended is its
descendants' and is thrown away, but read: a server that logs must not stop for lack of a reader.
"""

import asyncio
import fcntl
import os
import struct
import termios
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import BinaryIO, Self

from etude.protocols import ExecResult


class OutputPipe(asyncio.Protocol):
    """Pipe that keeps the first ``limit_bytes`` of an output."""

    def __init__(self, limit_bytes: int, file: BinaryIO, theirs: int) -> None:
        self._limit_bytes = limit_bytes
        self._file = file
        self._transport: asyncio.ReadTransport | None = None
        self._keeps = True
        self.theirs = theirs
        """The end to write to, until :meth:`close_write_end`; then -1."""
        self.data = bytearray()
        self.truncated = False
        """True once something was thrown away that a command had printed."""

    @classmethod
    async def open(cls, limit_bytes: int) -> Self:
        """Make a pipe and begin to read."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        file = os.fdopen(ours, "rb", buffering=0)
        pipe = cls(limit_bytes, file, theirs)
        try:
            pipe._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: pipe, file)
        except BaseException:
            file.close()
            os.close(theirs)
            raise
        return pipe

    @property
    def text(self) -> str:
        """The bytes kept, as text; those that are no UTF-8 are shown as such."""
        return self.data.decode("utf-8", "replace")

    @property
    def is_open(self) -> bool:
        """True while a process may still write to it."""
        return self._transport is not None and not self._transport.is_closing()

    def close_write_end(self) -> None:
        """Close our copy of the end to write to; calling it twice is harmless."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def finish(self) -> None:
        """Take what is in the pipe now, which is the last that is kept."""
        if self._keeps and self.is_open:
            left = struct.unpack("i", fcntl.ioctl(self._file, termios.FIONREAD, bytes(4)))[0]
            while left > 0 and (data := os.read(self._file.fileno(), left)):
                self.data_received(data)
                left -= len(data)
        self._keeps = False

    def close(self) -> None:
        """Stop listening: who writes now finds the pipe broken. Calling it twice is harmless."""
        self._keeps = False
        self.close_write_end()
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take what was printed."""
        if self._keeps:
            room = self._limit_bytes - len(self.data)
            self.data += data[:room]
            self.truncated |= len(data) > room


def exec_result(outputs: Sequence[OutputPipe], exit_code: int, *, timed_out: bool, start_s: float) -> ExecResult:
    """The result of a command that ended, with its outputs so far; it began at ``start_s``, monotonic."""
    for pipe in outputs:
        pipe.finish()
    stdout, stderr = outputs
    return ExecResult(
        exit_code=exit_code,
        stdout=stdout.text,
        stderr=stderr.text,
        timed_out=timed_out,
        truncated=stdout.truncated or stderr.truncated,
        seconds=time.monotonic() - start_s,
    )


class DescendantOutputs:
    """Drains the outputs of commands that ended but left a process that may still print.

    At most ``limit`` are listened to; who writes to the oldest finds it broken.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pipes: deque[OutputPipe] = deque()

    def add(self, pipes: Iterable[OutputPipe]) -> None:
        """Listen to the pipes of a command that ended, if any process still has them open."""
        for pipe in pipes:
            pipe.close_write_end()
            pipe.finish()
            self._pipes.append(pipe)
        self._pipes = deque(pipe for pipe in self._pipes if pipe.is_open)
        while len(self._pipes) > self._limit:
            self._pipes.popleft().close()

    def close(self) -> None:
        """Listen to nothing any more."""
        while self._pipes:
            self._pipes.popleft().close()
