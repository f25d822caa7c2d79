"""The filter of system calls, run by a small interpreter: which calls it refuses, and how."""

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.ns.seccomp import (
    ALLOW,
    AUDIT_ARCHITECTURES,
    CALL_NUMBERS,
    KILL_PROCESS,
    LASTING,
    NO_CALL,
    PRIORITIES,
    REFUSE,
    SCHEDULING,
    filter_program,
)

INSPECTED = ("clone", "ioctl", "prlimit64", "ptrace", "socket", "socketpair")
"""Refused for some arguments only."""
SHARED_ONLY = (*LASTING, *SCHEDULING, *PRIORITIES)
"""Allowed to commands that have namespaces of their own."""
MACHINES = list(AUDIT_ARCHITECTURES)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None, shared: bool = False) -> int:
    """The filter's verdict on a system call."""
    program = list(struct.iter_unpack("<HBBI", filter_program(machine, shared=shared)))
    numbers = AUDIT_ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, numbers, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    at, word = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x20:
            (word,) = struct.unpack_from("<I", data, constant)
        elif code == 0x06:
            return int(constant)
        else:
            holds = {0x15: word == constant, 0x35: word >= constant, 0x45: bool(word & constant)}[code]
            at += if_true if holds else if_false


def number(machine: str, call: str) -> int:
    return CALL_NUMBERS[call][MACHINES.index(machine)]


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_need_no_look_are_refused(machine: str) -> None:
    for call in CALL_NUMBERS.keys() - {*INSPECTED, *SHARED_ONLY}:
        if number(machine, call) == NO_CALL:
            continue
        unknown = call == "clone3" or call.startswith("io_uring")
        expected = REFUSE | (errno.ENOSYS if unknown else errno.EPERM)
        assert verdict(machine, number(machine, call)) == expected, call


@pytest.mark.parametrize("machine", MACHINES)
@given(call=st.integers(0, 600), arguments=st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_every_other_call_is_allowed(machine: str, call: int, arguments: list[int]) -> None:
    numbers = {pair[MACHINES.index(machine)] for pair in CALL_NUMBERS.values()}
    if call not in numbers:
        assert verdict(machine, call, *arguments) == verdict(machine, call, *arguments, shared=True) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "refused"),
    [
        ("clone", (0x11,), 0),
        ("clone", (0x003D0F00,), 0),  # a thread
        *(("clone", (flag | 0x11,), errno.EPERM) for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000, 0x2000000)),
        ("ioctl", (0, 0x5401), 0),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, 0xFFFFFFFF00005412), errno.EPERM),  # the kernel looks at half of it
        ("ptrace", (16, 7), 0),
        ("ptrace", (16, 1), errno.EPERM),
        ("prlimit64", (0, 7, 1), 0),
        *(("prlimit64", (process, 7, 0), 0) for process in (1, 2)),  # only asks
        *(("prlimit64", (process, 7, new), errno.EPERM) for process in (1, 2) for new in (1, 1 << 32)),
        *((call, (1, 1, 1), 0) for call in SHARED_ONLY),
        *(("socket", (family,), 0) for family in (1, 2, 10, 16)),
        *(("socket", (family,), errno.EAFNOSUPPORT) for family in (0, 17, 38, 40, 44)),
        ("socketpair", (1,), 0),
        ("socketpair", (40,), errno.EAFNOSUPPORT),
    ],
)
def test_some_calls_depend_on_an_argument(machine: str, call: str, arguments: tuple[int, ...], refused: int) -> None:
    assert verdict(machine, number(machine, call), *arguments) == (REFUSE | refused if refused else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments", "refused"),
    [
        *((call, (), errno.EPERM) for call in LASTING),
        *((call, (process, 1), 0) for call in SCHEDULING for process in (0, 2)),
        *((call, (1, 0), errno.EPERM) for call in SCHEDULING),
        ("setpriority", (0, 0, 5), 0),
        ("setpriority", (0, 1, 5), errno.EPERM),
        ("setpriority", (2, 0, 5), errno.EPERM),  # all of a user
        ("ioprio_set", (1, 0, 5), 0),
        ("ioprio_set", (1, 1, 5), errno.EPERM),
        ("ioprio_set", (3, 0, 5), errno.EPERM),
        ("socket", (1,), 0),
        ("socket", (16,), errno.EAFNOSUPPORT),
        ("chroot", (), 0),  # process 1 has the filter as well
    ],
)
def test_commands_that_share_namespaces_are_held_closer(
    machine: str, call: str, arguments: tuple[int, ...], refused: int
) -> None:
    expected = REFUSE | refused if refused else ALLOW
    assert verdict(machine, number(machine, call), *arguments, shared=True) == expected


def test_other_interfaces_of_the_kernel_are_closed() -> None:
    assert verdict("x86_64", 165, architecture=0x40000003) == KILL_PROCESS  # 32 bits
    assert verdict("x86_64", 0x40000000 | 165) == REFUSE | errno.ENOSYS  # x32


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed: apt-get install linux-libc-dev")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text(encoding="utf-8")))
    names = {call: defined.get(call) for call in CALL_NUMBERS if number(machine, call) != NO_CALL}
    assert {call: int(verdicts) for call, verdicts in names.items() if verdicts} == {
        call: number(machine, call) for call, verdicts in names.items() if verdicts
    }
    assert sum(verdicts is None for verdicts in names.values()) <= 2  # newer than the header


def test_an_unlisted_processor_is_an_error() -> None:
    with pytest.raises(KeyError):
        filter_program("m68k")
