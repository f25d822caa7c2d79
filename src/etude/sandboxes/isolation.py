"""Confinement of a process by Linux: identity, namespaces, capabilities, limits, and a guaranteed end.

Owns the system calls, made through libc. Uses only the standard library, because every process that runs a model's
program imports it. :mod:`etude.sandboxes.local.zygote` decides which to use.
"""

import ctypes
import os
import resource
import signal
import struct
from contextlib import suppress
from pathlib import Path

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID
"""All namespaces that an unprivileged process can unshare."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER, INSTRUCTION_BYTES = 2, 8
CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)
"""Version 3 of the structure, for the calling process."""
NO_CAPABILITIES = (ctypes.c_uint32 * 6)()
"""Effective, permitted and inheritable sets, all empty."""

MEMORY_LIMIT_BYTES = 512 << 20
"""Address space of one process, interpreter included."""
FILE_LIMIT_BYTES = 8 << 20
"""Largest file a process may write."""
DESCRIPTOR_LIMIT = 32
"""Files that one process may have open."""
PROCESS_LIMIT = 64
"""Processes and threads of one worker at a time; only a user namespace makes this count private."""
PENDING_SIGNALS_LIMIT = 256
"""Pending signals and timers of one worker; the kernel counts them per user of the machine."""
COUNTS = {"max_inotify_instances": 16, "max_inotify_watches": 1024}
"""Inotify limits of one worker, in ``/proc/sys/user``."""

LIBC = ctypes.CDLL(None, use_errno=True)


def become_user(user: int) -> None:
    """Change to ``user`` and the group of the same number, irreversibly. Raises ``PermissionError``."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def enter_namespaces() -> bool:
    """Enter a new user namespace and others (children: a new process namespace), or change nothing.

    The user keeps its own number and is not root anywhere. Returns False if the machine does not permit it.
    """
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(NAMESPACES) != 0:
        return False
    _prctl(PR_SET_DUMPABLE, 1)  # otherwise a process that changed user may not write its own maps
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")
    for name, most in COUNTS.items():
        with suppress(OSError):  # older kernels count differently
            Path("/proc/sys/user", name).write_text(str(most), encoding="utf-8")
    return True


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A later change of user would undo this."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_process(*, own_user_namespace: bool) -> None:
    """Set the resource limits of this process and its children, and adopt orphaned descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _limit(resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)
    _limit(resource.RLIMIT_FSIZE, FILE_LIMIT_BYTES)
    _limit(resource.RLIMIT_NOFILE, DESCRIPTOR_LIMIT)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_SIGPENDING, PENDING_SIGNALS_LIMIT)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    if own_user_namespace:
        _limit(resource.RLIMIT_NPROC, PROCESS_LIMIT)


def limit_cpu(seconds: int) -> None:
    """Have the kernel kill this process after ``seconds`` of processor time."""
    _limit(resource.RLIMIT_CPU, seconds)


def enter_root(directory: int, *, chroot: bool) -> None:
    """Make an open directory the working directory, with ``chroot`` the root as well, and drop every capability.

    Without capabilities a process can neither leave its root nor make another user namespace in it.
    """
    os.fchdir(directory)
    if chroot:
        os.chroot(".")
    drop_capabilities()


def install_filter(program: bytes) -> None:
    """Install a seccomp program for all system calls of this process and its children, irreversibly.

    Raises ``OSError`` if the kernel does not support it.
    """
    code = ctypes.create_string_buffer(program, len(program))
    filtering = struct.pack("HP", len(program) // INSTRUCTION_BYTES, ctypes.addressof(code))
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtering, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp: could not install a filter of system calls")


def drop_capabilities() -> None:
    """Drop every capability, irreversibly."""
    if LIBC.capset(CAPABILITY_HEADER, NO_CAPABILITIES) != 0:
        raise OSError(ctypes.get_errno(), "capset: could not drop capabilities")


def end_command(leader: int) -> int:
    """Kill a command with everything it started, reap it all, and return the leader's exit code.

    The code is that of the leader if it had already ended, 128 + signal number if a signal ended it.
    """
    code = 0
    while True:
        _kill_children()
        try:
            process, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if process == leader:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def _kill_children() -> None:
    """Kill all other processes of this process namespace, or without one, the children, whose orphans this process
    adopts.
    """
    if os.getpid() == 1:
        _kill(-1)
        return
    for process in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split():
        _kill(int(process))


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # it already ended
        os.kill(process, signal.SIGKILL)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
