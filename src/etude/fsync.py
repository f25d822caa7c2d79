"""Writes that are whole or not at all, and writes that survive a power cut."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def write_whole(file: Path, data: bytes, *, mode: int | None = None, syncs: bool = False) -> None:
    """Create or replace a file: a reader gets the old content or the new one, also while several processes write.

    The file has the permissions ``mode``, by default those of any new file. With ``syncs`` it survives a power cut.
    """
    partial = file.with_name(
        f".{file.name}.{uuid4().hex}.part"
    )  # each writer its own: none replaces by half of another
    try:
        partial.write_bytes(data)
        if mode is not None:
            partial.chmod(mode)
        if syncs:
            sync(partial)
        partial.replace(file)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if syncs:
        sync(file.parent)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
