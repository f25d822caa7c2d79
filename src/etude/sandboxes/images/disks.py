"""Read-only disks of layers for virtual machines: squashfs files in an image store, made when they are first needed.

Owns how they are made and named; :mod:`etude.sandboxes.images.store` owns their folder and removes unused ones.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from etude.errors import SandboxError
from etude.sandboxes.images.layers import AGENT, OWNED, digest_tree, entries
from etude.sandboxes.images.store import DIGEST, ImageStore, merged_digest, settle

DISK_TIMEOUT_S = 1800.0
"""Timeout of ``mksquashfs`` for one layer."""
MOUNT_AND_RUN = 'mount -t overlay -o "$0" overlay "$1" && shift && exec "$@"'
DISK_OPTIONS = ("-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet", "-mkfs-time", "0")
"""No compression: decompression is slow on a machine without hardware virtualisation. Files keep their times: Python
validates its compiled files by them.
"""


def disk_image(store: ImageStore, layer: Path) -> Path:
    """A squashfs of a layer, made if missing; slow, so not for an event loop.

    ``layer`` may belong to another store, or be any tree. Raises :class:`~etude.errors.SandboxError` if it fails.
    """
    try:
        digest = layer.name if DIGEST.fullmatch(layer.name) else digest_tree(layer, None)
        disk = store.folder / "disks" / f"{digest}.squashfs"
        if not disk.exists():
            with store.incoming() as folder:
                pack(layer, folder / "disk")
                settle(folder / "disk", disk)
    except (OSError, ValueError) as error:
        raise SandboxError(f"layer {layer} cannot be made a disk: {error}") from error
    return disk


def merged_disk(store: ImageStore, layers: Sequence[Path]) -> Path:
    """A squashfs that merges several layers, lowest first; needs root, and is slow if it has to be made.

    Raises :class:`~etude.errors.SandboxError` if it cannot be made.
    """
    disk = store.folder / "disks" / f"{merged_digest([layer.name for layer in layers])}.squashfs"
    if not disk.exists():
        with store.incoming() as folder:
            (folder / "merged").mkdir()
            pack(folder / "merged", folder / "disk", under=layers)
            settle(folder / "disk", disk)
    return disk


def pack(tree: Path, disk: Path, owned: Sequence[str] = OWNED, *, under: Sequence[Path] = ()) -> None:
    """Make the squashfs ``disk`` of a tree; without root, all files belong to root or the agent.

    With layers to mount ``under`` the tree, lowest first, the disk merges all of them.

    Raises :class:`~etude.errors.SandboxError` with the output of ``mksquashfs``.
    """
    program = shutil.which("mksquashfs")
    if program is None:
        raise SandboxError("'mksquashfs' is not installed: on Debian or Ubuntu, apt-get install squashfs-tools")
    argv = [program, str(tree), str(disk), *DISK_OPTIONS]
    if under:
        options = f"userxattr,lowerdir={':'.join(map(str, reversed(under)))}"
        argv = ["unshare", "--mount", "sh", "-c", MOUNT_AND_RUN, options, str(tree), *argv]
    if os.geteuid() != 0:
        argv += ["-all-root", "-pf", "/dev/stdin"]
    done = subprocess.run(
        argv,
        input=b"" if os.geteuid() == 0 else _agents_files(tree, owned),
        capture_output=True,
        timeout=DISK_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SandboxError(f"mksquashfs of {tree} failed: {done.stderr.decode(errors='replace').strip()[-400:]}")


def _agents_files(tree: Path, owned: Sequence[str]) -> bytes:
    """Lines for ``mksquashfs -pf`` that give files to the agent, if the packing user cannot."""
    lines = [
        b'"%s" m %o %d %d' % (re.sub(rb'(["\\])', rb"\\\1", os.fsencode(entry.path)), entry.mode, AGENT, AGENT)
        for entry in entries(tree, owned)
        if entry.user == AGENT
    ]
    return b"\n".join([*lines, b""])
