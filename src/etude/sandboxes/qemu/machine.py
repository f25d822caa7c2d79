"""One QEMU process: started, spoken to, brought to rest, copied, killed.

    NEW ──▶ RUNNING ◀──▶ RESTING
                └───────────┴────▶ GONE

A machine rests when its agent has said its last word and its processors stand still; then its memory, its devices and
its disk are written down as a :class:`Frozen`, from which any number of copies start in the middle of whatever the
original was doing. Owns the process, its two sockets and its folder. The process dies with this one, even if this one
is killed. Every wait has a deadline.
"""

import asyncio
import secrets
import shutil
import socket
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Self

from etude.errors import SandboxError
from etude.sandboxes.qemu.control import Control
from etude.sandboxes.qemu.hardware import UPPER, Boot, Disks, Shape, Wires, command_line, upper_node
from etude.sandboxes.qemu.link import Link
from etude.sandboxes.qemu.memory import save_memory

ENTROPY_BYTES = 64
WAKE_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 5.0
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""Has a program killed when the process that started it is gone."""


class MachineState(StrEnum):
    """Where a machine is in its life."""

    NEW = "new"
    RUNNING = "running"
    RESTING = "resting"
    GONE = "gone"


MOVES: Mapping[MachineState, frozenset[MachineState]] = MappingProxyType(
    {
        MachineState.NEW: frozenset({MachineState.RUNNING, MachineState.GONE}),
        MachineState.RUNNING: frozenset({MachineState.RESTING, MachineState.GONE}),
        MachineState.RESTING: frozenset({MachineState.RUNNING, MachineState.GONE}),
        MachineState.GONE: frozenset({MachineState.GONE}),
    }
)
"""State of a machine → where it may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A machine at rest, as files: what copies start from."""

    shape: Shape
    folder: Path
    disks: Disks
    next_id: int
    """Above all numbers that its agent has heard."""

    @property
    def ram(self) -> Path:
        """Its memory."""
        return self.folder / "ram"

    @property
    def devices(self) -> Path:
        """The state of its processors and devices."""
        return self.folder / "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes a copy another machine than its original."""

    name: str
    allow: tuple[str, ...] = ()


class Machine:
    """A running virtual machine."""

    def __init__(self, shape: Shape, folder: Path, disks: Disks, ram: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.disks = disks
        self.state = MachineState.NEW
        self._ram = ram
        self.link = Link()
        """Replaced by one that is open when the process starts."""
        self._process: Process | None = None
        self._control: Control | None = None
        self._tops = 0

    @classmethod
    async def boot(cls, program: str, shape: Shape, boot: Boot, disks: Disks, folder: Path) -> Self:
        """Start one from nothing, whose memory is the file ``ram`` in ``folder``; it answers a while later."""
        machine = cls(shape, folder, disks, folder / "ram")
        try:
            await machine._start(program, boot, None, Link())
        except BaseException:
            with suppress(SandboxError):
                await machine.kill()
            raise
        return machine

    @classmethod
    async def copy(
        cls, program: str, frozen: Frozen, folder: Path, identity: Identity, disks: Disks | None = None
    ) -> Self:
        """Start a copy, with a disk of its own in ``folder``, and wake it; ``disks`` replace those that it had.

        Raises :class:`~etude.errors.SandboxError`.
        """
        disks = disks or frozen.disks
        top = folder / "upper.qcow2"
        shutil.copyfile(disks.empty, top)
        machine = cls(frozen.shape, folder, replace(disks, upper=(*disks.upper, top)), frozen.ram)
        try:
            with frozen.devices.open("rb") as state:
                link = Link(next_id=frozen.next_id, allow=identity.allow)
                await machine._start(program, None, state.fileno(), link)
            await machine._ask("cont")
            await machine.wake(identity)
        except BaseException:
            with suppress(SandboxError):
                await machine.kill()
            raise
        return machine

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def rest(self) -> None:
        """Bring the machine to rest, between two words of its agent."""
        await self.link.ask("rest", {}, timeout_s=WAKE_TIMEOUT_S)
        await self.link.drain()
        await self._ask("stop")
        self._move(MachineState.RESTING)

    async def resume(self) -> None:
        """Let it go on."""
        await self._ask("cont")
        self._move(MachineState.RUNNING)
        await self.link.ask("wake", {"is_copy": False, "now_ns": time.time_ns()}, timeout_s=WAKE_TIMEOUT_S)

    async def wake(self, identity: Identity) -> None:
        """Tell the agent of a copy who and when it is."""
        news = {"is_copy": True, "now_ns": time.time_ns(), "name": identity.name, "allow": list(identity.allow)}
        await self.link.ask("wake", news, secrets.token_bytes(ENTROPY_BYTES), timeout_s=WAKE_TIMEOUT_S)

    async def freeze(self, folder: Path, *, keep: bool) -> Frozen:
        """Write a resting machine down into the new ``folder``; with ``keep`` it can be resumed afterwards.

        Its disk so far becomes part of what is written down; what it writes later goes into a new file.
        """
        assert self.state is MachineState.RESTING
        folder.mkdir()  # noqa: ASYNC240 - in memory, like all of a machine's files
        frozen = Frozen(shape=self.shape, folder=folder, disks=self.disks, next_id=self.link.next_id)
        try:
            await self._ask("xen-save-devices-state", filename=str(frozen.devices), live=False)
            if self._ram.parent == self.folder:  # it booted, so the file is its memory
                self._ram.rename(frozen.ram)
            else:
                await asyncio.to_thread(save_memory, self.pid, self._ram, frozen.ram)
            return replace(frozen, disks=await self._split_disk(folder, keep=keep))
        except OSError as error:
            raise SandboxError(f"a virtual machine cannot be written down in {folder}: {error}") from error

    async def kill(self) -> None:
        """End it, whatever it does; calling it twice is harmless.

        Raises :class:`~etude.errors.SandboxError` when its process stays.
        """
        self._move(MachineState.GONE)
        try:
            if self._process is not None:
                with suppress(ProcessLookupError):
                    self._process.kill()
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self._process.wait()
        except TimeoutError:
            raise SandboxError(f"a virtual machine did not end within {EXIT_TIMEOUT_S:g} s of being killed") from None
        finally:
            if self._control is not None:
                self._control.close()
            await self.link.close()

    async def _ask(self, command: str, **arguments: object) -> None:
        assert self._control is not None
        try:
            await self._control.ask(command, **arguments)
        except SandboxError as error:
            raise SandboxError(f"{error}{self._last_words()}") from error

    async def _split_disk(self, folder: Path, *, keep: bool) -> Disks:
        """Make what was written so far read-only and bring it to ``folder``; if need be, go on in a new file.

        A machine that goes on finds it at its old place as well: QEMU looks there again at the next snapshot.
        """
        top = self.disks.upper[-1]
        kept = folder / top.name
        if keep:
            self._tops += 1
            fresh = self.folder / f"upper{self._tops}.qcow2"
            shutil.copyfile(self.disks.empty, fresh)
            name = f"top{self._tops}"
            await self._ask("blockdev-add", **upper_node(fresh, name=name))
            below = f"disk{UPPER}" if self._tops == 1 else f"top{self._tops - 1}"
            await self._ask("blockdev-snapshot", node=below, overlay=name)
            self.disks = replace(self.disks, upper=(*self.disks.upper[:-1], kept, fresh))
            kept.hardlink_to(top)
        else:
            top.rename(kept)
        return replace(self.disks, upper=(*self.disks.upper[:-2], kept) if keep else (*self.disks.upper[:-1], kept))

    async def _start(self, program: str, boot: Boot | None, state: int | None, link: Link) -> None:
        """Start the process and the link to its agent; ``state`` is an open file with the devices of a copy."""
        control, port = socket.socketpair(), socket.socketpair()
        wires = Wires(control=control[1].fileno(), port=port[1].fileno(), state=state)
        argv = command_line(program, self.shape, self._ram, self.disks, wires, boot)
        inherited = [number for number in (wires.control, wires.port, state) if number is not None]
        self.link = link
        link.open(port[0])
        with control[1], port[1], (self.folder / "qemu.log").open("wb") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *WITH_PARENT, *argv, stdin=DEVNULL, stdout=log, stderr=log, pass_fds=inherited
                )
            except OSError as error:
                control[0].close()
                raise SandboxError(f"{program!r} cannot be started: {error}") from error
        self._move(MachineState.RUNNING)
        try:
            self._control = await Control.open(control[0])
        except SandboxError as error:
            raise SandboxError(f"{error}{self._last_words()}") from error

    def _last_words(self) -> str:
        """What QEMU said, for an error."""
        try:
            text = (self.folder / "qemu.log").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f"; it said: {text[-400:]}" if text else ""

    def _move(self, state: MachineState) -> None:
        assert state in MOVES[self.state], f"a machine went from {self.state} to {state}"
        self.state = state
