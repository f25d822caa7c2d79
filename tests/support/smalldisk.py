"""A disk of its own that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of 1 MB, mounted at a new folder; the test is skipped where that cannot be had."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on it; the file that takes it all."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler
