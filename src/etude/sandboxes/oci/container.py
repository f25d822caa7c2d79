"""One container of an OCI runtime: start, pause, resume, and its commands, each watched to its end.

    asleep ◀──sleep── awake ──▶ commands        after waking it has another name, but the same processes
           ──wake───▶

Owns the calls of the runtime and their files in the container's folder. :mod:`etude.sandboxes.oci.sandbox` decides
which calls are allowed when.
"""

import asyncio
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import orjson

from etude.errors import SandboxError, Unsupported
from etude.protocols import ExecResult
from etude.sandbox_spec import ImageUser, SandboxSpec
from etude.sandboxes.command_io import OUTPUT_LIMIT_BYTES, in_memory
from etude.sandboxes.folder_sandbox import Command
from etude.sandboxes.images.machine_base import variables_of
from etude.sandboxes.oci.bundle import ROOT, ROOT_POWERS, process
from etude.sandboxes.oci.namespaces import NamespaceHolder, run_program
from etude.sandboxes.oci.runtimes import OciRuntime
from etude.sandboxes.output_pipe import DescendantOutputs, OutputPipe, exec_result

RUN_TIMEOUT_S = 120.0
"""Timeout for the runtime to start, checkpoint or restore a container; it takes less than a second on an
idle machine.
"""
GRACE_S = 20.0
"""Timeout for a killed command to end."""
START_POLL_S = 0.01
"""Interval between checks for a command's process id, which is written to a file."""
MAX_LISTENED = 64
"""Outputs of commands' descendants read at a time."""
RUNTIME_FAILED, KILLED = 128, 137
"""Exit code of the runtime if it does not know how a command ended (a command may return it too); that of a killed
command.
"""
KILL = 'kill -9 "-$1" 2>/dev/null || kill -9 "$1"'
EXEC, EXEC_WITHOUT_INPUT = 'exec "$@"', 'exec "$@" </dev/null'
"""Scripts that run inside: the shell reports programs that cannot be run in the usual way."""
EXEC_IN_ROOT = """
exec </dev/null
uid=$1 gid=$2; shift 2
[ -h "$0/dev/fd" ] || {
    ln -s /proc/self/fd "$0/dev/fd"
    for number in 0:stdin 1:stdout 2:stderr; do ln -s fd/${number%:*} "$0/dev/${number#*:}"; done
}
for folder in /usr/sbin /usr/bin /sbin /bin; do
    [ ! -x $folder/chroot ] || break
done
into=$folder/chroot
[ $uid != 0 ] || exec $into "$0" "$@"
case $($into --help 2>&1) in *userspec*) exec $into --userspec=$uid:$gid --groups= "$0" "$@" ;; esac
case $($into "$0" chroot --help 2>&1) in
    *userspec*) exec $into "$0" chroot --userspec=$uid:$gid --groups= / "$@" ;;
esac
while IFS=: read -r name _ number group _; do
    [ "$number:$group" != $uid:$gid ] || exec $into "$0" su -m -s /bin/sh -- "$name" -c 'exec "$@"' sh "$@"
done <"$0/etc/passwd"
echo "to run as user $uid:$gid takes chroot of coreutils, or that user in /etc/passwd: add one, or use ns or qemu" >&2
exit 126
"""
"""The same in another root, by the programs there are: ``chroot`` of coreutils, in the sandbox's or the service's
image, or ``su`` of the latter.
"""
SERVICE_POWERS = ("SYS_CHROOT", "NET_BIND_SERVICE")
"""Capabilities of services, in addition to those for building an image."""
LOG_BYTES = 2000
"""Maximum length of a runtime's error in a message, in bytes."""
COUNT = "set -- /proc/[0-9]*; echo $(($# - 2))"
"""Counts the processes inside, except the first and the script's own."""
HOLDERS = "find /proc/[0-9]*/fd -maxdepth 1 -lname 'host:*' -printf '%h\\n' 2>/dev/null; echo /proc/$$/fd"
"""Lists who has something of the machine open; last the script itself, which has its own input and output."""


class Container:
    """One container in its own namespaces."""

    def __init__(self, runtime: OciRuntime, command: Sequence[str], namespaces: NamespaceHolder, folder: Path) -> None:
        """``command`` is the program with its flags; ``folder`` belongs to the container and has a ``bundle``."""
        self._runtime = runtime
        self._command = command
        self._namespaces = namespaces
        self._folder = folder
        self._wakes = 0
        self._commands = 0
        self._descendants = DescendantOutputs(MAX_LISTENED)
        self.is_awake = False
        """True while its processes run; false permanently after a failed restore."""

    async def boot(self) -> None:
        """Start it. Raises :class:`~etude.errors.SandboxError`."""
        await self._begin("run", "--detach", "--bundle", str(self._folder / "bundle"))

    async def sleep(self, memory: Path) -> None:
        """Write its memory to a new folder; afterwards it has no process.

        Raises :class:`~etude.errors.Unsupported`, without effect, while a process inside still has an output of an
        ended command open: the machine's end of the pipe cannot be restored.
        """
        code, printed = await self._call("exec", self._name, "/bin/sh", "-c", HOLDERS)
        *holders, own = printed.split() or [""]
        left = sorted({holder.split("/")[2] for holder in holders if holder not in (own, "/proc/1/fd")})
        if code or left:
            raise Unsupported(
                f"processes {', '.join(left)} hold outputs of commands that ended, which no checkpoint can keep: start "
                "them with their input and outputs redirected (PROGRAM >log 2>&1 </dev/null &), or use qemu"
            )
        await asyncio.to_thread(memory.mkdir)
        self.is_awake = False
        code, output = await self._call("checkpoint", "-image-path", str(memory), self._name)
        if code:
            raise SandboxError(f"a sandbox could not be checkpointed: {output.strip()}")

    async def wake(self, memory: Path) -> None:
        """Restore from the memory in a folder, with the current files."""
        self._wakes += 1
        bundle = str(self._folder / "bundle")
        await self._begin("restore", "-detach", "-bundle", bundle, "-image-path", str(memory))

    async def pause(self) -> None:
        """Pause all its processes. Raises :class:`~etude.errors.SandboxError`."""
        self.is_awake = False
        code, output = await (
            self._signal_all("STOP") if self._runtime.shares_kernel else self._call("pause", self._name)
        )
        if code:
            raise SandboxError(f"a sandbox could not be paused: {output.strip()}")

    async def resume(self) -> None:
        """Let it run again."""
        code, _ = await (self._signal_all("CONT") if self._runtime.shares_kernel else self._call("resume", self._name))
        self.is_awake = code == 0

    async def processes(self) -> float:
        """Count the processes inside, except the first; ``nan`` if the container does not respond."""
        code, text = await self._call("exec", self._name, "/bin/sh", "-c", COUNT)
        return float(text) if code == 0 and text.strip().isdigit() else math.nan

    async def run(self, command: Command, stdin: bytes) -> ExecResult:
        """Wait for the end of a command, or kill it with its process group.
        Raises :class:`~etude.errors.SandboxError`.
        """
        self._commands += 1
        order, pid_file = (self._folder / f"{self._commands}.{kind}" for kind in ("json", "pid"))
        await asyncio.to_thread(order.write_bytes, _order(command, has_input=bool(stdin)))
        source = in_memory(stdin)
        pipes = [await OutputPipe.open(OUTPUT_LIMIT_BYTES), await OutputPipe.open(OUTPUT_LIMIT_BYTES)]
        start_s = time.monotonic()
        try:
            line = self._line(
                "exec", "--process", str(order), self._runtime.command_pid_flag, str(pid_file), self._name
            )
            client = await asyncio.create_subprocess_exec(
                *line, stdin=source, stdout=pipes[0].theirs, stderr=pipes[1].theirs, start_new_session=True
            )
            for pipe in pipes:
                pipe.close_write_end()
            code = await self._end(client, command, pid_file)
            started = await asyncio.to_thread(pid_file.exists)
            exit_code = code if started and code is not None else KILLED  # killed by another process inside, too
            result = exec_result(pipes, exit_code, timed_out=code is None, start_s=start_s)
            if (not started or code == RUNTIME_FAILED) and math.isnan(await self.processes()):
                raise SandboxError(f"a command could not be run in a sandbox: {result.stderr.strip()}")
            return result
        finally:
            os.close(source)
            self._descendants.add(pipes)
            for file in (order, pid_file):
                file.unlink(missing_ok=True)

    def hang_up(self) -> None:
        """Stop reading outputs: the namespaces are gone."""
        self._descendants.close()

    @property
    def _name(self) -> str:
        return f"c{self._wakes}"

    def _line(self, *arguments: str) -> tuple[str, ...]:
        return self._namespaces.enter((*self._command, "--root", str(self._folder / "state"), *arguments))

    async def _call(self, *arguments: str) -> tuple[int, str]:
        return await run_program(self._line(*arguments), RUN_TIMEOUT_S)

    async def _signal_all(self, signal: str) -> tuple[int, str]:
        """Signal every process of the surrounding namespaces except the first."""
        return await run_program(self._namespaces.enter(("/bin/sh", "-c", f"kill -{signal} -1")), RUN_TIMEOUT_S)

    async def _begin(self, *arguments: str) -> None:
        """Start a container, which keeps the outputs of its starter: not a pipe, which would not end, and no file of
        the machine's, which root inside could fill. What it writes into memory is its own.
        """
        with os.fdopen(os.memfd_create("log"), "r+b") as log:
            code, _ = await run_program(self._line(*arguments, self._name), RUN_TIMEOUT_S, log.fileno())
            if code:
                log.seek(0)
                output = log.read(LOG_BYTES).decode("utf-8", "replace")
                raise SandboxError(f"no sandbox could be started: {output.strip()}")
        self.is_awake = True

    async def _end(self, client: asyncio.subprocess.Process, command: Command, pid_file: Path) -> int | None:
        """The exit code of the runtime's client, ``None`` if the command's time ran out."""
        ending = asyncio.ensure_future(client.wait())
        try:
            if (await asyncio.wait({ending}, timeout=command.timeout_s))[0]:
                return ending.result()
            await self._kill(command, pid_file, ending)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(self._kill(command, pid_file, ending))
            raise
        return None

    async def _kill(self, command: Command, pid_file: Path, ending: "asyncio.Future[int]") -> None:
        """Kill a command with its process group. Raises :class:`~etude.errors.SandboxError` if it does not end."""
        leader, deadline_s = "", time.monotonic() + GRACE_S
        while not ending.done() and not leader and time.monotonic() < deadline_s:
            with suppress(FileNotFoundError):
                leader = await asyncio.to_thread(pid_file.read_text, encoding="ascii")
            await asyncio.sleep(0 if leader else START_POLL_S)
        if leader and not ending.done() and self._runtime.shares_kernel:
            await run_program(self._namespaces.enter(("/bin/sh", "-c", KILL, "sh", leader)), RUN_TIMEOUT_S)
        elif leader and not ending.done():
            user = _user(command.spec)
            await self._call("exec", "-user", f"{user.uid}:{user.gid}", self._name, "/bin/sh", "-c", KILL, "sh", leader)
        if not (await asyncio.wait({ending}, timeout=GRACE_S))[0]:
            ending.cancel()
            raise SandboxError(f"a command of a sandbox did not end within {GRACE_S:g} s of being killed")


def _order(command: Command, *, has_input: bool) -> bytes:
    """``process.json`` of a command."""
    spec = command.spec
    if service := command.service:
        line = ["/bin/sh", "-c", EXEC_IN_ROOT, service.root, f"{service.uid}", f"{service.gid}", *command.argv]
        return orjson.dumps(process(line, service.environment, "/", powers=(*ROOT_POWERS, *SERVICE_POWERS)))
    argv = ["/bin/sh", "-c", EXEC if has_input else EXEC_WITHOUT_INPUT, "sh", *command.argv]
    return orjson.dumps(
        process(argv, variables_of(spec) | dict(command.environment), spec.image.workdir, user=_user(spec))
    )


def _user(spec: SandboxSpec) -> ImageUser:
    """The user that commands run as."""
    return ROOT if spec.user == "root" else spec.image.user
