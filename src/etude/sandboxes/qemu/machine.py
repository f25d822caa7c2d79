"""One QEMU process: start, control, freeze, copy and kill.

    NEW ──▶ RUNNING ◀──▶ RESTING
                └───────────┴────▶ GONE

A machine is resting when its agent is quiet and its processors are stopped; then its memory, devices and disk are saved
as a :class:`Frozen`, from which any number of copies start in the middle of whatever the original was doing. Owns the
process, its two sockets and its folder. The process dies with this one, even if this one is killed. Every wait has a
deadline.
"""

import asyncio
import errno
import fcntl
import os
import secrets
import shutil
import socket
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from etude.errors import SandboxError
from etude.sandboxes.qemu.hardware import UPPER, Boot, Disks, Shape, Wires, command_line, upper_node
from etude.sandboxes.qemu.link import GuestLink

TIMEOUT_S = 60.0
"""For QEMU to execute one command."""
LINE_LIMIT_BYTES = 1 << 20
"""Largest message of QEMU."""


class QmpControl:
    """Connection to one QEMU process by QMP, its control protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, channel: socket.socket) -> Self:
        """Negotiate with the process at the other end. Raises :class:`~etude.errors.SandboxError` on no answer."""
        control = cls(*await asyncio.open_connection(sock=channel, limit=LINE_LIMIT_BYTES))
        try:
            await control.ask("qmp_capabilities")
        except BaseException:
            control.close()
            raise
        return control

    async def ask(self, command: str, **arguments: object) -> object:
        """Execute a command and return its result. Raises :class:`~etude.errors.SandboxError`."""
        async with self._turn:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    self._writer.write(orjson.dumps({"execute": command, "arguments": arguments}) + b"\n")
                    await self._writer.drain()
                    return await self._result()
            except TimeoutError:
                raise SandboxError(f"QEMU did not do {command!r} within {TIMEOUT_S} s") from None
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise SandboxError(f"QEMU did not do {command!r}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _result(self) -> object:
        """The result of a command; events are skipped."""
        while line := await self._reader.readline():
            answer = orjson.loads(line)
            if "error" in answer:
                raise ValueError(answer["error"]["desc"])
            if "return" in answer:
                return answer["return"]
        raise ValueError("it ended")


Words: TypeAlias = npt.NDArray[np.uint64]
"""Entries of ``pagemap``."""
Pages: TypeAlias = npt.NDArray[np.intp]
"""Numbers of pages."""

PAGE_BYTES = 4096
PRESENT, SWAPPED, SHARED = 1 << 63, 1 << 62, 1 << 61
"""Flags in ``pagemap``; ``SHARED`` is set on pages of a file."""
FICLONE = 0x40049409
CHUNK_BYTES = 8 << 20


def save_memory(process: int, source: Path, target: Path) -> int:
    """Write the memory of a copy, which was mapped from ``source``, to ``target``; return the number of changed bytes.

    Raises ``OSError`` when the process is gone or may not be read.
    """
    copy_sparse(source, target)
    changed_bytes = 0
    memory = os.open(f"/proc/{process}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with target.open("r+b", buffering=0) as file:
            for address, offset, length in _mappings(process, source):
                for first, count in _runs(_changed_pages(process, address, length)):
                    start, size = first * PAGE_BYTES, count * PAGE_BYTES
                    changed_bytes += size
                    _copy(memory, address + start, file.fileno(), offset + start, size)
    finally:
        os.close(memory)
    return changed_bytes


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file with its holes, by reflink where the file system can."""
    with source.open("rb", buffering=0) as old, target.open("xb", buffering=0) as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:
            size = os.fstat(old.fileno()).st_size
            os.truncate(new.fileno(), size)
            for start, end in _data(old.fileno(), size):
                _copy(old.fileno(), start, new.fileno(), start, end - start)


def changed_pages(flags_N: Words) -> Pages:
    """Numbers of the pages that a process changed in a private mapping, from their ``pagemap`` words, [N] uint64."""
    is_here = (flags_N & np.uint64(PRESENT)) != 0
    is_own = (flags_N & np.uint64(SHARED)) == 0
    is_swapped = (flags_N & np.uint64(SWAPPED)) != 0
    return np.flatnonzero((is_here & is_own) | is_swapped)


def _changed_pages(process: int, address: int, length: int) -> Pages:
    with Path(f"/proc/{process}/pagemap").open("rb", buffering=0) as file:
        file.seek(address // PAGE_BYTES * 8)
        words = file.read(length // PAGE_BYTES * 8)
    return changed_pages(np.frombuffer(words, np.uint64))


def _runs(pages_N: Pages) -> Iterator[tuple[int, int]]:
    """First page and number of pages of every contiguous run, ascending."""
    if pages_N.size:
        for run in np.split(pages_N, np.flatnonzero(np.diff(pages_N) != 1) + 1):
            yield int(run[0]), run.size


def _mappings(process: int, source: Path) -> Iterator[tuple[int, int, int]]:
    """Address, offset in the file and length of every private mapping of ``source``."""
    inode = source.stat().st_ino
    for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
        span, mode, offset, _, number, *_ = line.split()
        if int(number) == inode and mode.endswith("p"):
            start, end = (int(part, 16) for part in span.split("-"))
            yield start, int(offset, 16), end - start


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of every part that is not a hole."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def _copy(source: int, at: int, target: int, to: int, length: int) -> None:
    done = 0
    while done < length:
        data = os.pread(source, min(CHUNK_BYTES, length - done), at + done)
        if not data:
            raise OSError(errno.EIO, f"the memory ends after {at + done} bytes")
        done += os.pwrite(target, data, to + done)


ENTROPY_BYTES = 64
WAKE_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 5.0
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""Prefix of a command that is killed when the process that started it is gone."""


class MachineState(StrEnum):
    """The state of a machine."""

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
"""State of a machine → the states it may move to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The files of a frozen machine, from which copies start."""

    shape: Shape
    folder: Path
    disks: Disks
    next_id: int
    """Greater than the ids of all requests that its agent has received."""

    @property
    def ram(self) -> Path:
        """Its memory."""
        return self.folder / "ram"

    @property
    def devices(self) -> Path:
        """The state of its processors and devices."""
        return self.folder / "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineIdentity:
    """Names and sockets that differ between a copy of a machine and its original."""

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
        self.link = GuestLink()
        """Replaced by an open one when the process starts."""
        self._process: Process | None = None
        self._control: QmpControl | None = None
        self._tops = 0

    @classmethod
    async def boot(cls, program: str, shape: Shape, boot: Boot, disks: Disks, folder: Path) -> Self:
        """Boot a machine whose memory is the file ``ram`` in ``folder``; its agent answers a while later."""
        machine = cls(shape, folder, disks, folder / "ram")
        try:
            await machine._start(program, boot, None, GuestLink())
        except BaseException:
            with suppress(SandboxError):
                await machine.kill()
            raise
        return machine

    @classmethod
    async def copy(
        cls, program: str, frozen: Frozen, folder: Path, identity: MachineIdentity, disks: Disks | None = None
    ) -> Self:
        """Start a copy, with a disk of its own in ``folder``, and wake it; ``disks`` replace those of the original.

        Raises :class:`~etude.errors.SandboxError`.
        """
        disks = disks or frozen.disks
        top = folder / "upper.qcow2"
        shutil.copyfile(disks.empty, top)
        machine = cls(frozen.shape, folder, replace(disks, upper=(*disks.upper, top)), frozen.ram)
        try:
            with frozen.devices.open("rb") as state:
                link = GuestLink(next_id=frozen.next_id, allow=identity.allow)
                await machine._start(program, None, state.fileno(), link)
            await machine._execute("cont")
            await machine.wake(identity)
        except BaseException:
            with suppress(SandboxError):
                await machine.kill()
            raise
        return machine

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    async def rest(self) -> None:
        """Bring the machine to rest, between two messages of its agent."""
        await self.link.ask("rest", {}, timeout_s=WAKE_TIMEOUT_S)
        await self.link.drain()
        await self._execute("stop")
        self._move(MachineState.RESTING)

    async def resume(self) -> None:
        """Let a resting machine run again."""
        await self._execute("cont")
        self._move(MachineState.RUNNING)
        await self.link.ask("wake", {"is_copy": False, "now_ns": time.time_ns()}, timeout_s=WAKE_TIMEOUT_S)

    async def wake(self, identity: MachineIdentity) -> None:
        """Send the agent of a copy its identity and the time."""
        news = {"is_copy": True, "now_ns": time.time_ns(), "name": identity.name, "allow": list(identity.allow)}
        await self.link.ask("wake", news, secrets.token_bytes(ENTROPY_BYTES), timeout_s=WAKE_TIMEOUT_S)

    async def freeze(self, folder: Path, *, keep: bool) -> Frozen:
        """Save a resting machine into the new ``folder``; with ``keep`` it can be resumed afterwards.

        Its disk so far becomes part of the saved machine; what it writes later goes into a new file.
        """
        assert self.state is MachineState.RESTING
        folder.mkdir()  # noqa: ASYNC240 - in memory, like all of a machine's files
        frozen = Frozen(shape=self.shape, folder=folder, disks=self.disks, next_id=self.link.next_id)
        try:
            await self._execute("xen-save-devices-state", filename=str(frozen.devices), live=False)
            if self._ram.parent == self.folder:  # it booted, so the file is its memory
                self._ram.rename(frozen.ram)
            else:
                await asyncio.to_thread(save_memory, self.pid, self._ram, frozen.ram)
            return replace(frozen, disks=await self._split_disk(folder, keep=keep))
        except OSError as error:
            raise SandboxError(f"a virtual machine cannot be saved in {folder}: {error}") from error

    async def kill(self) -> None:
        """Kill it; calling this twice is harmless.

        Raises :class:`~etude.errors.SandboxError` if its process does not end.
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

    async def _execute(self, command: str, **arguments: object) -> None:
        assert self._control is not None
        try:
            await self._control.ask(command, **arguments)
        except SandboxError as error:
            raise SandboxError(f"{error}{self._last_words()}") from error

    async def _split_disk(self, folder: Path, *, keep: bool) -> Disks:
        """Make the top layer of the disk read-only and move it to ``folder``; with ``keep``, continue in a new layer.

        With ``keep`` the old layer stays at its old path as well: QEMU looks there again at the next snapshot.
        """
        top = self.disks.upper[-1]
        frozen_disk = folder / top.name
        if keep:
            self._tops += 1
            fresh = self.folder / f"upper{self._tops}.qcow2"
            shutil.copyfile(self.disks.empty, fresh)
            name = f"top{self._tops}"
            await self._execute("blockdev-add", **upper_node(fresh, name=name))
            below = f"disk{UPPER}" if self._tops == 1 else f"top{self._tops - 1}"
            await self._execute("blockdev-snapshot", node=below, overlay=name)
            self.disks = replace(self.disks, upper=(*self.disks.upper[:-1], frozen_disk, fresh))
            frozen_disk.hardlink_to(top)
        else:
            top.rename(frozen_disk)
        return replace(
            self.disks, upper=(*self.disks.upper[:-2], frozen_disk) if keep else (*self.disks.upper[:-1], frozen_disk)
        )

    async def _start(self, program: str, boot: Boot | None, state: int | None, link: GuestLink) -> None:
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
            self._control = await QmpControl.open(control[0])
        except SandboxError as error:
            raise SandboxError(f"{error}{self._last_words()}") from error

    def _last_words(self) -> str:
        """The end of QEMU's log, for an error message."""
        try:
            text = (self.folder / "qemu.log").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f"; it said: {text[-400:]}" if text else ""

    def _move(self, state: MachineState) -> None:
        assert state in MOVES[self.state], f"a machine went from {self.state} to {state}"
        self.state = state
