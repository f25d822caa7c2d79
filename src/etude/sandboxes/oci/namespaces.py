"""The process that holds one container's mount, process and network namespaces, which end with it.

    provider ══standard input══▶ unshare ──▶ process 1: a shell, then cat       :mod:`etude.sandboxes.oci.bundle` mounts
             ──nsenter──▶ runtime ──▶ sentry, gofer, commands                   all of them below process 1

Every process in the namespaces dies with process 1, and the mounts with the last process. Process 1 ends when its
standard input closes, hence also when the provider is killed. Owns process 1, and the control groups around it if the
machine has any: hard limits against a sandbox that would use up the machine's memory or processes; beyond them the
whole sandbox dies.
"""

import asyncio
import os
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox_spec import SandboxLimits
from etude.sandboxes.lifecycle import close_all
from etude.sandboxes.ns.cgroups import (
    CPU,
    MEMORY,
    PROCESSES,
    Cgroups,
    Usage,
    find_hierarchies,
    launcher_name,
    writable,
)

START_TIMEOUT_S = 60.0
"""Timeout for the mounts of a root; they take some milliseconds."""
STOP_TIMEOUT_S = 30.0
"""Timeout for the kernel to end all processes inside."""
OVERHEAD_BYTES = 512 << 20
"""Memory of the sentry and the gofer, in addition to the sandbox's own limit."""
HOST_PROCESSES = 8
"""The machine's threads and processes per process inside, and the same number for the sentry."""
BOX = "box"
"""Name of the control group below the launcher's own."""


class NamespaceHolder:
    """One set of namespaces."""

    def __init__(self, process: Process, inner: int) -> None:
        self._process = process
        self._inner = inner
        self._cgroups: Cgroups | None = None
        self._join = ""

    @classmethod
    async def start(cls, script: str, limits: SandboxLimits) -> "NamespaceHolder":
        """Make the namespaces and run ``script`` in them until it reports that it is ready.

        Raises :class:`~etude.errors.SandboxError` with the script's error output.
        """
        process = await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
            start_new_session=True,
        )
        namespaces = cls(process, 0)
        try:
            await namespaces.ready()
            namespaces._inner = _only_child(process.pid)
            namespaces._wall_in(limits)
        except BaseException:
            await close_all([namespaces])
            raise
        return namespaces

    @property
    def root(self) -> Path:
        """The machine's path of the root inside."""
        return Path(f"/proc/{self._inner}/root")

    async def ready(self) -> None:
        """Wait until the script is ready again. Raises :class:`~etude.errors.SandboxError` if it ended."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if await self._process.stdout.readline() == b"ready\n":
                    return
                complaint = (await self._process.stderr.read()).decode("utf-8", "replace").strip()
        except TimeoutError:
            complaint = f"nothing happened within {START_TIMEOUT_S:g} s"
        raise SandboxError(f"no root could be made for a sandbox: {complaint}")

    async def go_on(self) -> None:
        """Let the script continue, and wait until it is ready again."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        await self.ready()

    def enter(self, argv: Sequence[str]) -> tuple[str, ...]:
        """The command line that runs another one in these namespaces."""
        return (
            "sh",
            "-c",
            f'{self._join}exec "$@"',
            "sh",
            "nsenter",
            "--target",
            str(self._inner),
            "--mount",
            "--pid",
            "--net",
            "--",
            *argv,
        )

    @property
    def has_wall(self) -> bool:
        """True if control groups of this machine enclose it."""
        return self._cgroups is not None

    def usage(self) -> Usage:
        """The usage on the machine, overhead included; empty without control groups."""
        return Usage(None, None, None) if self._cgroups is None else self._cgroups.usage(BOX)

    async def close(self) -> None:
        """End everything inside and wait for it. Calling it twice is harmless."""
        for victim in filter(None, (self._inner, self._process.pid if self._process.returncode is None else 0)):
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            raise SandboxError(f"a sandbox did not end within {STOP_TIMEOUT_S:g} s") from None
        if self._cgroups is not None:
            cgroups, self._cgroups = self._cgroups, None
            await asyncio.to_thread(cgroups.remove, BOX)
            cgroups.close()

    def _wall_in(self, limits: SandboxLimits) -> None:
        """Make the groups that every entering process joins, if the machine allows it."""
        launcher = launcher_name(self._process.pid)
        texts = (Path(f"/proc/self/{name}").read_text(encoding="utf-8") for name in ("mountinfo", "cgroup"))
        hierarchies = writable(find_hierarchies(*texts), launcher)
        if not hierarchies:
            return
        self._cgroups = Cgroups(hierarchies, launcher)
        most = {
            MEMORY: limits.memory_bytes + limits.disk_bytes + OVERHEAD_BYTES,
            PROCESSES: (limits.processes + 8) * HOST_PROCESSES,
            CPU: limits.cpus,
        }
        self._cgroups.make(BOX, most)
        for hierarchy in hierarchies:
            entry = hierarchy.folder / launcher / BOX / hierarchy.entry
            self._join += f"echo 0 > {shlex.quote(str(entry))} && "


async def run_program(argv: Sequence[str], timeout_s: float, output: int = PIPE) -> tuple[int, str]:
    """Run a program, or a line of :meth:`NamespaceHolder.enter`, to its end; returns its exit code and what it
    printed, errors included, unless that goes to the open file ``output``.

    Raises :class:`~etude.errors.SandboxError` if it takes too long; then it is killed.
    """
    nothing = os.memfd_create("stdin")  # not /dev/null: as root, runsc changes its input's owner to the user nobody
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=nothing, stdout=output, stderr=asyncio.subprocess.STDOUT, start_new_session=True
        )
    finally:
        os.close(nothing)
    try:
        async with asyncio.timeout(timeout_s):
            printed, _ = await process.communicate()
    except TimeoutError:
        raise SandboxError(f"{argv[0]} did not end within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return process.returncode, (printed or b"").decode("utf-8", "replace")


def _only_child(process: int) -> int:
    return int(Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()[0])
