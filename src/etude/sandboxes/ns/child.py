"""What becomes of the launcher's children: a sandbox's first process, a command, a job of étude's own.

The first two are lists of system calls (:mod:`etude.sandboxes.ns.syscalls`), the third a fork. The order in them is
what confines a command: into its namespaces and groups, then no longer root, then no new privileges and no
capabilities, and last the filter of system calls. Standard library alone.
"""

import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from etude.sandboxes.ns import kernel
from etude.sandboxes.ns.boxes import Box
from etude.sandboxes.ns.cgroups import MEMORY, Cgroups
from etude.sandboxes.ns.jobs import Answer, Verdict, run_job, runs_as_root, stays_outside
from etude.sandboxes.ns.network import Place, network_requests, socket_address
from etude.sandboxes.ns.root import AGENT, HOSTNAME, RootCalls, RootPlan
from etude.sandboxes.ns.syscalls import (
    CLONE_VFORK,
    CLONE_VM,
    MAY_FAIL,
    PARTS_WAYS,
    Block,
    CallList,
    Player,
    Result,
    strings,
)

JOINED = kernel.SANDBOX_NAMESPACES & ~kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP
"""What a process enters by itself; the process namespace is the one it was born in."""
ROOT_CAPABILITIES = frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 31})
"""Of the sandbox's root, over its own files and processes: owners, permissions, signals, users, low ports and file
capabilities. None to mount, ``chroot``, trace, configure a network or make devices.
"""
INIT_USER = 65534
OUT_OF_MEMORY_SCORE = b"500"
"""Commands are killed for memory before anything else of the sandbox."""
DESCRIPTORS, MOST_DESCRIPTORS = 1024, 1 << 16
"""Usual and highest number of open files of a process."""
PENDING_SIGNALS, MESSAGE_QUEUE_BYTES = 4096, 256 << 10
"""Signals and timers that wait, and room of POSIX message queues, of one sandbox: a small part of a user's."""
BACKLOG = 128
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes, as shells have them."""
SIGACTION_BYTES, SIGNAL_SET_BYTES = 32, 8
RESOLVE_NO_SYMLINKS = 0x04
BORN = CLONE_VM | CLONE_VFORK | kernel.CLONE_PARENT | signal.SIGCHLD
"""How a process comes into a new process namespace: as the child of one that is about to enter it, and our own."""


class Tools(NamedTuple):
    """What children are made with."""

    cgroups: Cgroups
    player: Player
    init: int
    """The descriptor of :mod:`etude.sandboxes.ns.init`'s program."""
    filter: bytes
    """The commands' seccomp program."""
    bare: int
    """The mount namespace that sandboxes begin as a copy of, see :mod:`etude.sandboxes.ns.root`."""
    maps_range: bool


class Cradle(NamedTuple):
    """What a first process is given."""

    users: int
    """Its user namespace."""
    doors: Sequence[int]
    """Into its control groups."""
    plan: RootPlan
    places: Sequence[Place]
    files: Mapping[str, bytes]
    """The first files, by their path inside."""
    parting: int
    """A socket to which it sends descriptors: of the folder that has what is written, and of a listener a place."""
    receiving: int
    """The other end, which is to be the launcher's alone: who sends to one that died ends as well."""
    as_root: bool


def first_process(tools: Tools, cradle: Cradle) -> tuple[CallList, Result]:
    """A process that builds a sandbox's root, sends what is kept of it outside, and becomes ``init``; its number."""
    calls = CallList(kernel.MACHINE)
    calls.add("close", cradle.receiving)
    calls.add("setns", tools.bare, kernel.CLONE_NEWNS)
    calls.add("setns", cradle.users, kernel.CLONE_NEWUSER)
    calls.add("unshare", kernel.SANDBOX_NAMESPACES & ~kernel.CLONE_NEWUSER)
    _add_user(calls, 0 if tools.maps_range else None)
    born = calls.add("clone", BORN, traits=PARTS_WAYS)
    calls.add("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    calls.add("setsid")
    _add_doors(calls, cradle.doors)
    calls.add("unshare", kernel.CLONE_NEWCGROUP)
    calls.add("umask", 0o022)
    calls.add("sethostname", HOSTNAME.encode(), len(HOSTNAME))
    written = RootCalls(calls, cradle.plan).add()
    message = _add_network(calls, written, cradle)
    _add_files(calls, cradle.files, AGENT if tools.maps_range and not cradle.as_root else None)
    calls.add("rt_sigaction", signal.SIGCHLD, _action(signal.SIG_IGN), 0, SIGNAL_SET_BYTES)  # orphans just go
    _add_user(calls, INIT_USER if tools.maps_range else None)
    _add_capabilities(calls, frozenset())
    calls.add("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user undoes it
    nothing = calls.add("openat", kernel.AT_FDCWD, b"/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        calls.add("dup3", nothing, number, 0)
    calls.add("sendmsg", cradle.parting, message.header, socket.MSG_NOSIGNAL)
    calls.add("execveat", tools.init, b"", strings([b"/sbin/init"]), strings([]), kernel.AT_EMPTY_PATH)
    calls.add("exit_group", NOT_EXECUTABLE)
    calls.hold(message)
    return calls, born


def command_process(
    tools: Tools, box: Box, command: Mapping[str, Any], descriptors: Sequence[int], doors: Sequence[int]
) -> tuple[CallList, Result | None]:
    """A command, confined; ``descriptors`` are its stdin, stdout and stderr.

    The result is its number, for who cannot be in its process namespace before it is made; for the machine's root, who
    can, it is ``None``.
    """
    calls = CallList(kernel.MACHINE)
    born = None
    if not tools.maps_range:
        calls.add("setns", box.pidfd, kernel.CLONE_NEWPID)
        born = calls.add("clone", BORN, traits=PARTS_WAYS)
    calls.add("setsid")
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        calls.add("rt_sigaction", ignored, bytes(SIGACTION_BYTES), 0, SIGNAL_SET_BYTES)
    score = calls.add("openat", kernel.AT_FDCWD, b"/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    calls.add("write", score, OUT_OF_MEMORY_SCORE, len(OUT_OF_MEMORY_SCORE))
    _add_doors(calls, doors)
    calls.add("prctl", kernel.PR_SET_DUMPABLE, 0)  # inside are processes of its user; the launcher's memory is its own
    calls.add("setns", box.pidfd, JOINED)
    for number, descriptor in enumerate(descriptors):
        calls.add("dup3", descriptor, number, 0)
    _add_limits(calls, box, counts_memory=MEMORY in tools.cgroups.controllers)
    kept = ROOT_CAPABILITIES if box.as_root else frozenset[int]()
    calls.extend(_bounding(kept))
    _add_user(calls, (0 if box.as_root else AGENT) if tools.maps_range else None)
    _add_capabilities(calls, kept)
    program = ctypes.create_string_buffer(tools.filter, len(tools.filter))
    calls.hold(program)
    length = len(tools.filter) // kernel.INSTRUCTION_BYTES
    filtering = struct.pack("HP", length, ctypes.addressof(program))
    calls.add("prctl", kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, filtering)
    calls.add("chdir", command["workdir"].encode("utf-8", "surrogateescape"), about=command["workdir"])
    _add_program(calls, command["argv"], command["environment"])
    return calls, born


def how_it_failed(calls: CallList, program: str) -> tuple[str, int] | None:
    """Why a command's program was not executed, and with what code that ends; ``None`` if it was.

    Raises ``OSError`` where something else failed than the program.
    """
    if failure := calls.failure:
        raise OSError(f"no command can be started: {failure.call} {failure.about}: {os.strerror(failure.errno)}")
    errors = calls.errors("execve")
    if 0 in errors:
        return None  # it did not return
    telling = [number for number in errors if number not in (errno.ENOENT, errno.ENOTDIR)]
    if not telling:
        return f"{program}: not found", NOT_FOUND
    return f"{program}: {os.strerror(telling[0])}", NOT_EXECUTABLE


def become_job(box: Box, tools: Tools, request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Do a job of étude's inside and end; ``descriptors`` are what it reads, what it fills, and for its answer."""
    source, target, answers = descriptors
    with End():
        try:
            _start_session()
            kernel.hide_process()  # inside are processes of its user, and it has the launcher's memory and descriptors
            if not stays_outside(request["job"]):
                kernel.enter(box.pidfd, JOINED)
                os.chdir("/")
                _take_role(request["job"], box, tools)
            answer = run_job(request, source, target)
        except OSError as error:
            answer = Answer(Verdict.FAILED, str(error).encode())
        with suppress(OSError), os.fdopen(answers, "wb") as file:
            file.write(bytes([answer.verdict]) + answer.payload)
        os._exit(0)
    raise AssertionError("the process outlived its end")


def _take_role(job: str, box: Box, tools: Tools) -> None:
    """Become who does a job inside.

    A job that touches what the agent has does so with the agent's rights, but is another's process: where there are
    users enough, nothing that the agent left running can kill or stop it.
    """
    if runs_as_root(job):
        _become(0 if tools.maps_range else None)
    else:
        _confine(box, tools, real=0)


class End:
    """Whatever leaves this block ends the process: nothing of a child may go on as if it were the launcher."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        os._exit(1)


# --- Parts of the lists -------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """A ``struct msghdr`` that carries descriptors, and what it points to."""

    header: bytes
    control: "ctypes.Array[ctypes.c_char]"
    parts: object


def _add_network(calls: CallList, written: Result, cradle: Cradle) -> _Message:
    """Raise the loopback, listen at every place, and have a message made of ``written`` and the listeners."""
    message = _message(1 + len(cradle.places))
    first = ctypes.addressof(message.control) + socket.CMSG_LEN(0)
    calls.store(written, first)
    for request in network_requests(cradle.places):
        any_socket = calls.add("socket", socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0)
        calls.add("ioctl", any_socket, request.kind, request.data, about=request.about)
    for number, place in enumerate(cradle.places):
        listener = calls.add("socket", socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0)
        address = socket_address(place)
        calls.add("bind", listener, address, len(address), about=f"{place.host}:{place.port}")
        calls.add("listen", listener, BACKLOG)
        calls.store(listener, first + 4 * (1 + number))
    return message


def _message(count: int) -> _Message:
    control = ctypes.create_string_buffer(socket.CMSG_SPACE(4 * count))
    struct.pack_into("Nii", control, 0, socket.CMSG_LEN(4 * count), socket.SOL_SOCKET, socket.SCM_RIGHTS)
    text = ctypes.create_string_buffer(b"{}", 2)
    vector = ctypes.create_string_buffer(struct.pack("PN", ctypes.addressof(text), 2))
    header = struct.pack("PI4xPNPNi4x", 0, 0, ctypes.addressof(vector), 1, ctypes.addressof(control), len(control), 0)
    return _Message(header, control, (text, vector))


def _add_files(calls: CallList, files: Mapping[str, bytes], user: int | None) -> None:
    """Write the first files as the user that commands run as; no link of the image is followed to any."""
    if files and user is not None:
        calls.add("setfsgid", user)
        calls.add("setfsuid", user)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    how = struct.pack("QQQ", flags, 0o644, RESOLVE_NO_SYMLINKS)
    for path, data in files.items():
        whole = path.encode("utf-8", "surrogateescape")
        parts = whole.split(b"/")
        for end in range(2, len(parts)):
            calls.add("mkdirat", kernel.AT_FDCWD, b"/".join(parts[:end]), 0o755, traits=MAY_FAIL)
        file = calls.add("openat2", kernel.AT_FDCWD, whole, how, len(how), about=path)
        calls.add("write", file, data, len(data), about=path)
        calls.add("close", file)


def _add_doors(calls: CallList, doors: Sequence[int]) -> None:
    for door in doors:
        calls.add("write", door, b"0", 1, about="a control group")


def _add_user(calls: CallList, user: int | None) -> None:
    """Change user and group; ``None`` where there is but one."""
    if user is not None:
        calls.add("setgroups", 0, 0)
        calls.add("setresgid", user, user, user)
        calls.add("setresuid", user, user, user)


def _add_capabilities(calls: CallList, kept: frozenset[int]) -> None:
    """Keep only some capabilities, and gain none any more."""
    calls.add("capset", *kernel.capability_sets(kept))
    calls.add("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1)


@cache
def _bounding(kept: frozenset[int]) -> Block:
    """What lets an ``exec`` gain no capabilities but some."""
    calls = CallList(kernel.MACHINE)
    for capability in range(kernel.CAP_LAST + 1):
        if capability not in kept:
            calls.add("prctl", kernel.PR_CAPBSET_DROP, capability, traits=MAY_FAIL)
    return calls.pack()


def _add_limits(calls: CallList, box: Box, *, counts_memory: bool) -> None:
    """Limits of each process; where there is no group to count memory, this is all that holds it."""
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
    """Execute a program, looked for as a shell does."""
    name = os.fsencode(argv[0])
    arguments = strings([os.fsencode(argument) for argument in argv])
    variables = strings([os.fsencode(f"{key}={value}") for key, value in environment.items()])
    folders = [b""] if b"/" in name else [os.fsencode(folder) or b"." for folder in environment["PATH"].split(":")]
    for folder in folders:
        path = folder + b"/" + name if folder else name
        calls.add("execve", path, arguments, variables, traits=MAY_FAIL)
    calls.add("exit_group", NOT_FOUND)


def _action(handler: signal.Handlers) -> bytes:
    """A ``struct sigaction`` with a handler and nothing else."""
    return struct.pack("P", handler).ljust(SIGACTION_BYTES, b"\0")


# --- Parts of a job -----------------------------------------------------------------------------------------------


def _start_session() -> None:
    """Be nobody's process group but our own, with signals as programs expect them."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _confine(box: Box, tools: Tools, *, real: int) -> None:
    """Take the rights of whom commands run as; ``real`` is whose process it is, which is who may send it signals."""
    kept = ROOT_CAPABILITIES if box.as_root else frozenset[int]()
    kernel.bound_capabilities(kept)
    if tools.maps_range:
        _become(0 if box.as_root else AGENT, real=real)
    kernel.limit_capabilities(kept)


def _become(user: int | None, *, real: int = 0) -> None:
    """Change user and group, of the process of user ``real``; ``None`` where there is but one."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(real, user, real)
