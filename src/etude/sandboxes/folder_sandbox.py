"""A sandbox in a folder of this machine, whose provider runs its commands.

    exec ──Command──▶ runner of the provider ──ExecResult──▶        files ──▶ etude.sandboxes.folders

Owns the life of one sandbox: it is open until its owner, its provider or its time to live closes it, which kills
running commands. No process outlives a command, so a sandbox consists only of its files, and a copy of them is a fork.
Confinement is the runner's responsibility.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from etude.errors import SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Image, ImageService, SandboxSpec, SandboxStats
from etude.sandboxes.capabilities import unsupported
from etude.sandboxes.folders import Folder, tree_bytes
from etude.sandboxes.lifecycle import close_all

ARGUMENT_LIMIT_BYTES = 120 << 10
"""Maximum length of a command line in bytes; Linux limits one argument to 128 KiB."""
NOT_EXECUTABLE = 126
"""Exit code of a command that cannot be executed, as in shells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command to run in a folder."""

    argv: Sequence[str]
    stdin: str
    timeout_s: float
    environment: Mapping[str, str]
    """Variables of image, specification and call; they override the runner's own."""
    spec: SandboxSpec
    service: ImageService | None = None
    """The service in whose root, and as whose user, the command runs; it then gets only ``environment``."""

    def __post_init__(self) -> None:
        if not self.argv or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"exec(argv={self.argv!r}, timeout_s={self.timeout_s!r}) needs a command and some time")
        if any("\0" in text for pair in self.environment.items() for text in pair) or any("\0" in a for a in self.argv):
            raise ValueError("a command line and its variables cannot hold a NUL character")

    @property
    def size_bytes(self) -> int:
        """Length of the command line."""
        return sum(len(argument.encode("utf-8", "surrogateescape")) + 1 for argument in self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSandboxHooks:
    """Callbacks from a sandbox to its provider."""

    name: str
    """Name of the provider, for error messages."""
    run: Callable[[Folder, Command], Awaitable[ExecResult]]
    copy: Callable[["FolderSandbox"], Awaitable["FolderSandbox"]]
    remove: Callable[["FolderSandbox"], None]
    """Forget the sandbox and remove its folder; called once, in a thread."""


class FolderSandbox:
    """One folder in which commands run; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, home: FolderSandboxHooks, folder: Folder, spec: SandboxSpec) -> None:
        self._home = home
        self.folder = folder
        self.spec = spec
        self._born_s = time.monotonic()
        self._running: set[asyncio.Future[ExecResult]] = set()
        self._writing: set[asyncio.Future[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._ending = asyncio.get_running_loop().call_later(spec.ttl_s, self._end)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command and store at most 64 KiB each of stdout and stderr; its processes do not outlive it.

        Raises :class:`~etude.errors.SandboxError` if the sandbox failed, not the command.
        """
        self._check_open()
        variables = {**self.spec.image.environment, **self.spec.environment, **(environment or {})}
        command = Command(argv=argv, stdin=stdin, timeout_s=timeout_s, environment=variables, spec=self.spec)
        if command.size_bytes > ARGUMENT_LIMIT_BYTES:
            return too_long(argv[0])
        running = asyncio.ensure_future(self._home.run(self.folder, command))
        self._running.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller was cancelled
            what = "all processes were killed" if self._closing is None else "the sandbox was closed"
            raise SandboxError(f"{what} under a command") from None
        finally:
            self._running.discard(running)

    async def read_file(self, path: str) -> str | None:
        """The text of a file (its first 8 MiB), or ``None`` if it does not exist; ``ValueError`` if it is not a regular
        file.
        """
        self._check_open()
        return self.folder.read(path)

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and its parent folders; ``ValueError`` if the path cannot be a regular file."""
        self._check_open()
        self.folder.write(path, text)

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 64 << 20) -> bytes:
        """A tar of files and whole folders; ``ValueError`` beyond the limit."""
        self._check_open()
        return await asyncio.to_thread(self.folder.pack, list(paths), limit_bytes)

    async def load(self, tar: bytes) -> None:
        """Unpack a tar into the working folder; if it is invalid, unpack nothing and raise ``ValueError``."""
        self._check_open()
        await self.write(lambda: self.folder.unpack(tar))

    async def write(self, work: Callable[[], None]) -> None:
        """Write files here in a thread. It cannot be stopped, so files are not removed before it ends."""
        writing = asyncio.get_running_loop().run_in_executor(None, work)
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    async def stats(self) -> SandboxStats:
        """The size of its files and its age; the resource usage of commands is not measured."""
        self._check_open()
        size_bytes = await asyncio.to_thread(tree_bytes, self.folder.path)
        age_s = time.monotonic() - self._born_s
        return SandboxStats(
            memory_bytes=math.nan, disk_bytes=size_bytes, processes=math.nan, cpu_s=math.nan, age_s=age_s
        )

    async def kill_processes(self) -> None:
        """Kill the running commands; there are no other processes."""
        self._check_open()
        running = [*self._running]
        for command in running:
            command.cancel()
        if running:
            await asyncio.wait(running)

    async def snapshot(self) -> Image:
        """Unsupported: no sandbox of this provider starts from an image."""
        self._check_open()
        raise unsupported(self._home.name, "a snapshot", "ns")

    async def fork(self, count: int = 1) -> "Sequence[FolderSandbox]":
        """Copies with the same files and specification; all of them, or none and an error."""
        self._check_open()
        if count < 1:
            raise ValueError(f"fork({count}): at least one")
        copies: list[FolderSandbox] = []
        try:
            for _ in range(count):
                copies.append(await self._home.copy(self))  # noqa: PERF401 - what was made is closed on error
        except BaseException:
            await close_all(copies)
            raise
        return copies

    async def close(self) -> None:
        """Kill running commands and remove everything; calling it twice is harmless."""
        self._ending.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _end(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        for running in self._running:
            running.cancel()
        busy: set[asyncio.Future[ExecResult] | asyncio.Future[None]] = {*self._running, *self._writing}
        if busy:
            await asyncio.wait(busy)
        await asyncio.to_thread(self._home.remove, self)  # the agent determines how much there is to remove

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing.discard(writing)
        writing.exception()  # the caller may have been cancelled

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox is closed")


def too_long(program: str) -> ExecResult:
    """The result for a command line that is too long for Linux, as a shell would report it."""
    stderr = f"{program}: Argument list too long: use a file or stdin\n"
    return ExecResult(exit_code=NOT_EXECUTABLE, stdout="", stderr=stderr, timed_out=False, truncated=False, seconds=0.0)
