"""Child processes that are lists of system calls: their effects, and their results on each processor."""

import errno
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from etude.sandboxes.ns.syscalls import (
    CLONE_VFORK,
    CLONE_VM,
    CODE,
    ENTRY,
    MACHINES,
    MAY_FAIL,
    NOT_MADE,
    NUMBERS,
    PARENT_EXITS,
    CallFailure,
    CallList,
    Player,
    machine_code,
    strings,
)

MACHINE = platform.machine()
AT_FDCWD = -100
CLONE_PARENT = 0x8000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def execute(calls: CallList, *argv: str) -> None:
    """Add calls that execute a program, or exit with 127."""
    arguments = strings([text.encode() for text in argv])
    calls.add("execve", argv[0].encode(), arguments, strings([b"A=b"]), traits=MAY_FAIL)
    calls.add("exit_group", 127)


def run(calls: CallList) -> int:
    """Play a list to the end of its child; returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(Player(MACHINE).play(calls), 0)[1])


def test_calls_are_made_in_order_and_use_each_others_results(tmp_path: Path) -> None:
    calls = CallList(MACHINE)
    calls.add("chdir", os.fsencode(tmp_path))
    file = calls.add("openat", AT_FDCWD, b"made", os.O_WRONLY | os.O_CREAT, 0o644)
    calls.add("write", file, b"one ", 4)
    calls.add("write", file, b"two", 3)
    calls.add("dup3", file, 1, 0)
    execute(calls, "/bin/sh", "-c", "echo ' three' $A")
    assert run(calls) == 0
    assert (tmp_path / "made").read_text(encoding="utf-8") == "one two three b\n"
    assert calls.failure is None
    assert calls.errors("execve") == [0]


def test_a_call_that_fails_ends_the_list_and_is_named(tmp_path: Path) -> None:
    calls = CallList(MACHINE)
    calls.add("chdir", os.fsencode(tmp_path / "nowhere"), about="a folder")
    later = calls.add("openat", AT_FDCWD, os.fsencode(tmp_path / "made"), os.O_WRONLY | os.O_CREAT, 0o644)
    execute(calls, "/bin/true")
    assert run(calls) == 127
    assert calls.failure == CallFailure("chdir", errno.ENOENT, "a folder")
    assert calls.result(later) == NOT_MADE
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_may_fail_ends_nothing() -> None:
    calls = CallList(MACHINE)
    calls.add("chdir", b"/no/such/folder", traits=MAY_FAIL)
    calls.add("execve", b"/no/such/program", strings([b"x"]), strings([]), traits=MAY_FAIL)
    execute(calls, "/bin/true")
    assert run(calls) == 0
    assert calls.failure is None
    assert calls.errors("execve") == [errno.ENOENT, 0]


def test_a_child_may_make_another_and_leave_it_to_us() -> None:
    calls = CallList(MACHINE)
    born = calls.add("clone", CLONE_VM | CLONE_VFORK | CLONE_PARENT | signal.SIGCHLD, traits=PARENT_EXITS)
    execute(calls, "/bin/sh", "-c", "exit 7")
    assert run(calls) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(calls.result(born), 0)[1]) == 7


def test_packed_calls_stand_in_other_lists() -> None:
    block = CallList(MACHINE)
    block.add("umask", 0o077)
    calls = CallList(MACHINE)
    calls.add("setsid")
    calls.extend(block.pack())
    execute(calls, "/bin/sh", "-c", "test $(umask) = 0077")
    assert run(calls) == 0
    assert run(calls) == 0  # a list can be played again


def test_a_list_that_points_to_something_cannot_be_packed() -> None:
    calls = CallList(MACHINE)
    calls.add("chdir", b"/")
    with pytest.raises(AssertionError, match="may be gone"):
        calls.pack()


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed: apt-get install linux-libc-dev")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text(encoding="utf-8")))
    column = MACHINES.index(machine)
    numbers = {call: int(defined[call]) for call in NUMBERS if call in defined}
    assert numbers == {call: NUMBERS[call][column] for call in numbers}
    assert len(numbers) >= len(NUMBERS) - 2  # newer than the header


@pytest.mark.skipif(
    shutil.which("qemu-aarch64") is None, reason="qemu-aarch64 is not installed: apt-get install qemu-user"
)
def test_the_code_for_the_other_processor_plays_a_list(tmp_path: Path) -> None:
    """A static program whose start calls ``play`` with a list that writes, and exits."""
    code, start = machine_code("aarch64"), 0x400000 + 120
    stub_bytes = 4 * 9
    table = start + stub_bytes + len(code)
    text = table + 3 * ENTRY.size
    write, leave = NUMBERS["write"][1], NUMBERS["exit_group"][1]
    scrap = text + 8
    entries = ENTRY.pack(NUMBERS["chdir"][1], 0, 0, 0, 0, 0, 0, NOT_MADE, scrap, scrap, scrap, MAY_FAIL)
    entries += ENTRY.pack(write, 1, text, 6, 0, 0, 0, NOT_MADE, scrap, scrap, scrap, 0)
    entries += ENTRY.pack(leave, 0, 0, 0, 0, 0, 0, NOT_MADE, scrap, scrap, scrap, 0)
    stub = [0xD2800000 | signal.SIGCHLD << 5, 0xD2800001]  # x0 = flags, x1 = 0: as fork does
    stub += [0xD2A00002 | (table >> 16) << 5, 0xF2800002 | (table & 0xFFFF) << 5]  # x2 = the table
    stub += [0x94000000 | 5]  # play, behind this stub
    stub += [0xD2800000, 0xD2800BC8, 0xD4000001, 0xD503201F]  # exit_group(0)
    program = struct.pack("<9I", *stub) + code + entries + b"said\n\0" + bytes(32)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    size = 120 + len(program)
    segment = struct.pack("<IIQQQQQQ", 1, 7, 0, 0x400000, 0x400000, size, size, 0x1000)
    file = tmp_path / "program"
    file.write_bytes(ident + header + segment + program)
    file.chmod(0o755)
    done = subprocess.run(["qemu-aarch64", str(file)], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, b"said\n\0")


def test_every_machine_has_code() -> None:
    assert set(CODE) == set(MACHINES)
    with pytest.raises(KeyError):
        machine_code("m68k")
    with pytest.raises(ValueError, match="not in tuple"):
        CallList("m68k")
