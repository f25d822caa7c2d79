"""One virtual machine as a sandbox; implements :class:`~etude.protocols.Sandbox`.

Owns the machine and its time to live. What happens inside is the agent's (:mod:`etude.sandboxes.qemu.guest.agent`).
"""

import asyncio
import math
import os
import stat
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from etude.errors import SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Image, ImageService, SandboxSpec, SandboxStats
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES, check_date, read_archive
from etude.sandboxes.images.layers import PATH_LIMIT_BYTES, WHITEOUT_XATTRS
from etude.sandboxes.qemu.guest.filesystem import XATTR_HEADER
from etude.sandboxes.qemu.guest.frames import GuestMessage
from etude.sandboxes.qemu.machine import Frozen, Machine, MachineIdentity

COPY_BYTES = 1 << 20
MODE = 0o7777


def unpack_upper(tar: Path, target: Path) -> None:
    """Unpack an upper layer into the new folder ``target``. Raises :class:`~etude.errors.SandboxError`."""
    target.mkdir(mode=0o755)
    folders: dict[str, tarfile.TarInfo | None] = {".": None}
    try:
        with tarfile.open(tar, mode="r:") as archive:
            for member in archive:
                _check(member, folders)
                _make(archive, member, target / member.name)
                if member.isdir():
                    folders[member.name] = member
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SandboxError(f"what a virtual machine wrote cannot be made a layer: {error}") from error
    for name, folder in reversed(folders.items()):  # last, since to fill a folder changes its time
        if folder is not None:
            _finish(folder, target / name)


def _check(member: tarfile.TarInfo, folders: dict[str, tarfile.TarInfo | None]) -> None:
    path = PurePosixPath(member.name)
    is_plain = str(path) == member.name and not path.is_absolute() and ".." not in path.parts and path.parts
    if not is_plain or str(path.parent) not in folders or member.name in folders:
        raise ValueError(f"{member.name!r} is not below a folder of the layer")
    if len(os.fsencode(member.name)) > PATH_LIMIT_BYTES:
        raise ValueError(f"{member.name[:60]}… is longer than {PATH_LIMIT_BYTES} bytes")
    check_date(member)


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(mode=0o700)
        if member.pax_headers.get(XATTR_HEADER) == "y":
            os.setxattr(path, WHITEOUT_XATTRS[0], b"y")
        return
    if member.issym():
        path.symlink_to(member.linkname)
    elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
        os.mknod(path, stat.S_IFCHR | 0o600, 0)
    elif member.isreg():
        _write(archive, member, path)
    else:
        raise ValueError(f"{member.name!r} is of a kind that no layer holds (tar type {member.type!r})")
    _finish(member, path)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    with path.open("xb") as file:
        while chunk := source.read(COPY_BYTES):
            file.write(chunk)


def _finish(member: tarfile.TarInfo, path: Path) -> None:
    """Set the owner, mode and time of a file."""
    if os.geteuid() == 0:
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if member.isreg() or member.isdir():
        path.chmod(member.mode & MODE)
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)


if TYPE_CHECKING:
    from etude.sandboxes.qemu.provider import QemuSandboxes

FILE_TIMEOUT_S = 60.0
"""For one file."""
ARCHIVE_TIMEOUT_S = 300.0
GRACE_S = 30.0
"""Time after a command's own deadline within which its end may be reported."""


class QemuSandbox:
    """One sandbox in its own virtual machine."""

    def __init__(
        self, provider: "QemuSandboxes", spec: SandboxSpec, machine: Machine, memories: tuple[Frozen, ...]
    ) -> None:
        """``memories`` are those whose files the machine or its copies need, including its original's."""
        self.spec = spec
        self.memories = memories
        self._provider = provider
        self._machine = machine
        self._started_at = time.monotonic()
        self._closed = False
        self._closing = asyncio.Lock()
        self._still = asyncio.Lock()
        self._bulk = asyncio.Lock()
        self._expiry = asyncio.get_running_loop().call_later(spec.ttl_s, self._expire)
        self._reason = "the sandbox is closed"
        self._expiring: asyncio.Task[None] | None = None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command; stores 64 KiB of each output. See :meth:`~etude.protocols.Sandbox.exec`."""
        if not argv or not 0 < timeout_s < math.inf or any("\0" in word for word in argv):
            raise ValueError(f"exec(argv={argv!r}, timeout_s={timeout_s!r}) needs a command and some time")
        return await self._exec(
            argv, stdin, timeout_s, {"environment": dict(environment or {}), "root": "", "user": []}
        )

    async def exec_in(self, service: ImageService, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """See :class:`~etude.sandboxes.entrypoint.ServiceHost`."""
        place = {"root": service.root, "user": [service.uid, service.gid]}
        return await self._exec(argv, "", timeout_s, {"environment": dict(service.environment), **place})

    async def _exec(self, argv: Sequence[str], stdin: str, timeout_s: float, place: Mapping[str, Any]) -> ExecResult:
        order = {"argv": list(argv), "timeout_s": timeout_s, **place}
        head = (await self._request("exec", order, stdin.encode(), timeout_s=timeout_s + GRACE_S)).head
        return ExecResult(
            exit_code=int(head["exit_code"]),
            stdout=str(head["stdout"]),
            stderr=str(head["stderr"]),
            timed_out=bool(head["timed_out"]),
            truncated=bool(head["truncated"]),
            seconds=float(head["seconds"]),
        )

    async def read_file(self, path: str) -> str | None:
        """The first 8 MiB of a file's text. See :meth:`~etude.protocols.Sandbox.read_file`."""
        answer = await self._request("read", {"path": path}, timeout_s=FILE_TIMEOUT_S)
        return answer.body.decode("utf-8", "replace") if answer.head["found"] else None

    async def write_file(self, path: str, text: str) -> None:
        """See :meth:`~etude.protocols.Sandbox.write_file`."""
        await self.write_files({path: text})

    async def export(self, paths: Sequence[str], *, limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
        """See :meth:`~etude.protocols.Sandbox.export`."""
        if not 0 < limit_bytes <= 2 * EXPORT_LIMIT_BYTES:
            raise ValueError(f"limit_bytes={limit_bytes!r}: a virtual machine exports at most {2 * EXPORT_LIMIT_BYTES}")
        order = {"paths": list(paths), "limit_bytes": limit_bytes}
        async with self._bulk:
            tar = (await self._request("export", order, timeout_s=ARCHIVE_TIMEOUT_S)).body
        await asyncio.to_thread(_check_archive, tar)
        return tar

    async def load(self, tar: bytes) -> None:
        """See :meth:`~etude.protocols.Sandbox.load`."""
        async with self._bulk:
            await self._request("load", {}, tar, timeout_s=ARCHIVE_TIMEOUT_S)

    async def stats(self) -> SandboxStats:
        """Usage of the commands, as the machine's kernel counts it."""
        stats: Mapping[str, Any] = (await self._request("stats", {}, timeout_s=FILE_TIMEOUT_S)).head["stats"]
        return SandboxStats(
            memory_bytes=float(stats["memory_bytes"]),
            disk_bytes=float(stats["disk_bytes"]),
            processes=float(stats["processes"]),
            cpu_s=float(stats["cpu_s"]),
            age_s=time.monotonic() - self._started_at,
        )

    async def kill_processes(self) -> None:
        """Kill every command, with all that it started."""
        await self._request("kill_all", {}, timeout_s=FILE_TIMEOUT_S)

    async def snapshot(self) -> Image:
        """The files as a layer over the image's; commands stand still meanwhile."""

        async def pack(*, is_first: bool) -> tuple[bytes, bool]:
            """The next part of the written files, as a tar, and whether it is the last."""
            answer = await self._request("pack", {"first": is_first}, timeout_s=ARCHIVE_TIMEOUT_S)
            return answer.body, bool(answer.head["last"])

        async with self._still:
            await self._request("freeze", {"frozen": True}, timeout_s=FILE_TIMEOUT_S)
            try:
                return await self._provider.keep_files(self.spec, pack)
            finally:
                await self._request("freeze", {"frozen": False}, timeout_s=FILE_TIMEOUT_S)

    async def fork(self, count: int = 1) -> Sequence["QemuSandbox"]:
        """Copies that continue in the middle of this one's processes; it is paused for a moment."""
        if count < 1:
            raise ValueError(f"fork({count}): at least one copy")
        async with self._still:
            self._check_open()
            await self._machine.rest()
            try:
                frozen = await self._machine.freeze(self._provider.fresh_folder(), keep=True)
            finally:
                await self._machine.resume()
        self._provider.hold(self, frozen)  # its disk goes on over the frozen one
        return await self._provider.copies(self.spec, self.memories, count)

    async def close(self) -> None:
        """Kill the machine and remove its files."""
        await self._end("the sandbox is closed")

    async def write_files(self, files: Mapping[str, str]) -> None:
        """Write several files at once."""
        datas = {path: text.encode() for path, text in files.items()}
        if datas:
            sizes = [[path, len(data)] for path, data in datas.items()]
            await self._request("write", {"files": sizes}, b"".join(datas.values()), timeout_s=FILE_TIMEOUT_S)

    async def _request(self, do: str, head: Mapping[str, Any], body: bytes = b"", *, timeout_s: float) -> GuestMessage:
        self._check_open()
        try:
            return await self._machine.link.ask(do, head, body, timeout_s=timeout_s)
        except SandboxError as error:
            if self._closed:
                raise SandboxError(self._reason) from error
            raise
        except (KeyError, TypeError, UnicodeError) as error:
            raise SandboxError(f"a virtual machine's answer to {do!r} cannot be read: {error!r}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(self._reason)

    def _expire(self) -> None:
        words = f"the sandbox's time is up: its ttl_s is {self.spec.ttl_s}"
        self._expiring = asyncio.get_running_loop().create_task(self._end(words))

    async def _end(self, reason: str) -> None:
        if not self._closed:
            self._closed, self._reason = True, reason
            self._expiry.cancel()
        async with self._closing:
            await self._machine.kill()
            await self._provider.forget(self, self._machine)


def identity_of(name: str, spec: SandboxSpec) -> MachineIdentity:
    """The machine's host name, and the places that it may reach."""
    return MachineIdentity(name=name, allow=spec.allow)


def _check_archive(tar: bytes) -> None:
    """Check an archive from inside. Raises :class:`~etude.errors.SandboxError`."""
    try:
        read_archive(tar)
    except ValueError as error:
        raise SandboxError(f"a virtual machine exported what is not an archive: {error}") from error
