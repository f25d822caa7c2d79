"""Sandboxes on this machine for short commands, thousands a minute.

    exec ──▶ idle slots ──▶ worker process ──▶ zygote ──fork──▶ command

Owns the sandboxes' directories and the worker processes. A worker that dies fails its current command
(:class:`~etude.errors.SandboxError`) and is replaced. How well a command is confined depends on the machine: see
:meth:`LocalSandboxes.capabilities`, and :mod:`etude.sandboxes.local.zygote` for their meaning.

States of a provider: new ──create──▶ open ──close──▶ closed. Consumes commands; waits for an idle worker and its
answer, each with a deadline; on close all processes and files are removed.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Self

import orjson

import etude
from etude.errors import SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Capability, SandboxSpec
from etude.sandboxes.capabilities import check_spec, unsupported
from etude.sandboxes.command_io import OUTPUT_LIMIT_BYTES
from etude.sandboxes.folder_sandbox import Command, FolderSandbox, FolderSandboxHooks
from etude.sandboxes.folders import Folder
from etude.sandboxes.lifecycle import close_all
from etude.sandboxes.local.worker import LENGTH, CommandOutcome, WorkerRequest
from etude.sandboxes.scratch import Scratch

UNPRIVILEGED_USER = 65534
"""User of commands if this process is root (``nobody``); otherwise commands run as this process's user."""
GRANTS: Mapping[str, Capability] = MappingProxyType(
    {
        "chroot": Capability.CONFINED,
        "network_off": Capability.NETWORK_OFF,
        "process_namespace": Capability.PROCESSES_APART,
    }
)
"""Capabilities, by the grants that a worker reports."""
HOMES = ("/home/agent", "/tmp")
"""Folders that commands may write to, in addition to the working folder."""
START_TIMEOUT_S = 30.0
"""Timeout for a worker to report; it takes some 50 ms on an idle machine."""
QUEUE_TIMEOUT_S = 60.0
"""Timeout for a worker to become idle."""
GRACE_S = 10.0
"""Time after a command's own deadline after which its worker counts as dead."""
EXIT_TIMEOUT_S = 2.0
"""Timeout for a worker to end by itself once its stdin is closed."""


class LocalSandboxes:
    """Makes sandboxes out of directories and forks; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(self, workers: int = 2, scratch: Path | None = None, *, isolate: bool = True) -> None:
        """``scratch`` is where directories are made (default: in memory); ``isolate=False`` uses no namespaces.

        Without ``chroot``, programs import their own modules only if their user can reach ``scratch``.
        """
        if workers < 1:
            raise ValueError(f"workers={workers}: at least one process must run the commands")
        self._parent = scratch
        self._isolate = isolate
        self._user = UNPRIVILEGED_USER if os.geteuid() == 0 else None
        self._scratch: Scratch | None = None
        self._slots = [_WorkerSlot() for _ in range(workers)]
        self._idle: asyncio.Queue[_WorkerSlot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._granted: frozenset[Capability] | None = None
        self._sandboxes: set[FolderSandbox] = set()
        self._home = FolderSandboxHooks(name="local", run=self._run, copy=self._copy, remove=self._remove)
        self._closed = False

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The running worker processes."""
        return tuple(slot.worker.pid for slot in self._slots if slot.worker)

    async def capabilities(self) -> frozenset[Capability]:
        """The machine's capabilities, as reported by a worker; the first call starts one.

        Limits apply to each command, so it has no capability for limits of a sandbox.
        """
        if self._granted is None:
            async with self._worker() as worker:
                granted = (capability for name, capability in GRANTS.items() if worker.capabilities[name])
                self._granted = frozenset((*granted, Capability.FORK))
        return self._granted

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FolderSandbox:
        """A fresh sandbox that holds ``files``; the first one also starts a worker, to learn the machine's
        capabilities.

        Raises :class:`~etude.errors.SandboxError` if there is no room or no worker, ``ValueError`` for a path that
        would leave the sandbox.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        spec, granted = spec or SandboxSpec(), await self.capabilities()
        check_spec(spec, granted, "local")
        if spec.mounts:
            raise unsupported("local", f"mounts={list(spec.mounts)}", "ns")
        return self._create(files, spec, inside="/" if Capability.CONFINED in granted else None)

    def _create(self, files: Mapping[str, str], spec: SandboxSpec, *, inside: str | None) -> FolderSandbox:
        scratch = self._open_scratch()
        path = scratch.create(reader=self._user)
        try:
            folder = Folder(path, owner=self._user, inside=inside, workdir=spec.image.workdir)
            folder.make(".", *(HOMES if inside else ()))
            for name, text in files.items():
                folder.write(name, text)
        except BaseException:
            scratch.remove(path)
            raise
        sandbox = FolderSandbox(self._home, folder, spec)
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox and worker and remove all files; calling it twice is harmless."""
        self._closed = True
        failures = [*await close_all(self._sandboxes), *await close_all(self._slots)]
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        if failures:
            raise failures[0]

    async def _run(self, folder: Folder, command: Command) -> ExecResult:
        """Run one command on an idle worker. Raises :class:`~etude.errors.SandboxError`."""
        request = WorkerRequest(
            root=folder.path.name,
            workdir=folder.workdir,
            environment=dict(command.environment),
            argv=list(command.argv),
            stdin=command.stdin,
            timeout_s=command.timeout_s,
            output_limit=OUTPUT_LIMIT_BYTES,
        )
        async with self._worker() as worker:
            answer: CommandOutcome = orjson.loads(await worker.ask(orjson.dumps(request), command.timeout_s + GRACE_S))
            worker.is_broken = bool(answer["error"])
        if answer["error"]:
            raise SandboxError(answer["error"])
        return ExecResult(
            exit_code=answer["exit_code"],
            stdout=answer["stdout"],
            stderr=answer["stderr"],
            timed_out=answer["timed_out"],
            truncated=answer["truncated"],
            seconds=answer["seconds"],
        )

    async def _copy(self, sandbox: FolderSandbox) -> FolderSandbox:
        copy = await self.create({}, sandbox.spec)
        try:
            await copy.write(lambda: sandbox.folder.copy_to(copy.folder))
        except BaseException:
            await close_all([copy])
            raise
        return copy

    def _remove(self, sandbox: FolderSandbox) -> None:
        self._open_scratch().remove(sandbox.folder.path)
        self._sandboxes.discard(sandbox)

    def _open_scratch(self) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch.open(self._parent, passable=True)  # programs are another user's
        return self._scratch

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator["_WorkerProcess"]:
        """A running worker for exclusive use by one caller."""
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                slot = await self._idle.get()
        except TimeoutError:
            raise SandboxError(
                f"no idle sandbox worker within {QUEUE_TIMEOUT_S} s: {len(self._slots)} workers are too few"
            ) from None
        try:
            if slot.worker is None or slot.worker.is_broken:
                await slot.close()
                if self._closed:
                    raise SandboxError("the sandbox provider is closed")
                options = {"scratch": str(self._open_scratch().path), "run_as": self._user, "isolate": self._isolate}
                slot.worker = await _WorkerProcess.start(options)
            yield slot.worker
        finally:
            try:
                if slot.worker is not None and slot.worker.is_broken:
                    await slot.close()  # this also ends its command
            finally:
                self._idle.put_nowait(slot)


class _WorkerSlot:
    """Slot of one worker process."""

    def __init__(self) -> None:
        self.worker: _WorkerProcess | None = None

    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
            self.worker = None


class _WorkerProcess:
    """The provider's end of a worker process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.pid = process.pid
        self.is_broken = False
        """True after a failure in the middle of a frame, or to start a command; such a worker can only be closed."""
        self.capabilities: Mapping[str, bool] = {}

    @classmethod
    async def start(cls, options: Mapping[str, str | int | bool | None]) -> Self:
        """Start a process and read its capabilities. Raises :class:`~etude.errors.SandboxError`."""
        command = (
            "-P",
            "-s",
            "-S",
            "-B",
            "-X",
            "utf8",
            "-m",
            "etude.sandboxes.local.worker",
            orjson.dumps(options).decode(),
        )
        environment = {"PYTHONPATH": str(Path(etude.__file__).parents[1]), "PYTHONHASHSEED": "0"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=PIPE, stdout=PIPE, cwd="/", env=environment
        )
        worker = cls(process)
        try:
            worker.capabilities = orjson.loads(await worker._read_frame(START_TIMEOUT_S))
        except BaseException:
            await worker.close()
            raise
        return worker

    async def ask(self, request: bytes, timeout_s: float) -> bytes:
        """Send a frame and return its answer; on failure or cancellation, the command is killed."""
        try:
            self._stdin.write(LENGTH.pack(len(request)) + request)
            return await self._read_frame(timeout_s)
        except BaseException:
            self.is_broken = True
            self._stdin.close()
            raise

    async def close(self) -> None:
        """End the process: close its stdin, and kill it if it does not exit."""
        self._stdin.close()
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _read_frame(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                (length,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
                return await self._stdout.readexactly(length)
        except TimeoutError:
            raise SandboxError(f"sandbox worker {self.pid} gave no answer within {timeout_s} s") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxError(f"sandbox worker {self.pid} died") from error
