"""What of the machine a namespace sandbox is given: mounts that the launcher makes, and hands over as descriptors.

The sandbox's own root could not look these paths up: it is nobody outside. As the machine's root, the launcher shows
layers and programs through a mapping of owners: what belongs to user 0 on disk belongs to the sandbox's root inside,
and what is written belongs to it, too. Owns which trees a root is made from; :mod:`etude.sandboxes.ns.root` puts them
together. Standard library alone.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.sandbox_spec import WORKDIR
from etude.sandboxes.ns import kernel
from etude.sandboxes.ns.boxes import Box, is_own_folder
from etude.sandboxes.ns.root import AGENT, HOME, Overlay, RootPlan, Shown

DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Name → the kernel's numbers."""
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
GUARDED = kernel.ATTR_NOSUID | kernel.ATTR_NODEV
MAX_LAYERS = 100
"""Of one image; overlayfs takes a few hundred."""
SHARED_MEMORY_PART = 2
"""``/dev/shm`` may hold this part of a sandbox's memory, and no more than its disk."""


def make_device_tree(folder: Path, *, is_root: bool) -> str:
    """A ``/dev`` for all sandboxes, in the launcher's own mount namespace; returns where.

    Only the machine's root makes devices; anybody else shows the machine's, each a mount of its own.
    """
    folder.mkdir()
    kernel.mount("devices", str(folder), "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "size=64k,mode=755")
    for name, numbers in DEVICES.items():
        if is_root:
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(*numbers))
            (folder / name).chmod(0o666)
        else:
            (folder / name).touch()
            kernel.mount(f"/dev/{name}", str(folder / name), flags=kernel.MS_BIND)
    for name, target in DEVICE_LINKS.items():
        (folder / name).symlink_to(target)
    for name in ("pts", "shm"):
        (folder / name).mkdir()
    return str(folder)


class Parcel:
    """The mounts for one sandbox; leaving the block closes them."""

    def __init__(self, user_namespace: int | None) -> None:
        """``user_namespace`` is the one that owners are shown in, ``None`` to show the machine's."""
        self._user_namespace = user_namespace
        self.trees: list[int] = []

    def __enter__(self) -> "Parcel":
        return self

    def __exit__(self, *unused: object) -> None:
        for tree in self.trees:
            os.close(tree)

    def add(self, path: str, attributes: int, *, mapped: bool, recursive: bool = False) -> int:
        """Add a mount; returns its descriptor. ``OSError`` for a path that is not there."""
        tree, recursive = _clone(path, recursive=recursive)
        self.trees.append(tree)
        if mapped and self._user_namespace is not None:
            kernel.set_attributes(tree, attributes | kernel.ATTR_IDMAP, self._user_namespace, recursive=recursive)
        elif attributes:
            kernel.set_attributes(tree, attributes, recursive=recursive)
        return tree


def plan_root(box: Box, parcel: Parcel, *, skeleton: str, devices: str, maps_range: bool) -> RootPlan:
    """Fill a parcel for a sandbox; returns the plan of its root."""
    creation = box.creation
    overlays = []
    for target in box.overlays:
        bottom = creation["root"] or (target or skeleton)
        paths = [f"{layer}{target}" for layer in reversed(creation["layers"])]
        there = [path for path in paths if not target or is_own_folder(path)]
        trees = tuple(parcel.add(path, GUARDED, mapped=True) for path in (*there, bottom))
        overlays.append(Overlay(target, trees))
    shown = []
    read_only = GUARDED | kernel.ATTR_RDONLY
    if not creation["root"] and "/usr" not in box.overlays:
        shown.append(Shown("/usr", parcel.add("/usr", read_only, mapped=True), is_folder=True, has_place=True))
    for target, path in creation["system"].items():
        shown.append(Shown(target, parcel.add(path, read_only, mapped=False), is_folder=True, has_place=True))
    for target, path in creation["shown"].items():
        is_folder = os.path.isdir(path)  # noqa: PTH112
        shown.append(Shown(target, parcel.add(path, read_only, mapped=False), is_folder, has_place=False))
    return RootPlan(
        overlays=tuple(overlays),
        devices=parcel.add(devices, 0, mapped=False, recursive=True),
        shown=tuple(shown),
        disk_bytes=creation["disk_bytes"],
        shared_memory_bytes=min(creation["memory_bytes"] // SHARED_MEMORY_PART, creation["disk_bytes"]),
        workdir=creation["workdir"],
        hosts=creation["hosts"],
        is_settled=not creation["root"] and not creation["layers"] and creation["workdir"] == WORKDIR,
        maps_range=maps_range,
    )


def is_unsettled(creation: Mapping[str, Any]) -> bool:
    """Whether an image has something in the agent's folders that is not the agent's; a store's images have not."""
    trees = [*reversed(creation["layers"]), *filter(None, [creation["root"]])]
    for place in (creation["workdir"], HOME):
        for tree in trees:
            try:
                owner = os.lstat(f"{tree}{place}").st_uid
            except FileNotFoundError:
                continue
            if owner != AGENT:
                return True
            break
    return False


def _clone(path: str, *, recursive: bool) -> tuple[int, bool]:
    """A mount of ``path``, with what is mounted below it where that may not be uncovered; and whether it is."""
    try:
        return kernel.clone_tree(path, recursive=recursive), recursive
    except OSError as error:
        if recursive or isinstance(error, FileNotFoundError | PermissionError):
            raise
        return kernel.clone_tree(path, recursive=True), True
