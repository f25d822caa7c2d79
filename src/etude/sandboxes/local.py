"""Sandboxes on this machine for short commands, thousands a minute.

    exec ──▶ idle slots ──▶ worker process ──▶ zygote ──fork──▶ command

Owns the sandboxes' directories and the worker processes. A worker that dies fails the command it was running
(:class:`~etude.errors.SandboxError`) and is replaced by the next one. How well a command is locked in is the machine's
to say: :attr:`LocalSandboxes.capabilities`, and :mod:`etude.sandboxes.zygote` for what they mean.

States of a provider: new ──create──▶ open ──close──▶ closed. Consumes commands; waits for an idle worker and its
answer, each with a deadline; on close every process and file is gone.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import orjson

import etude
from etude.errors import SandboxError
from etude.protocols import ExecResult
from etude.sandboxes.scratch import Scratch
from etude.sandboxes.worker import LENGTH, Answer, Request

UNPRIVILEGED_USER = 65534
"""Whom commands run as when this process is root (``nobody``); else they run as this process's user."""
OUTPUT_LIMIT_BYTES = 64 << 10
"""Kept of each of a command's stdout and stderr."""
START_TIMEOUT_S = 30.0
"""For a worker to report; it takes some 50 ms on an idle machine."""
QUEUE_TIMEOUT_S = 60.0
"""For a worker to become idle."""
GRACE_S = 10.0
"""How much later than a command's own deadline its worker may answer before it counts as dead."""
EXIT_TIMEOUT_S = 2.0
"""For a worker to end by itself once its stdin is closed."""


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
        self._slots = [_Slot() for _ in range(workers)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._sandboxes: set[LocalSandbox] = set()
        self._closed = False

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """What the machine grants, as a worker found out; empty, so nothing, before the first :meth:`create`."""
        return next((slot.worker.capabilities for slot in self._slots if slot.worker), {})

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The running worker processes."""
        return tuple(slot.worker.pid for slot in self._slots if slot.worker)

    async def create(self, files: Mapping[str, str]) -> "LocalSandbox":
        """A fresh sandbox that holds ``files``; the first one also starts a worker, to learn what the machine grants.

        Raises :class:`~etude.errors.SandboxError` if there is no room or no worker, ``ValueError`` for a path that
        would leave the sandbox.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        if self._scratch is None:
            self._scratch = Scratch.open(self._parent, owner=self._user)
        if not self.capabilities:
            async with self._worker(self._scratch):
                pass
        sandbox = LocalSandbox(self, self._scratch)
        self._sandboxes.add(sandbox)
        try:
            for path, text in files.items():
                await sandbox.write_file(path, text)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """Close every sandbox and worker and remove all files; calling it twice is harmless."""
        self._closed = True
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        for slot in self._slots:
            await slot.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    async def run(self, request: Request, scratch: Scratch) -> Answer:
        """Run one command on an idle worker. Raises :class:`~etude.errors.SandboxError`."""
        async with self._worker(scratch) as worker:
            answer: Answer = orjson.loads(await worker.ask(orjson.dumps(request), request["timeout_s"] + GRACE_S))
        if answer["error"]:
            raise SandboxError(answer["error"])
        return answer

    def forget(self, sandbox: "LocalSandbox") -> None:
        """A sandbox has been closed."""
        self._sandboxes.discard(sandbox)

    @asynccontextmanager
    async def _worker(self, scratch: Scratch) -> AsyncIterator["_Worker"]:
        """A running worker that is nobody else's meanwhile."""
        try:
            slot = await asyncio.wait_for(self._idle.get(), QUEUE_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(
                f"no idle sandbox worker within {QUEUE_TIMEOUT_S} s: {len(self._slots)} workers are too few"
            ) from None
        try:
            if slot.worker is None or slot.worker.is_broken:
                await slot.close()
                if self._closed:
                    raise SandboxError("the sandbox provider is closed")
                options = {"scratch": str(scratch.path), "run_as": self._user, "isolate": self._isolate}
                slot.worker = await _Worker.start(options)
            yield slot.worker
        finally:
            self._idle.put_nowait(slot)


class LocalSandbox:
    """One directory in which commands run; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, provider: LocalSandboxes, scratch: Scratch) -> None:
        self._provider = provider
        self._scratch = scratch
        self._name = scratch.create()
        self._closed = False

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float = 5.0) -> ExecResult:
        """Run one command, at most 64 KiB of stdout and of stderr being kept; nothing it started outlives it.

        Raises :class:`~etude.errors.SandboxError` when the sandbox failed, not the command.
        """
        self._check_open()
        if not argv or timeout_s <= 0:
            raise ValueError(f"exec(argv={argv!r}, timeout_s={timeout_s!r}) needs a command and some time")
        request = Request(
            root=self._name, argv=list(argv), stdin=stdin, timeout_s=timeout_s, output_limit=OUTPUT_LIMIT_BYTES
        )
        answer = await self._provider.run(request, self._scratch)
        return ExecResult(
            exit_code=answer["exit_code"],
            stdout=answer["stdout"],
            stderr=answer["stderr"],
            timed_out=answer["timed_out"],
            truncated=answer["truncated"],
            seconds=answer["seconds"],
        )

    async def read_file(self, path: str) -> str | None:
        """The text of a file (its first 8 MiB), or ``None`` if there is none; ``ValueError`` if it is no plain file."""
        self._check_open()
        return self._scratch.read(self._name, path)

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and the folders above it; ``ValueError`` for a path that is no plain file's."""
        self._check_open()
        self._scratch.write(self._name, path, text)

    async def close(self) -> None:
        """Remove everything; calling it twice is harmless. No command is running: none outlives its ``exec``."""
        if not self._closed:
            self._closed = True
            self._provider.forget(self)
            await asyncio.to_thread(self._scratch.remove, self._name)  # how much there is was up to the agent

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")


class _Slot:
    """Room for one worker process."""

    def __init__(self) -> None:
        self.worker: _Worker | None = None

    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
            self.worker = None


class _Worker:
    """Our end of a worker process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.pid = process.pid
        self.is_broken = False
        """True after a failure in the middle of a frame; such a worker can only be closed."""
        self.capabilities: Mapping[str, bool] = {}

    @classmethod
    async def start(cls, options: Mapping[str, str | int | bool | None]) -> Self:
        """Start a process and hear what it is capable of. Raises :class:`~etude.errors.SandboxError`."""
        command = ("-P", "-s", "-S", "-B", "-X", "utf8", "-m", "etude.sandboxes.worker", orjson.dumps(options).decode())
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
        """Send a frame and await its answer; if that fails or is given up, the command is killed."""
        try:
            self._stdin.write(LENGTH.pack(len(request)) + request)
            return await self._read_frame(timeout_s)
        except BaseException:
            self.is_broken = True
            self._stdin.close()
            raise

    async def close(self) -> None:
        """End the process: it leaves when its stdin closes, or is killed."""
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_TIMEOUT_S)
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
