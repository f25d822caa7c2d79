"""The memory of a virtual machine as a file that copies are mapped from.

A machine that booted shares its memory with a file, so the file is its memory. A copy maps such a file privately: what
it wrote is in its process alone, and the kernel knows which pages those are (``/proc/PID/pagemap``). The memory of a
copy is therefore the file it was made from with those pages over it, and no page is read that nobody wrote. Owns
reading a process of ours; the machine must rest meanwhile.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
"""What ``pagemap`` says of pages."""
Pages: TypeAlias = npt.NDArray[np.intp]
"""Numbers of pages."""

PAGE_BYTES = 4096
PRESENT, SWAPPED, SHARED = 1 << 63, 1 << 62, 1 << 61
"""Flags in ``pagemap``; ``SHARED`` is set on pages of a file."""
FICLONE = 0x40049409
CHUNK_BYTES = 8 << 20


def save_memory(process: int, source: Path, target: Path) -> int:
    """Write the memory of a copy, which was mapped from ``source``, to ``target``; return the bytes it had changed.

    Raises ``OSError`` when the process is gone or not ours to read.
    """
    copy_sparse(source, target)
    changed_bytes = 0
    memory = os.open(f"/proc/{process}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with target.open("r+b", buffering=0) as file:
            for address, offset, length in _mappings(process, source):
                for first, count in _runs(_changed_pages(process, address, length)):
                    start, size = first * PAGE_BYTES, count * PAGE_BYTES
                    changed_bytes += size
                    _copy(memory, address + start, file.fileno(), offset + start, size)
    finally:
        os.close(memory)
    return changed_bytes


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file with its holes, by reference where the file system can."""
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:
            size = os.fstat(old.fileno()).st_size
            os.truncate(new.fileno(), size)
            for start, end in _data(old.fileno(), size):
                _copy(old.fileno(), start, new.fileno(), start, end - start)


def changed_pages(flags_N: Words) -> Pages:
    """Numbers of the pages that a process changed in a private mapping, from their ``pagemap`` words, [N] uint64."""
    is_here = (flags_N & np.uint64(PRESENT)) != 0
    is_own = (flags_N & np.uint64(SHARED)) == 0
    is_swapped = (flags_N & np.uint64(SWAPPED)) != 0
    return np.flatnonzero((is_here & is_own) | is_swapped)


def _changed_pages(process: int, address: int, length: int) -> Pages:
    with Path(f"/proc/{process}/pagemap").open("rb", buffering=0) as file:
        file.seek(address // PAGE_BYTES * 8)
        words = file.read(length // PAGE_BYTES * 8)
    return changed_pages(np.frombuffer(words, np.uint64))


def _runs(pages_N: Pages) -> Iterator[tuple[int, int]]:
    """First page and number of pages of every run of neighbours, ascending."""
    if pages_N.size:
        for run in np.split(pages_N, np.flatnonzero(np.diff(pages_N) != 1) + 1):
            yield int(run[0]), run.size


def _mappings(process: int, source: Path) -> Iterator[tuple[int, int, int]]:
    """Address, offset in the file and length of every private mapping of ``source``."""
    inode = source.stat().st_ino
    for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
        span, mode, offset, _, number, *_ = line.split()
        if int(number) == inode and mode.endswith("p"):
            start, end = (int(part, 16) for part in span.split("-"))
            yield start, int(offset, 16), end - start


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of all that is not a hole."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def _copy(source: int, at: int, target: int, to: int, length: int) -> None:
    done = 0
    while done < length:
        data = os.pread(source, min(CHUNK_BYTES, length - done), at + done)
        if not data:
            raise OSError(errno.EIO, f"the memory ends after {at + done} bytes")
        done += os.pwrite(target, data, to + done)
