"""Hardware of a virtual machine: disks and memory of a spec, and QEMU's command line.

    disk 0   the machine's own root      disk 1   what commands write       disks 2 …   layers of images

Every machine has the same devices, because a copy must find those of its original: a slot for an unused layer holds an
empty disk. All disks report a size of ``DISK_BYTES``, so that the disk in a slot can be replaced while a machine rests.
Owns the translation from specs, which packs layers and mounts into disks if necessary: slow, so not for an event loop.
Processes are in :mod:`etude.sandboxes.qemu.machine`.
"""

import hashlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from etude.errors import SandboxError
from etude.sandbox_spec import SCRATCH, SandboxLimits, SandboxSpec
from etude.sandboxes.images.debian import Base, open_base
from etude.sandboxes.images.disks import disk_image, merged_disk
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.qemu.guest.agent import PORT_NAME

LAYER_DISKS = 10
"""Places for layers and mounts."""
FIRST_LAYER = 2
"""Number of the first of them."""
UPPER = 1
"""Number of the disk that is written to."""
DISK_BYTES = 64 << 30
KERNEL_MIB = 224
"""Memory in addition to that of commands, for the kernel, the agent and archives in transfer."""
BOOT_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 reboot=t mitigations=off random.trust_cpu=on audit=0 apparmor=0 "
    "cgroup_no_v1=all psi=0 transparent_hugepage=never nowatchdog"
)
SOFTWARE_ARGUMENTS = "no_timer_check clocksource=hpet tsc=unstable"
"""Without hardware virtualisation: the tick counter's speed is guessed at boot, wrongly on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Hardware properties that all copies of a machine have in common."""

    accelerator: str
    """``tcg`` or ``kvm``."""
    memory_mib: int
    """Commands' and ``KERNEL_MIB``."""
    cpus: int

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.memory_mib << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """The boot files of a machine."""

    kernel: Path
    initramfs: Path
    console: Path
    """File for the kernel's console output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks:
    """The disk images of a machine."""

    system: Path
    upper: tuple[Path, ...]
    """Each is based on the previous ones: a raw disk unless ``is_blank``, then qcow2 files, the last of which is
    written.
    """
    is_blank: bool
    """True if there is no raw disk at the bottom."""
    layers: tuple[Path, ...]
    """Squashfs files, from ``FIRST_LAYER`` on."""
    empty: Path
    """An empty qcow2 file of ``DISK_BYTES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Descriptors that a machine's process inherits."""

    control: int
    """A socket for QMP."""
    port: int
    """A socket for the agent."""
    state: int | None
    """A file with the state of the devices, for a copy."""


def command_line(program: str, shape: Shape, ram: Path, disks: Disks, wires: Wires, boot: Boot | None) -> list[str]:
    """QEMU's command line: a machine that boots and shares its memory with the file ``ram``, or a copy of one.

    A copy sees the memory in ``ram`` and keeps its changes to itself.
    """
    is_copy = boot is None
    argv = [
        *(program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *(("-S",) if is_copy else ()),
        *("-machine", f"pc,accel={shape.accelerator},memory-backend=ram,suppress-vmdesc=on,vmport=off"),
        *("-cpu", "max" if shape.accelerator == "tcg" else "host", "-smp", str(shape.cpus)),
        *("-m", f"{shape.memory_mib}M", "-object", _memory(shape, ram, is_shared=not is_copy)),
        *("-global", "migration.send-configuration=off"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-chardev", f"socket,id=control,fd={wires.control}", "-mon", "chardev=control,mode=control"),
        *("-chardev", f"socket,id=port,fd={wires.port}", "-device", "virtio-serial-pci"),
        *("-device", f"virtserialport,chardev=port,name={PORT_NAME}"),
        *("-serial", "null" if boot is None else f"file:{boot.console}"),
    ]
    for node in _nodes(disks):
        argv += ["-blockdev", orjson.dumps(node).decode()]
    for number in range(FIRST_LAYER + LAYER_DISKS):
        argv += ["-device", f"virtio-blk-pci,drive=disk{number},addr={number + 4:#x}"]
    if boot is not None:
        words = f"{BOOT_ARGUMENTS} {SOFTWARE_ARGUMENTS}" if shape.accelerator == "tcg" else BOOT_ARGUMENTS
        argv += ["-kernel", str(boot.kernel), "-initrd", str(boot.initramfs), "-append", words]
    elif wires.state is not None:
        argv += ["-incoming", f"fd:{wires.state}"]
    return argv


def upper_node(path: Path, *, name: str) -> dict[str, object]:
    """A new writable overlay, for QEMU's ``blockdev-add``; its backing file is set later."""
    return {"driver": "qcow2", "node-name": name, "file": _file(path, is_written=True), "backing": None}


def _memory(shape: Shape, ram: Path, *, is_shared: bool) -> str:
    share = "on" if is_shared else "off"
    return f"memory-backend-file,id=ram,size={shape.memory_mib}M,mem-path={ram},share={share}"


def _nodes(disks: Disks) -> Iterator[dict[str, object]]:
    """Block devices, each named before another one lies over it."""
    yield {"driver": "raw", "node-name": "disk0", "file": _file(disks.system), "read-only": True}
    yield from _chain(disks)
    for place in range(LAYER_DISKS):
        node: dict[str, object] = {"driver": "qcow2", "file": _file(disks.empty), "read-only": True}
        if place < len(disks.layers):
            name = f"layer{place}"
            yield {"driver": "raw", "node-name": name, "file": _file(disks.layers[place]), "read-only": True}
            node["backing"] = name
        yield {**node, "node-name": f"disk{FIRST_LAYER + place}"}


def _chain(disks: Disks) -> Iterator[dict[str, object]]:
    below = ""
    for height, path in enumerate(disks.upper):
        is_top = height == len(disks.upper) - 1
        is_raw = height == 0 and not disks.is_blank
        name = f"disk{UPPER}" if is_top else f"upper{height}"
        node: dict[str, object] = {"driver": "raw" if is_raw else "qcow2", "node-name": name}
        node |= {"file": _file(path, is_written=is_top), "read-only": not is_top}
        if below:
            node["backing"] = below
        yield node
        below = name


def _file(path: Path, *, is_written: bool = False) -> dict[str, object]:
    return {"driver": "file", "filename": str(path), "locking": "off", "read-only": not is_written}


def memory_mib(memory_bytes: int) -> int:
    """Memory of a machine whose commands may use ``memory_bytes``, in steps that templates can share."""
    return -(-memory_bytes // (64 << 20)) * 64 + KERNEL_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class VmSpec:
    """The hardware and disks of a sandbox; equal ones share a template."""

    shape: Shape
    layers: tuple[Path, ...]
    """Disks in their places, lowest first, those of mounts after those of the image."""
    order: str
    """The rest, as JSON for :class:`~etude.sandboxes.qemu.guest.filesystem.GuestEnvironment`."""
    disk_bytes: int

    @property
    def key(self) -> str:
        """Its digest."""
        parts = [self.shape.accelerator, self.shape.memory_mib, self.shape.cpus, self.disk_bytes, self.order]
        return hashlib.sha256(orjson.dumps([*parts, *map(str, self.layers)])).hexdigest()[:24]


def shape_of(accelerator: str, limits: SandboxLimits) -> Shape:
    """The machine shape for these limits."""
    cpus = math.ceil(limits.cpus)
    return Shape(accelerator=accelerator, memory_mib=memory_mib(limits.memory_bytes), cpus=cpus)


def vm_spec_of(spec: SandboxSpec, accelerator: str, store: ImageStore, base: Base) -> VmSpec:
    """The VM spec of a sandbox spec; ``base`` is the base system of the machine itself.

    Raises :class:`~etude.errors.SandboxError` for too many layers and mounts, or a mount of a missing path,
    :class:`~etude.errors.ConfigError` for a base system that is not stored.
    """
    image = spec.image
    user = image.user
    is_system = image.base in ("", base.name)
    disks = [] if is_system or image.base == SCRATCH else [open_base(store, image.base).disk]
    mounts = sorted(spec.mounts.items())
    surplus = len(image.layers) + len(mounts) - LAYER_DISKS
    if image.base == SCRATCH and surplus > 0:  # nothing is below them that they could hide
        disks.append(merged_disk(store, image.layers[: surplus + 1]))
        image = replace(image, layers=image.layers[surplus + 1 :])
    disks += [disk_image(store, layer) for layer in image.layers]
    first_mount = FIRST_LAYER + len(disks)
    if len(disks) + len(mounts) > LAYER_DISKS:
        raise SandboxError(
            f"{len(disks)} layers and {len(mounts)} mounts: a virtual machine has places for {LAYER_DISKS} together; "
            "put several layers into one"
        )
    order = {
        "disks": list(range(FIRST_LAYER, first_mount)),
        "system": is_system,
        "mounts": [
            [first_mount + place, path, source.name if source.is_file() else ""]
            for place, (path, source) in enumerate(mounts)
        ],
        "workdir": image.workdir,
        "user": ["root", 0, 0, "/root"] if spec.user == "root" else ["agent", user.uid, user.gid, user.home],
        "names": list(spec.names),
        "roots": [service.root for service in image.services],
        "environment": {**image.environment, **spec.environment},
        "memory_bytes": spec.limits.memory_bytes,
        "processes": spec.limits.processes,
        "cpus": spec.limits.cpus,
    }
    return VmSpec(
        shape=shape_of(accelerator, spec.limits),
        layers=(*disks, *(_mount_disk(store, source) for _, source in mounts)),
        order=orjson.dumps(order, option=orjson.OPT_SORT_KEYS).decode(),
        disk_bytes=spec.limits.disk_bytes,
    )


def _mount_disk(store: ImageStore, source: Path) -> Path:
    """The squashfs of a folder, or of one that holds a file, as they are now."""
    if source.is_dir():
        return disk_image(store, source)
    if not source.is_file():
        raise SandboxError(f"a sandbox cannot show {source}: there is no such folder or file")
    with store.incoming() as folder:
        alone = folder / "alone"
        alone.mkdir()
        shutil.copy2(source, alone / source.name)
        return disk_image(store, alone)
