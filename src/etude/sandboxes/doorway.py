"""The first process of a bubble: ``python -m etude.sandboxes.doorway JOB CONTROL SYSCTL``, three descriptors.

    provider ──job──▶ doorway ──fork──▶ command ──any HTTP client──▶ 127.0.0.1:8400 ──▶ doorway ──▶ door's socket
             ◀─report─┘

Owns the end of a command and its one way out. It is process 1 of its namespace, so that the kernel ends everything else
in there as soon as it ends, and it ends with the command, at the deadline, or when the provider hangs up, whichever
comes first. Confines itself before it starts anything; the kernel interface and timing stay open to a command, as
:mod:`etude.sandboxes.zygote` says of its own.

Standard library and :mod:`etude.sandboxes.isolation` alone: nothing else of étude is in a bubble.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn, TypedDict

from etude.sandboxes import isolation

DOOR_PORT = 8400
"""Where the door is inside; every bubble has a loopback interface of its own."""
DOOR_SOCKET = "/run/etude/door"
"""The provider's end of it."""
MAX_CONNECTIONS = 32
"""Through one door at a time; more wait in the listener's queue."""
COPY_BYTES = 1 << 16
DESCRIPTORS_END = 1 << 16
"""Beyond the highest descriptor that a doorway was given; they have the provider's numbers."""
REAP_S = 1.0
"""How often orphans that ended are collected; until then they count as processes."""
NOT_FOUND, NOT_EXECUTABLE, KILLED = 127, 126, 137
"""Exit codes, as shells have them."""
STARTED = b"started\n"
"""Sent when the bubble is ready; what goes wrong earlier is not the command's fault."""


class Job(TypedDict):
    """One command to run."""

    argv: list[str]
    folder: str
    """Where it runs."""
    environment: dict[str, str]
    timeout_s: float
    has_door: bool
    user: int | None
    """Whom to become; ``None`` to stay who we are."""
    limits: list[int]
    """The fields of :class:`~etude.sandboxes.isolation.Limits`."""


class Report(TypedDict):
    """How it ended."""

    exit_code: int
    timed_out: bool
    seconds: float


def main() -> NoReturn:
    """Run one command to its end and say how it ended; everything that it left behind ends here as well."""
    job_fd, control_fd, sysctl_fd = map(int, sys.argv[1:4])
    with os.fdopen(job_fd, "rb") as file:
        job: Job = json.load(file)
    control = socket.socket(fileno=control_fd)
    listener = socket.create_server(("127.0.0.1", DOOR_PORT)) if job["has_door"] else None
    confine(job, sysctl_fd)
    control.sendall(STARTED)
    start = time.monotonic()
    command = os.fork()
    if command == 0:
        become_command(job)
    if listener is not None:
        threading.Thread(target=serve_door, args=(listener,), daemon=True).start()
    exit_code, timed_out = wait_for(command, control, start + job["timeout_s"])
    report = Report(exit_code=exit_code, timed_out=timed_out, seconds=time.monotonic() - start)
    with suppress(OSError):  # nobody is left to hear it
        control.sendall(json.dumps(report).encode())
    os._exit(0)


def confine(job: Job, sysctl: int) -> None:
    """Become who the command shall be, in a user namespace that can have no further ones, within its limits.

    ``sysctl`` is an open ``/proc/sys/user``: bubblewrap leaves only a read-only one in here.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 is immune to
    if job["user"] is not None:
        isolation.become_user(job["user"])
        if not isolation.enter_namespaces(isolation.CLONE_NEWUSER):
            sys.exit("this machine grants no user namespace")
        setting = os.open("max_user_namespaces", os.O_WRONLY, dir_fd=sysctl)
        os.write(setting, b"0")
        os.close(setting)
    os.close(sysctl)
    isolation.die_with_parent()
    isolation.drop_capabilities()
    isolation.limit_process(isolation.Limits(*job["limits"]), own_user_namespace=True)
    isolation.hide_process()


def become_command(job: Job) -> NoReturn:
    """Replace this process, the fork of a doorway, by the command."""
    try:
        os.closerange(3, DESCRIPTORS_END)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, other programs expect them
        os.chdir(job["folder"])
        os.execvpe(job["argv"][0], job["argv"], job["environment"])
    except FileNotFoundError:
        _give_up(f"{job['argv'][0]}: not found", NOT_FOUND)
    except OSError as error:
        _give_up(f"{job['argv'][0]}: {error.strerror}", NOT_EXECUTABLE)
    raise AssertionError("the process outlived its end")


def wait_for(command: int, control: socket.socket, deadline_s: float) -> tuple[int, bool]:
    """The exit code of a command, and whether time ran out first. Ends the process when the provider hangs up."""
    poller = select.poll()
    ended = os.pidfd_open(command)
    poller.register(ended, select.POLLIN)
    poller.register(control, select.POLLIN)
    while (left_s := deadline_s - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poller.poll(min(left_s, REAP_S) * 1000 + 1)}
        if control.fileno() in ready:
            os._exit(0)  # it sends nothing, so this is its end
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
            return (128 - code if code < 0 else code), False
        _reap_orphans(command)
    return KILLED, True


def serve_door(listener: socket.socket) -> NoReturn:
    """Carry the bytes of every connection to the door and back, for ever."""
    places = threading.BoundedSemaphore(MAX_CONNECTIONS)
    while True:
        places.acquire()
        client, _ = listener.accept()
        threading.Thread(target=_carry, args=(client, places), daemon=True).start()


def _carry(client: socket.socket, places: threading.BoundedSemaphore) -> None:
    with client, socket.socket(socket.AF_UNIX) as door, suppress(OSError):
        door.connect(DOOR_SOCKET)
        back = threading.Thread(target=_copy, args=(door, client), daemon=True)
        back.start()
        _copy(client, door)
        back.join()
    places.release()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copy until the source ends, then say so to the sink; when either breaks, both are over."""
    try:
        while data := source.recv(COPY_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _reap_orphans(command: int) -> None:
    """Collect what ended, up to the command itself, which :func:`wait_for` asks for."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != command:
            os.waitpid(ended.si_pid, 0)


def _give_up(message: str, exit_code: int) -> NoReturn:
    os.write(2, f"{message}\n".encode())
    os._exit(exit_code)


if __name__ == "__main__":
    main()
