"""gVisor sandboxes beyond the contract: tools that work, refusals with a reason, and no leftovers."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import ConfigError, SandboxError, Unsupported
from etude.protocols import Sandbox
from etude.sandbox_spec import Image, SandboxSpec
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.oci.runtimes import GVISOR
from waiting import until

pytestmark = pytest.mark.heavy("runsc, and root", missing=shutil.which("runsc") is None or os.geteuid() != 0)

T = TypeVar("T")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """An otherwise empty folder for a provider."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of this machine that no sandbox may reach, with a file of its root's."""
    folder = tmp_path / "machine"
    (folder / "inner").mkdir(parents=True, mode=0o700)
    (folder / "inner" / "secret").write_text("secret", encoding="utf-8")
    for path in (folder, folder / "inner", folder / "inner" / "secret"):
        path.chmod(0o700)
    return folder


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Path, mode and owner of everything in a folder."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(path), path.lstat().st_mode, path.lstat().st_uid) for path in paths]


def play(scratch: Path, scenario: Callable[[OciSandboxes, Sandbox], Awaitable[T]]) -> T:
    async def act() -> T:
        provider = OciSandboxes(scratch=scratch)
        try:
            return await scenario(provider, await provider.create({"a": "b"}))
        finally:
            await provider.close()

    result = asyncio.run(act())
    assert list(scratch.iterdir()) == []
    return result


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler for the shim")
def test_tools_work_on_a_runtime_that_is_older_than_they_are(tmp_path: Path) -> None:
    async def look(provider: OciSandboxes, sandbox: Sandbox) -> str:
        result = await sandbox.exec(["sh", "-c", "ls && stat -c %s a && ls -la / | wc -l"], timeout_s=30)
        assert result.stderr == ""
        return result.stdout

    assert play(tmp_path, look).startswith("a\n1\n")


def test_the_machines_null_device_stays_whose_it_is(tmp_path: Path) -> None:
    async def use(provider: OciSandboxes, sandbox: Sandbox) -> int:
        await sandbox.exec(["true"], timeout_s=30)
        (copy,) = await sandbox.fork()
        return (await copy.exec(["true"], timeout_s=30)).exit_code

    before = os.stat("/dev/null").st_uid  # noqa: PTH116 - as the device is known
    assert play(tmp_path, use) == 0
    assert os.stat("/dev/null").st_uid == before  # noqa: PTH116


def test_a_fork_is_refused_while_a_process_holds_outputs_and_nothing_is_lost(tmp_path: Path) -> None:
    async def fork(provider: OciSandboxes, sandbox: Sandbox) -> tuple[str | None, str]:
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
    async def die(provider: OciSandboxes, sandbox: Sandbox) -> None:
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
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.oci.runtimes import GVISOR
from etude.sandboxes.oci.runtimes import GVISOR
from etude.sandbox_spec import Image, SandboxSpec
async def main():
    sandbox = await OciSandboxes(scratch=Path(sys.argv[1])).create({})
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

    async def look(provider: OciSandboxes, sandbox: Sandbox) -> int:
        return len(os.listdir(tmp_path))  # noqa: PTH208 - a folder of a few entries

    assert play(tmp_path, look) == 1
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("place", "is_absolute"),
    [
        *((place, True) for place in ("tmp", "proc", "home", "home/agent", "work", "app/here", "srv", "usr")),
        *((place, False) for place in ("tmp", "app")),
    ],
)
def test_a_link_of_an_image_leads_nowhere_on_the_machine(
    tmp_path: Path, scratch: Path, machine: Path, place: str, is_absolute: bool
) -> None:
    layer, shown = tmp_path / "layer", tmp_path / "shown"
    (layer / place).parent.mkdir(parents=True)
    (layer / place).symlink_to(machine if is_absolute else "../" * 12 + str(machine).lstrip("/"))
    shown.mkdir()
    workdir = "/work/inner" if place == "work" else "/app/here/inner"
    spec = SandboxSpec(image=Image(layers=(layer,), workdir=workdir), mounts={"/srv/inner": shown})

    async def enter(provider: OciSandboxes, sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError, match=f"/{place} is a link, .* make it one in the image"):
            await provider.create({"a": "b"}, spec)
        assert (await sandbox.exec(["cat", "a"], timeout_s=30)).stdout == "b"

    before = state(machine)
    play(scratch, enter)
    assert state(machine) == before


def test_a_snapshot_with_links_leads_nowhere_on_the_machine(scratch: Path, machine: Path) -> None:
    async def enter(provider: OciSandboxes, _: Sandbox) -> None:
        builder = await provider.create({}, SandboxSpec(user="root"))
        script = f"ln -s {machine} /app && rmdir /home/agent && ln -s {machine}/inner /home/agent"
        assert (await builder.exec(["sh", "-c", script], timeout_s=30)).exit_code == 0
        image = await builder.snapshot()
        for workdir, link in (("/app/inner", "/app"), ("/work", "/home/agent")):
            with pytest.raises(SandboxError, match=f"{link} is a link"):
                await provider.create({}, replace(SandboxSpec(), image=replace(image, workdir=workdir)))

    before = state(machine)
    play(scratch, enter)
    assert state(machine) == before


def test_a_fork_of_what_put_a_link_in_the_way_is_refused_and_the_original_goes_on(
    tmp_path: Path, scratch: Path, machine: Path
) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()

    async def fork(provider: OciSandboxes, _: Sandbox) -> str:
        sandbox = await provider.create({}, SandboxSpec(mounts={"/work/a/fresh": shown}))
        script = f"mv a b && ln -s {machine} a"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=30)
        assert (result.exit_code, result.stderr) == (0, "")
        with pytest.raises(SandboxError, match="/work/a is a link"):
            await sandbox.fork()
        return (await sandbox.exec(["echo", "on"], timeout_s=30)).stdout

    before = state(machine)
    assert play(scratch, fork) == "on\n"
    assert state(machine) == before


def test_links_that_nothing_is_built_on_are_an_images_own(tmp_path: Path, scratch: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "srv").mkdir(parents=True)
    (layer / "srv" / "name").symlink_to("/etc/hostname")
    (layer / "opt").symlink_to("srv")

    async def look(provider: OciSandboxes, _: Sandbox) -> str:
        sandbox = await provider.create({}, SandboxSpec(image=Image(layers=(layer,))))
        return (await sandbox.exec(["sh", "-c", "cat /opt/name && touch /tmp/a"], timeout_s=30)).stdout

    assert play(scratch, look) == "sandbox\n"


def test_a_machine_without_the_runtime_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match="apt-get install runsc"):
        OciSandboxes(replace(GVISOR, program="no-such-runsc"))


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
