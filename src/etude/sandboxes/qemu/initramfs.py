"""The initial RAM disk of a virtual machine: cpio archives with kernel modules and a script.

The kernel unpacks several archives one after the other, so the part that comes from Debian is made with the base system
and the agent's code, :func:`agent_archive`, is put behind it whenever a machine boots. Owns the format and the script.
"""

import lzma
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import etude

MODULES = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "vmw_vsock_virtio_transport", "squashfs")
"""Kernel modules without which there is no disk and no port; :data:`OVERLAY` comes last."""
OVERLAY = "overlay"
AGENT_PARTS = ("__init__", "agent", "filesystem", "frames", "system", "tunnels")
AGENT_CODE = (
    *("__init__.py", "errors.py", "sandboxes/__init__.py", "sandboxes/command_io.py", "sandboxes/folders.py"),
    *("sandboxes/images/__init__.py", "sandboxes/images/archives.py", "sandboxes/qemu/__init__.py"),
    *(f"sandboxes/qemu/guest/{name}.py" for name in AGENT_PARTS),
)
"""Files of the package ``etude`` that run inside, and those that they import."""
AGENT_MODULE = "etude.sandboxes.qemu.guest.agent"
SCRIPT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
for m in {modules}; do $b insmod /modules/$m.ko; done
tries=0
until [ -b /dev/vda ] || [ $tries = 500 ]; do $b sleep 0.01; tries=$((tries + 1)); done
$b mount -t squashfs -o ro /dev/vda /new || echo "etude: the root disk cannot be mounted" > /dev/console
$b mount -t devtmpfs dev /new/dev
$b mount -t proc proc /new/proc
$b mount -t sysfs sys /new/sys
$b mount -t cgroup2 cgroup2 /new/sys/fs/cgroup
$b mount -t tmpfs -o mode=755 run /new/run
$b cp -r /agent /new/run/agent
cd /new
exec $b switch_root /new /usr/bin/env -i PYTHONPATH=/run/agent PATH=/usr/bin:/usr/sbin:/bin LANG=C.UTF-8 \\
    /usr/bin/python3 -s -S -B -m {agent} < /dev/console > /dev/console 2>&1
"""
FOLDERS = ("bin", "dev", "proc", "sys", "new", "modules")


def write_initramfs(modules: Path, busybox: Path) -> bytes:
    """The archive of a kernel whose modules are below ``modules``. Raises ``FileNotFoundError`` for one it lacks."""
    order = module_order(modules, (*MODULES, OVERLAY))
    script = SCRIPT.format(modules=" ".join(order), agent=AGENT_MODULE)
    files = {
        "init": (0o755, script.encode()),
        "bin/busybox": (0o755, busybox.read_bytes()),
        **{f"modules/{name}.ko": (0o644, _module(path)) for name, path in order.items()},
    }
    return write_cpio(FOLDERS, files)


def agent_archive() -> bytes:
    """The archive with the agent's code, in ``/agent``."""
    source = Path(etude.__file__).parent
    files = {f"agent/etude/{name}": (0o644, _code(source / name)) for name in AGENT_CODE}
    folders = {str(parent): None for name in sorted(files) for parent in [*PurePosixPath(name).parents][-2::-1]}
    return write_cpio(tuple(folders), files)


def module_order(modules: Path, names: Sequence[str]) -> Mapping[str, Path]:
    """The modules ``names`` and their dependencies, each after its own. Raises ``FileNotFoundError``."""
    paths = {path.name.split(".ko")[0].replace("-", "_"): path for path in modules.rglob("*.ko*")}
    order: dict[str, Path] = {}
    waiting = list(reversed(names))
    while waiting:
        name = waiting.pop()
        if name in order:
            continue
        if name not in paths:
            raise FileNotFoundError(f"kernel module {name!r} is not below {modules}")
        depends = re.search(rb"\0depends=([^\0]*)\0", _module(paths[name]))
        needs = [need.decode().replace("-", "_") for need in (depends[1] if depends else b"").split(b",") if need]
        missing = [need for need in needs if need not in order]
        if missing:
            waiting += [name, *missing]
        else:
            order[name] = paths[name]
    return order


def write_cpio(folders: Sequence[str], files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive of folders and of files, path → (mode, content), all root's, as the kernel reads them ("newc")."""
    entries = [(folder, stat.S_IFDIR | 0o755, b"") for folder in folders]
    entries += [(path, stat.S_IFREG | mode, data) for path, (mode, data) in files.items()]
    archive = bytearray()
    for number, (path, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
        for part in (b"070701" + b"".join(b"%08X" % field for field in fields) + name, data):
            archive += part + bytes(-(len(archive) + len(part)) % 4)
    return bytes(archive)


def _module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _code(path: Path) -> bytes:
    """The source of a module; packages are empty inside, since what theirs import is not there."""
    return b"" if path.name == "__init__.py" else path.read_bytes()
