"""What is kept of a command's output: the first bytes, whatever it goes on to print.

Standard library alone: processes that run commands import it.
"""

OUTPUT_LIMIT_BYTES = 64 << 10
"""Kept of each of a command's stdout and stderr, unless its provider keeps more."""


class CappedOutput:
    """One output of a command: keeps the first ``limit_bytes`` and throws the rest away."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept = bytearray()
        self.truncated = False
        """True once something was thrown away."""

    def add(self, chunk: bytes) -> None:
        """Take what a command printed next."""
        room = self._limit_bytes - len(self._kept)
        self._kept += chunk[:room]
        self.truncated |= len(chunk) > room

    @property
    def text(self) -> str:
        """What was kept; bytes that are no UTF-8 are shown as such."""
        return self._kept.decode("utf-8", "replace")
