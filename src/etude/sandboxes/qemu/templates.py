"""Frozen machines to copy sandboxes from: one booted for each shape, one prepared for each VM spec.

    boot (seconds) ──▶ booted, kept on disk ──copy, environment──▶ prepared, kept in memory ──copy──▶ sandbox

A booted machine depends only on QEMU, the base system, the agent's code and its shape, so it is stored next to the
images and reused by later processes. Owns both kinds and the callers that wait for one in preparation; at most
``PREPARED_LIMIT`` prepared ones are kept, in addition to those in use by sandboxes.
"""

import asyncio
import hashlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from etude.errors import SandboxError
from etude.sandboxes.images.debian import Base
from etude.sandboxes.images.layers import remove_tree
from etude.sandboxes.images.store import ImageStore, settle
from etude.sandboxes.qemu.disks import make_empty, make_writable
from etude.sandboxes.qemu.hardware import UPPER, Boot, Disks, Shape, VmSpec, Wires, command_line
from etude.sandboxes.qemu.initramfs import agent_archive
from etude.sandboxes.qemu.machine import Frozen, Machine, MachineIdentity

BOOT_TIMEOUT_S = 180.0
"""Timeout for software emulation on a busy machine; on an idle one it takes eight seconds."""
PREPARE_TIMEOUT_S = 60.0
PREPARED_LIMIT = 16
BOOTED_LIMIT = 12
"""Booted machines kept on disk; each takes some 150 MB."""
LOCK_LIMIT = 8 * PREPARED_LIMIT
"""Maximum number of locks of templates that are, or were, in preparation."""
CONSOLE_TAIL = 600
"""Characters of the console output in the error of a failed boot."""


class Templates:
    """Booted and prepared machines, made on first use."""

    def __init__(self, program: str, version: str, store: ImageStore, base: Base, folder: Path) -> None:
        """``folder`` holds prepared machines, ``version`` is QEMU's version text."""
        self._program = program
        self._version = version
        self._store = store
        self._base = base
        self._folder = folder
        self._agent = agent_archive()
        self._prepared: OrderedDict[str, Frozen] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[Path, int] = {}
        self._made = 0

    async def prepared(self, vm_spec: VmSpec) -> Frozen:
        """The template of a VM spec; a caller that copies it says so with :meth:`hold`."""
        key = vm_spec.key
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._prepared:
                self._prepared[key] = await self._prepare(vm_spec)
            self._prepared.move_to_end(key)
            self._evict()
            return self._prepared[key]

    async def booted(self, shape: Shape, timeout_s: float = BOOT_TIMEOUT_S) -> Frozen:
        """A machine of a shape in its state when its agent first answers.

        Raises :class:`~etude.errors.SandboxError` with the end of its console output if it does not boot.
        """
        place = self._store.folder / "machines" / self.key(shape)
        async with self._locks.setdefault(place.name, asyncio.Lock()):
            if not (place / "frozen.json").exists():
                place.parent.mkdir(exist_ok=True)
                await self._boot(shape, place, timeout_s)
                await asyncio.to_thread(prune, place.parent)
            os.utime(place / "frozen.json")
            next_id = orjson.loads((place / "frozen.json").read_bytes())["next_id"]
            return Frozen(shape=shape, folder=place, disks=self._blank(place), next_id=next_id)

    def hold(self, frozen: Frozen) -> None:
        """Keep a template's files until they are released as often."""
        self._users[frozen.folder] = self._users.get(frozen.folder, 0) + 1

    def let_go(self, frozen: Frozen) -> None:
        """Release a template's files for one copy."""
        self._users[frozen.folder] -= 1
        if not self._users[frozen.folder]:
            del self._users[frozen.folder]
            if all(frozen_disk.folder != frozen.folder for frozen_disk in self._prepared.values()):
                remove_tree(frozen.folder)

    def fresh_folder(self) -> Path:
        """The path of a folder that does not exist yet."""
        self._made += 1
        return self._folder / f"t{self._made:06d}"

    def _evict(self) -> None:
        if len(self._locks) > LOCK_LIMIT:
            frozen_disk = {key: lock for key, lock in self._locks.items() if lock.locked() or key in self._prepared}
            self._locks = frozen_disk
        while len(self._prepared) > PREPARED_LIMIT:
            _, frozen = self._prepared.popitem(last=False)
            if frozen.folder not in self._users:
                remove_tree(frozen.folder)

    async def _prepare(self, vm_spec: VmSpec) -> Frozen:
        """Copy a booted machine, have it make the commands' environment, and bring it to rest."""
        booted = await self.booted(vm_spec.shape)
        disk = await asyncio.to_thread(self._writable, vm_spec.disk_bytes)
        disks = replace(booted.disks, upper=(disk,), is_blank=False, layers=vm_spec.layers)
        folder = self.fresh_folder()
        folder.mkdir()
        machine = await Machine.copy(self._program, booted, folder, MachineIdentity(name="template"), disks)
        try:
            order: Mapping[str, Any] = orjson.loads(vm_spec.order)
            await machine.link.ask("environment", {**order, "upper": UPPER}, timeout_s=PREPARE_TIMEOUT_S)
            await machine.rest()
            return await machine.freeze(self.fresh_folder(), keep=False)
        finally:
            await machine.kill()
            remove_tree(folder)

    async def _boot(self, shape: Shape, place: Path, timeout_s: float) -> None:
        with self._store.incoming() as folder:
            blank = self._blank(folder)
            await asyncio.to_thread(make_empty, folder / "empty.qcow2")
            top = folder / "upper.qcow2"
            shutil.copyfile(blank.empty, top)
            (folder / "initrd").write_bytes(self._base.initramfs.read_bytes() + self._agent)
            boot = Boot(kernel=self._base.kernel, initramfs=folder / "initrd", console=folder / "console")
            machine = await Machine.boot(self._program, shape, boot, replace(blank, upper=(top,)), folder)
            try:
                await machine.link.ask("hello", {}, timeout_s=timeout_s)
                await machine.rest()
                frozen = await machine.freeze(folder / "frozen", keep=False)
            except SandboxError as error:
                raise SandboxError(f"a virtual machine does not boot: {error}{_tail(folder / 'console')}") from error
            finally:
                await machine.kill()
            (folder / "empty.qcow2").rename(frozen.folder / "empty.qcow2")
            (frozen.folder / "frozen.json").write_bytes(orjson.dumps({"next_id": frozen.next_id}))
            settle(frozen.folder, place)

    def _blank(self, folder: Path) -> Disks:
        return Disks(system=self._base.disk, upper=(), is_blank=True, layers=(), empty=folder / "empty.qcow2")

    def _writable(self, size_bytes: int) -> Path:
        """An empty disk from which all copies of this size are made."""
        path = self._folder / f"disk{size_bytes}"
        if not path.exists():
            make_writable(path, size_bytes)
        return path

    def key(self, shape: Shape) -> str:
        """Digest of everything that a booted machine depends on."""
        wires = Wires(control=0, port=0, state=None)
        boot = Boot(kernel=Path("kernel"), initramfs=Path("initrd"), console=Path("console"))
        disks = replace(self._blank(Path()), upper=(Path("upper"),))
        parts = [*command_line(self._program, shape, Path("ram"), disks, wires, boot), self._version, _host(shape)]
        digest = hashlib.sha256("\0".join(parts).encode())
        for part in (self._agent, self._base.initramfs.read_bytes(), self._base.kernel.read_bytes()):
            digest.update(hashlib.sha256(part).digest())
        status = self._base.disk.stat()
        digest.update(f"{self._base.digest} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()[:24]


def prune(folder: Path) -> None:
    """Keep the most recently used booted machines and records of failed boots."""
    used = {path: path.stat().st_mtime_ns for path in folder.glob("*.refused")}
    used |= {file.parent: file.stat().st_mtime_ns for file in folder.glob("*/frozen.json")}
    for path in sorted(used, key=lambda path: used[path])[:-BOOTED_LIMIT]:
        if path.is_dir():
            (path / "frozen.json").unlink()  # first, so that half a machine is not taken for one
            remove_tree(path)
        else:
            path.unlink()


def _host(shape: Shape) -> str:
    """The host's processor, which the guest sees with hardware virtualisation: a copy runs on no other model."""
    if shape.accelerator == "tcg":
        return ""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "microcode"))}))


def _tail(console: Path) -> str:
    try:
        text = console.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return f"; its console ends: {text[-CONSOLE_TAIL:]}" if text else ""
