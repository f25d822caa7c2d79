"""A child process as a list of system calls, prepared in Python and executed by a hundred bytes of machine code.

    entries ──clone, sharing memory──▶ child: call, call, call … execve          no interpreter, no copy of a process

The cost of ``fork`` is copying page tables, and then every page that an interpreter touches; that would be most of the
time to start a command. The child made here shares its parent's memory until it executes a program, and touches only
the list. The parent is suspended meanwhile (``vfork``), for well under a millisecond, and then reads from the list the
result of each call. Owns the machine code and the format of entries; :mod:`etude.sandboxes.ns.child` decides the calls
and their order. Standard library alone.
"""

import ctypes
import mmap
import os
import signal
import struct
from collections.abc import Mapping, Sequence
from textwrap import dedent
from typing import Any, Final, NamedTuple

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CLONE_PARENT = 0x00008000
"""The caller's parent becomes the child's."""
SANDBOX_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
"""Namespaces of every sandbox from its start; the cgroup namespace follows once the process is in its group."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_IDMAP = 1, 2, 4, 0x00100000
"""Attributes of a mount, for ``mount_setattr``."""
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}
SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
"""By machine; later calls have the same number everywhere."""
SYS_OPEN_TREE, SYS_MOUNT_SETATTR = 428, 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER, INSTRUCTION_BYTES = 2, 8
CAPABILITY_VERSION_3 = 0x20080522
CAP_LAST = 40
"""The highest Linux capability since 5.9; dropping one that does not exist is harmless."""
MACHINE = os.uname().machine
LIBC = ctypes.CDLL(None, use_errno=True)
HOLDING_LIBC = ctypes.PyDLL(None, use_errno=True)
"""The same library without releasing the interpreter lock, which the child of a clone must hold."""


def clone(namespaces: int) -> int:
    """Fork into new ``namespaces`` (``CLONE_NEW…``): 0 in the child, else its process number.

    The child has only the calling thread, so a process with several threads must not call this.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    process: int = HOLDING_LIBC.syscall(SYS_CLONE[MACHINE], ctypes.c_long(namespaces | signal.SIGCHLD), 0, 0, 0, 0)
    if process == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(process, f"clone(0x{namespaces:x})")


def unshare(namespaces: int) -> None:
    """Move to new namespaces."""
    _check(LIBC.unshare(namespaces), f"unshare(0x{namespaces:x})")


def enter(descriptor: int, namespaces: int) -> None:
    """Enter ``namespaces`` of a process (``descriptor`` is a pidfd), or the namespace of the descriptor."""
    _check(LIBC.setns(descriptor, namespaces), f"setns(0x{namespaces:x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, as ``mount(2)`` does."""
    done = LIBC.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(done, f"mount {source or kind} on {target}")


def unmount(target: str) -> None:
    """Detach a mount with all mounts below it; it ends with its last user."""
    _check(LIBC.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root() -> None:
    """Make the working directory the root; the old root is mounted over it."""
    _check(LIBC.syscall(SYS_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")


def clone_tree(path: str, *, recursive: bool = False) -> int:
    """A descriptor of an unattached mount of ``path``."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    return _check(LIBC.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}")


def set_attributes(tree: int, attributes: int, user_namespace: int = 0, *, recursive: bool = False) -> None:
    """Set attributes of a mount; with ``ATTR_IDMAP`` a user namespace maps the owners."""
    settings = struct.pack("4Q", attributes, 0, 0, user_namespace)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    done = LIBC.syscall(SYS_MOUNT_SETATTR, tree, b"", flags, settings, ctypes.c_size_t(len(settings)))
    _check(done, f"mount_setattr 0x{attributes:x}")


def write_text(path: str, text: bytes) -> None:
    """Write a kernel file in a single write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


def show_process() -> None:
    """Let this process's user access it again, after its children, which shared its memory, hid it."""
    _prctl(PR_SET_DUMPABLE, 1)


def hide_process() -> None:
    """Prevent all users except root from reading this process's memory or tracing it, until it executes a program."""
    _prctl(PR_SET_DUMPABLE, 0)


def bound_capabilities(capabilities: frozenset[int]) -> None:
    """Limit the capabilities that an ``exec`` can gain; needs the right to set capabilities."""
    for capability in range(CAP_LAST + 1):
        if capability not in capabilities:
            _prctl(PR_CAPBSET_DROP, capability)


def limit_capabilities(capabilities: frozenset[int]) -> None:
    """Drop all capabilities except some, and prevent gaining any by an ``exec``, permanently."""
    _check(LIBC.capset(*capability_sets(capabilities)), "capset")
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def capability_sets(capabilities: frozenset[int]) -> tuple[bytes, bytes]:
    """Header and data of ``capset``: these permitted and effective, none inheritable."""
    mask = sum(1 << capability for capability in capabilities)
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


# ── the first process: some hundred bytes that name themselves ``init`` and sleep for ever ────────────────────────────
#     prctl(PR_SET_NAME, "init"); for (;;) ppoll(NULL, 0, NULL, NULL);
# It exposes nothing of the host: no interpreter, no environment, no descriptor, only one page of memory. It is started
# with SIGCHLD ignored, which an exec preserves, so orphans in its namespace need no reaping. When it is killed, the
# kernel kills everything else inside.

NAME = b"init\0"
LOAD_ADDRESS = 0x400000
HEADERS_BYTES = 64 + 56
"""An ELF header and one program header."""
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def init_program(machine: str) -> bytes:
    """The ``init`` program as a static ELF executable. ``KeyError`` for an unsupported processor."""
    code = {"x86_64": _x86_64, "aarch64": _aarch64}[machine]()
    size = HEADERS_BYTES + len(code)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    entry = LOAD_ADDRESS + HEADERS_BYTES
    header = struct.pack("<HHIQQQIHHHHHH", 2, ELF_MACHINES[machine], 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 0x1000)
    return ident + header + segment + code


def open_init(machine: str) -> int:
    """An executable, unreadable descriptor of the ``init`` program in memory."""
    descriptor = os.memfd_create("init")
    os.write(descriptor, init_program(machine))
    os.fchmod(descriptor, 0o111)  # a process that cannot read its own program reveals nothing of itself in /proc
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH)
    os.close(descriptor)  # a file that is open for writing cannot be executed
    return readable


def _x86_64() -> bytes:
    head = bytes.fromhex("bf0f000000")  # mov edi, 15 (PR_SET_NAME)
    name_offset = bytes.fromhex("488d35")  # lea rsi, [rip + …]
    tail = bytes.fromhex(
        "b89d000000"  # mov eax, 157 (prctl)
        "0f05"  # syscall
        "31ff31f631d24d31d2"  # edi = esi = edx = r10 = 0
        "b80f010000"  # loop: mov eax, 271 (ppoll)
        "0f05"  # syscall
        "ebf7"  # jmp loop
    )
    return head + name_offset + struct.pack("<i", len(tail)) + tail + NAME


def _aarch64() -> bytes:
    instructions = (
        0xD28001E0,  # mov x0, 15 (PR_SET_NAME)
        0x10000141,  # adr x1, name: 40 bytes on
        0xD28014E8,  # mov x8, 167 (prctl)
        0xD4000001,  # svc 0
        0xD2800000,  # loop: mov x0, 0
        0xD2800001,  # mov x1, 0
        0xD2800002,  # mov x2, 0
        0xD2800003,  # mov x3, 0
        0xD2800928,  # mov x8, 73 (ppoll)
        0xD4000001,  # svc 0
        0x17FFFFFA,  # b loop
    )
    return struct.pack(f"<{len(instructions)}I", *instructions) + NAME


ENTRY: Final = struct.Struct("=7Qq3QQ")
"""Number, six arguments, result, a second address for the result (4 bytes each), and traits."""
ARGUMENTS, STORES = 6, 3
RESULT_FIELD, STORE_FIELD, TRAITS_FIELD = 7, 8, 11
MAY_FAIL, PARENT_EXITS = 1, 2
"""Traits: ``MAY_FAIL`` continues with the next call after an error; with ``PARENT_EXITS`` a process that gets a result
other than 0 exits, with status 0.
"""
NOT_MADE = 1 << 62
"""The result of a call that was not made."""
STACK_BYTES = 1 << 15
"""Stack for a child that a signal interrupts; its code needs none."""
CLONE_VM, CLONE_VFORK = 0x00000100, 0x00004000
MASK = (1 << 64) - 1
MACHINES = ("x86_64", "aarch64")
NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "bind": (49, 200),
    "capset": (126, 91),
    "chdir": (80, 49),
    "chroot": (161, 51),
    "clone": (56, 220),
    "close": (3, 57),
    "dup3": (292, 24),
    "execve": (59, 221),
    "execveat": (322, 281),
    "exit_group": (231, 94),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "ioctl": (16, 29),
    "listen": (50, 201),
    "mkdirat": (258, 34),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "openat": (257, 56),
    "openat2": (437, 437),
    "open_tree": (428, 428),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "rt_sigaction": (13, 134),
    "sendmsg": (46, 211),
    "setfsgid": (123, 152),
    "setfsuid": (122, 151),
    "setgroups": (116, 159),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
    "setsid": (112, 157),
    "socket": (41, 198),
    "umask": (95, 166),
    "unshare": (272, 97),
    "write": (1, 64),
}
"""Call → its number on each of ``MACHINES``."""
CODE: Final[Mapping[str, str]] = {
    "x86_64": """
        53 4889d3           push rbx; rbx = rdx: the first entry
        31d2 4531d2 4531c0  edx = r10d = r8d = 0
        b838000000 0f05     clone(edi: flags, rsi: stack, 0, 0, 0)
        4885c0 7402         in the child go to next
        5b c3               in the parent return its number
        488b03              next: rax = number
        488b7b08 488b7310   rdi, rsi
        488b5318 4c8b5320   rdx, r10
        4c8b4328 4c8b4b30   r8, r9
        0f05 48894338       call, and keep the result
        488b4b40 8901       where else it is put
        488b4b48 8901
        488b4b50 8901
        8b5358              edx = traits
        483d00f0ffff 7614   if it is no error, go to good
        f7c201000000 751b   if it may fail, go to follow
        bf7f000000          edi = 127
        b8e7000000 0f05     end: exit_group(edi)
        31ff                good: edi = 0
        f7c202000000 7405   if it does not part ways, go to follow
        4885c0 75ea         if the result is not 0, go to end
        4883c360 eb99       follow: rbx = the next entry; go to next
    """,
    "aarch64": """
        e90302aa            x9 = x2: the first entry
        e2031faa e3031faa   x2 = x3 = 0
        e4031faa 881b80d2   x4 = 0; x8 = clone
        010000d4 400000b4   call; in the child go to next
        c0035fd6            in the parent return its number
        280140f9 208540a9   next: x8 = number; x0, x1
        228d41a9 249542a9   x2, x3, x4, x5
        010000d4 201d00f9   call, and keep the result
        2a2140f9 400100b9   where else it is put
        2a2540f9 400100b9
        2a2940f9 400100b9
        2b5940b9            w11 = traits
        1f0440b1 a9000054   if it is no error, go to good
        0b010037 e00f80d2   if it may fail, go to follow; x0 = 127
        c80b80d2 010000d4   end: exit_group(x0)
        8b000836 ea0300aa   good: if it does not part ways, go to follow
        e0031faa 6affffb5   x0 = 0; if the result is not 0, go to end
        29810191 e8ffff17   follow: x9 = the next entry; go to next
    """,
}
"""Machine → the code that makes a child, ``long play(long flags, void *stack, struct entry *first)``, with comments."""
CODE_COLUMNS = 20
NOWHERE = ctypes.create_string_buffer(8)
SCRAP = ctypes.addressof(NOWHERE)
"""Address for unused results."""


class CallFailure(NamedTuple):
    """The failed call of a list."""

    call: str
    errno: int
    about: str
    """Its purpose, as given to :meth:`CallList.add`."""


class Result(NamedTuple):
    """Placeholder for the result of an earlier call, usually a descriptor, as an argument of later calls."""

    number: int


class MemoryBlock(NamedTuple):
    """An encoded list of calls that is reused in other lists."""

    calls: tuple[tuple[str, str], ...]
    entries: tuple[bytes, ...]


Argument = int | bytes | Result | ctypes.Array[Any]


class CallList:
    """System calls of a child, in order; the last must not return."""

    def __init__(self, machine: str) -> None:
        """``ValueError`` for an unsupported processor."""
        self._column = MACHINES.index(machine)
        self._calls: list[tuple[str, str]] = []
        self._entries: list[list[int] | bytes] = []
        """The entries: lists while they can change, packed once they cannot."""
        self._uses: list[tuple[int, int, int]] = []
        """Source entry, and the entry and argument that use its result."""
        self._buffers: list[object] = []
        """Memory that arguments point to."""
        self._table = ctypes.create_string_buffer(0)

    def add(self, call: str, *arguments: Argument, traits: int = 0, about: str = "") -> Result:
        """Add a call; bytes stand for a pointer to them with a terminating zero byte, arrays for a pointer to the
        array.
        """
        number = len(self._calls)
        values = [self._value(argument, number, position) for position, argument in enumerate(arguments)]
        values += [0] * (ARGUMENTS - len(values))
        self._calls.append((call, about))
        self._entries.append([NUMBERS[call][self._column], *values, NOT_MADE, *([SCRAP] * STORES), traits])
        return Result(number)

    def hold(self, thing: object) -> None:
        """Keep an object alive to which an argument contains a pointer."""
        self._buffers.append(thing)

    def store(self, result: Result, address: int) -> None:
        """Store 4 bytes of a result at an address of this process, too."""
        entry = self._entries[result.number]
        assert isinstance(entry, list), "a packed entry has no result"
        entry[entry.index(SCRAP, STORE_FIELD, TRAITS_FIELD)] = address

    def extend(self, block: "MemoryBlock") -> None:
        """Add calls that were packed earlier."""
        self._calls += block.calls
        self._entries += block.entries

    def pack(self) -> "MemoryBlock":
        """The calls so far, for reuse; they must not contain pointers or use results."""
        assert not self._buffers, "an argument would point to what may be gone"
        assert not self._uses, "a result would go to another list"
        return MemoryBlock(tuple(self._calls), tuple(map(_packed, self._entries)))

    def table(self) -> int:
        """The address of the list; it must live until the child has executed a program or ended."""
        self._table = ctypes.create_string_buffer(ENTRY.size * len(self._entries))
        base = ctypes.addressof(self._table)
        for source, number, position in self._uses:
            self.store(Result(source), base + number * ENTRY.size + 8 * (1 + position))
        self._uses.clear()
        ctypes.memmove(base, b"".join(map(_packed, self._entries)), len(self._table))
        return base

    def result(self, made: Result) -> int:
        """The return value of a call, negative for an error; ``NOT_MADE`` if it was not made."""
        return int(ENTRY.unpack_from(self._table, made.number * ENTRY.size)[RESULT_FIELD])

    @property
    def failure(self) -> CallFailure | None:
        """The call that failed and must not fail; ``None`` if all succeeded or none was made yet."""
        for (call, about), entry in zip(self._calls, ENTRY.iter_unpack(self._table), strict=False):
            if entry[RESULT_FIELD] < 0 and not entry[TRAITS_FIELD] & MAY_FAIL:
                return CallFailure(call, -entry[RESULT_FIELD], about)
        return None

    def errors(self, call: str) -> list[int]:
        """Error numbers of the calls with this name, in order; 0 for a call that succeeded, did not return or was not
        made.
        """
        numbers = [number for number, (name, _) in enumerate(self._calls) if name == call]
        return [-min(0, self.result(Result(number))) for number in numbers]

    def _value(self, argument: Argument, number: int, position: int) -> int:
        """The number that is passed to the kernel."""
        if isinstance(argument, Result):
            self._uses.append((argument.number, number, position))
            return 0
        if isinstance(argument, int):
            return argument & MASK
        self._buffers.append(argument)
        if isinstance(argument, bytes):
            return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
        return ctypes.addressof(argument)


class Player:
    """The machine code that runs a call list."""

    def __init__(self, machine: str) -> None:
        """``KeyError`` for an unsupported processor, ``OSError`` if memory cannot be made executable."""
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        memory.write(machine_code(machine))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if LIBC.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
            raise OSError(ctypes.get_errno(), "this process may not make machine code")
        self._memory = memory
        self._function = ctypes.PYFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(address)
        self._stack = ctypes.create_string_buffer(STACK_BYTES)
        self._stack_top = (ctypes.addressof(self._stack) + STACK_BYTES) & ~15

    def play(self, calls: CallList, flags: int = 0) -> int:
        """Make a child that makes the calls, and wait until it has executed a program or ended; return its number.

        ``flags`` are additional flags of ``clone``. The list then has the results of the calls.
        """
        process = int(self._function(flags | CLONE_VM | CLONE_VFORK | signal.SIGCHLD, self._stack_top, calls.table()))
        if process < 0:
            raise OSError(-process, f"no process can be started: {os.strerror(-process)}")
        return process


def _packed(entry: list[int] | bytes) -> bytes:
    return entry if isinstance(entry, bytes) else ENTRY.pack(*entry)


def machine_code(machine: str) -> bytes:
    """The machine code, decoded from ``CODE``."""
    lines = dedent(CODE[machine]).strip().splitlines()
    return bytes.fromhex("".join(line[:CODE_COLUMNS] for line in lines))


def strings(texts: Sequence[bytes]) -> "ctypes.Array[ctypes.c_char_p]":
    """A string array for ``execve``."""
    return (ctypes.c_char_p * (len(texts) + 1))(*texts, None)
