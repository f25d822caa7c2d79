"""One sandbox of an OCI runtime: its commands and files, and the locking of snapshots of its memory.

    open ──fork, snapshot──▶ alone ──▶ open        commands wait for it, and it for the commands that run
      └──close, time to live, failure──▶ closed

Files are read from outside, through the root's overlay; they are written by programs inside, since gVisor's sentry
caches them. Owns the life of the sandbox; :mod:`etude.sandboxes.oci.container` owns that of its processes.
"""

import asyncio
import errno
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from etude.errors import AgentFault, SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Image, ImageService, SandboxSpec, SandboxStats
from etude.sandboxes.folder_sandbox import ARGUMENT_LIMIT_BYTES, Command, too_long
from etude.sandboxes.folders import Folder
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES
from etude.sandboxes.lifecycle import SharedLock
from etude.sandboxes.oci.container import Container
from etude.sandboxes.oci.namespaces import NamespaceHolder
from etude.sandboxes.oci.runtimes import OciRuntime

FILE_TIMEOUT_S = 120.0
"""For a file or an archive to be written."""
KILL_ROUNDS = 3
"""Rounds of killing everything: a process started during one round is found in the next."""
SIGNALLED = 128
"""Higher exit codes mean that a signal ended the process."""
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
IS_ODD = '[ -e "$1" ] && [ ! -f "$1" ]'
UNPACK = 'exec tar -x -p -f - -C "$1"'
"""Scripts that run inside. Pipes and sockets are the sentry's alone, so only there it can be seen that there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OciSandboxHooks:
    """Callbacks from a sandbox to its provider."""

    runtime: OciRuntime
    command: Sequence[str]
    """The runtime's program and its flags."""
    stage: Path
    """Folder in which the root is built, in the mount namespace of each sandbox."""
    snapshot: Callable[["OciSandbox"], Awaitable[Image]]
    fork: Callable[["OciSandbox", int], Awaitable["Sequence[OciSandbox]"]]
    forget: Callable[["OciSandbox"], Awaitable[None]]
    """Remove its files on disk; called once."""


class OciSandbox:
    """A container in its own namespaces; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, home: OciSandboxHooks, namespaces: NamespaceHolder, folder: Path, spec: SandboxSpec) -> None:
        """``folder`` is its own on disk, with a ``bundle``; ``namespaces`` has its root."""
        self._home = home
        self.namespaces = namespaces
        self.container = Container(home.runtime, home.command, namespaces, folder)
        self.folder = folder
        self.spec = spec
        self.stage = namespaces.root.joinpath(*home.stage.parts[1:])
        """The stage, as it is reached from outside."""
        owner = spec.image.user.uid if spec.user == "agent" else None
        self.files = Folder(self.stage / "root", owner=owner, inside="/", workdir=spec.image.workdir)
        """The root; written from outside only before the container has started."""
        self._born_s = time.monotonic()
        self._lock = SharedLock(self._check_open)
        self._running: set[asyncio.Task[ExecResult]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._ttl = asyncio.get_running_loop().call_later(spec.ttl_s, self._expire)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command in the working folder, keeping at most 64 KiB each of stdout and stderr.

        If it times out or the caller is cancelled, its process group is killed; processes in other groups continue.
        """
        self._check_open()
        variables = dict(environment or {})
        command = Command(argv=argv, stdin=stdin, timeout_s=timeout_s, environment=variables, spec=self.spec)
        if command.size_bytes > ARGUMENT_LIMIT_BYTES:
            return too_long(argv[0])
        return await self._run(command, stdin.encode())

    async def exec_in(self, service: ImageService, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """See :class:`~etude.sandboxes.entrypoint.ServiceHost`."""
        self._check_open()
        command = Command(argv=argv, stdin="", timeout_s=timeout_s, environment={}, spec=self.spec, service=service)
        return await self._run(command, b"")

    async def read_file(self, path: str) -> str | None:
        """The text of a file (its first 8 MiB), or ``None`` if there is none; ``ValueError`` if it is not a regular
        file.
        """
        async with self._lock.shared():
            text = await asyncio.to_thread(self.files.read, path)
        if text is None and not (await self._run(_script(self, IS_ODD, path), b"")).exit_code:
            raise ValueError(f"{path!r} is not a file in the sandbox: only its own kernel knows it")
        return text

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and its parent folders; ``ValueError`` if the path cannot be a regular file."""
        data = text.encode()
        await self.read_file(path)  # raises if the path is invalid
        result = await self._run(_script(self, WRITE, path), data)
        _check_done(f"{path!r} could not be written", result)

    async def export(self, paths: Sequence[str], *, limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
        """A tar of files and whole folders; ``ValueError`` beyond the limit."""
        async with self._lock.shared():
            return await asyncio.to_thread(self.files.pack, list(paths), limit_bytes)

    async def load(self, tar: bytes) -> None:
        """Unpack a tar into the working folder; if it is invalid, unpack nothing and raise ``ValueError``."""
        async with self._lock.shared():
            await asyncio.to_thread(self.files.check, tar)
        result = await self._run(_script(self, UNPACK, "."), tar)
        _check_done("an archive could not be unpacked", result)

    async def stats(self) -> SandboxStats:
        """Usage now; memory and processor time are those of the sentry, too, processes those inside."""
        async with self._lock.shared():
            usage = self.namespaces.usage()
            disk = os.statvfs(self.stage)
            processes = await self.container.processes()
        return SandboxStats(
            memory_bytes=math.nan if usage.memory_bytes is None else usage.memory_bytes,
            disk_bytes=(disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            processes=processes,
            cpu_s=math.nan if usage.cpu_s is None else usage.cpu_s,
            age_s=time.monotonic() - self._born_s,
        )

    async def kill_processes(self) -> None:
        """Kill everything inside except its first process."""
        root = replace(self.spec, user="root")  # so that nothing of the agent's can kill the killer first
        argv = ("/bin/sh", "-c", "kill -9 -1")
        killer = Command(argv=argv, stdin="", timeout_s=FILE_TIMEOUT_S, environment={}, spec=root)
        for _ in range(KILL_ROUNDS):
            await self._run(killer, b"")

    async def snapshot(self) -> Image:
        """The files as they are, as an image over this one's; processes are not in it."""
        async with self._alone():
            return await self._home.snapshot(self)

    async def fork(self, count: int = 1) -> "Sequence[OciSandbox]":
        """Copies with the same files, memory and processes; waits for the commands that run.

        Raises :class:`~etude.errors.Unsupported` while something inside has outputs of a command open that ended.
        """
        if count < 1:
            raise ValueError(f"fork({count}): at least one")
        async with self._alone():
            return await self._home.fork(self, count)

    async def close(self) -> None:
        """Kill all processes and remove the sandbox; calling it twice is harmless."""
        self._expire()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _run(self, command: Command, stdin: bytes) -> ExecResult:
        async with self._lock.shared():
            running = asyncio.ensure_future(self.container.run(command, stdin))
            self._running.add(running)
            try:
                return await running  # and the gate asks whether it was killed with the sandbox
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closing is None or (task is not None and task.cancelling()):
                    raise
                raise SandboxError("the sandbox was closed under its command") from None
            except SandboxError:
                self._expire()  # it is dead, or something in it cannot be killed
                raise
            finally:
                self._running.discard(running)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Wait until no other call is in progress, and block new ones; if the container no longer runs, close the
        sandbox.
        """
        async with self._lock.exclusive():
            try:
                yield
            finally:
                if not self.container.is_awake:
                    self._expire()

    def _expire(self) -> None:
        if self._closing is None:
            self._ttl.cancel()
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        await self.namespaces.close()
        for running in list(self._running):
            running.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self.container.hang_up()
        await self._lock.close()
        await self._home.forget(self)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox is closed")


def _script(sandbox: OciSandbox, script: str, path: str) -> Command:
    """A script to be run inside that does something with a path."""
    argv = ("/bin/sh", "-c", script, "sh", f"/{sandbox.files.place(path)}")
    return Command(argv=argv, stdin="", timeout_s=FILE_TIMEOUT_S, environment={}, spec=sandbox.spec)


def _check_done(failed: str, result: ExecResult) -> None:
    """Check the result of one of étude's scripts inside: a full disk, or a signal from another process inside, is the
    agent's fault.
    """
    if result.exit_code > SIGNALLED or os.strerror(errno.ENOSPC) in result.stderr:
        raise AgentFault(f"{failed}: exit code {result.exit_code}: {result.stderr.strip()}")
    if result.exit_code:
        raise SandboxError(f"{failed}: {result.stderr.strip()}")
