"""Sandboxes that are virtual machines: QEMU with the base system's own kernel; implements ``SandboxProvider``.

    create ──▶ template of this VM spec ──copy──▶ machine ──▶ sandbox

Uses hardware virtualisation if a machine boots under it, else software emulation: about ten times slower, otherwise the
same. Needs no privileges except reading ``/dev/kvm``, if it exists. Owns the machines, the templates and their folder,
which the next provider removes if this one is killed; the machines die with this process.

States: new ──create──▶ open ──close──▶ closed.
"""

import asyncio
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from etude.errors import ConfigError, SandboxError
from etude.sandbox_spec import Capability, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.capabilities import check_spec
from etude.sandboxes.entrypoint import services_started, started
from etude.sandboxes.images.debian import open_base
from etude.sandboxes.images.layers import remove_tree
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.lifecycle import all_or_none, close_all
from etude.sandboxes.qemu.disks import missing_tools
from etude.sandboxes.qemu.hardware import shape_of, vm_spec_of
from etude.sandboxes.qemu.machine import Frozen, Machine
from etude.sandboxes.qemu.sandbox import QemuSandbox, identity_of, unpack_upper
from etude.sandboxes.qemu.templates import Templates
from etude.sandboxes.scratch import Scratch

PROGRAM = "qemu-system-x86_64"
CLAIMS = frozenset(Capability) - {Capability.LIMIT_WALL}
"""All capabilities, as each sandbox is a separate machine; it enforces limits itself, and needs no wall."""
PACKAGES: Mapping[str, str] = {
    "qemu-img": "qemu-utils", "mke2fs": "e2fsprogs", "mksquashfs": "squashfs-tools", "setpriv": "util-linux"
}  # fmt: skip
VERSION_TIMEOUT_S = 10.0

Accelerator = Literal["auto", "kvm", "tcg"]
PROBE_TIMEOUT_S = 20.0
"""Timeout of a boot that normally takes one or two seconds."""


class QemuSandboxes:
    """Makes virtual machines."""

    def __init__(
        self,
        *,
        store: ImageStore | None = None,
        scratch: Path | None = None,
        base: str = "debian",
        accelerator: Accelerator = "auto",
        program: str = PROGRAM,
    ) -> None:
        """``store`` has the images and the base system ``base``; ``scratch`` is the parent folder of machines' files.

        Raises :class:`~etude.errors.ConfigError` if a program is missing or the base system is not built.
        """
        path = shutil.which(program)
        missing = [*missing_tools(), *([] if path else [program])]
        if path is None or missing:
            packages = sorted({PACKAGES.get(name, "qemu-system-x86") for name in missing})
            raise ConfigError(f"{missing} are not installed: on Debian or Ubuntu, apt-get install {' '.join(packages)}")
        self.accelerator: str = accelerator
        """``auto`` until the first sandbox is requested, then ``kvm`` or ``tcg``."""
        self._program = path
        self._store = store or ImageStore()
        self._base = open_base(self._store, base)
        self._parent = scratch
        self._scratch: Scratch | None = None
        self._templates: Templates | None = None
        self._opening = asyncio.Lock()
        self._sandboxes: set[QemuSandbox] = set()
        self._made = 0
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """All of them, once a machine has booted. Raises :class:`~etude.errors.SandboxError` if none boots."""
        templates = await self._open()
        await templates.booted(shape_of(self.accelerator, SandboxLimits()))
        return CLAIMS

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> QemuSandbox:
        """A fresh machine that holds ``files``. The first of its kind takes longer, since its template is made.

        Raises :class:`~etude.errors.SandboxError`, ``ValueError`` for a path that would leave the sandbox.
        """
        spec = spec or SandboxSpec()
        check_spec(spec, CLAIMS, "qemu")
        templates = await self._open()
        vm_spec = await asyncio.to_thread(vm_spec_of, spec, self.accelerator, self._store, self._base)
        frozen = await templates.prepared(vm_spec)
        (sandbox,) = await self.copies(spec, (frozen,), 1)
        try:
            await sandbox.write_files(files)
        except BaseException:
            await close_all([sandbox])
            raise
        await services_started(sandbox, spec.image)
        await started(sandbox, spec.image)
        return sandbox

    async def close(self) -> None:
        """Kill every machine and remove all files; calling it twice is harmless."""
        self._closed = True
        async with self._opening:
            failures = await close_all(self._sandboxes)
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None
        if failures:
            raise failures[0]

    async def copies(self, spec: SandboxSpec, memories: tuple[Frozen, ...], count: int) -> Sequence[QemuSandbox]:
        """A number of sandboxes that start from the first of ``memories`` and need the files of all; or none, and an
        error.
        """
        self._hold(memories)  # until all are made
        try:
            return await all_or_none(self._copy(spec, memories) for _ in range(count))
        finally:
            self._let_go(memories)

    def hold(self, sandbox: QemuSandbox, frozen: Frozen) -> None:
        """Store the files of a frozen machine as long as a sandbox exists."""
        self._opened.hold(frozen)
        sandbox.memories = (frozen, *sandbox.memories)

    def fresh_folder(self) -> Path:
        """Folder for the memory of machines."""
        return self._opened.fresh_folder()

    async def keep_files(self, spec: SandboxSpec, pack: Callable[..., Awaitable[tuple[bytes, bool]]]) -> Image:
        """An image of a sandbox's own image and the files that ``pack`` returns, part by part."""
        folder = self._new_folder()
        tar, layer = folder / "tar", folder / "layer"
        limit_bytes, is_last = 2 * spec.limits.disk_bytes + (64 << 20), False
        with tar.open("xb") as file:
            while not is_last:
                part, is_last = await pack(is_first=file.tell() == 0)
                file.write(part)
                if file.tell() > limit_bytes:
                    raise SandboxError(f"a virtual machine wrote more than the {limit_bytes} bytes that it could have")
        await asyncio.to_thread(unpack_upper, tar, layer)
        tar.unlink()
        return replace(spec.image, digest="", layers=(*spec.image.layers, layer))

    async def forget(self, sandbox: QemuSandbox, machine: Machine) -> None:
        """A sandbox has been closed."""
        if sandbox in self._sandboxes:
            self._sandboxes.discard(sandbox)
            self._let_go(sandbox.memories)
            await asyncio.to_thread(remove_tree, machine.folder)

    @property
    def _opened(self) -> Templates:
        if self._templates is None:
            raise SandboxError("the sandbox provider has no sandboxes yet")
        return self._templates

    async def _copy(self, spec: SandboxSpec, memories: tuple[Frozen, ...]) -> QemuSandbox:
        folder = self._new_folder()
        self._hold(memories)
        try:
            machine = await Machine.copy(self._program, memories[0], folder, identity_of(_name(), spec))
        except BaseException:
            self._let_go(memories)
            remove_tree(folder)
            raise
        sandbox = QemuSandbox(self, spec, machine, memories)
        self._sandboxes.add(sandbox)
        if self._closed:
            await sandbox.close()
            raise SandboxError("the sandbox provider is closed")
        return sandbox

    def _hold(self, memories: tuple[Frozen, ...]) -> None:
        for frozen in memories:
            self._opened.hold(frozen)

    def _let_go(self, memories: tuple[Frozen, ...]) -> None:
        for frozen in memories:
            self._opened.let_go(frozen)

    async def _open(self) -> Templates:
        """Make the folder and choose the accelerator, once."""
        async with self._opening:
            if self._closed:
                raise SandboxError("the sandbox provider is closed")
            if self._templates is None:
                self._scratch = Scratch.open(self._parent)
                version = await self._version()
                self._templates = Templates(self._program, version, self._store, self._base, self._scratch.path)
            if self.accelerator == "auto":
                self.accelerator = await find_accelerator(self._templates, self._store)
            return self._templates

    async def _version(self) -> str:
        process = await asyncio.create_subprocess_exec(self._program, "--version", stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(VERSION_TIMEOUT_S):
            output, _ = await process.communicate()
        return output.decode(errors="replace").strip()

    def _new_folder(self) -> Path:
        if self._scratch is None:
            raise SandboxError("the sandbox provider is closed")
        return self._scratch.create(reader=None)


def _name() -> str:
    """A name that no other machine has."""
    return f"box-{secrets.token_hex(4)}"


async def find_accelerator(templates: Templates, store: ImageStore) -> str:
    """``kvm`` if a machine boots under it, else ``tcg``. An accessible ``/dev/kvm`` proves little: under some nested
    virtualisation, Debian's kernel then stops at an instruction that is not emulated. A negative result takes a while,
    so it is recorded next to the booted machines.
    """
    if not _can_open_kvm():
        return "tcg"
    shape = shape_of("kvm", SandboxLimits())
    note = store.folder / "machines" / f"{templates.key(shape)}.refused"
    if note.exists():
        return "tcg"
    try:
        await templates.booted(shape, PROBE_TIMEOUT_S)
    except SandboxError as error:
        note.parent.mkdir(exist_ok=True)
        note.write_text(f"{error}\n", encoding="utf-8")
        return "tcg"
    return "kvm"


def _can_open_kvm() -> bool:
    try:
        with Path("/dev/kvm").open("r+b", buffering=0):
            return True
    except OSError:
        return False
