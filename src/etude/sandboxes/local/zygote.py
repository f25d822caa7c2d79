"""The zygote: a warm process from which commands are forked, instead of starting an interpreter.

    worker ──(root, cpu seconds) + invocation, stdin, stdout, stderr──▶ zygote ──fork──▶ command
       ▲                                                                  │
       └──────────── exit code, once all of its processes are dead ───────┘

The zygote never reads a command's input or output: it passes descriptors on, so no data of one task is in the memory of
the next one's process. The kernel isolates commands: another user, namespaces, ``chroot``, no capabilities, limits, and
a system call filter (:mod:`etude.sandboxes.ns.seccomp`), without which a command could change the limits of the zygote,
and so of all later commands, and leave shared memory and keys for them. The isolation that the machine allows is
reported, never assumed:

    chroot             a command sees no file outside its root
    network_off        it has no network, not even the machine's own
    process_namespace  it sees, signals and changes only its own processes, all of which die with it
    process_limit      it cannot use up the machine's processes

Not isolated: the kernel itself, timing, and the number of files that a command creates. This suits models in training,
not hostile tenants; use a virtual machine for those.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Self, TypedDict

from etude.sandboxes import isolation
from etude.sandboxes.local import program
from etude.sandboxes.ns.seccomp import filter_program

PRELOADED = (
    *("bisect", "collections", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "heapq", "io", "itertools", "json", "math", "operator", "os", "random", "re", "statistics"),
    *("string", "sys", "textwrap", "time", "types", "typing", "unicodedata"),
    *("encodings.ascii", "encodings.latin_1"),
)
"""Standard modules that are preloaded for programs; behind ``chroot``, or as another user, others may
be unavailable.
"""
MESSAGE_LIMIT_BYTES = 4 << 10
"""Maximum length of a message between worker and zygote."""
KILL = b"kill"
"""Message of the worker when a command has timed out."""
PACKAGE_ROOT = str(Path(__file__).parents[3])
"""Module path of étude, removed so that programs cannot import from it."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/home/agent"}
"""Environment of every command, without any of the provider's variables."""


def preload() -> None:
    """Import modules that commands may import, while this process can still reach them."""
    for name in PRELOADED:
        importlib.import_module(name)


class ForkRequest(TypedDict):
    """The part of a command's request that the zygote itself reads."""

    root: str
    """Name of the sandbox's directory in the scratch directory."""
    cpu_s: int


class Invocation(NamedTuple):
    """The part of a command's request that only the command's process reads."""

    workdir: str
    environment: Mapping[str, str]
    argv: Sequence[str]

    def to_bytes(self) -> bytes:
        """Encode it as NUL-separated texts, which a freshly forked process reads faster than JSON."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return b"\0".join(map(os.fsencode, [self.workdir, *variables, "", *self.argv]))

    @classmethod
    def of_bytes(cls, data: bytes) -> Self:
        """Decode what :meth:`to_bytes` encoded."""
        workdir, *rest = map(os.fsdecode, data.split(b"\0"))
        end = rest.index("")
        variables = (variable.partition("=") for variable in rest[:end])
        return cls(workdir, {name: value for name, _, value in variables}, rest[end + 1 :])


class Zygote:
    """Serves one command at a time until the worker disconnects."""

    def __init__(self, control: socket.socket, scratch: int, *, namespaces: bool) -> None:
        self._control = control
        self._scratch = scratch
        self._namespaces = namespaces
        self._chroot = False

    def serve(self) -> NoReturn:
        """Get ready, report the capabilities, then fork a command per request; never returns."""
        self._prepare()
        self._chroot = self._namespaces and self._can_chroot()
        apart = _install_filter() and self._namespaces
        self._answer(
            {
                "chroot": self._chroot,
                "network_off": apart,
                "process_namespace": apart,
                "process_limit": self._namespaces,
            }
        )
        gc.collect()
        gc.freeze()  # the collector of a fork would copy every page it marks
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_LIMIT_BYTES, 4)
            if not message:
                os._exit(0)
            if message == KILL:
                continue  # it arrived after the command had ended
            try:
                self._answer(self._run(message, descriptors))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _prepare(self) -> None:
        isolation.die_with_parent()
        isolation.limit_process(own_user_namespace=self._namespaces)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one signal that Python would let a command end process 1 by
        sys.path[:] = [folder for folder in sys.path if folder != PACKAGE_ROOT]
        for name in [name for name in sys.modules if name.partition(".")[0] == "etude"]:
            del sys.modules[name]  # a program that has a module of this name must find its own
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)

    def _can_chroot(self) -> bool:
        """Try it in a child: a security module may forbid it even if a namespace permits it."""
        child = os.fork()
        if child == 0:
            try:
                isolation.enter_root(self._scratch, chroot=True)
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def _run(self, message: bytes, descriptors: list[int]) -> dict[str, int | str]:
        request: ForkRequest = json.loads(message)
        root = -1
        try:
            root = os.open(request["root"], os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._scratch)
            child = os.fork()
            if child == 0:
                try:
                    program.run(self._become_command(root, descriptors, request["cpu_s"]))
                finally:
                    os._exit(1)
            try:
                _wait_for(child, self._control)
            finally:
                exit_code = isolation.end_command(child)
            return {"exit_code": exit_code, "error": ""}
        except OSError as error:
            return {"exit_code": 0, "error": f"no process in sandbox {request['root']!r}: {error}"}
        finally:
            if root >= 0:
                os.close(root)

    def _answer(self, value: Mapping[str, bool | int | str]) -> None:
        self._control.send(json.dumps(value).encode())

    def _become_command(self, root: int, descriptors: list[int], cpu_s: int) -> Sequence[str]:
        """Confine this process, and return the command line that it will run."""
        invocation, *streams = descriptors
        os.setsid()
        isolation.die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        isolation.limit_cpu(cpu_s)
        isolation.enter_root(root, chroot=self._chroot)
        command = Invocation.of_bytes(os.read(invocation, os.fstat(invocation).st_size))
        os.chdir(command.workdir.lstrip("/") or ".")
        os.environ.update(command.environment)
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        os.closerange(3, isolation.DESCRIPTOR_LIMIT)
        return command.argv


def _install_filter() -> bool:
    """Install the filter of system calls, which commands inherit; false if it is not supported here."""
    try:
        isolation.install_filter(filter_program(os.uname().machine, shared=True))
    except (KeyError, OSError):
        return False
    return True


def _wait_for(child: int, control: socket.socket) -> None:
    """Wait until a child has ended or the worker requests its end. Reaps nothing."""
    descriptor = os.pidfd_open(child)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.register(control, select.POLLIN)
    ready = [fd for fd, _ in poller.poll()]
    os.close(descriptor)
    if control.fileno() in ready and not control.recv(len(KILL)):
        isolation.end_command(child)
        os._exit(0)  # the worker is gone
