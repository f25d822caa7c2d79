"""Output pipes of commands, read continuously as long as any process may write to them.

Owns both ends, the write end until a command has its copy. Output after a command has ended comes from its descendants:
it is read, because a server that logs must not block, and discarded.
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
    """A pipe that stores the first ``limit_bytes`` of an output."""

    def __init__(self, limit_bytes: int, file: BinaryIO, theirs: int) -> None:
        self._limit_bytes = limit_bytes
        self._file = file
        self._transport: asyncio.ReadTransport | None = None
        self._keeps = True
        self.theirs = theirs
        """The write end, until :meth:`close_write_end`; then -1."""
        self.data = bytearray()
        self.truncated = False
        """True once output of the command was discarded."""

    @classmethod
    async def open(cls, limit_bytes: int) -> Self:
        """Make a pipe and start to read."""
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
        """The stored bytes as text; bytes that are not UTF-8 are escaped."""
        return self.data.decode("utf-8", "replace")

    @property
    def is_open(self) -> bool:
        """True while a process may still write to it."""
        return self._transport is not None and not self._transport.is_closing()

    def close_write_end(self) -> None:
        """Close this process's copy of the write end; calling it twice is harmless."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def finish(self) -> None:
        """Read what is in the pipe now; later output is discarded."""
        if self._keeps and self.is_open:
            left = struct.unpack("i", fcntl.ioctl(self._file, termios.FIONREAD, bytes(4)))[0]
            while left > 0 and (data := os.read(self._file.fileno(), left)):
                self.data_received(data)
                left -= len(data)
        self._keeps = False

    def close(self) -> None:
        """Stop reading: later writers get a broken pipe. Calling it twice is harmless."""
        self._keeps = False
        self.close_write_end()
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Store output that has arrived."""
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

    At most ``limit`` pipes are read; writers to the oldest get a broken pipe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pipes: deque[OutputPipe] = deque()

    def add(self, pipes: Iterable[OutputPipe]) -> None:
        """Keep reading the pipes of a command that ended, if any process still has them open."""
        for pipe in pipes:
            pipe.close_write_end()
            pipe.finish()
            self._pipes.append(pipe)
        self._pipes = deque(pipe for pipe in self._pipes if pipe.is_open)
        while len(self._pipes) > self._limit:
            self._pipes.popleft().close()

    def close(self) -> None:
        """Stop reading all pipes."""
        while self._pipes:
            self._pipes.popleft().close()
