"""Sandboxes for long commands that need a real system around them, such as another team's harness: bubblewrap.

    exec ──job──▶ bwrap ──▶ doorway (process 1) ──▶ command          see etude.sandboxes.doorway
                                 └── door ──▶ one URL                see etude.sandboxes.door

Inside: the machine's programs, read-only; the folders that were asked for, read-only; the sandbox's files in its
working folder, writable; a fresh ``/tmp`` and home, gone with the command. Own user, process, network, IPC and host
name spaces, no capabilities, no network but the door. Owns the directories and the door; a command has a process tree
of its own, so there may be as many at a time as callers start. For thousands of short programs a minute:
:mod:`etude.sandboxes.local`.

Bubblewrap as root opens folders that only root can reach, then :mod:`etude.sandboxes.doorway` becomes ``nobody``; as
any other user it makes the user namespace itself. What the machine does not grant fails the command; it never runs with
less. How much a command writes in all is not limited, only how much into one file.

States of a provider: new ──create──▶ open ──close──▶ closed. Waits for each command with a deadline.
"""

import asyncio
import os
import shutil
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import orjson

import etude
from etude.errors import ConfigError, SandboxError
from etude.protocols import ExecResult
from etude.sandboxes.door import Door
from etude.sandboxes.doorway import DOOR_PORT, DOOR_SOCKET, STARTED, Job, Report
from etude.sandboxes.folder_sandbox import Command, FolderSandbox, Home
from etude.sandboxes.folders import Folder
from etude.sandboxes.isolation import Limits
from etude.sandboxes.local import UNPRIVILEGED_USER
from etude.sandboxes.outputs import OUTPUT_LIMIT_BYTES, CappedOutput
from etude.sandboxes.promises import check_spec
from etude.sandboxes.scratch import Scratch
from etude.worlds import Capability, SandboxSpec

HOME = "/home/agent"
"""Of commands, inside."""
DOOR_URL = f"http://127.0.0.1:{DOOR_PORT}"
"""Base of every URL that can be reached inside."""
HARNESS_LIMITS = Limits(memory_bytes=4 << 30, file_bytes=64 << 20, descriptors=256, processes=256)
"""Address space of each process, a file, and per process and bubble: enough for an agent written in any language."""
CAPABILITIES = frozenset((Capability.CONFINED, Capability.PROCESSES_APART, Capability.NETWORK_OFF, Capability.FORK))
"""All of it, or a command does not run; limits are those of each command, so none of a sandbox's is claimed."""
GRACE_S = 10.0
"""How much later than a command's own deadline its end may be reported."""
EXIT_TIMEOUT_S = 5.0
"""For a bubble to end once its provider has hung up."""
REPORT_BYTES = 4096
"""More than any report has."""
CODE = "/run/etude/code"
"""Where a bubble finds its doorway."""
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders or links beside ``/usr`` where programs and libraries may be."""
SYSTEM_FILES = ("ld.so.cache", "alternatives", "localtime", "ssl/certs")
"""Of ``/etc``: what programs need to start, tell the time and check certificates."""
OWN_FILES = {
    "passwd": "agent:x:{user}:{group}::" + HOME + ":/bin/sh\n",
    "group": "agent:x:{group}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
"""Of ``/etc``: what says who and where a program is."""


class BubbleSandboxes:
    """Makes sandboxes with bubblewrap; implements :class:`~etude.protocols.SandboxProvider`."""

    def __init__(
        self,
        *,
        door: str | None = None,
        mounts: Mapping[str, Path] | None = None,
        limits: Limits = HARNESS_LIMITS,
        scratch: Path | None = None,
        program: str = "bwrap",
    ) -> None:
        """``door`` is the URL that commands reach at ``DOOR_URL``; ``mounts`` are read-only, by their path inside.

        ``scratch`` is where directories are made (default: in memory). Raises :class:`~etude.errors.ConfigError` when
        bubblewrap is not installed or a mount does not exist.
        """
        found = shutil.which(program)
        if found is None:
            raise ConfigError(f"{program!r} is not installed: on Debian or Ubuntu, apt-get install bubblewrap")
        missing = [str(source) for source in (mounts or {}).values() if not source.exists()]
        if missing:
            raise ConfigError(f"a sandbox cannot show {' and '.join(missing)}: there is no such folder or file")
        self._program = found
        self._door = None if door is None else Door(door)
        self._mounts = dict(mounts or {})
        self._limits = limits
        self._parent = scratch
        self._user = UNPRIVILEGED_USER if os.geteuid() == 0 else None
        self._scratch: Scratch | None = None
        self._opening = asyncio.Lock()
        self._sandboxes: set[FolderSandbox] = set()
        self._home = Home(name="bubblewrap", run=self._run, copy=self._copy, remove=self._remove)
        self._closed = False

    async def capabilities(self) -> frozenset[Capability]:
        """What a command is held by: all of it, or it does not run."""
        return CAPABILITIES

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FolderSandbox:
        """A fresh sandbox that holds ``files``; the first one also opens the door.

        Raises :class:`~etude.errors.SandboxError` if there is no room, ``ValueError`` for a path that would leave it.
        """
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        spec = spec or SandboxSpec()
        check_spec(spec, CAPABILITIES, "bubblewrap")
        missing = [str(source) for source in spec.mounts.values() if not source.exists()]
        if missing:
            raise SandboxError(f"a sandbox cannot show {' and '.join(missing)}: there is no such folder or file")
        async with self._opening:
            if self._scratch is None:
                self._scratch = await self._open()
        workdir = spec.image.workdir
        folder = Folder(self._scratch.create(reader=self._user), owner=self._user, inside=workdir, workdir=workdir)
        sandbox = FolderSandbox(self._home, folder, spec)
        self._sandboxes.add(sandbox)
        try:
            folder.make(workdir)
            for path, text in files.items():
                folder.write(path, text)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        """Close every sandbox and the door and remove all files; calling it twice is harmless."""
        self._closed = True
        for sandbox in list(self._sandboxes):
            await sandbox.close()
        if self._door is not None:
            await self._door.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    async def _run(self, folder: Folder, command: Command) -> ExecResult:
        """Run one command with ``folder`` as its working folder. Raises :class:`~etude.errors.SandboxError`."""
        job = Job(
            argv=list(command.argv),
            folder=folder.workdir,
            environment={"PATH": self._search_path(), "LANG": "C.UTF-8", "HOME": HOME, **command.environment},
            timeout_s=command.timeout_s,
            has_door=self._door is not None,
            user=self._user,
            limits=list(self._limits),
        )
        with ExitStack() as stack:
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            ours.setblocking(False)
            job_fd, stdin_fd, sysctl = _in_memory(orjson.dumps(job)), _in_memory(command.stdin.encode()), _open_sysctl()
            for descriptor in (job_fd, stdin_fd, sysctl):
                stack.callback(os.close, descriptor)
            descriptors = job_fd, theirs.fileno(), sysctl
            arguments_fd = _in_memory("\0".join(self._arguments(folder, command.spec)).encode())
            stack.callback(os.close, arguments_fd)
            process = await asyncio.create_subprocess_exec(
                *(self._program, "--args", str(arguments_fd), "--", *_doorway(descriptors)),
                stdin=stdin_fd,
                stdout=PIPE,
                stderr=PIPE,
                env={"PYTHONPATH": CODE, "PATH": os.defpath},
                pass_fds=(*descriptors, arguments_fd),
                start_new_session=True,
            )
            theirs.close()
            return await _end(process, ours, command.timeout_s + GRACE_S)

    async def _copy(self, sandbox: FolderSandbox) -> FolderSandbox:
        copy = await self.create({}, sandbox.spec)
        try:
            await asyncio.to_thread(sandbox.folder.copy_to, copy.folder)
        except BaseException:
            await copy.close()
            raise
        return copy

    def _remove(self, sandbox: FolderSandbox) -> None:
        if self._scratch is not None:
            self._scratch.remove(sandbox.folder.path)
        self._sandboxes.discard(sandbox)

    async def _open(self) -> Scratch:
        scratch = Scratch.open(self._parent)
        user = {"user": os.geteuid() if self._user is None else self._user}
        user["group"] = os.getegid() if self._user is None else self._user
        (scratch.path / "etc").mkdir()
        for name, text in OWN_FILES.items():
            file = scratch.path / "etc" / name
            file.write_text(text.format(**user), encoding="utf-8")
            file.chmod(0o644)
        if self._door is not None:
            await self._door.open(scratch.path / "door", owner=self._user)
        return scratch

    def _arguments(self, folder: Folder, spec: SandboxSpec) -> list[str]:
        """What bubblewrap is told; a later line covers an earlier one."""
        scratch = folder.path.parent
        arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        arguments += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1"]
        if self._user is None:
            arguments += ["--unshare-user", "--disable-userns"]
        else:
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        shown = {f"/etc/{name}": scratch / "etc" / name for name in OWN_FILES} | _interpreter()
        shown |= self._mounts | dict(spec.mounts)
        for path in ("/tmp", HOME):
            arguments += ["--perms", "1777", "--tmpfs", path]
        for path in _parents((*shown, folder.workdir, DOOR_SOCKET)):
            arguments += ["--perms", "0755", "--dir", path]
        arguments += [*_system(), "--proc", "/proc", "--dev", "/dev"]
        for target, source in shown.items():
            arguments += ["--ro-bind", str(source), target]
        if self._door is not None:
            arguments += ["--bind", str(scratch / "door"), DOOR_SOCKET]
        return [*arguments, "--bind", str(folder.path), folder.workdir, "--chdir", "/"]

    def _search_path(self) -> str:
        """Programs of the mounts come before the machine's, and those before the interpreter's."""
        own = [f"{target}/bin" for target, source in self._mounts.items() if (source / "bin").is_dir()]
        return ":".join((*own, "/usr/local/bin", "/usr/bin", "/bin", f"{sys.base_prefix}/bin"))


async def _end(process: Process, control: socket.socket, timeout_s: float) -> ExecResult:
    """See a bubble to its end; if it is given up or late, it ends before this does."""
    ending = asyncio.ensure_future(_collect(process))
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await asyncio.shield(ending)
        heard = control.recv(REPORT_BYTES)
    except TimeoutError:
        raise SandboxError(f"a bubble did not end within {timeout_s:g} s") from None
    finally:
        control.close()  # whatever still runs in there ends now
        if not (await asyncio.wait({ending}, timeout=EXIT_TIMEOUT_S))[0]:
            process.kill()
            await ending
    started, report_json = heard[: len(STARTED)], heard[len(STARTED) :]
    if started != STARTED:
        raise SandboxError(f"no bubble could be made: {stderr.text.strip()}")
    if not report_json:
        raise SandboxError("a bubble died under its command")
    report: Report = orjson.loads(report_json)
    return ExecResult(
        exit_code=report["exit_code"],
        stdout=stdout.text,
        stderr=stderr.text,
        timed_out=report["timed_out"],
        truncated=stdout.truncated or stderr.truncated,
        seconds=report["seconds"],
    )


async def _collect(process: Process) -> tuple[CappedOutput, CappedOutput]:
    """Both outputs, once every process that could write to them is dead."""
    stdout, stderr, _ = await asyncio.gather(_read(process.stdout), _read(process.stderr), process.wait())
    return stdout, stderr


async def _read(stream: asyncio.StreamReader | None) -> CappedOutput:
    assert stream is not None
    output = CappedOutput()
    while chunk := await stream.read(OUTPUT_LIMIT_BYTES):
        output.add(chunk)
    return output


def _doorway(descriptors: tuple[int, int, int]) -> tuple[str, ...]:
    python = str(Path(sys.executable).resolve())
    return python, "-P", "-s", "-S", "-B", "-X", "utf8", "-m", "etude.sandboxes.doorway", *map(str, descriptors)


def _system() -> list[str]:
    """The machine's programs and libraries, as they are laid out there."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_FOLDERS:
        folder = Path("/", name)
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    for name in SYSTEM_FILES:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments


def _interpreter() -> dict[str, Path]:
    """The Python that runs here, and the two modules that a doorway needs."""
    package = Path(etude.__file__).parent
    modules = ("__init__.py", "sandboxes/__init__.py", "sandboxes/isolation.py", "sandboxes/doorway.py")
    mounts = {f"{CODE}/etude/{name}": package / name for name in modules}
    base = Path(sys.base_prefix)
    return mounts if base.is_relative_to("/usr") else {str(base): base, **mounts}


def _parents(paths: Iterable[str]) -> list[str]:
    """The folders above some paths, outer ones first; left to itself, bubblewrap may make them for one user only."""
    return sorted({str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"/"})


def _in_memory(data: bytes) -> int:
    """A descriptor from which ``data`` can be read."""
    descriptor = os.memfd_create("bubble")
    with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
        file.write(data)
        file.seek(0)
    return descriptor


def _open_sysctl() -> int:
    """The settings of user namespaces; which namespace's is decided by who opens a file in there."""
    return os.open("/proc/sys/user", os.O_RDONLY | os.O_DIRECTORY)
