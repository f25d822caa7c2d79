"""The root of a namespace sandbox, as the system calls with which its first process builds it.

    skeleton or base ◀ layers ◀ upper (a tmpfs as large as the disk limit)   one overlay, and one of /usr where it is
    the machine's; then /proc, /dev and what is shown read-only; all of it covers the bare root below.

The calls are made in the sandbox's namespaces as their root, which is an unprivileged user outside. Their mount
namespace starts as a copy of a bare one (:func:`make_bare_root`) that has nothing of the machine except a ``/proc``
required by the kernel, so no mounts have to be detached, which would take longer than all the rest. Covered mounts
cannot be reached: that needs the right to mount or to ``chroot``, which no command has, not even the sandbox's root.
Everything from the machine enters as a mount that the launcher has opened, so no path of the machine is resolved here.
Owns the order of mounts. Standard library alone.
"""

import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from etude.sandbox_spec import WORKDIR
from etude.sandboxes.ns.boxes import SandboxRecord, is_own_folder
from etude.sandboxes.ns.syscalls import (
    AT_FDCWD,
    AT_SYMLINK_NOFOLLOW,
    ATTR_IDMAP,
    ATTR_NODEV,
    ATTR_NOSUID,
    ATTR_RDONLY,
    MAY_FAIL,
    MOVE_MOUNT_F_EMPTY_PATH,
    MS_BIND,
    MS_MOVE,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    OPEN_TREE_CLONE,
    CallList,
    Result,
    clone_tree,
    mount,
    pivot_root,
    set_attributes,
    unmount,
)

NAMES_NETWORK = ipaddress.IPv4Network("127.77.0.0/16")
"""Addresses assigned to names, in order; 127.0.0.1 stays the sandbox's own."""
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, IFF_UP_RUNNING = 0x8914, 0x8916, 0x891C, 0x41
MAX_PLACES = 64
"""Most places of one sandbox: each has a listener in the provider's process."""


class AllowedPlace(NamedTuple):
    """One network place that a sandbox may reach."""

    host: str
    port: int
    address: str
    """Its address inside, on the loopback."""


def places(allow: Sequence[str]) -> tuple[AllowedPlace, ...]:
    """The places in a list of ``host:port``, with their addresses inside. ``ValueError`` for an invalid port or too
    many places.

    A name has the same address for each of its ports.
    """
    if len(allow) > MAX_PLACES:
        raise ValueError(f"{len(allow)} places in allow, at most {MAX_PLACES}: put a proxy of yours before them")
    addresses: dict[str, str] = {"localhost": "127.0.0.1"}
    result = []
    for text in dict.fromkeys(allow):
        host, _, port = text.rpartition(":")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"allow={text!r}: there is no port {port}")
        if host not in addresses:
            addresses[host] = _literal(host) or str(NAMES_NETWORK[len(addresses)])
        result.append(AllowedPlace(host, int(port), addresses[host]))
    return tuple(result)


def hosts_text(reachable: Sequence[AllowedPlace], hostname: str, names: Sequence[str] = ()) -> str:
    """The text of a sandbox's ``/etc/hosts``; ``names`` are the sandbox's additional names."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback", f"127.0.1.1 {hostname}"]
    lines += [f"127.0.0.1 {name}" for name in names]
    lines += dict.fromkeys(f"{place.address} {place.host}" for place in reachable if place.host not in _silent(place))
    return "\n".join(lines) + "\n"


class SocketIoctl(NamedTuple):
    """An ``ioctl`` of a socket."""

    kind: int
    data: bytes
    about: str


def network_requests(reachable: Sequence[AllowedPlace]) -> list[SocketIoctl]:
    """The ``ioctl`` requests that activate a namespace's loopback and add the addresses of places to it."""
    requests = [SocketIoctl(SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP_RUNNING), "the loopback")]
    added = sorted({place.address for place in reachable if not place.address.startswith("127.")})
    for number, address in enumerate(added):
        alias = f"lo:{number}".encode()
        requests += [
            SocketIoctl(kind, struct.pack("16sHH4s16x", alias, socket.AF_INET, 0, socket.inet_aton(text)), address)
            for kind, text in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.255"))
        ]
    return requests


def socket_address(place: AllowedPlace) -> bytes:
    """The address of a place inside, as a kernel ``sockaddr``."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", place.port, socket.inet_aton(place.address))


def _literal(host: str) -> str | None:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return None


def _silent(place: AllowedPlace) -> tuple[str, ...]:
    """Hosts that need no line."""
    return place.address, "localhost"


AGENT = 1000
HOME = "/home/agent"
HOSTNAME = "sandbox"
INODE_BYTES = 4096
"""Bytes of disk per allowed file or folder: even empty ones take memory."""
TERMINALS = 64
"""Open pseudo-terminals of a sandbox; the machine has some thousand."""
SHIELDED = ("/proc/sys",)
"""Shown read-only. A process in its own user namespace cannot write there anyway: this is a second barrier."""
HIDDEN_FILES = ("/proc/kcore", "/proc/keys", "/proc/latency_stats")
HIDDEN_FOLDERS = ("/proc/acpi", "/proc/scsi", "/proc/asound")
"""Folders that reveal facts about the machine and none about the sandbox, as far as users other than root can read
them.
"""
STAGE = "/stage"
"""Folder in a bare root in which the root is built."""
QUIET = MS_NOSUID | MS_NODEV
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


class OverlayMount(NamedTuple):
    """Overlaid trees, the topmost first, and their mount point."""

    target: str
    trees: tuple[int, ...]
    """Mounts that are not attached yet."""


class ShownMount(NamedTuple):
    """A bind mount of one tree or file."""

    target: str
    tree: int
    is_folder: bool
    has_place: bool
    """True if the lowest tree contains the target."""


class RootPlan(NamedTuple):
    """The plan of a sandbox's root."""

    overlays: tuple[OverlayMount, ...]
    """The root's overlay first."""
    devices: int
    """The mount for ``/dev``."""
    shown: tuple[ShownMount, ...]
    disk_bytes: int
    shared_memory_bytes: int
    workdir: str
    user: Sequence[Any]
    """Number, group and home of the user that owns the working folder."""
    hosts: str
    """The text of ``/etc/hosts``; empty to keep the existing file."""
    roots: Sequence[str]
    """Paths that are roots of services."""
    is_settled: bool
    """True if the lowest tree has all folders that a root needs, with the right owner of the agent's folders."""
    maps_range: bool
    """True if the namespace has users besides the one that runs commands."""


def make_bare_root(folder: str) -> None:
    """Make a new root for this process in ``folder``, with only a ``/proc`` and a folder to build in."""
    mount("bare", folder, "tmpfs", QUIET | MS_NOEXEC, "size=64k,mode=755")
    for name in ("proc", STAGE.strip("/")):
        os.mkdir(f"{folder}/{name}")  # noqa: PTH102 - beside the mounts
    mount("/proc", f"{folder}/proc", flags=MS_BIND | MS_REC)
    os.chdir(folder)
    pivot_root()
    unmount(".")
    os.chdir("/")


@cache
def existing_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The paths that exist on this kernel."""
    return tuple(filter(os.path.exists, paths))


class RootCalls:
    """Appends to a list the system calls that build and enter a root."""

    def __init__(self, calls: CallList, plan: RootPlan) -> None:
        self._calls = calls
        self._plan = plan

    def add(self) -> Result:
        """Add all calls; the result is a descriptor of the folder for written files."""
        plan, calls = self._plan, self._calls
        inodes = max(1024, plan.disk_bytes // INODE_BYTES)
        self._mount("files", STAGE, "tmpfs", QUIET, f"size={plan.disk_bytes},nr_inodes={inodes},mode=755")
        calls.add("chdir", STAGE.encode())
        self._make_folder("root")
        self._make_folder("upper")
        for number, overlay in enumerate(plan.overlays):
            self._add_overlay(number, overlay)
        written = calls.add("openat", AT_FDCWD, b"upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        hosts = self._add_hosts() if plan.hosts else None
        calls.add("chdir", b"root")
        self._mount(".", "/", "", MS_MOVE)
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
        for root in plan.roots:
            self._add_root(root)
        if not plan.maps_range:
            self._guard_system()
        return written

    def _add_overlay(self, number: int, overlay: OverlayMount) -> None:
        """Mount trees over each other at ``root`` + target; written files go to ``upper/number``."""
        lowers = [f"lower{number}.{index}" for index in range(len(overlay.trees))]
        for lower, tree in zip(lowers, overlay.trees, strict=True):
            self._make_folder(lower)
            self._attach(tree, lower)
        for folder in (f"upper/{number}", f"work{number}"):
            self._make_folder(folder)
        options = f"lowerdir={':'.join(lowers)},upperdir=upper/{number},workdir=work{number},userxattr"
        self._mount("overlay", f"root{overlay.target}", "overlay", QUIET, options)

    def _add_hosts(self) -> Result:
        """Add a file outside the root, as an unattached mount."""
        text = self._plan.hosts.encode()
        file = self._calls.add("openat", AT_FDCWD, b"hosts", NEW_FILE, 0o644)
        self._calls.add("write", file, text, len(text))
        flags = OPEN_TREE_CLONE | os.O_CLOEXEC
        return self._calls.add("open_tree", AT_FDCWD, b"hosts", flags)

    def _settle(self) -> None:
        """Make folders that an image's root may lack, and set the owner of the agent's folders."""
        for path in ("/proc", "/dev", "/sys", "/tmp", "/etc"):
            self._make_folder(path, anyway=True)
        self._calls.add("fchmodat", AT_FDCWD, b"/tmp", 0o1777)
        uid, gid, home = self._plan.user
        for path in (self._plan.workdir, home):
            self._make_parents(path)
            self._make_folder(path, anyway=True)
            if self._plan.maps_range:
                self._calls.add("fchownat", AT_FDCWD, path.encode(), uid, gid, AT_SYMLINK_NOFOLLOW)

    def _add_system(self) -> None:
        """Mount ``/proc`` and ``/dev``; the kernel allows ``/proc`` because the bare root has one without
        hidden parts.
        """
        self._mount("proc", "/proc", "proc", QUIET | MS_NOEXEC)
        self._attach(self._plan.devices, "/dev")
        terminals = f"newinstance,ptmxmode=0666,max={TERMINALS}"
        self._mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
        self._mount("shm", "/dev/shm", "tmpfs", QUIET, f"size={self._plan.shared_memory_bytes},mode=1777")

    def _show(self, item: ShownMount) -> None:
        if not item.has_place:
            self._make_parents(item.target)
            if item.is_folder:
                self._make_folder(item.target, anyway=True)
            else:
                self._make_file(item.target)
        self._attach(item.tree, item.target)

    def _shield(self) -> None:
        again = MS_BIND | MS_REMOUNT | MS_RDONLY
        for path in existing_paths(SHIELDED):
            self._mount(path, path, "", MS_BIND)
            self._mount("", path, "", again | QUIET | MS_NOEXEC)
        for path in existing_paths(HIDDEN_FILES):
            self._mount("/dev/null", path, "", MS_BIND)
            self._mount("", path, "", again)
        for path in existing_paths(HIDDEN_FOLDERS):
            self._mount("none", path, "tmpfs", MS_RDONLY, "size=4k")

    def _add_root(self, root: str) -> None:
        """Show a service's root the processes and devices of the sandbox."""
        for path in ("/proc", "/dev"):
            self._make_folder(root + path, anyway=True)
            self._mount(path, root + path, "", MS_BIND | MS_REC)

    def _guard_system(self) -> None:
        """Make only the agent's folders writable if everything belongs to the only user."""
        for path in (self._plan.workdir, self._plan.user[2], "/tmp", "/var/tmp"):
            self._mount(path, path, "", MS_BIND | MS_REC)
        read_only = struct.pack("4Q", ATTR_RDONLY, 0, 0, 0)
        self._calls.add("mount_setattr", AT_FDCWD, b"/", 0, read_only, len(read_only), about="a read-only root")

    def _make_parents(self, path: str) -> None:
        for parent in [*reversed(PurePosixPath(path).parents)][1:]:
            self._make_folder(str(parent), anyway=True)

    def _make_folder(self, path: str, *, anyway: bool = False) -> None:
        """With ``anyway``, an existing folder is accepted."""
        traits = MAY_FAIL if anyway else 0
        self._calls.add("mkdirat", AT_FDCWD, path.encode(), 0o755, traits=traits, about=path)

    def _make_file(self, path: str) -> None:
        """Make and close a file; an existing one is accepted. A root with open files could not be made read-only."""
        file = self._calls.add("openat", AT_FDCWD, path.encode(), NEW_FILE, 0o644, traits=MAY_FAIL)
        self._calls.add("close", file, traits=MAY_FAIL)

    def _mount(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        arguments = (source.encode(), target.encode(), kind.encode() or 0, flags, options.encode() or 0)
        self._calls.add("mount", *arguments, about=f"{kind or source} on {target}")

    def _attach(self, tree: int | Result, target: str) -> None:
        """Attach an unattached mount to its mount point."""
        flags = MOVE_MOUNT_F_EMPTY_PATH
        self._calls.add("move_mount", tree, b"", AT_FDCWD, target.encode(), flags, about=target)


def overlay_folders(targets: Sequence[str]) -> dict[str, str]:
    """The folder of written files → its path in a layer, from the targets of a root's overlays."""
    return {str(number): target.strip("/") for number, target in enumerate(targets)}


DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Name → the kernel's numbers."""
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
GUARDED = ATTR_NOSUID | ATTR_NODEV
MAX_LAYERS = 100
"""Most layers of one image; overlayfs allows a few hundred."""
SHARED_MEMORY_PART = 2
"""``/dev/shm`` may hold this part of a sandbox's memory, and no more than its disk limit."""


def make_device_tree(folder: Path, *, is_root: bool) -> str:
    """Make a ``/dev`` for all sandboxes, in the launcher's own mount namespace; return its path.

    Only the machine's root can make devices; other users bind-mount each of the machine's devices.
    """
    folder.mkdir()
    mount("devices", str(folder), "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=755")
    for name, numbers in DEVICES.items():
        if is_root:
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(*numbers))
            (folder / name).chmod(0o666)
        else:
            (folder / name).touch()
            mount(f"/dev/{name}", str(folder / name), flags=MS_BIND)
    for name, target in DEVICE_LINKS.items():
        (folder / name).symlink_to(target)
    for name in ("pts", "shm"):
        (folder / name).mkdir()
    return str(folder)


class MountBundle:
    """The mounts for one sandbox; leaving the block closes them."""

    def __init__(self, user_namespace: int | None) -> None:
        """``user_namespace`` maps the owners of files; ``None`` shows the machine's owners."""
        self._user_namespace = user_namespace
        self.trees: list[int] = []

    def __enter__(self) -> "MountBundle":
        return self

    def __exit__(self, *unused: object) -> None:
        for tree in self.trees:
            os.close(tree)

    def add(self, path: str, attributes: int, *, mapped: bool, recursive: bool = False) -> int:
        """Add a mount; return its descriptor. ``OSError`` for a missing path."""
        tree, recursive = _clone(path, recursive=recursive)
        self.trees.append(tree)
        if mapped and self._user_namespace is not None:
            set_attributes(tree, attributes | ATTR_IDMAP, self._user_namespace, recursive=recursive)
        elif attributes:
            set_attributes(tree, attributes, recursive=recursive)
        return tree


def plan_root(box: SandboxRecord, bundle: MountBundle, *, skeleton: str, devices: str, maps_range: bool) -> RootPlan:
    """Fill a sandbox's mount bundle; return the plan of its root."""
    creation = box.creation
    overlays = []
    for target in box.overlays:
        bottom = creation["root"] or (target or skeleton)
        paths = [f"{layer}{target}" for layer in reversed(creation["layers"])]
        there = [path for path in paths if not target or is_own_folder(path)]
        trees = tuple(bundle.add(path, GUARDED, mapped=True) for path in (*there, bottom))
        overlays.append(OverlayMount(target, trees))
    shown = []
    read_only = GUARDED | ATTR_RDONLY
    if not creation["root"] and "/usr" not in box.overlays:
        shown.append(ShownMount("/usr", bundle.add("/usr", read_only, mapped=True), is_folder=True, has_place=True))
    for target, path in creation["system"].items():
        shown.append(ShownMount(target, bundle.add(path, read_only, mapped=False), is_folder=True, has_place=True))
    for target, path in creation["shown"].items():
        is_folder = os.path.isdir(path)  # noqa: PTH112
        shown.append(ShownMount(target, bundle.add(path, read_only, mapped=False), is_folder, has_place=False))
    return RootPlan(
        overlays=tuple(overlays),
        devices=bundle.add(devices, 0, mapped=False, recursive=True),
        shown=tuple(shown),
        disk_bytes=creation["disk_bytes"],
        shared_memory_bytes=min(creation["memory_bytes"] // SHARED_MEMORY_PART, creation["disk_bytes"]),
        workdir=creation["workdir"],
        user=creation["user"],
        hosts=creation["hosts"],
        roots=creation["roots"],
        is_settled=not creation["root"] and not creation["layers"] and creation["workdir"] == WORKDIR,
        maps_range=maps_range,
    )


def is_unsettled(creation: Mapping[str, Any]) -> bool:
    """True if an image has files with another owner in its user's folders; images of a store never do."""
    trees = [*reversed(creation["layers"]), *filter(None, [creation["root"]])]
    uid, _, home = creation["user"]
    for place in (creation["workdir"], home):
        for tree in trees:
            try:
                owner = os.lstat(f"{tree}{place}").st_uid
            except FileNotFoundError:
                continue
            if owner != uid:
                return True
            break
    return False


def _clone(path: str, *, recursive: bool) -> tuple[int, bool]:
    """A mount of ``path``, with the mounts below it if they must not be uncovered; and whether it includes them."""
    try:
        return clone_tree(path, recursive=recursive), recursive
    except OSError as error:
        if recursive or isinstance(error, FileNotFoundError | PermissionError):
            raise
        return clone_tree(path, recursive=True), True
