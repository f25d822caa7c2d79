"""One namespace sandbox, seen from its provider: commands, files, copies, and its end.

    exec ──argv, pipes──▶ launcher ──▶ command        files ──▶ job inside (etude.sandboxes.ns.jobs)

Owns its life: open until it is closed, by its holder, its provider or its time to live, or until its first process
dies. Then everything in it is killed, and what still waits for it fails. What runs in it is
:mod:`etude.sandboxes.ns.commands`'s.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from etude.errors import SandboxError
from etude.protocols import ExecResult
from etude.sandbox_spec import Image, SandboxSpec, SandboxStats
from etude.sandboxes.folder_sandbox import Command
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES
from etude.sandboxes.ns.commands import Commands
from etude.sandboxes.ns.egress import Doors
from etude.sandboxes.ns.link import Link
from etude.sandboxes.ns.root import HOME

CLOSE_TIMEOUT_S = 30.0
"""For a sandbox's last process to be gone."""
STATS_TIMEOUT_S = 30.0
"""For the launcher to count."""
ROOT_HOME = "/root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What a provider does for its sandboxes."""

    link: Link
    snapshot: Callable[["NamespaceSandbox"], Awaitable[Image]]
    fork: Callable[["NamespaceSandbox", int], Awaitable[Sequence["NamespaceSandbox"]]]
    forget: Callable[["NamespaceSandbox"], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Birthright:
    """What a sandbox is born with."""

    box: int
    """The launcher's number of it."""
    spec: SandboxSpec
    search_path: str
    """Where its commands are looked for."""
    doors: Doors


class NamespaceSandbox:
    """A machine of its own, but for the kernel; implements :class:`~etude.protocols.Sandbox`."""

    def __init__(self, home: Home, birthright: Birthright) -> None:
        self._home = home
        self._link = home.link
        self.spec = birthright.spec
        self.box = birthright.box
        """The launcher's number of it."""
        self._doors = birthright.doors
        self._commands = Commands(home.link, self.box, check_open=self._check_open, fail=self._fail)
        user_home = ROOT_HOME if self.spec.user == "root" else HOME
        self._environment = {"PATH": birthright.search_path, "LANG": "C.UTF-8", "HOME": user_home}
        self._environment |= {**self.spec.image.environment, **self.spec.environment}
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
        """Run one command in the working folder, at most 64 KiB of stdout and of stderr being kept.

        When its time runs out, or whoever asked gives up, its whole session is killed. What it left running in
        another session, or when it ended by itself, goes on.
        """
        self._check_open()
        command = Command(
            argv=argv, stdin=stdin, timeout_s=timeout_s, environment=dict(environment or {}), spec=self.spec
        )
        variables = {**self._environment, **command.environment}
        return await self._commands.run(command, environment=variables, workdir=self.spec.image.workdir)

    async def read_file(self, path: str) -> str | None:
        """The text of a file (its first 8 MiB), or ``None`` if there is none; ``ValueError`` if it is no plain file."""
        answer = await self.job("read", {"path": path})
        return None if answer is None else answer.decode("utf-8")

    async def write_file(self, path: str, text: str) -> None:
        """Create or replace a file and the folders above it; ``ValueError`` for a path that is no plain file's."""
        await self.job("write", {}, orjson.dumps({path: text}))

    async def export(self, paths: Sequence[str], *, limit_bytes: int = EXPORT_LIMIT_BYTES) -> bytes:
        """A tar of files and folders, without what is missing or unreadable; ``ValueError`` beyond the limit."""
        answer = await self.job("export", {"paths": list(paths), "limit_bytes": limit_bytes})
        return answer or b""

    async def load(self, tar: bytes) -> None:
        """Unpack a tar into the working folder, or nothing of it and ``ValueError``."""
        await self.job("load", {}, tar)

    async def stats(self) -> SandboxStats:
        """What is used now, by all its processes together; ``nan`` for what the machine counts for root alone."""
        self._check_open()
        request = {"kind": "stats", "id": self._link.next_number(), "box": self.box}
        async with asyncio.timeout(STATS_TIMEOUT_S):
            answer = await (await self._link.ask(request))
        return SandboxStats(
            memory_bytes=_or_nan(answer["memory_bytes"]),
            disk_bytes=answer["disk_bytes"],
            processes=_or_nan(answer["processes"]) - 1,  # init is not the agent's
            cpu_s=_or_nan(answer["cpu_s"]),
            age_s=time.monotonic() - self._born_s,
        )

    async def kill_processes(self) -> None:
        """Kill everything inside but its first process; who does it is out of reach of all in there."""
        await self.job("kill", {})

    async def snapshot(self) -> Image:
        """The files as they are, as an image that lives as long as the provider."""
        self._check_open()
        return await self._home.snapshot(self)

    async def fork(self, count: int = 1) -> "Sequence[NamespaceSandbox]":
        """Independent copies with the same files and specification; all of them, or none and an error."""
        self._check_open()
        if count < 1:
            raise ValueError(f"fork({count}): at least one")
        return await self._home.fork(self, count)

    async def job(self, job: str, request: Mapping[str, object], data: bytes = b"") -> bytes | None:
        """Have one of étude's own jobs done inside, see :mod:`etude.sandboxes.ns.jobs`."""
        self._check_open()
        return await self._commands.job(job, {"workdir": self.spec.image.workdir, **request}, data)

    async def close(self) -> None:
        """Kill what still runs and remove everything; calling it twice is harmless."""
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
        """Close it without a holder who asks for it, and remember why."""
        if self._closing is None:
            self._why = why
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        self._ttl.cancel()
        await self._doors.close()
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
