"""The memory of a copied machine: the mapped file with exactly its changes, without filling holes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.qemu.machine import PAGE_BYTES, PRESENT, SHARED, SWAPPED, changed_pages, copy_sparse, save_memory

PAGES = 600
WRITER = f"""
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
memory = mmap.mmap(file, {PAGES * PAGE_BYTES}, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
seen = sum(memory[page * {PAGE_BYTES}] for page in range(100))
for page in (0, 7, 8, 9, 300, {PAGES - 1}):
    memory[page * {PAGE_BYTES} + 5] = 255
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_process_changed_is_laid_over_what_it_was_mapped_from(tmp_path: Path) -> None:
    source, target = tmp_path / "ram", tmp_path / "copy"
    before = bytearray(PAGES * PAGE_BYTES)
    before[: 20 * PAGE_BYTES] = b"a" * (20 * PAGE_BYTES)
    with source.open("wb") as file:
        file.write(before[: 20 * PAGE_BYTES])
        file.truncate(len(before))
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        changed_bytes = save_memory(process.pid, source, target)
        process.communicate(b"")
    for page in (0, 7, 8, 9, 300, PAGES - 1):
        before[page * PAGE_BYTES + 5] = 255
    assert target.read_bytes() == before
    assert changed_bytes == 6 * PAGE_BYTES
    assert source.read_bytes()[:10] == b"a" * 10


def test_holes_stay_holes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"x" * PAGE_BYTES)
        file.truncate(64 << 20)
    copy_sparse(tmp_path / "sparse", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "sparse").read_bytes()
    assert (tmp_path / "copy").stat().st_blocks * 512 < 1 << 20


@given(st.lists(st.integers(0, 7), max_size=50))
def test_pages_are_own_when_present_and_not_of_a_file_or_swapped(kinds: list[int]) -> None:
    flags = np.array(
        [(PRESENT * (kind & 1)) | (SWAPPED * (kind >> 1 & 1)) | (SHARED * (kind >> 2)) | 12345 for kind in kinds],
        np.uint64,
    )
    expected = [page for page, kind in enumerate(kinds) if kind & 2 or kind == 1]
    assert changed_pages(flags).tolist() == expected
