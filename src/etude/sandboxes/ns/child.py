"""Children of the launcher: a sandbox's first process, a command, or one of étude's own jobs.

The first two are lists of system calls (:mod:`etude.sandboxes.ns.syscalls`), the third is a fork. A command is confined
in this order: enter its control groups and namespaces, set its limits, drop root, drop capabilities, forbid new
privileges, and last install the system call filter. Standard library alone.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, NoReturn

from etude.errors import SandboxError
from etude.sandboxes.folders import Folder, is_full
from etude.sandboxes.ns.boxes import SandboxRecord
from etude.sandboxes.ns.cgroups import MEMORY, Cgroups
from etude.sandboxes.ns.forks import End
from etude.sandboxes.ns.root import (
    HOSTNAME,
    AllowedPlace,
    RootCalls,
    RootPlan,
    network_requests,
    overlay_folders,
    socket_address,
)
from etude.sandboxes.ns.syscalls import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    CAP_LAST,
    CLONE_NEWCGROUP,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_PARENT,
    CLONE_VFORK,
    CLONE_VM,
    INSTRUCTION_BYTES,
    MACHINE,
    MAY_FAIL,
    PARENT_EXITS,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    SANDBOX_NAMESPACES,
    SECCOMP_MODE_FILTER,
    CallList,
    MemoryBlock,
    Player,
    Result,
    bound_capabilities,
    capability_sets,
    enter,
    hide_process,
    limit_capabilities,
    strings,
)

MAX_DEPTH = 200
"""Deepest nesting of folders in a snapshot; deeper nesting is an attack."""
OPAQUE = "user.overlay.opaque"
"""The attribute of a folder that hides the content of lower layers."""
COPY_BYTES = 1 << 20
END_ROUNDS, ROUND_S = 50, 0.02
"""Number of rounds that kill processes which still live or are new, and the pause after each. If processes of a
command's session are left after the last round, all processes of the sandbox are killed.
"""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class JobVerdict(IntEnum):
    """The first byte of a job's answer."""

    DONE = 0
    MISSING = 1
    """The file does not exist."""
    REFUSED = 2
    """A ``ValueError``: the request is invalid."""
    FAILED = 3
    FULL = 4
    """The sandbox's own disk is full; only processes inside can have filled it."""


class JobResult(NamedTuple):
    """The answer of a job."""

    verdict: JobVerdict
    payload: bytes = b""
    """The result, or the error message."""


def run_job(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    """Run a job inside a sandbox; the job defines the meaning of the descriptors ``source`` and ``target``."""
    try:
        return JOBS[request["job"]](request, source, target)
    except ValueError as error:
        return JobResult(JobVerdict.REFUSED, str(error).encode("utf-8", "backslashreplace"))
    except (SandboxError, OSError, RecursionError) as error:
        is_own_disk = request["job"] != "copy"  # which writes to the machine's disk
        verdict = JobVerdict.FULL if is_own_disk and is_full(error) else JobVerdict.FAILED
        return JobResult(verdict, str(error).encode("utf-8", "backslashreplace"))


def runs_as_root(job: str) -> bool:
    """True if a job keeps the capabilities of the sandbox's root."""
    return job in ("copy", "end", "settle")


def stays_outside(job: str) -> bool:
    """True if a job enters only the process namespace and is unreachable for processes in the sandbox."""
    return job == "kill"


def _read(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    text = _folder(request).read(request["path"])
    return (
        JobResult(JobVerdict.MISSING) if text is None else JobResult(JobVerdict.DONE, text.encode("utf-8", "replace"))
    )


def _write(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    folder = _folder(request)
    with _opened(source) as file:
        files: dict[str, str] = json.load(file)
    for path in files:
        folder.place(path)  # write all of them or none
    for path, text in files.items():
        folder.write(path, text)
    return JobResult(JobVerdict.DONE)


def _export(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    return JobResult(JobVerdict.DONE, _folder(request).pack(request["paths"], request["limit_bytes"]))


def _load(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    with _opened(source) as file:
        _folder(request).unpack(file.read())
    return JobResult(JobVerdict.DONE)


def _copy(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    """Copy the written files ``source`` into the empty layer ``target``, in overlayfs's format."""
    owned = (request["workdir"].strip("/"), request["user"][2].strip("/"))
    copier = TreeCopier(owned if request["maps_range"] else None, request["user"])
    for name, place in overlay_folders(request["overlays"]).items():
        into = os.open(".", DIRECTORY, dir_fd=target)  # an unattached mount cannot be changed itself
        for part in filter(None, place.split("/")):
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=into)
            into, above = os.open(part, DIRECTORY, dir_fd=into), into
            os.close(above)
        written = os.open(name, DIRECTORY, dir_fd=source)
        try:
            copier.copy(written, into, place)
        finally:
            os.close(written)
            os.close(into)
    return JobResult(JobVerdict.DONE)


def _settle(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    """Give the agent's folders, with their content from the image, to the agent."""
    uid, gid, home = request["user"]
    for place in (request["workdir"], home):
        _give_away(os.open(place, DIRECTORY), uid, gid)
    return JobResult(JobVerdict.DONE)


def _give_away(folder: int, uid: int, gid: int, depth: int = 0) -> None:
    """Give an open folder and its content to a user, and close it."""
    try:
        os.fchown(folder, uid, gid)
        for name in os.listdir(folder):
            os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
            if depth < MAX_DEPTH and stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                _give_away(os.open(name, DIRECTORY, dir_fd=folder), uid, gid, depth + 1)
    finally:
        os.close(folder)


def _end(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    """End every process of a command's session; if it keeps multiplying, everything in the sandbox except init."""
    for _ in range(END_ROUNDS):
        members = [process for process, session in _sessions() if session == request["session"]]
        for process in members:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not members:
            return JobResult(JobVerdict.DONE)
        time.sleep(ROUND_S)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # the kernel spares init and the caller
    return JobResult(JobVerdict.DONE)


def _kill(request: Mapping[str, Any], source: int, target: int) -> JobResult:
    """Kill every process of the sandbox except the first, repeating until none is left, as processes may still fork."""
    for _ in range(END_ROUNDS):
        try:
            os.kill(-1, signal.SIGKILL)  # the kernel spares init and the caller
        except ProcessLookupError:
            return JobResult(JobVerdict.DONE)
        time.sleep(ROUND_S)
    return JobResult(JobVerdict.FAILED, b"processes of a sandbox did not end when they were killed")


JOBS: Mapping[str, Callable[[Mapping[str, Any], int, int], JobResult]] = MappingProxyType(
    {"read": _read, "write": _write, "export": _export, "load": _load, "copy": _copy, "end": _end, "settle": _settle}
    | {"kill": _kill}
)
"""The jobs, by name."""


def _folder(request: Mapping[str, Any]) -> Folder:
    return Folder(Path("/"), owner=None, inside="/", workdir=request["workdir"])


def _opened(descriptor: int) -> BinaryIO:
    return os.fdopen(descriptor, "rb", closefd=False)


def _sessions() -> list[tuple[int, int]]:
    """Every living process of the sandbox and its session."""
    parents = []
    for name in (path.name for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                parents.append((int(name), int(fields[3])))
    return parents


class TreeCopier:
    """Copies a tree of untrusted files through descriptors: links are never followed, even if swapped meanwhile."""

    def __init__(self, owned: Sequence[str] | None, user: Sequence[Any]) -> None:
        """Files below the paths ``owned`` get the owner ``user``, and others keep theirs; ``None`` sets no owners."""
        self._owned = owned
        self._user = user[0], user[1]

    def copy(self, source: int, target: int, path: str, depth: int = 0) -> None:
        """Copy the content and the metadata of an open folder; ``path`` is its path in the layer.

        Sockets, pipes and devices are skipped. ``ValueError`` for folders that no image can hold.
        """
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} folders inside each other: no image can hold that")
        for name in os.listdir(source):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            inner = f"{path}/{name}".lstrip("/")
            if stat.S_ISDIR(status.st_mode):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=target)
                folder, copy = os.open(name, DIRECTORY, dir_fd=source), os.open(name, DIRECTORY, dir_fd=target)
                try:
                    self.copy(folder, copy, inner, depth + 1)
                finally:
                    os.close(folder)
                    os.close(copy)
            elif stat.S_ISREG(status.st_mode):
                self._copy_file(source, target, name, inner)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                self._keep_link(target, name, status, inner)
            elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=target)  # a whiteout: the file below was removed
        with suppress(OSError):  # the attribute is missing
            os.setxattr(target, OPAQUE, os.getxattr(source, OPAQUE))
        self._keep(target, os.fstat(source), path)

    def _copy_file(self, source: int, target: int, name: str, path: str) -> None:
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        original = os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=source)
        with os.fdopen(original, "rb") as read:
            if not stat.S_ISREG(os.fstat(original).st_mode):
                return
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600, dir_fd=target)
            with os.fdopen(made, "wb") as copy:
                while data := read.read(COPY_BYTES):
                    copy.write(data)
                copy.flush()
                self._keep(made, os.fstat(original), path)

    def _keep(self, copy: int, status: os.stat_result, path: str) -> None:
        """Set owner, mode and time of an open copy to the original's."""
        if self._owned is not None:
            os.fchown(copy, *self._owner(status, path))
        os.fchmod(copy, stat.S_IMODE(status.st_mode))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _keep_link(self, folder: int, name: str, status: os.stat_result, path: str) -> None:
        if self._owned is not None:
            os.chown(name, *self._owner(status, path), dir_fd=folder, follow_symlinks=False)
        os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False)

    def _owner(self, status: os.stat_result, path: str) -> tuple[int, int]:
        if any(path == place or path.startswith(f"{place}/") for place in self._owned or ()):
            return self._user
        return status.st_uid, status.st_gid


JOINED = SANDBOX_NAMESPACES & ~CLONE_NEWPID | CLONE_NEWCGROUP
"""Namespaces that a process enters by itself; it starts in its process namespace."""
ROOT_CAPABILITIES = frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 31})
"""Capabilities of the sandbox's root over its own files and processes: owners, permissions, signals, users, low ports
and file capabilities. None of them allows it to mount, ``chroot``, trace, configure a network or make devices.
"""
INIT_USER = 65534
OUT_OF_MEMORY_SCORE = b"500"
"""The kernel kills commands for lack of memory before other processes of the sandbox."""
DESCRIPTORS, MOST_DESCRIPTORS = 1024, 1 << 16
"""Default and highest number of open files of a process."""
PENDING_SIGNALS, MESSAGE_QUEUE_BYTES = 4096, 256 << 10
"""Pending signals and timers, and bytes of POSIX message queues, of one sandbox: a small part of a user's limits."""
BACKLOG = 128
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes, as shells have them."""
SIGACTION_BYTES, SIGNAL_SET_BYTES = 32, 8
RESOLVE_NO_SYMLINKS = 0x04
NEW_PROCESS = CLONE_VM | CLONE_VFORK | CLONE_PARENT | signal.SIGCHLD
"""Flags that start a process in a process namespace. Only processes cloned after ``setns`` or ``unshare`` are in it, so
the caller makes one, with the launcher as its parent, and exits.
"""


class Tools(NamedTuple):
    """The resources needed to make the launcher's children."""

    cgroups: Cgroups
    player: Player
    init: int
    """The descriptor of :mod:`etude.sandboxes.ns.syscalls`'s program."""
    filter: bytes
    """The commands' seccomp program."""
    bare: int
    """The mount namespace that each sandbox starts with a copy of, see :mod:`etude.sandboxes.ns.root`."""
    maps_range: bool


class InitPipe(NamedTuple):
    """The arguments of a sandbox's first process, and the pipe that it reads them from."""

    users: int
    """Its user namespace."""
    entries: Sequence[int]
    """Descriptors to enter its control groups."""
    plan: RootPlan
    places: Sequence[AllowedPlace]
    files: Mapping[str, bytes]
    """The first files, by path inside."""
    parting: int
    """A socket on which it sends descriptors: the folder of written files, and one listener per place."""
    receiving: int
    """The other end, which only the launcher may keep: sending fails once the launcher has died."""
    as_root: bool


def first_process(tools: Tools, init_pipe: InitPipe) -> tuple[CallList, Result]:
    """Start the process that builds a sandbox's root and becomes ``init``; return its number."""
    calls = CallList(MACHINE)
    calls.add("close", init_pipe.receiving)
    calls.add("setns", tools.bare, CLONE_NEWNS)
    calls.add("setns", init_pipe.users, CLONE_NEWUSER)
    calls.add("unshare", SANDBOX_NAMESPACES & ~CLONE_NEWUSER)
    _add_user(calls, 0 if tools.maps_range else None)
    new_process = calls.add("clone", NEW_PROCESS, traits=PARENT_EXITS)
    calls.add("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    calls.add("setsid")
    _join_groups(calls, init_pipe.entries)
    calls.add("unshare", CLONE_NEWCGROUP)
    calls.add("umask", 0o022)
    calls.add("sethostname", HOSTNAME.encode(), len(HOSTNAME))
    written = RootCalls(calls, init_pipe.plan).add()
    message = _add_network(calls, written, init_pipe)
    _add_files(calls, init_pipe.files, init_pipe.plan.user if tools.maps_range and not init_pipe.as_root else None)
    calls.add("rt_sigaction", signal.SIGCHLD, _action(signal.SIG_IGN), 0, SIGNAL_SET_BYTES)  # orphans need no reaping
    _add_user(calls, INIT_USER if tools.maps_range else None)
    _add_capabilities(calls, frozenset())
    calls.add("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets this
    nothing = calls.add("openat", AT_FDCWD, b"/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        calls.add("dup3", nothing, number, 0)
    calls.add("sendmsg", init_pipe.parting, message.header, socket.MSG_NOSIGNAL)
    calls.add("execveat", tools.init, b"", strings([b"/sbin/init"]), strings([]), AT_EMPTY_PATH)
    calls.add("exit_group", NOT_EXECUTABLE)
    calls.hold(message)
    return calls, new_process


def command_process(
    tools: Tools, box: SandboxRecord, command: Mapping[str, Any], descriptors: Sequence[int], entries: Sequence[int]
) -> tuple[CallList, Result | None]:
    """Start a confined command; ``descriptors`` are its stdin, stdout and stderr.

    The result is its number, for launchers that cannot be in its process namespace beforehand; the machine's root can,
    and gets ``None``.
    """
    calls = CallList(MACHINE)
    new_process = None
    if not tools.maps_range:
        calls.add("setns", box.pidfd, CLONE_NEWPID)
        new_process = calls.add("clone", NEW_PROCESS, traits=PARENT_EXITS)
    calls.add("setsid")
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        calls.add("rt_sigaction", ignored, bytes(SIGACTION_BYTES), 0, SIGNAL_SET_BYTES)
    score = calls.add("openat", AT_FDCWD, b"/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    calls.add("write", score, OUT_OF_MEMORY_SCORE, len(OUT_OF_MEMORY_SCORE))
    _join_groups(calls, entries)
    calls.add("prctl", PR_SET_DUMPABLE, 0)  # its user's other processes must not read the launcher's memory
    calls.add("setns", box.pidfd, JOINED)
    for number, descriptor in enumerate(descriptors):
        calls.add("dup3", descriptor, number, 0)
    _add_limits(calls, box, counts_memory=MEMORY in tools.cgroups.controllers)
    if command["root"]:
        calls.add("chroot", command["root"].encode(), about=command["root"])
    user = command["user"] or _commands_user(box)
    capabilities = ROOT_CAPABILITIES if user[0] == 0 else frozenset[int]()
    calls.extend(_bounding(capabilities))
    _add_user(calls, *(user if tools.maps_range else (None,)))
    _add_capabilities(calls, capabilities)
    program = ctypes.create_string_buffer(tools.filter, len(tools.filter))
    calls.hold(program)
    length = len(tools.filter) // INSTRUCTION_BYTES
    filtering = struct.pack("HP", length, ctypes.addressof(program))
    calls.add("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtering)
    calls.add("chdir", command["workdir"].encode("utf-8", "surrogateescape"), about=command["workdir"])
    _add_program(calls, command["argv"], command["environment"])
    return calls, new_process


def how_it_failed(calls: CallList, program: str) -> tuple[str, int] | None:
    """The reason and exit code if a command's program was not executed; ``None`` if it was.

    Raises ``OSError`` if something other than the program failed.
    """
    if failure := calls.failure:
        raise OSError(f"no command can be started: {failure.call} {failure.about}: {os.strerror(failure.errno)}")
    errors = calls.errors("execve")
    if 0 in errors:
        return None  # execve did not return
    telling = [number for number in errors if number not in (errno.ENOENT, errno.ENOTDIR)]
    if not telling:
        return f"{program}: not found", NOT_FOUND
    return f"{program}: {os.strerror(telling[0])}", NOT_EXECUTABLE


def become_job(box: SandboxRecord, tools: Tools, request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run one of étude's jobs inside a sandbox and exit; ``descriptors`` are its input, its output and its answer."""
    source, target, answers = descriptors
    with End():
        try:
            _start_session()
            hide_process()  # its user's processes inside must not read the launcher's memory and descriptors
            if not stays_outside(request["job"]):
                enter(box.pidfd, JOINED)
                os.chdir("/")
                _take_role(request["job"], box, tools)
            answer = run_job({**request, "user": box.creation["user"]}, source, target)
        except OSError as error:
            answer = JobResult(JobVerdict.FAILED, str(error).encode())
        with suppress(OSError), os.fdopen(answers, "wb") as file:
            file.write(bytes([answer.verdict]) + answer.payload)
        os._exit(0)
    raise AssertionError("the process outlived its end")


def _take_role(job: str, box: SandboxRecord, tools: Tools) -> None:
    """Take the identity for a job inside.

    A job on the agent's files has the agent's rights but a different real user: if there are enough users, no process
    that the agent left running can kill or stop it.
    """
    if runs_as_root(job):
        if tools.maps_range:
            _become(0, 0)
    else:
        _confine(box, tools, real=0)


# --- Parts of the lists -------------------------------------------------------------------------------------------


class _SocketMessage(NamedTuple):
    """A ``struct msghdr`` that carries descriptors, and what it points to."""

    header: bytes
    control: "ctypes.Array[ctypes.c_char]"
    parts: object


def _add_network(calls: CallList, written: Result, init_pipe: InitPipe) -> _SocketMessage:
    """Activate the loopback, listen at every place, and build a message with ``written`` and the listeners."""
    message = _message(1 + len(init_pipe.places))
    first = ctypes.addressof(message.control) + socket.CMSG_LEN(0)
    calls.store(written, first)
    for request in network_requests(init_pipe.places):
        any_socket = calls.add("socket", socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0)
        calls.add("ioctl", any_socket, request.kind, request.data, about=request.about)
    for number, place in enumerate(init_pipe.places):
        listener = calls.add("socket", socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0)
        address = socket_address(place)
        calls.add("bind", listener, address, len(address), about=f"{place.host}:{place.port}")
        calls.add("listen", listener, BACKLOG)
        calls.store(listener, first + 4 * (1 + number))
    return message


def _message(count: int) -> _SocketMessage:
    control = ctypes.create_string_buffer(socket.CMSG_SPACE(4 * count))
    struct.pack_into("Nii", control, 0, socket.CMSG_LEN(4 * count), socket.SOL_SOCKET, socket.SCM_RIGHTS)
    text = ctypes.create_string_buffer(b"{}", 2)
    vector = ctypes.create_string_buffer(struct.pack("PN", ctypes.addressof(text), 2))
    header = struct.pack("PI4xPNPNi4x", 0, 0, ctypes.addressof(vector), 1, ctypes.addressof(control), len(control), 0)
    return _SocketMessage(header, control, (text, vector))


def _add_files(calls: CallList, files: Mapping[str, bytes], user: Sequence[Any] | None) -> None:
    """Write the first files as the user that runs commands; links of the image are never followed."""
    if files and user is not None:
        calls.add("setfsgid", user[1])
        calls.add("setfsuid", user[0])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    how = struct.pack("QQQ", flags, 0o644, RESOLVE_NO_SYMLINKS)
    for path, data in files.items():
        whole = path.encode("utf-8", "surrogateescape")
        parts = whole.split(b"/")
        for end in range(2, len(parts)):
            calls.add("mkdirat", AT_FDCWD, b"/".join(parts[:end]), 0o755, traits=MAY_FAIL)
        file = calls.add("openat2", AT_FDCWD, whole, how, len(how), about=path)
        calls.add("write", file, data, len(data), about=path)
        calls.add("close", file)


def _join_groups(calls: CallList, entries: Sequence[int]) -> None:
    for entry in entries:
        calls.add("write", entry, b"0", 1, about="a control group")


def _commands_user(box: SandboxRecord) -> tuple[int, int]:
    """Numbers of the user and group that commands run as."""
    uid, gid, _ = box.creation["user"]
    return (0, 0) if box.as_root else (uid, gid)


def _add_user(calls: CallList, user: int | None, group: int | None = None) -> None:
    """Change user and group (default: the user's number); ``None`` if there is only one user."""
    if user is not None:
        group = user if group is None else group
        calls.add("setgroups", 0, 0)
        calls.add("setresgid", group, group, group)
        calls.add("setresuid", user, user, user)


def _add_capabilities(calls: CallList, capabilities: frozenset[int]) -> None:
    """Keep only these capabilities, and forbid to gain others."""
    calls.add("capset", *capability_sets(capabilities))
    calls.add("prctl", PR_SET_NO_NEW_PRIVS, 1)


@cache
def _bounding(capabilities: frozenset[int]) -> MemoryBlock:
    """Secure bits and sets that restrict the capabilities an ``exec`` can gain."""
    calls = CallList(MACHINE)
    for capability in range(CAP_LAST + 1):
        if capability not in capabilities:
            calls.add("prctl", PR_CAPBSET_DROP, capability, traits=MAY_FAIL)
    return calls.pack()


def _add_limits(calls: CallList, box: SandboxRecord, *, counts_memory: bool) -> None:
    """Set the limits of each process; without a memory cgroup, these are the only limits."""
    processes, memory = box.creation["processes"], box.creation["memory_bytes"]
    limits = [
        (resource.RLIMIT_NOFILE, DESCRIPTORS, MOST_DESCRIPTORS),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS, PENDING_SIGNALS),
        (resource.RLIMIT_MSGQUEUE, MESSAGE_QUEUE_BYTES, MESSAGE_QUEUE_BYTES),
    ]
    limits += [] if counts_memory else [(resource.RLIMIT_DATA, memory, memory)]
    for kind, soft, hard in limits:
        now = resource.getrlimit(kind)[1]
        top = hard if now == resource.RLIM_INFINITY else min(now, hard)
        calls.add("prlimit64", 0, kind, struct.pack("QQ", min(soft, top), top), 0)


def _add_program(calls: CallList, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Execute a program, searching the path as a shell does."""
    name = os.fsencode(argv[0])
    arguments = strings([os.fsencode(argument) for argument in argv])
    variables = strings([os.fsencode(f"{key}={value}") for key, value in environment.items()])
    folders = [b""] if b"/" in name else [os.fsencode(folder) or b"." for folder in environment["PATH"].split(":")]
    for folder in folders:
        path = folder + b"/" + name if folder else name
        calls.add("execve", path, arguments, variables, traits=MAY_FAIL)
    calls.add("exit_group", NOT_FOUND)


def _action(handler: signal.Handlers) -> bytes:
    """A ``struct sigaction`` with only a handler."""
    return struct.pack("P", handler).ljust(SIGACTION_BYTES, b"\0")


# --- Parts of a job -----------------------------------------------------------------------------------------------


def _start_session() -> None:
    """Start a new session, with the default handlers of SIGINT and SIGTERM, which the launcher ignores."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _confine(box: SandboxRecord, tools: Tools, *, real: int) -> None:
    """Take the rights of the user that runs commands; ``real`` is the real user, which determines who may
    send signals.
    """
    capabilities = ROOT_CAPABILITIES if box.as_root else frozenset[int]()
    bound_capabilities(capabilities)
    if tools.maps_range:
        _become(*_commands_user(box), real=real)
    limit_capabilities(capabilities)


def _become(user: int, group: int, *, real: int = 0) -> None:
    """Change user and group; ``real`` is the real user of the process."""
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(real, user, real)
