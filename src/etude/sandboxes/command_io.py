"""The input of a command as a file in memory, and the first bytes of its output. Standard library alone: processes that
run commands import it.
"""

import os

OUTPUT_LIMIT_BYTES = 64 << 10
"""Bytes that are kept of each of a command's stdout and stderr, unless its provider keeps more."""


def in_memory(data: bytes) -> int:
    """A file descriptor from which ``data`` can be read, in memory."""
    descriptor = os.memfd_create("input")
    with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
        file.write(data)
        file.seek(0)
    return descriptor


class CappedOutput:
    """One output of a command: keeps the first ``limit_bytes`` and drops the rest."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._data = bytearray()
        self.truncated = False
        """True once something was thrown away."""

    def add(self, chunk: bytes) -> None:
        """Take what a command printed next."""
        room = self._limit_bytes - len(self._data)
        self._data += chunk[:room]
        self.truncated |= len(chunk) > room

    @property
    def text(self) -> str:
        """The bytes kept, as text; those that are no UTF-8 are shown as such."""
        return self._data.decode("utf-8", "replace")
