"""Writes that are whole or not at all, and writes that survive a power cut."""

import os
from pathlib import Path


def write_whole(file: Path, data: bytes) -> None:
    """Make or replace a file: who reads it meanwhile has the old one or the new one, which a power cut may lose."""
    partial = file.with_name(f".{file.name}.part")
    partial.write_bytes(data)
    partial.replace(file)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
