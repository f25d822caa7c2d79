"""System calls that are forbidden in ``ns`` and ``local`` sandboxes, as a classic BPF program for seccomp. Pure.

Commands share the machine's kernel, so they get only what a development machine needs. Refused are calls that only root
can use, calls with a history of vulnerabilities (BPF, io_uring, userfaultfd, keys, new namespaces), limits of processes
other than the caller, and socket families that no network namespace confines: a virtual machine's ``AF_VSOCK`` reaches
its host. Everything else is allowed, including debuggers, except on process 1.

Commands of ``local`` run one after the other in the same namespaces, as children of a process 1 with the same user. So
they may not create objects that outlive a process (System V and POSIX shared memory, semaphores and queues) and may not
change the scheduling of process 1 or of all their user's processes. They have no netlink sockets either. They inherit
the filter from process 1, which later calls ``chroot``, so that call is left to the kernel: it needs a capability.

A refused call fails with ``EPERM``, as for an ordinary user; a refused socket family with ``EAFNOSUPPORT``; ``clone3``,
io_uring and x32 calls with ``ENOSYS``, so that C libraries fall back to calls that can be inspected. A 32-bit program
is killed.
"""

import errno
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

NO_CALL = -1
"""The number of a call that does not exist on a processor."""
AUDIT_ARCHITECTURES: Mapping[str, int] = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})
"""The kernel's ids of the native system call interfaces; 32-bit programs have another id and cannot run."""
CALL_NUMBERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "acct": (163, 89),
        "add_key": (248, 217),
        "adjtimex": (159, 171),
        "bpf": (321, 280),
        "chroot": (161, 51),
        "clock_adjtime": (305, 266),
        "clock_settime": (227, 112),
        "clone": (56, 220),
        "clone3": (435, 435),
        "delete_module": (176, 106),
        "fanotify_init": (300, 262),
        "finit_module": (313, 273),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fsopen": (430, 430),
        "fspick": (433, 433),
        "init_module": (175, 105),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "io_uring_setup": (425, 425),
        "ioctl": (16, 29),
        "ioprio_set": (251, 30),
        "kexec_file_load": (320, 294),
        "kexec_load": (246, 104),
        "keyctl": (250, 219),
        "lookup_dcookie": (212, 18),
        "modify_ldt": (154, NO_CALL),
        "mount": (165, 40),
        "mount_setattr": (442, 442),
        "move_mount": (429, 429),
        "mq_open": (240, 180),
        "msgget": (68, 186),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "open_tree": (428, 428),
        "perf_event_open": (298, 241),
        "pivot_root": (155, 41),
        "prlimit64": (302, 261),
        "ptrace": (101, 117),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "reboot": (169, 142),
        "request_key": (249, 218),
        "sched_setaffinity": (203, 122),
        "sched_setattr": (314, 274),
        "sched_setparam": (142, 118),
        "sched_setscheduler": (144, 119),
        "semget": (64, 190),
        "setdomainname": (171, 162),
        "sethostname": (170, 161),
        "setns": (308, 268),
        "setpriority": (141, 140),
        "settimeofday": (164, 170),
        "shmat": (30, 196),
        "shmget": (29, 194),
        "socket": (41, 198),
        "socketpair": (53, 199),
        "swapoff": (168, 225),
        "swapon": (167, 224),
        "syslog": (103, 116),
        "umount2": (166, 39),
        "unshare": (272, 97),
        "userfaultfd": (323, 282),
        "vhangup": (153, 58),
    }
)
"""Call → its number on x86_64 and on aarch64."""
LASTING = ("mq_open", "msgget", "semget", "shmat", "shmget")
"""Calls that create or find memory and queues that belong to the namespace instead of a process."""
SCHEDULING = ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
"""Calls that set a process's scheduling; the first argument is the process number."""
PRIORITIES: Mapping[str, int] = MappingProxyType({"setpriority": 2, "ioprio_set": 3})
"""The same for a process, a group or, if the first argument has this value, all processes of a user."""
UNKNOWN = ("clone3", "io_uring_enter", "io_uring_register", "io_uring_setup")
"""Refused as if the kernel lacked them."""
INSPECTED = ("clone", "ioctl", "prlimit64", "ptrace", "socket", "socketpair")
"""Refused depending on their arguments."""
REFUSED_CALLS = frozenset(CALL_NUMBERS).difference(INSPECTED, LASTING, SCHEDULING, PRIORITIES)
"""Always refused, whatever the arguments."""
NEW_NAMESPACES = 0x7E020000
"""All of ``CLONE_NEW…`` that ``clone`` takes; ``CLONE_NEWTIME`` is ``unshare``'s."""
TYPING = (0x5412, 0x541C)
"""Terminal calls that fake typed input: ``TIOCSTI`` and ``TIOCLINUX``."""
FAMILIES, NETLINK = (1, 2, 10), 16
"""Unix, IPv4 and IPv6 sockets, and netlink sockets; namespaces confine each of them."""
CALLER, INIT_PROCESS = 0, 1
"""Process numbers in arguments: the caller, and a namespace's first process."""

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF: load a word, compare with a constant, return the verdict."""
ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
"""Verdicts; ``REFUSE`` has an error number in its low half."""
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
"""Offsets in ``struct seccomp_data``; arguments have 8 bytes, low half first on both processors."""
X32_BIT = 0x40000000
"""Bit in the numbers of x86_64's second interface, which would bypass this list."""

FARTHEST_JUMP = 255

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


def filter_program(machine: str, *, shared: bool = False) -> bytes:
    """The BPF program for a processor, in the kernel's format: 8 bytes per instruction.

    ``shared`` is for commands that share namespaces, and the user of process 1, with the next sandbox. The program is a
    search tree, because on installation, once per command, the kernel runs it for every existing call. ``KeyError`` for
    a processor that is not in the table.
    """
    architecture = AUDIT_ARCHITECTURES[machine]
    column = list(AUDIT_ARCHITECTURES).index(machine)
    bodies = {CALL_NUMBERS[call][column]: body for call, body in _bodies(shared).items()}
    bodies.pop(NO_CALL, None)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_OFFSET),
        *_when(JUMP_AT_LEAST, X32_BIT, [_refuse(errno.ENOSYS)]),
        *_tree(sorted(bodies), bodies),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _bodies(shared: bool) -> dict[str, list[Instruction]]:
    """Call → the instructions that return its verdict."""
    spared = {"chroot"} if shared else {*LASTING, *SCHEDULING, *PRIORITIES}
    bodies = {
        call: [_refuse(errno.ENOSYS if call in UNKNOWN else errno.EPERM)] for call in CALL_NUMBERS.keys() - spared
    }
    refused, allowed = _refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)
    terminal = [line for call in TYPING for line in _when(JUMP_EQUAL, call, [refused])]
    families = [*FAMILIES] if shared else [*FAMILIES, NETLINK]
    sockets = [line for family in families for line in _when(JUMP_EQUAL, family, [allowed])]
    only_asks = [_argument(2), *_when(JUMP_EQUAL, 0, [_argument(2, high=True), *_when(JUMP_EQUAL, 0, [allowed])])]
    spares_init = _when(JUMP_EQUAL, INIT_PROCESS, [refused])
    inspections = {
        "clone": [_argument(0), *_when(JUMP_SET, NEW_NAMESPACES, [refused]), allowed],
        "ioctl": [_argument(1), *terminal, allowed],
        "prlimit64": [_argument(0), *_when(JUMP_EQUAL, CALLER, [allowed]), *only_asks, refused],
        "ptrace": [_argument(1), *spares_init, allowed],
        "socket": [_argument(0), *sockets, _refuse(errno.EAFNOSUPPORT)],
        "socketpair": [_argument(0), *sockets, _refuse(errno.EAFNOSUPPORT)],
    }
    for call in SCHEDULING:
        inspections[call] = [_argument(0), *spares_init, allowed]
    for call, whole_user in PRIORITIES.items():
        whose = _when(JUMP_EQUAL, whole_user, [refused])
        inspections[call] = [_argument(0), *whose, _argument(1), *spares_init, allowed]
    return bodies | {call: body for call, body in inspections.items() if call not in spared}


def _tree(numbers: Sequence[int], bodies: Mapping[int, list[Instruction]]) -> list[Instruction]:
    """Find a call among the sorted ``numbers`` and return its verdict; other calls are allowed."""
    if len(numbers) == 1:
        return [*_when(JUMP_EQUAL, numbers[0], bodies[numbers[0]]), (RETURN, 0, 0, ALLOW)]
    middle = len(numbers) // 2
    lower, upper = _tree(numbers[:middle], bodies), _tree(numbers[middle:], bodies)
    assert len(lower) <= FARTHEST_JUMP, "the program is too long for one tree"
    return [(JUMP_AT_LEAST, len(lower), 0, numbers[middle]), *lower, *upper]


def _when(jump: int, value: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run ``body`` if the loaded word compares, else continue after it."""
    return [(jump, 0, len(body), value), *body]


def _argument(index: int, *, high: bool = False) -> Instruction:
    """Load the low half of an argument, which the kernel uses for a number, or the high half of a pointer."""
    return LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * index + (4 if high else 0)


def _refuse(number: int) -> Instruction:
    return RETURN, 0, 0, REFUSE | number
