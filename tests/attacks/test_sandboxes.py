"""Attacks out of sandboxes, as the agent and as root inside, on every kind that this machine has."""

import asyncio
import os
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, SandboxSpec
from providers import PROVIDERS, Stage, stage

KINDS = [
    pytest.param(kind, marks=[pytest.mark.heavy(PROVIDERS[kind].heavy)] if PROVIDERS[kind].heavy else [])
    for kind in ("local", "ns", "crun", "gvisor", "qemu")
]
BYTES = 64 << 20


@pytest.fixture(scope="module", params=KINDS)
def cell(request: pytest.FixtureRequest) -> Iterator[Stage]:
    candidate = PROVIDERS[request.param]
    if missing := candidate.missing():
        pytest.skip(missing)
    yield from stage(request.param, candidate.make)


@pytest.fixture(params=["agent", "root"])
def attacker(request: pytest.FixtureRequest, cell: Stage) -> SandboxSpec:
    if request.param == "root" and Capability.IMAGES not in cell.claims:
        pytest.skip(f"there is no root in {cell.name}")
    return SandboxSpec(user=request.param)


FILL = """
import glob, os
for link in glob.glob('/proc/[0-9]*/fd/*'):
    try:
        place = os.readlink(link)
        if not place.startswith('/') or place.startswith(('/dev/', '/proc/', '/memfd:')) or os.path.exists(place):
            continue  # a pipe, a file of the sandbox, or memory, which is counted as the writer's
        with open(link, 'ab') as file:
            print('writes to', place, file.write(b'x' * 4096))
    except OSError:
        pass
"""


def test_to_write_to_a_file_of_the_machine_that_a_process_holds_open(cell: Stage, attacker: SandboxSpec) -> None:
    assert cell.python(FILL, spec=attacker).stdout == ""


REPLACE = """
import os, time
end, seen = time.time() + {seconds}, set()
while time.time() < end:
    for process in os.listdir('/proc') if os.path.isdir('/proc') else []:
        if process.isdigit() and process != str(os.getpid()):
            try:
                link = f'/proc/{{process}}/exe'
                place = os.readlink(link)
                if not os.path.exists(place):  # no program of the sandbox's: what starts its commands
                    os.close(os.open(link, os.O_WRONLY))
                    seen.add(place)
            except OSError:
                pass
print(*seen)
"""


def test_to_replace_the_program_that_starts_commands(cell: Stage, attacker: SandboxSpec) -> None:
    async def race(sandbox: Sandbox) -> str:
        attack = asyncio.create_task(sandbox.exec(["python3", "-c", REPLACE.format(seconds=2)], timeout_s=30.0))
        while not attack.done():
            await sandbox.exec(["true"], timeout_s=30.0)
        return (await attack).stdout

    assert cell.play(race, spec=attacker).strip() == ""


CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
space = ctypes.create_string_buffer(256)
tries = {
    'bpf': (321, 0, space, 72), 'perf_event_open': (298, space, 0, -1, -1, 0), 'userfaultfd': (323, 1),
    'keyctl': (250, 0, -3, 1), 'io_uring_setup': (425, 4, space), 'fanotify_init': (300, 0, 0), 'acct': (163, b'/a'),
    'open_tree': (428, -100, b'/', 1), 'fsopen': (430, b'proc', 0), 'kexec_load': (246, 0, 0, 0, 0), 'iopl': (172, 3),
    'syslog': (103, 3, space, 99), 'swapon': (167, b'/tmp/x', 0), 'init_module': (175, space, 0, b''),
    'sethostname': (170, b'x', 1), 'settimeofday': (164, space, 0), 'setns': (308, 0, 0), 'unshare': (272, 0x20000),
    'unshare users': (272, 0x10000000), 'unshare network': (272, 0x40000000), 'pivot_root': (155, b'/', b'/'),
    'open_by_handle_at': (304, -100, space, 0),
}
for name, call in tries.items():
    if libc.syscall(*call) != -1:
        print(name)
"""


def test_to_use_what_a_kernel_gives_its_administrator(cell: Stage, attacker: SandboxSpec) -> None:
    if Capability.OWN_KERNEL in cell.claims:
        pytest.skip("what its own kernel gives is no business of the machine's")
    if attacker.user == "root" and cell.name == "ns":
        pytest.skip("root of a user namespace: the contract tests say what it has")
    assert cell.python(CALLS, spec=attacker).stdout == ""


KNOCK = """
import socket
for place in (('127.0.0.1', {port}), ('169.254.169.254', 80), ('10.0.2.2', {port}), ('172.17.0.1', {port})):
    try:
        socket.create_connection(place, 0.3).close()
        print('reached', place)
    except OSError:
        pass
for name in ('\\0{name}', '{path}'):
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        print('reached', name)
    except OSError:
        pass
for family in (16, 17, 38, 40):
    try:
        with socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_DGRAM) as made:
            if family == 40:
                made.settimeout(0.3)
                for context in (1, 2):
                    try:
                        made.connect((context, 22))
                        print('reached', context)
                    except OSError:
                        pass
    except OSError:
        pass
"""


def test_to_reach_servers_of_the_machine_and_its_neighbours(cell: Stage, attacker: SandboxSpec) -> None:
    cell.need(Capability.NETWORK_OFF)
    name = f"etude-attack-{os.getpid()}"
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen()
        code = KNOCK.format(port=server.getsockname()[1], name=name, path="/run/dbus/system_bus_socket")
        assert cell.python(code, spec=attacker).stdout == ""


def test_to_turn_a_verdict_into_a_failure_of_the_machine(cell: Stage) -> None:
    """A command's output, or the way it ends, cannot look like étude's own answer or like a machine's failure."""
    code = "import os, sys\nsys.stdout.write('\\x00' * 99 + '\\udcff\\x1b]0;x\\x07')\nsys.stdout.flush()\nos.kill(0, 9)"
    result = cell.play(partial(_run, code))
    assert result != 0


async def _run(code: str, sandbox: Sandbox) -> int:
    return (await sandbox.exec(["python3", "-c", code], timeout_s=20.0)).exit_code
