"""A machine that goes wrong on demand: full disk, ill storage, jumping clock, for the processes of one run.

    campaign ──▶ page of shared memory ──▶ faults_preload.c, loaded into every process of the run before the C library

Nothing of étude knows of it: what fails are calls of the operating system, with the system's own errors. Linux with a C
compiler; elsewhere the kinds of fault that need it are left out by name.
"""

import contextlib
import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import final

from etude.errors import InfrastructureError

SOURCE = Path(__file__).with_name("preload.c")
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")
COMPILE_S = 60.0
"""Time limit of the compiler, which takes a fraction of a second."""
PAGE_BYTES = mmap.PAGESIZE
DETOURS = 2
"""Ports that can lead elsewhere."""


class _Word(IntEnum):
    """Position of each setting in the page, in words of 64 bits; as in ``faults_preload.c``."""

    CLOCK_NS = 0
    FULL = 1
    ROOM = 2
    STORE_ERRNO = 3
    STORE_US = 4
    DETOURS = 5


def missing() -> str | None:
    """Why no machine can go wrong here; ``None`` where it can."""
    if sys.platform != "linux":
        return f"calls of the operating system cannot be made to fail on {sys.platform}: that needs Linux"
    if not any(map(shutil.which, COMPILERS)):
        return f"there is no C compiler ({', '.join(COMPILERS)}): install gcc"
    return None if SOURCE.is_file() else f"{SOURCE} was not installed: run from a checkout"


def compile_preload(folder: Path) -> Path:
    """Make the library that processes load; returns where it is. Raises :class:`~etude.errors.InfrastructureError`."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise InfrastructureError(str(missing()))
    library = folder / "faults_preload.so"
    command = [compiler, *OPTIONS, "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode:
        raise InfrastructureError(f"{SOURCE.name} cannot be compiled: {done.stderr.strip()[-500:]}")
    return library


@final
class Machine:
    """The machine as the processes of one run see it; sound at first."""

    def __init__(self, run: Path, store: Path, page: Path, library: Path) -> None:
        """``run`` is the run's folder, ``store`` that of its weights, ``page`` a file to be made, outside of both."""
        self._run = run.resolve()
        self._store = store.resolve()
        self._file = page
        self._library = library
        page.write_bytes(bytes(PAGE_BYTES))
        with page.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._words = memoryview(self._memory).cast("q")

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that put a process, and those it starts, on this machine; our children die with us."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAULTS_PAGE": str(self._file),
            "FAULTS_FOLDER": str(self._run),
            "FAULTS_STORE": str(self._store),
            "FAULTS_CAMPAIGN": str(os.getpid()),
        }

    def close(self) -> None:
        """Let go of the page; processes that share it keep theirs."""
        self._words.release()
        self._memory.close()

    def lead(self, number: int, port: int, to: int) -> None:
        """Let connections to a port of the loopback go ``to`` another one."""
        assert 0 <= number < DETOURS
        place = _Word.DETOURS + 2 * number
        self._words[place + 1] = 0  # no process may see a new port with an old goal
        self._words[place] = port
        self._words[place + 1] = to

    @contextlib.contextmanager
    def full_disk(self, room_bytes: int) -> Iterator[None]:
        """After ``room_bytes`` more, nothing can be written below the run's folder."""
        self._words[_Word.ROOM] = room_bytes
        with self._set(_Word.FULL, 1):
            yield

    @contextlib.contextmanager
    def ill_store(self) -> Iterator[None]:
        """Every access to the weight store fails."""
        with self._set(_Word.STORE_ERRNO, errno.EIO):
            yield

    @contextlib.contextmanager
    def slow_store(self, seconds: float) -> Iterator[None]:
        """Every access to the weight store takes that long."""
        with self._set(_Word.STORE_US, int(seconds * 1e6)):
            yield

    @contextlib.contextmanager
    def jumped_clock(self, seconds: float) -> Iterator[None]:
        """Move the clock forward or back; clocks that only count continue unchanged."""
        with self._set(_Word.CLOCK_NS, int(seconds * 1e9)):
            yield

    @contextlib.contextmanager
    def _set(self, word: _Word, value: int) -> Iterator[None]:
        self._words[word] = value
        try:
            yield
        finally:
            self._words[word] = 0
