"""Input of a command, as a file in memory that nobody has to feed. Standard library alone."""

import os


def in_memory(data: bytes) -> int:
    """A descriptor from which ``data`` can be read."""
    descriptor = os.memfd_create("input")
    with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
        file.write(data)
        file.seek(0)
    return descriptor
