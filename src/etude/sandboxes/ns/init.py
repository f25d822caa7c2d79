"""The first process of a sandbox: a program of some hundred bytes that names itself ``init`` and sleeps for ever.

Owns its machine code. Nothing of the host can be found in it: no interpreter, no environment, no descriptor, no memory
but one page. Its children are none of its business: it is started with SIGCHLD ignored, which an ``exec`` keeps, so
orphans that end in its namespace are gone at once. When it is killed, the kernel kills everything else in there.

    prctl(PR_SET_NAME, "init"); for (;;) ppoll(NULL, 0, NULL, NULL);
"""

import os
import struct

NAME = b"init\0"
LOAD_ADDRESS = 0x400000
HEADERS_BYTES = 64 + 56
"""An ELF header and one program header."""
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def init_program(machine: str) -> bytes:
    """The program as a static ELF executable. ``KeyError`` for a processor that it was not written for."""
    code = {"x86_64": _x86_64, "aarch64": _aarch64}[machine]()
    size = HEADERS_BYTES + len(code)
    ident = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    entry = LOAD_ADDRESS + HEADERS_BYTES
    header = struct.pack("<HHIQQQIHHHHHH", 2, ELF_MACHINES[machine], 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 0x1000)
    return ident + header + segment + code


def open_init(machine: str) -> int:
    """A descriptor of the program in memory, which can be executed and not be read."""
    descriptor = os.memfd_create("init")
    os.write(descriptor, init_program(machine))
    os.fchmod(descriptor, 0o111)  # a process whose program it may not read shows nothing of itself in /proc
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_PATH)
    os.close(descriptor)  # nothing that is open for writing can be executed
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
