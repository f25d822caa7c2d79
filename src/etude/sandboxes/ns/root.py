"""The root of a namespace sandbox, as the system calls with which its first process builds it.

    skeleton or base ◀ layers ◀ upper (a tmpfs as large as the disk limit)   one overlay, and one of /usr where it is
    the machine's; then /proc, /dev and what is shown read-only; all of it covers the bare root below.

The calls are made in the sandbox's namespaces, as their root and nobody outside. Their mount namespace begins as a copy
of a bare one (:func:`make_bare_root`), in which there is nothing of the machine but a ``/proc`` for the kernel to see:
so nothing has to be let go of, which would take longer than all the rest. What is covered can be reached by nobody:
that takes the right to mount or to ``chroot``, which no command has, not even the sandbox's root. Everything of the
machine comes in as a mount that the launcher made and has open, so no path of the machine is looked up in here. Owns
the order of mounts. Standard library alone.
"""

import os
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

from etude.sandboxes.ns import kernel
from etude.sandboxes.ns.syscalls import MAY_FAIL, CallList, Result

AGENT = 1000
HOME = "/home/agent"
HOSTNAME = "sandbox"
INODE_BYTES = 4096
"""One file or folder for each so many bytes of disk: empty ones take memory, too."""
TERMINALS = 64
"""Pseudo-terminals that may be open; the machine has some thousand."""
SHIELDED = ("/proc/sys",)
"""Shown read-only. In a user namespace of its own nobody may write there anyway: two locks on that door."""
HIDDEN_FILES = ("/proc/kcore", "/proc/keys", "/proc/latency_stats")
HIDDEN_FOLDERS = ("/proc/acpi", "/proc/scsi", "/proc/asound")
"""What tells of the machine and nothing of the sandbox, as far as others than the machine's root may read it."""
STAGE = "/stage"
"""Where a root is built, in a bare one."""
QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


class Overlay(NamedTuple):
    """Trees that lie over each other, the topmost first, and where they are seen."""

    target: str
    trees: tuple[int, ...]
    """Mounts that are nowhere yet."""


class Shown(NamedTuple):
    """Something that is shown as it is."""

    target: str
    tree: int
    is_folder: bool
    has_place: bool
    """Whether the lowest tree has something at the target."""


class RootPlan(NamedTuple):
    """What a root is made from."""

    overlays: tuple[Overlay, ...]
    """The root's first."""
    devices: int
    """The mount of a ``/dev``."""
    shown: tuple[Shown, ...]
    disk_bytes: int
    shared_memory_bytes: int
    workdir: str
    hosts: str
    """The text of ``/etc/hosts``; empty for the one that is there."""
    is_settled: bool
    """Whether the lowest tree has all folders that a root needs, the agent's among them as they shall be."""
    maps_range: bool
    """Whether the namespace has users besides the one that commands run as."""


def make_bare_root(folder: str) -> None:
    """Make this process's root a new one in ``folder``, with nothing in it but a ``/proc`` and a place to build on."""
    kernel.mount("bare", folder, "tmpfs", QUIET | kernel.MS_NOEXEC, "size=64k,mode=755")
    for name in ("proc", STAGE.strip("/")):
        os.mkdir(f"{folder}/{name}")  # noqa: PTH102 - beside the mounts
    kernel.mount("/proc", f"{folder}/proc", flags=kernel.MS_BIND | kernel.MS_REC)
    os.chdir(folder)
    kernel.pivot_root()
    kernel.unmount(".")
    os.chdir("/")


@cache
def present(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Those that this kernel has."""
    return tuple(filter(os.path.exists, paths))


class RootCalls:
    """Adds to a list the calls that build a root and enter it."""

    def __init__(self, calls: CallList, plan: RootPlan) -> None:
        self._calls = calls
        self._plan = plan

    def add(self) -> Result:
        """Add all of them; the result is a descriptor of the folder that has what will be written."""
        plan, calls = self._plan, self._calls
        inodes = max(1024, plan.disk_bytes // INODE_BYTES)
        self._mount("files", STAGE, "tmpfs", QUIET, f"size={plan.disk_bytes},nr_inodes={inodes},mode=755")
        calls.add("chdir", STAGE.encode())
        self._make_folder("root")
        self._make_folder("upper")
        for number, overlay in enumerate(plan.overlays):
            self._add_overlay(number, overlay)
        written = calls.add("openat", kernel.AT_FDCWD, b"upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        hosts = self._add_hosts() if plan.hosts else None
        calls.add("chdir", b"root")
        self._mount(".", "/", "", kernel.MS_MOVE)
        calls.add("chroot", b".")
        if not plan.is_settled:
            self._settle()
        self._add_system()
        for item in plan.shown:
            self._show(item)
        if hosts is not None:
            self._make_file("/etc/hosts")
            self._attach(hosts, "/etc/hosts")
        self._shield()
        if not plan.maps_range:
            self._guard_system()
        return written

    def _add_overlay(self, number: int, overlay: Overlay) -> None:
        """Mount trees over each other at ``root`` + target; what is written goes to ``upper/number``."""
        lowers = [f"lower{number}.{index}" for index in range(len(overlay.trees))]
        for lower, tree in zip(lowers, overlay.trees, strict=True):
            self._make_folder(lower)
            self._attach(tree, lower)
        for folder in (f"upper/{number}", f"work{number}"):
            self._make_folder(folder)
        options = f"lowerdir={':'.join(lowers)},upperdir=upper/{number},workdir=work{number},userxattr"
        self._mount("overlay", f"root{overlay.target}", "overlay", QUIET, options)

    def _add_hosts(self) -> Result:
        """A file beside the root, as a mount that is nowhere yet."""
        text = self._plan.hosts.encode()
        file = self._calls.add("openat", kernel.AT_FDCWD, b"hosts", NEW_FILE, 0o644)
        self._calls.add("write", file, text, len(text))
        flags = kernel.OPEN_TREE_CLONE | os.O_CLOEXEC
        return self._calls.add("open_tree", kernel.AT_FDCWD, b"hosts", flags)

    def _settle(self) -> None:
        """Folders that another root than ours may lack; what belongs to the agent."""
        for path in ("/proc", "/dev", "/sys", "/tmp", "/etc"):
            self._make_folder(path, anyway=True)
        self._calls.add("fchmodat", kernel.AT_FDCWD, b"/tmp", 0o1777)
        for path in (self._plan.workdir, HOME):
            self._make_parents(path)
            self._make_folder(path, anyway=True)
            if self._plan.maps_range:
                self._calls.add("fchownat", kernel.AT_FDCWD, path.encode(), AGENT, AGENT, kernel.AT_SYMLINK_NOFOLLOW)

    def _add_system(self) -> None:
        """``/proc`` and ``/dev``; the kernel allows the former because of the one that hides nothing below."""
        self._mount("proc", "/proc", "proc", QUIET | kernel.MS_NOEXEC)
        self._attach(self._plan.devices, "/dev")
        terminals = f"newinstance,ptmxmode=0666,max={TERMINALS}"
        self._mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, terminals)
        self._mount("shm", "/dev/shm", "tmpfs", QUIET, f"size={self._plan.shared_memory_bytes},mode=1777")

    def _show(self, item: Shown) -> None:
        if not item.has_place:
            self._make_parents(item.target)
            if item.is_folder:
                self._make_folder(item.target, anyway=True)
            else:
                self._make_file(item.target)
        self._attach(item.tree, item.target)

    def _shield(self) -> None:
        again = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY
        for path in present(SHIELDED):
            self._mount(path, path, "", kernel.MS_BIND)
            self._mount("", path, "", again | QUIET | kernel.MS_NOEXEC)
        for path in present(HIDDEN_FILES):
            self._mount("/dev/null", path, "", kernel.MS_BIND)
            self._mount("", path, "", again)
        for path in present(HIDDEN_FOLDERS):
            self._mount("none", path, "tmpfs", kernel.MS_RDONLY, "size=4k")

    def _guard_system(self) -> None:
        """Where everything belongs to the one user there is, only the agent's folders can be written."""
        for path in (self._plan.workdir, HOME, "/tmp", "/var/tmp"):
            self._mount(path, path, "", kernel.MS_BIND | kernel.MS_REC)
        read_only = struct.pack("4Q", kernel.ATTR_RDONLY, 0, 0, 0)
        self._calls.add("mount_setattr", kernel.AT_FDCWD, b"/", 0, read_only, len(read_only), about="a read-only root")

    def _make_parents(self, path: str) -> None:
        for parent in [*reversed(PurePosixPath(path).parents)][1:]:
            self._make_folder(str(parent), anyway=True)

    def _make_folder(self, path: str, *, anyway: bool = False) -> None:
        """``anyway``: one that is there already will do."""
        traits = MAY_FAIL if anyway else 0
        self._calls.add("mkdirat", kernel.AT_FDCWD, path.encode(), 0o755, traits=traits, about=path)

    def _make_file(self, path: str) -> None:
        """One that is there already will do. It is closed: a root with open files could not be made read-only."""
        file = self._calls.add("openat", kernel.AT_FDCWD, path.encode(), NEW_FILE, 0o644, traits=MAY_FAIL)
        self._calls.add("close", file, traits=MAY_FAIL)

    def _mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        arguments = (source.encode(), target.encode(), kind.encode() or 0, flags, options.encode() or 0)
        self._calls.add("mount", *arguments, about=f"{kind or source} on {target}")

    def _attach(self, tree: int | Result, target: str) -> None:
        """Put a mount that is nowhere yet in its place."""
        flags = kernel.MOVE_MOUNT_F_EMPTY_PATH
        self._calls.add("move_mount", tree, b"", kernel.AT_FDCWD, target.encode(), flags, about=target)


def overlay_folders(targets: Sequence[str]) -> dict[str, str]:
    """The folder of what is written → where it belongs in a layer, by the targets of a root's overlays."""
    return {str(number): target.strip("/") for number, target in enumerate(targets)}
