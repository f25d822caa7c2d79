"""What a spec needs of a virtual machine: its shape, the disks in their places, the order to the agent.

Owns the translation, and packs layers and mounts that are not disks yet, so it is slow and not for an event loop.
"""

import hashlib
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import orjson

from etude.errors import SandboxError
from etude.sandbox_spec import SandboxLimits, SandboxSpec
from etude.sandboxes.images.debian import Base, open_base
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.qemu.hardware import FIRST_LAYER, LAYER_DISKS, Shape, memory_mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Furnishing:
    """What a world is made from; equal ones share a template."""

    shape: Shape
    layers: tuple[Path, ...]
    """Disks in their places, lowest first, those of mounts after those of the image."""
    order: str
    """The rest, as JSON for :class:`~etude.sandboxes.qemu.guest.filesystem.World`."""
    disk_bytes: int

    @property
    def key(self) -> str:
        """Its digest."""
        parts = [self.shape.accelerator, self.shape.memory_mib, self.shape.cpus, self.disk_bytes, self.order]
        return hashlib.sha256(orjson.dumps([*parts, *map(str, self.layers)])).hexdigest()[:24]


def shape_of(accelerator: str, limits: SandboxLimits) -> Shape:
    """The shape of a machine for these limits."""
    cpus = math.ceil(limits.cpus)
    return Shape(accelerator=accelerator, memory_mib=memory_mib(limits.memory_bytes), cpus=cpus)


def furnishing_of(spec: SandboxSpec, accelerator: str, store: ImageStore, base: Base) -> Furnishing:
    """What a spec's template is made from; ``base`` is the base system of the machine itself.

    Raises :class:`~etude.errors.SandboxError` for more layers and mounts than there are places, or a mount of nothing,
    :class:`~etude.errors.ConfigError` for a base system that is not stored.
    """
    image = spec.image
    is_system = image.base in ("", base.name)
    disks = [] if is_system else [open_base(store, image.base).disk]
    disks += [store.disk_image(layer) for layer in image.layers]
    mounts = sorted(spec.mounts.items())
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
        "user": spec.user,
        "environment": {**image.environment, **spec.environment},
        "memory_bytes": spec.limits.memory_bytes,
        "processes": spec.limits.processes,
        "cpus": spec.limits.cpus,
    }
    return Furnishing(
        shape=shape_of(accelerator, spec.limits),
        layers=(*disks, *(_mount_disk(store, source) for _, source in mounts)),
        order=orjson.dumps(order, option=orjson.OPT_SORT_KEYS).decode(),
        disk_bytes=spec.limits.disk_bytes,
    )


def _mount_disk(store: ImageStore, source: Path) -> Path:
    """The squashfs of a folder, or of one that holds a file, as they are now."""
    if source.is_dir():
        return store.disk_image(source)
    if not source.is_file():
        raise SandboxError(f"a sandbox cannot show {source}: there is no such folder or file")
    with store.incoming() as folder:
        alone = folder / "alone"
        alone.mkdir()
        shutil.copy2(source, alone / source.name)
        return store.disk_image(alone)
