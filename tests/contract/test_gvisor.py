"""What gVisor sandboxes promise beyond the contract: tools that work, honest refusals, and nothing that is left."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import ConfigError, SandboxError, Unsupported
from etude.protocols import Sandbox
from etude.sandboxes.gvisor import GvisorSandboxes
from patience import until

pytestmark = pytest.mark.skipif(shutil.which("runsc") is None or os.geteuid() != 0, reason="it needs runsc, and root")

T = TypeVar("T")


def play(scratch: Path, scenario: Callable[[GvisorSandboxes, Sandbox], Awaitable[T]]) -> T:
    async def act() -> T:
        provider = GvisorSandboxes(scratch=scratch)
        try:
            return await scenario(provider, await provider.create({"a": "b"}))
        finally:
            await provider.close()

    result = asyncio.run(act())
    assert list(scratch.iterdir()) == []
    return result


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler for the shim")
def test_tools_work_on_a_runtime_that_is_older_than_they_are(tmp_path: Path) -> None:
    async def look(provider: GvisorSandboxes, sandbox: Sandbox) -> str:
        result = await sandbox.exec(["sh", "-c", "ls && stat -c %s a && ls -la / | wc -l"], timeout_s=30)
        assert result.stderr == ""
        return result.stdout

    assert play(tmp_path, look).startswith("a\n1\n")


def test_the_machines_null_device_stays_whose_it_is(tmp_path: Path) -> None:
    async def use(provider: GvisorSandboxes, sandbox: Sandbox) -> int:
        await sandbox.exec(["true"], timeout_s=30)
        (copy,) = await sandbox.fork()
        return (await copy.exec(["true"], timeout_s=30)).exit_code

    before = os.stat("/dev/null").st_uid  # noqa: PTH116 - as the device is known
    assert play(tmp_path, use) == 0
    assert os.stat("/dev/null").st_uid == before  # noqa: PTH116


def test_a_fork_is_refused_while_a_process_holds_outputs_and_nothing_is_lost(tmp_path: Path) -> None:
    async def fork(provider: GvisorSandboxes, sandbox: Sandbox) -> tuple[str | None, str]:
        begin = "setsid sh -c 'echo $$ > pid; exec sleep 1000' & until [ -s pid ]; do sleep 0.01; done"
        await sandbox.exec(["sh", "-c", begin], timeout_s=30)
        with pytest.raises(Unsupported, match="redirected"):
            await sandbox.fork()
        end = "kill $(cat pid); while [ -h /proc/$(cat pid)/fd/1 ]; do sleep 0.01; done"
        await sandbox.exec(["sh", "-c", end], timeout_s=30)
        (copy,) = await sandbox.fork()
        return await copy.read_file("a"), (await sandbox.exec(["echo", "on"], timeout_s=30)).stdout

    assert play(tmp_path, fork) == ("b", "on\n")


def test_a_sentry_that_dies_is_an_error_of_the_sandbox(tmp_path: Path) -> None:
    async def die(provider: GvisorSandboxes, sandbox: Sandbox) -> None:
        running = asyncio.ensure_future(sandbox.exec(["sleep", "100"], timeout_s=60))
        await asyncio.sleep(1.0)
        for process in below(os.getpid()):
            if b"runsc-sandbox" in cmdline(process):
                os.kill(process, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.exec(["true"])

    play(tmp_path, die)


LAUNCH = """
import asyncio, sys
from pathlib import Path
from etude.sandboxes.gvisor import GvisorSandboxes
async def main():
    sandbox = await GvisorSandboxes(scratch=Path(sys.argv[1])).create({})
    print("up", flush=True)
    await sandbox.exec(["sleep", "1000"], timeout_s=1000)
asyncio.run(main())
"""


def test_everything_dies_with_its_provider_and_the_next_one_sweeps(tmp_path: Path) -> None:
    async def kill() -> None:
        launched = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LAUNCH, str(tmp_path), stdout=asyncio.subprocess.PIPE
        )
        assert launched.stdout is not None
        assert await asyncio.wait_for(launched.stdout.readline(), 60) == b"up\n"
        mine = [process for process in below(launched.pid) if process != launched.pid]
        assert len(mine) >= 4
        launched.kill()
        await launched.wait()
        await until(lambda: not any(str(tmp_path).encode() in cmdline(process) for process in processes()), every_s=0.1)

    asyncio.run(kill())

    async def look(provider: GvisorSandboxes, sandbox: Sandbox) -> int:
        return len(os.listdir(tmp_path))  # noqa: PTH208 - a folder of a few entries

    assert play(tmp_path, look) == 1
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


def test_a_machine_without_the_runtime_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match="apt-get install runsc"):
        GvisorSandboxes(program="no-such-runsc")


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def cmdline(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def below(process: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [process, *(deeper for child in children for deeper in below(int(child)))]
