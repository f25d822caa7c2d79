"""Disk images of virtual machines: empty ones and writable ones. Slow, so not for an event loop."""

import os
import shutil
import subprocess
from pathlib import Path

from etude.errors import SandboxError
from etude.sandboxes.qemu.hardware import DISK_BYTES

TIMEOUT_S = 60.0
OVERHEAD = 1.03
"""Size of a file system over what can be written to it."""
RESERVE_BYTES = 4 << 20
SEARCH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Search path for ``mke2fs``, which is an administrator's program and may be outside of a user's ``PATH``."""


def make_empty(path: Path) -> None:
    """Make an empty qcow2 file. Raises :class:`~etude.errors.SandboxError`."""
    _run("qemu-img", "qemu-utils", ["create", "-q", "-f", "qcow2", str(path), str(DISK_BYTES)])


def make_writable(path: Path, size_bytes: int) -> None:
    """Make a raw disk with a file system for ``size_bytes`` of files. Raises :class:`~etude.errors.SandboxError`."""
    whole = int(size_bytes * OVERHEAD) + RESERVE_BYTES
    with path.open("xb") as file:
        file.truncate(whole // 4096 * 4096)
    options = ["-q", "-t", "ext4", "-b", "4096", "-m", "0", "-O", "^has_journal,^resize_inode"]
    _run("mke2fs", "e2fsprogs", [*options, "-E", "lazy_itable_init=1,nodiscard", str(path)])


def missing_tools() -> tuple[str, ...]:
    """Required programs that are not installed."""
    needed = ("qemu-img", "mke2fs", "mksquashfs", "setpriv")
    return tuple(name for name in needed if shutil.which(name, path=SEARCH) is None)


def _run(name: str, package: str, arguments: list[str]) -> None:
    program = shutil.which(name, path=SEARCH)
    if program is None:
        raise SandboxError(f"{name!r} is not installed: on Debian or Ubuntu, apt-get install {package}")
    done = subprocess.run([program, *arguments], capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SandboxError(f"{name} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
