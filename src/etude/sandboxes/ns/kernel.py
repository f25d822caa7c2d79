"""The system calls behind namespaces: mounts as descriptors, clones, capabilities. Linux, through libc.

Owns numbers and signatures; decides nothing. Every call raises ``OSError`` with what was attempted. Standard library
alone: the launcher of sandboxes imports it (:mod:`etude.sandboxes.ns.launcher`).
"""

import ctypes
import os
import signal
import struct
from typing import Final

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CLONE_PARENT = 0x00008000
"""The caller's parent becomes the child's."""
SANDBOX_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
"""What every sandbox has of its own from its first moment; a control group namespace comes when it is in its group."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 1, 2, 4, 0x00100000
"""Attributes of a mount, as ``mount_setattr`` has them."""
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}
SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
"""By machine; later calls have one number everywhere."""
SYS_OPEN_TREE, SYS_MOUNT_SETATTR = 428, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER, INSTRUCTION_BYTES = 2, 8
CAPABILITY_VERSION_3 = 0x20080522
CAP_LAST = 40
"""The highest capability that Linux has had since 5.9; dropping one that does not exist does no harm."""
MACHINE = os.uname().machine
LIBC = ctypes.CDLL(None, use_errno=True)
HOLDING_LIBC = ctypes.PyDLL(None, use_errno=True)
"""The same, without letting go of the interpreter: the child of a clone must hold it."""


def clone(namespaces: int) -> int:
    """Fork into new ``namespaces`` (``CLONE_NEW…``): 0 in the child, else its process number.

    The child keeps the calling thread alone, so a process that uses threads must not.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    process: int = HOLDING_LIBC.syscall(SYS_CLONE[MACHINE], ctypes.c_long(namespaces | signal.SIGCHLD), 0, 0, 0, 0)
    if process == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(process, f"clone(0x{namespaces:x})")


def unshare(namespaces: int) -> None:
    """Leave some namespaces for new ones."""
    _check(LIBC.unshare(namespaces), f"unshare(0x{namespaces:x})")


def enter(descriptor: int, namespaces: int) -> None:
    """Enter ``namespaces`` of a process (``descriptor`` is a pidfd) or the one that a descriptor is."""
    _check(LIBC.setns(descriptor, namespaces), f"setns(0x{namespaces:x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, as ``mount(2)`` does."""
    done = LIBC.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(done, f"mount {source or kind} on {target}")


def unmount(target: str) -> None:
    """Take a mount and all below it out of sight; it ends when nobody uses it any more."""
    _check(LIBC.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root() -> None:
    """Make the working directory the root; the old root is mounted over it."""
    _check(LIBC.syscall(SYS_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")


def clone_tree(path: str, *, recursive: bool = False) -> int:
    """A descriptor of a mount that shows what is at ``path`` and is nowhere yet."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return _check(LIBC.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}")


def set_attributes(tree: int, attributes: int, user_namespace: int = 0, *, recursive: bool = False) -> None:
    """Set attributes of a mount; with ``ATTR_IDMAP`` owners are shown as a namespace maps them."""
    wanted = struct.pack("4Q", attributes, 0, 0, user_namespace)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    done = LIBC.syscall(SYS_MOUNT_SETATTR, tree, b"", flags, wanted, ctypes.c_size_t(len(wanted)))
    _check(done, f"mount_setattr 0x{attributes:x}")


def write_text(path: str, text: bytes) -> None:
    """Write a file of the kernel's, in one piece."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def show_process() -> None:
    """Let this process's own user see it again, whatever its children did while they shared its memory."""
    _prctl(PR_SET_DUMPABLE, 1)


def hide_process() -> None:
    """Let nobody but root open this process's memory or trace it, until it executes a program."""
    _prctl(PR_SET_DUMPABLE, 0)


def bound_capabilities(kept: frozenset[int]) -> None:
    """Keep only some capabilities from being gained by an ``exec``; takes the right to set capabilities."""
    for capability in range(CAP_LAST + 1):
        if capability not in kept:
            _prctl(PR_CAPBSET_DROP, capability)


def limit_capabilities(kept: frozenset[int]) -> None:
    """Give up all capabilities but some, and gain none by an ``exec`` any more, for good."""
    _check(LIBC.capset(*capability_sets(kept)), "capset")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def capability_sets(kept: frozenset[int]) -> tuple[bytes, bytes]:
    """Header and data of ``capset``: these permitted and in effect, none handed on."""
    mask = sum(1 << capability for capability in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return struct.pack("2I", CAPABILITY_VERSION_3, 0), struct.pack("6I", low, low, 0, high, high, 0)


def _prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0 and option != PR_CAPBSET_DROP:
        _check(-1, f"prctl({option}, {value})")


def _check(result: int, attempt: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{attempt}: {os.strerror(number)}")
    return result
