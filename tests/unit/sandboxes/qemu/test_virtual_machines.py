"""Features of virtual machines only: copies at any moment, identities, an end with their provider."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import ConfigError, SandboxError
from etude.protocols import Sandbox
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.qemu.provider import QemuSandboxes
from waiting import wait_until

pytestmark = pytest.mark.heavy("QEMU, and a base system")

T = TypeVar("T")

TIMEOUT_S = 60.0
CLOCK_S = 5.0
"""By how much a guest's clock may be off: its memory is as old as the first boot, or as its original's last fork."""


class Lab:
    """A provider with an event loop of its own."""

    def __init__(self, provider: QemuSandboxes, runner: asyncio.Runner) -> None:
        self.provider = provider
        self._runner = runner

    def play(self, scenario: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Act out a scenario in a fresh sandbox."""

        async def act() -> T:
            sandbox = await self.provider.create({})
            try:
                return await scenario(sandbox)
            finally:
                await sandbox.close()

        return self._runner.run(act())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    scratch = tmp_path_factory.mktemp("machines")
    try:
        provider = QemuSandboxes(scratch=scratch)
    except ConfigError as error:
        pytest.skip(str(error))
    with asyncio.Runner() as runner:
        yield Lab(provider, runner)
        runner.run(provider.close())
    assert list(scratch.iterdir()) == []
    assert machines_below(scratch) == []


async def sh(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(["sh", "-c", script], timeout_s=TIMEOUT_S)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def machines_below(scratch: Path) -> list[int]:
    """Processes whose command line names files of a provider."""
    program = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(scratch).encode() in words and b"qemu-system" in words:
            program.append(int(process.name))
    return program


COUNTER = """
import os, time
for number in range(10_000):
    with open("count.new", "w") as file:
        file.write(str(number))
    os.rename("count.new", "count")
    time.sleep(0.02)
"""


def test_copies_go_on_in_the_middle_of_things_and_apart(lab: Lab) -> None:
    async def fork(sandbox: Sandbox) -> list[list[int]]:
        await sandbox.write_file("counter.py", COUNTER)
        running = asyncio.ensure_future(sandbox.exec(["python3", "counter.py"], timeout_s=TIMEOUT_S))
        while int(await sandbox.read_file("count") or 0) < 5:
            await asyncio.sleep(0.05)
        copies = await sandbox.fork(2)
        assert not running.done()
        seen = []
        for one in (sandbox, *copies):
            first = later = int(await one.read_file("count") or -1)
            async with asyncio.timeout(20):
                while later == first:
                    await asyncio.sleep(0.05)
                    later = int(await one.read_file("count") or -1)
            seen.append([first, later])
        await sh(copies[0], "pkill -f 'counter[.]py'; rm count")
        assert await copies[0].read_file("count") is None
        assert await copies[1].read_file("count") is not None
        running.cancel()
        for copy in copies:
            await copy.close()
        return seen

    for first, second in lab.play(fork):
        assert 5 <= first < second


def test_a_copy_has_a_name_a_clock_and_random_numbers_of_its_own(lab: Lab) -> None:
    async def fork(sandbox: Sandbox) -> list[list[str]]:
        (copy,) = await sandbox.fork()
        (copy_of_copy,) = await copy.fork()
        look = "hostname; cat /etc/hostname; head -c 16 /dev/urandom | base64; date +%s.%N"
        program = []
        for one in (sandbox, copy, copy_of_copy):
            before = time.time()
            lines = (await sh(one, look)).split()
            assert before - CLOCK_S <= float(lines.pop()) <= time.time() + CLOCK_S
            program.append(lines)
        await copy.close()
        await copy_of_copy.close()
        return program

    program = lab.play(fork)
    assert all(name == in_file for name, in_file, _ in program)
    assert len({name for name, _, _ in program}) == len({numbers for _, _, numbers in program}) == 3


def test_commands_find_nothing_of_the_agent(lab: Lab) -> None:
    async def look(sandbox: Sandbox) -> list[str]:
        return [
            await sh(sandbox, "tr '\\0' ' ' < /proc/1/cmdline; cat /proc/1/comm; ls /run; ls -A /proc/1/task"),
            await sh(sandbox, "ps -e -o comm= | sort | tr '\\n' ' '"),
            await sh(sandbox, "ls /dev | tr '\\n' ' '; find / -xdev -name '*etude*' 2>/dev/null; true"),
        ]

    first, processes, devices = lab.play(look)
    assert first.split() == ["/sbin/init", "init", "lock", "1"]
    assert processes.split() == ["init", "ps", "sh", "sort", "tr"]
    assert devices.split() == [
        "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"
    ]  # fmt: skip


def test_a_machine_that_dies_fails_its_commands_and_closes(lab: Lab, tmp_path: Path) -> None:
    async def die(sandbox: Sandbox) -> None:
        mine = [pid for pid in machines_below(tmp_path.parent) if pid]
        running = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=TIMEOUT_S))
        await asyncio.sleep(0.3)
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="virtual machine ended"):
            await running
        with pytest.raises(SandboxError):
            await sandbox.read_file("a")

    lab.play(die)


def test_a_booted_machine_is_found_again(lab: Lab, tmp_path: Path) -> None:
    async def again() -> set[tuple[str, int]]:
        provider = QemuSandboxes(scratch=tmp_path)
        try:
            await (await provider.create({})).close()
        finally:
            await provider.close()
        return frozen_disk()

    def frozen_disk() -> set[tuple[str, int]]:
        return {(path.name, path.stat().st_mtime_ns) for path in (ImageStore().folder / "machines").iterdir()}

    lab.play(lambda sandbox: sh(sandbox, "true"))
    assert frozen_disk() == asyncio.run(again())


KILLED = """
import asyncio, sys
from pathlib import Path
from etude.sandboxes.qemu.provider import QemuSandboxes

async def main():
    provider = QemuSandboxes(scratch=Path(sys.argv[1]))
    sandboxes = [await provider.create({}) for _ in range(2)]
    print("made", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_provider_leaves_no_machine_and_the_next_one_no_file(lab: Lab, tmp_path: Path) -> None:
    lab.play(lambda sandbox: sh(sandbox, "true"))  # skips where there are no machines; boots one if need be
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        assert len(machines_below(tmp_path)) == 2
        process.kill()
    wait_until(lambda: not machines_below(tmp_path), every_s=0.05)
    assert list(tmp_path.iterdir()) != []

    async def sweep() -> None:
        provider = QemuSandboxes(scratch=tmp_path)
        await provider.capabilities()
        await provider.close()

    asyncio.run(sweep())
    assert list(tmp_path.iterdir()) == []
