"""Scripts and JSON files of an OCI sandbox, for ``sh`` and the OCI runtime. Pure.

    stage (a tmpfs as large as the disk limit)
    ├── upper/N, work/N    what was written over the N-th overlay
    ├── upper/N, work/N    files written over the N-th overlay
    ├── root               skeleton or base ◀ layers ◀ upper/0;  root/usr: the machine's /usr ◀ layers ◀ upper/1

The stage has the same path in every sandbox, each in its own mount namespace: the memory of a checkpoint refers to
files by path. Source: https://github.com/opencontainers/runtime-spec.

The machine's root builds the root folder inside the machine's own file tree, from untrusted files: a link in it would
be resolved on this machine. So before anything is created, mounted or given away at a path, the path is checked for
links; no process runs in the root yet that could add one meanwhile.
"""

import errno
import resource
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from etude.errors import SandboxError
from etude.sandbox_spec import ImageService, ImageUser, SandboxSpec
from etude.sandboxes.images.layers import first_link
from etude.sandboxes.ns.seccomp import FAMILIES, NETLINK, NEW_NAMESPACES, REFUSED_CALLS, TYPING, UNKNOWN
from etude.types import Json

SHARED_MEMORY_BYTES = 64 << 20
"""Size of ``/dev/shm``, as in container runtimes."""
OPEN_FILES, SOFT_OPEN_FILES = 1 << 16, 1024
"""Hard limit of open files per process, if this machine allows it, and the soft limit."""
ROOT_POWERS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP")
"""Capabilities of the user that builds an image; an agent has none."""
ROOT = ImageUser(uid=0, gid=0, home="/root")
ESCAPED = ":,\\"
"""Characters that the options of an overlay cannot have in a path."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""Devices in the roots of services."""
OWN_FOLDERS = ("/tmp", "/proc", "/dev", "/sys")
"""Folders of every root, whatever its image."""
MASKED_PATHS = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/scsi"),
    *("/proc/sched_debug", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware", "/sys/devices/virtual/powercap"),
)
READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Paths that containers on the machine's kernel cannot read, and cannot write: Docker's own lists."""
NO_LINKS = """
no_links() {
    for place; do
        if [ -L "$root$place" ]; then
            printf '%s is a link, where a sandbox needs a folder or file of its own: ' "$place" >&2
            printf 'make it one in the image, or use ns or qemu\\n' >&2
            exit 1
        fi
    done
}
"""
"""Rejects paths below the root that are links, which would lead outside."""
Object: TypeAlias = dict[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOverlay:
    """Overlaid trees and their mount point."""

    target: str
    """From ``/``; empty for the root itself."""
    lowers: Sequence[Path]
    """Topmost first."""


def overlays(spec: SandboxSpec, bottom: Sequence[Path], machine: Mapping[str, Path]) -> list[RootOverlay]:
    """The overlay of a root over ``bottom``, topmost first, and overlays over the folders of the ``machine`` in it.

    ``machine`` is by path inside. No link of a layer is followed.
    Raises :class:`~etude.errors.SandboxError` for a path that no overlay can have.
    """
    layers = list(reversed(spec.image.layers))
    result = [RootOverlay(target="", lowers=[*layers, *bottom])]
    for target, folder in machine.items():
        above = [layer / target.lstrip("/") for layer in layers if first_link(layer, target) is None]
        result.append(RootOverlay(target=target, lowers=[*filter(_is_folder, above), folder]))
    for path in (path for overlay in result for path in overlay.lowers):
        if any(character in str(path) for character in ESCAPED):
            raise SandboxError(f"{path} has one of the characters {ESCAPED!r}: move it")
    return result


def stage_script(stage: Path, disk_bytes: int) -> str:
    """Make the stage in a new mount namespace, and wait for a line; files copied in meanwhile become an
    upper folder.
    """
    place = shlex.quote(str(stage))
    return (
        "set -e\n"
        "trap '' CHLD\n"  # orphans have no parent that waits: the kernel need not keep them
        "mount --make-rprivate /\n"
        # crun refuses a machine with groups of both versions, though it is told to make none.
        "if [ -d /sys/fs/cgroup/unified ]; then mount -t tmpfs none /sys/fs/cgroup/unified; fi\n"
        f"mount -t tmpfs -o size={disk_bytes},nr_inodes={max(1024, disk_bytes // 4096)},mode=755 files {place}\n"
        f"mkdir {place}/root {place}/upper {place}/work\n"
        "echo ready\n"
        "read -r go\n"
    )


def root_script(stage: Path, overlays: Sequence[RootOverlay], spec: SandboxSpec) -> str:
    """Build the root on the stage, and stay until standard input is closed.

    If a required path contains a link, exits with an error, without touching anything outside the stage.
    """
    place = shlex.quote(str(stage))
    root = f"{place}/root"
    lines = [f"root={root}", NO_LINKS]
    for number, overlay in enumerate(overlays):
        upper, work = f"{stage}/upper/{number}", f"{stage}/work/{number}"
        options = f"lowerdir={':'.join(map(str, overlay.lowers))},upperdir={upper},workdir={work},userxattr"
        lines.append(f"mkdir -p {shlex.quote(upper)} {shlex.quote(work)}")
        lines.append(_no_links(overlay.target))
        lines.append(f"mkdir -p {root}{shlex.quote(overlay.target)}")
        lines.append(f"mount -t overlay -o {shlex.quote(options)} overlay {root}{shlex.quote(overlay.target)}")
    user = spec.image.user
    service_folders = [f"{service.root}/{name}" for service in spec.image.services for name in ("proc", "dev")]
    lines.append(_no_links(spec.image.workdir, user.home, *OWN_FOLDERS, *service_folders))
    for path in (spec.image.workdir, user.home):
        inner = root + shlex.quote(path)
        lines.append(f"mkdir -p {inner}")
        lines.append(f'[ "$(stat -c %u {inner})" = {user.uid} ] || chown -R -h {user.uid}:{user.gid} {inner}')
    lines.append(f"mkdir -p {' '.join(root + path for path in OWN_FOLDERS)} && chmod 1777 {root}/tmp")
    lines.append(f"mkdir {place}/tmp && mount --bind {root}/tmp {place}/tmp")
    if spec.names:
        lines.append(_no_links("/etc/hosts"))
        lines.append(f"printf '127.0.0.1 %s\\n' {shlex.join(spec.names)} >>{root}/etc/hosts")
    for target, source in spec.mounts.items():
        inner, shown = root + shlex.quote(target), shlex.quote(str(source))
        make = f"mkdir -p {inner}" if _is_folder(source) else f'mkdir -p "$(dirname {inner})" && touch {inner}'
        lines.append(_no_links(target))  # only now: earlier mounts may contain links, too
        lines.append(f"{make} && mount --bind {shown} {inner} && mount -o remount,bind,ro {inner}")
    return "\n".join([*lines, "echo ready", "exec cat >/dev/null", ""])


def bundle(stage: Path, services: Sequence[ImageService] = (), *, shares_kernel: bool) -> Object:
    """``config.json`` of an idle container, in which commands and ``services`` may run.

    With ``shares_kernel`` it masks information and settings of the machine's kernel, as Docker's containers do, and
    blocks the system calls that sandboxes of ``ns`` block.
    """
    mounts: list[Json] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["size=64k"]},
        _shared_memory(""),
        # Else the runtime would put a file system of its own there, in memory that is not counted. Not by its path in
        # the root: the runtime looks it up again when it restores a sandbox.
        {"destination": "/tmp", "type": "bind", "source": f"{stage}/tmp", "options": ["rbind", "rw"]},
        *(mount for service in services for mount in _root_mounts(service.root, shares_kernel=shares_kernel)),
    ]
    return {
        "ociVersion": "1.0.0",
        "process": {**process(["/bin/sleep", "2147483647"], {"PATH": "/usr/bin:/bin"}, "/", powers=())},
        "root": {"path": f"{stage}/root", "readonly": False},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            **(_kernel_guard(["", *(service.root for service in services)]) if shares_kernel else {}),
        },
    }


def _root_mounts(root: str, *, shares_kernel: bool) -> list[Json]:
    """Processes and devices in a service's root: the machine's devices, or those of the kernel in between."""
    devices: list[Json] = [{"destination": f"{root}/dev", "type": "devtmpfs", "source": "devtmpfs"}]
    if shares_kernel:
        devices = [{"destination": f"{root}/dev", "type": "tmpfs", "source": "tmpfs", "options": ["size=64k"]}]
        devices += [_shown_device(root, name) for name in DEVICES]
    return [{"destination": f"{root}/proc", "type": "proc", "source": "proc"}, *devices, _shared_memory(root)]


def _shared_memory(root: str) -> Object:
    options: list[Json] = [f"size={SHARED_MEMORY_BYTES}", "mode=1777"]
    return {"destination": f"{root}/dev/shm", "type": "tmpfs", "source": "shm", "options": options}


def _shown_device(root: str, name: str) -> Object:
    """The mount of one of the machine's devices."""
    path = f"/dev/{name}"
    return {"destination": root + path, "type": "bind", "source": path, "options": ["bind", "nosuid", "noexec"]}


def _kernel_guard(roots: Sequence[str]) -> Object:
    """Masks and the filter of system calls over a kernel that is the machine's, which every root shows."""
    masked: list[Json] = [root + path for root in roots for path in MASKED_PATHS]
    read_only: list[Json] = [root + path for root in roots for path in READ_ONLY_PATHS]
    return {
        "maskedPaths": masked,
        "readonlyPaths": read_only,
        "seccomp": {
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [
                # chroot takes a capability, which étude's own start of a service has
                _refuse(sorted(REFUSED_CALLS - {*UNKNOWN, "chroot"}), errno.EPERM),
                _refuse(sorted(UNKNOWN), errno.ENOSYS),
                *(
                    _refuse(
                        ["ioctl"],
                        errno.EPERM,
                        # the kernel looks at the low half alone, the filter at all 64 bits
                        {"index": 1, "value": 0xFFFFFFFF, "valueTwo": call, "op": "SCMP_CMP_MASKED_EQ"},
                    )
                    for call in TYPING
                ),
                *(
                    _refuse(
                        ["clone"],
                        errno.EPERM,
                        {"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"},
                    )
                    for flag in (1 << bit for bit in range(32))
                    if flag & NEW_NAMESPACES
                ),
                *(
                    _refuse(
                        ["socket", "socketpair"], errno.EAFNOSUPPORT, {"index": 0, "value": family, "op": "SCMP_CMP_EQ"}
                    )
                    for family in range(NETLINK)
                    if family not in FAMILIES
                ),
                _refuse(
                    ["socket", "socketpair"], errno.EAFNOSUPPORT, {"index": 0, "value": NETLINK, "op": "SCMP_CMP_GT"}
                ),
            ],
        },
    }


def _refuse(calls: Sequence[str], error: int, *arguments: Object) -> Object:
    """The rule that calls, all of them or those with some argument, fail with an error."""
    rule: Object = {"names": [*calls], "action": "SCMP_ACT_ERRNO", "errnoRet": error}
    return {**rule, "args": [*arguments]} if arguments else rule


def process(
    argv: Sequence[str],
    environment: Mapping[str, str],
    workdir: str,
    *,
    user: ImageUser = ROOT,
    powers: Sequence[str] = ROOT_POWERS,
) -> Object:
    """``process.json`` of one command; ``powers`` are root's alone."""
    capabilities: list[Json] = [f"CAP_{power}" for power in powers] if user == ROOT else []
    return {
        "user": {"uid": user.uid, "gid": user.gid},
        "args": list(argv),
        "env": [f"{name}={value}" for name, value in environment.items()],
        "cwd": workdir,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        "rlimits": [{"type": "RLIMIT_NOFILE", "hard": max_open_files(), "soft": SOFT_OPEN_FILES}],
        "noNewPrivileges": user != ROOT,
    }


def max_open_files() -> int:
    """Hard limit of open files of a command: at most this process's, which root cannot raise on every machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)


def _no_links(*targets: str) -> str:
    """The line that fails for targets in the root that are links, or are below one."""
    parts = [PurePosixPath(target).parts[1:] for target in targets]
    places = dict.fromkeys("/" + "/".join(part[:end]) for part in parts for end in range(1, len(part) + 1))
    return " ".join(["no_links", *map(shlex.quote, places)])


def _is_folder(path: Path) -> bool:
    return path.is_dir()
