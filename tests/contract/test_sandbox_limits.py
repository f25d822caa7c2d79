"""Contract of a provider that claims to limit a sandbox's use of resources."""

import asyncio
import sys
from asyncio.subprocess import PIPE

import pytest

from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, SandboxSpec
from providers import TIGHT, TIMEOUT_S, Stage, output, python

FORK_BOMB = """
import os, time
def bomb():
    count = 0
    while True:
        try:
            if os.fork() == 0:
                time.sleep(0.2)
                while True:
                    try:
                        os.fork()
                    except OSError:
                        time.sleep(0.05)
            count += 1
        except OSError:
            return count
print(bomb(), flush=True)
while True: time.sleep(1)
"""
MEMORY_BOMB = "x = []\nwhile True: x.append(bytearray(b'x' * (4 << 20)))"
MANY_EATERS = """
import os, signal, time
eaters = set()
for _ in range(8):
    eater = os.fork()
    if eater == 0:
        x = bytearray(b'x' * (64 << 20))
        open(f'eaten-{os.getpid()}', 'w').close()
        time.sleep(600)
        os._exit(0)
    eaters.add(eater)
hungry = eaters
while hungry:
    time.sleep(0.05)
    hungry = {eater for eater in eaters if not os.path.exists(f'eaten-{eater}')}
    eaters = {eater for eater in eaters if os.waitpid(eater, os.WNOHANG) == (0, 0)}
    hungry &= eaters
open('full', 'w').write('x' * len(eaters))
for eater in eaters:
    os.kill(eater, signal.SIGKILL)
"""
"""Each eats, and stays: those who are there when none is hungry any more are full at the same time."""
DISK_BOMB = """
import os
total = 0
for folder in ('.', '/tmp', '/home/agent', '/dev/shm', '/var/tmp', '/run'):
    try:
        with open(folder + '/big', 'wb', buffering=0) as file:
            while True:
                total += file.write(bytes(1 << 20))
    except OSError:
        pass
print(total)
"""

HOARD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def timer():
    event, number = (ctypes.c_int * 16)(0, 0, 34, 0), ctypes.c_void_p()
    return libc.timer_create(1, event, ctypes.byref(number))
def queue():
    name = b'/etude%d' % os.getpid()
    number = libc.mq_open(name, 0o302, 0o600, None)
    libc.mq_unlink(name)
    return number
def terminal():
    try:
        return os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return -1
KINDS = {'watches': lambda: libc.inotify_init1(0), 'timers': timer, 'queues': queue, 'terminals': terminal}
"""
"""What the kernel counts for a user of the machine, or for all of it."""
TAKE_ALL = """
import resource, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
for take in KINDS.values():
    for _ in range(100_000):
        if take() < 0:
            break
open('full', 'w').write('x')
time.sleep(600)
"""
TAKE_ONE = "\nprint([kind for kind, take in KINDS.items() if take() < 0])"


async def survives(sandbox: Sandbox, other: Sandbox, bomb: str, timeout_s: float) -> str:
    """Output of a program that exhausts a resource, after checking that its sandbox and another one still work."""
    exploding = asyncio.ensure_future(python(sandbox, bomb, timeout_s=timeout_s))
    await asyncio.sleep(0.5)
    assert await output(other, "print('neighbour')") == "neighbour\n"
    result = await exploding
    assert await output(sandbox, "print('survivor')") == "survivor\n"
    return result.stdout


def explode(stage: Stage, bomb: str, timeout_s: float = TIMEOUT_S) -> str:
    async def act(sandbox: Sandbox) -> str:
        other = await stage.provider.create({})
        try:
            return await survives(sandbox, other, bomb, timeout_s)
        finally:
            await other.close()

    return stage.play(act, spec=stage.tight)


def test_a_fork_bomb_stops_at_the_limit(stage: Stage) -> None:
    stage.need(Capability.PROCESS_LIMIT)
    count = explode(stage, FORK_BOMB, timeout_s=3.0) or explode(stage, FORK_BOMB)  # a busy machine is slow to light it
    assert 4 <= int(count) < TIGHT.processes


def test_a_memory_bomb_ends_and_nothing_else(stage: Stage) -> None:
    stage.need(Capability.MEMORY_LIMIT)
    explode(stage, MEMORY_BOMB)


def test_a_wall_stands_around_a_sandbox_whatever_becomes_of_it(stage: Stage) -> None:
    stage.need(Capability.LIMIT_WALL)

    async def explode() -> None:
        other = await stage.provider.create({})
        sandbox = await stage.provider.create({}, SandboxSpec(limits=TIGHT))
        try:
            result = await python(sandbox, MEMORY_BOMB, timeout_s=2 * TIMEOUT_S)
            assert not result.timed_out
            assert result.exit_code
        except SandboxError:
            pass
        finally:
            await sandbox.close()
        assert await output(other, "print('neighbour')") == "neighbour\n"
        await other.close()

    stage.run(explode())


def test_memory_is_counted_over_all_processes(stage: Stage) -> None:
    stage.need(Capability.MEMORY_LIMIT)

    async def eat(sandbox: Sandbox) -> int:
        await python(sandbox, MANY_EATERS)
        return len(await sandbox.read_file("full") or "")

    assert 1 <= stage.play(eat, spec=stage.tight) < 5


def test_a_disk_fills_up_to_the_limit(stage: Stage) -> None:
    stage.need(Capability.DISK_LIMIT)
    total = int(explode(stage, DISK_BOMB, timeout_s=2 * TIMEOUT_S))  # it writes more than all others together
    assert TIGHT.disk_bytes // 4 < total <= TIGHT.disk_bytes + TIGHT.memory_bytes


def test_what_was_deleted_makes_room(stage: Stage) -> None:
    stage.need(Capability.DISK_LIMIT)
    code = (
        "import os\nfor _ in range(4):\n    with open('big', 'wb') as file:\n"
        "        file.write(bytes(TOTAL))\n    os.unlink('big')\nprint('fits')"
    ).replace("TOTAL", str(TIGHT.disk_bytes // 2))
    assert stage.python(code, spec=stage.tight).stdout == "fits\n"


def test_sandboxes_cannot_use_up_what_the_kernel_counts_for_all(stage: Stage) -> None:
    stage.need(Capability.COUNTERS_APART)
    if Capability.OWN_KERNEL in stage.claims:
        pytest.skip("what another kernel counts is no business of the machine's")
    at_once = 3 if Capability.IMAGES in stage.claims else 1  # without root, all are the same user's

    async def hoard() -> tuple[str, str]:
        hoarders = [await stage.provider.create({}) for _ in range(at_once)]
        hoarding = [asyncio.ensure_future(python(hoarder, HOARD + TAKE_ALL)) for hoarder in hoarders]
        for hoarder, command in zip(hoarders, hoarding, strict=True):
            while not command.done() and not await hoarder.read_file("full"):
                await asyncio.sleep(0.05)
        machine = await asyncio.create_subprocess_exec(sys.executable, "-c", HOARD + TAKE_ONE, stdout=PIPE)
        left, _ = await machine.communicate()
        other = await stage.provider.create({})
        try:
            return left.decode(), await output(other, HOARD + TAKE_ONE)
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in [other, *hoarders]))
            await asyncio.gather(*hoarding, return_exceptions=True)

    assert stage.run(hoard()) == ("[]\n", "[]\n")
