"""One namespace sandbox, as its provider handles it: commands, files, copies, and its end.

    exec ──argv, pipes──▶ launcher ──▶ command        files ──▶ job inside (etude.sandboxes.ns.child)

Owns its life: open until it is closed by its holder, its provider or its time to live, or until its first process dies.
Then everything in it is killed, and pending calls fail. :class:`Commands` runs its commands.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from etude.errors import AgentFault, SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Image, ImageService, SandboxSpec, SandboxStats
from etude.sandboxes.command_io import OUTPUT_LIMIT_BYTES, in_memory
from etude.sandboxes.egress import EgressProxy
from etude.sandboxes.folder_sandbox import Command, too_long
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES
from etude.sandboxes.images.machine_base import variables_of
from etude.sandboxes.ns import wire
from etude.sandboxes.ns.child import JobVerdict
from etude.sandboxes.ns.link import LauncherLink
from etude.sandboxes.output_pipe import DescendantOutputs, OutputPipe, exec_result

GRACE_S = 10.0
"""Timeout for a killed command to end; after that its sandbox is closed."""
JOB_TIMEOUT_S = 120.0
"""Timeout for a transfer of files."""
MAX_LISTENED = 32
"""Outputs of commands' descendants read at a time."""
ANSWER_LIMIT_BYTES = 1 << 30
"""Largest answer of a job; its content has limits of its own."""
KILLED = 137
"""Exit code of a command that timed out."""


class Commands:
    """The running commands of one sandbox."""

    def __init__(
        self, link: LauncherLink, box: int, *, check_open: Callable[[], None], fail: Callable[[str], None]
    ) -> None:
        """``check_open`` raises if the sandbox is closed; ``fail`` closes it with a reason."""
        self._link = link
        self._box = box
        self._check_open = check_open
        self._fail = fail
        self._descendants = DescendantOutputs(MAX_LISTENED)

    async def run(self, command: Command, *, environment: Mapping[str, str], workdir: str) -> ExecResult:
        """Run a command to its end. Raises :class:`~etude.errors.SandboxError` if the sandbox fails meanwhile."""
        body = {
            "kind": "exec",
            "id": self._link.next_number(),
            "box": self._box,
            **wire.ExecOrder(
                argv=list(command.argv),
                environment=dict(environment),
                workdir=workdir,
                root=command.service.root if command.service else "",
                user=[command.service.uid, command.service.gid] if command.service else [],
            ),
        }
        if wire.is_too_large(body):
            return too_long(command.argv[0])
        pipes = [await OutputPipe.open(OUTPUT_LIMIT_BYTES), await OutputPipe.open(OUTPUT_LIMIT_BYTES)]
        try:
            return await self._run(body, command, pipes)
        finally:
            self._descendants.add(pipes)

    async def job(self, job: str, request: Mapping[str, Any], data: bytes = b"") -> bytes | None:
        """Run one of :data:`~etude.sandboxes.ns.child.JOBS` inside; ``None`` if the file does not exist."""
        number = self._link.next_number()
        body = {"kind": "job", "id": number, "box": self._box, "job": job, **request}
        pipe = await OutputPipe.open(ANSWER_LIMIT_BYTES)
        try:
            ending = await self._start(body, (in_memory(data), pipe.theirs))
            pipe.close_write_end()
            timed_out = await self._see_end(number, ending, JOB_TIMEOUT_S)
            end = await self._end(ending)
            if end["agents_doing"]:
                raise AgentFault(
                    f"{job} was killed or stopped by what runs in the sandbox, or by what fills its memory"
                )
            if timed_out:
                raise SandboxError(f"{job} in a sandbox took more than {JOB_TIMEOUT_S:g} s")
            self._status(end)
            pipe.finish()
            return judge(job, bytes(pipe.data))
        finally:
            pipe.close()

    def close(self) -> None:
        """Stop reading all outputs."""
        self._descendants.close()

    async def _run(self, body: Mapping[str, Any], command: Command, pipes: Sequence[OutputPipe]) -> ExecResult:
        start_s = time.monotonic()
        stdin = in_memory(command.stdin.encode("utf-8", "surrogateescape"))
        ending = await self._start(body, (stdin, *(pipe.theirs for pipe in pipes)))
        for pipe in pipes:
            pipe.close_write_end()
        timed_out = await self._see_end(body["id"], ending, command.timeout_s)
        status = self._status(await self._end(ending))
        exit_code = status if status >= 0 else 128 - status
        if timed_out:
            exit_code = KILLED
        return exec_result(pipes, exit_code, timed_out=timed_out, start_s=start_s)

    async def _start(self, body: Mapping[str, Any], descriptors: Sequence[int]) -> asyncio.Future[dict[str, Any]]:
        """Start a command or job; its input, the first descriptor, is closed on this side."""
        try:
            return await self._link.ask(body, descriptors)
        except SandboxError:
            self._check_open()  # the sandbox's end is a better reason than a missing launcher
            raise
        finally:
            os.close(descriptors[0])

    async def _see_end(self, number: int, ending: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for the end of a command or job, or kill it; true if it timed out. It has always ended when this
        returns.
        """
        try:
            await asyncio.wait({ending}, timeout=timeout_s)
            return not ending.done()
        finally:
            if not ending.done():
                await self._link.send({"kind": "kill", "id": number, "box": self._box})
                await asyncio.wait({ending}, timeout=GRACE_S)
            if not ending.done():
                self._fail(f"a command did not end within {GRACE_S:g} s of being killed")
                ending.cancel()

    async def _end(self, ending: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """The end of a command or job. Raises :class:`~etude.errors.SandboxError` if it never ended and its sandbox was
        closed; a cancelled ``ending`` must not be mistaken for the caller's cancellation.
        """
        if ending.cancelled():
            self._check_open()
        return await ending

    def _status(self, end: Mapping[str, Any]) -> int:
        """The exit code of a command or job; raises if it ended only because its sandbox did."""
        if end["sandbox_died"]:
            self._fail("the sandbox has died under a command")
        self._check_open()
        return int(end["status"])


def judge(job: str, answer: bytes) -> bytes | None:
    """Decode a job's answer. Raises ``ValueError``, :class:`~etude.errors.AgentFault` or
    :class:`~etude.errors.SandboxError` if it failed.
    """
    verdict, payload = answer[:1], answer[1:]
    if verdict == bytes([JobVerdict.DONE]):
        return payload
    if verdict == bytes([JobVerdict.MISSING]):
        return None
    text = payload.decode("utf-8", "replace")
    if verdict == bytes([JobVerdict.REFUSED]):
        raise ValueError(text)
    if verdict == bytes([JobVerdict.FULL]):
        raise AgentFault(f"{job} in a sandbox that has no room left: {text}")
    raise SandboxError(text or f"{job} in a sandbox was killed")


CLOSE_TIMEOUT_S = 30.0
"""Timeout for a sandbox's last process to end."""
STATS_TIMEOUT_S = 30.0
"""Timeout for the launcher's statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSandboxHooks:
    """Callbacks from a sandbox to its provider."""

    link: LauncherLink
    snapshot: Callable[["NamespaceSandbox"], Awaitable[Image]]
    fork: Callable[["NamespaceSandbox", int], Awaitable[Sequence["NamespaceSandbox"]]]
    forget: Callable[["NamespaceSandbox"], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleArguments:
    """The constructor arguments of a sandbox's handle."""

    box: int
    """The launcher's number of the sandbox."""
    spec: SandboxSpec
    egress: EgressProxy


class NamespaceSandbox:
    """A sandbox of Linux namespaces, with the host's kernel; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, home: NamespaceSandboxHooks, arguments: HandleArguments) -> None:
        self._home = home
        self._link = home.link
        self.spec = arguments.spec
        self.box = arguments.box
        """The launcher's number of the sandbox."""
        self._egress = arguments.egress
        self._commands = Commands(home.link, self.box, check_open=self._check_open, fail=self._fail)
        self._environment = variables_of(self.spec)
        self._born_s = time.monotonic()
        self._end = home.link.watch_box(self.box)
        self._why = ""
        self._closing: asyncio.Task[None] | None = None
        self._ttl = asyncio.get_running_loop().call_later(self.spec.ttl_s, self._expire)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run one command in the working folder, keeping at most 64 KiB each of stdout and stderr.

        If it times out or the caller is cancelled, its whole session is killed. Processes in other sessions continue,
        as does anything left running by a command that ended by itself.
        """
        self._check_open()
        command = Command(
            argv=argv, stdin=stdin, timeout_s=timeout_s, environment=dict(environment or {}), spec=self.spec
        )
        variables = {**self._environment, **command.environment}
        return await self._commands.run(command, environment=variables, workdir=self.spec.image.workdir)

    async def exec_in(self, service: ImageService, argv: Sequence[str], *, timeout_s: float) -> ExecResult:
        """See :class:`~etude.sandboxes.entrypoint.ServiceHost`."""
        self._check_open()
        variables = service.environment
        command = Command(
            argv=argv, stdin="", timeout_s=timeout_s, environment=variables, spec=self.spec, service=service
        )
        return await self._commands.run(command, environment=variables, workdir="/")

    async def read_file(self, path: str) -> str | None:
        """The text of a file (its first 8 MiB), or ``None`` if there is none; ``ValueError`` if it is not a regular
        file.
        """
        answer = await self.job("read", {"path": path})
        return None if answer is None else answer.decode("utf-8")

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and its parent folders; ``ValueError`` if the path cannot be a regular file."""
        await self.job("write", {}, orjson.dumps({path: text}))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
        """A tar of files and folders, without missing or unreadable ones; ``ValueError`` beyond the limit."""
        answer = await self.job("export", {"paths": list(paths), "limit_bytes": limit_bytes})
        return answer or b""

    async def load(self, tar: bytes) -> None:
        """Unpack a tar into the working folder; if it is invalid, unpack nothing and raise ``ValueError``."""
        await self.job("load", {}, tar)

    async def stats(self) -> SandboxStats:
        """Current usage of all its processes together; ``nan`` for figures that only root can read."""
        self._check_open()
        request = {"kind": "stats", "id": self._link.next_number(), "box": self.box}
        async with asyncio.timeout(STATS_TIMEOUT_S):
            answer = await (await self._link.ask(request))
        return SandboxStats(
            memory_bytes=_or_nan(answer["memory_bytes"]),
            disk_bytes=answer["disk_bytes"],
            processes=_or_nan(answer["processes"]) - 1,  # init is not the agent's process
            cpu_s=_or_nan(answer["cpu_s"]),
            age_s=time.monotonic() - self._born_s,
        )

    async def kill_processes(self) -> None:
        """Kill everything inside except the first process; the killing process is out of reach of those inside."""
        await self.job("kill", {})

    async def snapshot(self) -> Image:
        """The current files, as an image that lives as long as the provider."""
        self._check_open()
        return await self._home.snapshot(self)

    async def fork(self, count: int = 1) -> "Sequence[NamespaceSandbox]":
        """Independent copies with the same files and specification; all of them, or none and an error."""
        self._check_open()
        if count < 1:
            raise ValueError(f"fork({count}): at least one")
        return await self._home.fork(self, count)

    async def job(self, job: str, request: Mapping[str, object], data: bytes = b"") -> bytes | None:
        """Run one of étude's own jobs inside, see :mod:`etude.sandboxes.ns.child`."""
        self._check_open()
        return await self._commands.job(job, {"workdir": self.spec.image.workdir, **request}, data)

    async def close(self) -> None:
        """Kill everything inside and remove the sandbox; calling it twice is harmless."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _check_open(self) -> None:
        if self._closing is None and self._end.done():
            self._fail(f"the sandbox has died: {self._end.result()}")
        if self._closing is not None:
            raise SandboxError(self._why or "the sandbox is closed")

    def _expire(self) -> None:
        self._fail(f"the sandbox is closed: it had {self.spec.ttl_s:g} s to live")

    def _fail(self, why: str) -> None:
        """Close the sandbox without a request from its holder, and record the reason."""
        if self._closing is None:
            self._why = why
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        self._ttl.cancel()
        await self._egress.close()
        try:
            if not self._end.done():
                await self._link.send({"kind": "close", "box": self.box})
                if not (await asyncio.wait({self._end}, timeout=CLOSE_TIMEOUT_S))[0]:
                    raise SandboxError(f"a sandbox did not end within {CLOSE_TIMEOUT_S:g} s")
        finally:
            self._commands.close()
            await self._home.forget(self)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
