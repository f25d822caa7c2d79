"""The input of a command as a file in memory, and the first bytes of its output. Standard library alone: processes that
run commands import it.
"""

import os

OUTPUT_LIMIT_BYTES = 64 << 10
"""Maximum number of bytes that are stored of a command's stdout, and of its stderr, unless its provider stores more."""


def in_memory(data: bytes) -> int:
    """A file descriptor from which ``data`` can be read, in memory."""
    descriptor = os.memfd_create("input")
    with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
        file.write(data)
        file.seek(0)
    return descriptor


class CappedOutput:
    """One output of a command: stores the first ``limit_bytes`` and drops the rest."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._data = bytearray()
        self.truncated = False
        """True once output was dropped."""

    def add(self, chunk: bytes) -> None:
        """Append a chunk of output."""
        room = self._limit_bytes - len(self._data)
        self._data += chunk[:room]
        self.truncated |= len(chunk) > room

    @property
    def text(self) -> str:
        """The stored bytes as text; invalid UTF-8 is replaced."""
        return self._data.decode("utf-8", "replace")
