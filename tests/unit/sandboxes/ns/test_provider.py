"""Namespace sandboxes beyond the contract: they leak nothing and leave nothing behind.

The tests end them in many ways: a killed provider, launcher or first process, daemons, commands that print for ever.
"""

import asyncio
import fnmatch
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import SandboxError, Unsupported
from etude.protocols import ExecResult
from etude.sandbox_spec import WORKDIR, Capability, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.images.archives import read_archive
from etude.sandboxes.images.machine_base import environment_mounts
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.ns.sandbox import NamespaceSandbox
from process_table import children, opened, outlives, owner, seen, settled, state, survivors, until_running
from waiting import until, wait_until

T = TypeVar("T")
Scenario = Callable[[NamespaceSandboxes], Awaitable[T]]

CYCLES = 10_000 if os.environ.get("ETUDE_LONG") else 60
TIMEOUT_S = 30.0
KILLS, MAKING_S = 20, 0.02
"""How often a launcher is killed while it makes sandboxes, which takes it about so long."""
TRIES = 50
"""How often copying is given up, at most, to be given up in the midst of it."""
ROOT = SandboxSpec(user="root")


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    """Skip where the machine grants no namespaces."""

    async def ask() -> frozenset[Capability]:
        provider = NamespaceSandboxes()
        try:
            return await provider.capabilities()
        finally:
            await provider.close()

    if not asyncio.run(ask()):
        pytest.skip("this machine grants no sandboxes with namespaces")


def act(scenario: Scenario[T], scratch: Path | None = None) -> T:
    """Act out a scenario with a provider of its own."""

    async def run() -> T:
        provider = NamespaceSandboxes(scratch=scratch)
        try:
            return await scenario(provider)
        finally:
            await provider.close()

    return asyncio.run(run())


def shell(script: str, spec: SandboxSpec | None = None) -> ExecResult:
    """Run a script in a fresh sandbox."""

    async def run(provider: NamespaceSandboxes) -> ExecResult:
        if spec is ROOT and Capability.IMAGES not in await provider.capabilities():
            pytest.skip("only the machine's root can build images")
        sandbox = await provider.create({}, spec)
        return await sandbox.exec(["sh", "-c", script], timeout_s=TIMEOUT_S)

    return act(run)


# --- What is leaked -----------------------------------------------------------------------------------------------


def test_the_first_process_shows_nothing_of_the_machine() -> None:
    script = "cat /proc/1/comm /proc/1/cmdline; cd /proc/1; cat environ maps; ls fd; readlink -v exe cwd root"
    result = shell(script)
    assert result.stdout == "init\n/sbin/init\0"
    assert result.stderr.count("denied") == 6


def test_the_first_process_has_nothing_open_but_the_null_device() -> None:
    async def look(provider: NamespaceSandboxes) -> list[list[str]]:
        await provider.create({})
        return [opened(process) for process in await until_running(provider.launcher_pid, "init", 1)]

    if os.geteuid() != 0:
        pytest.skip("only root sees what another process has open")
    assert act(look) == [["/dev/null"] * 3]


def test_an_export_leaves_out_what_is_mounted_below_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "harness").write_text("not the agent's")

    async def export(provider: NamespaceSandboxes) -> list[str]:
        spec = SandboxSpec(mounts={f"{WORKDIR}/home/me/tools": tmp_path})
        sandbox = await provider.create({"own.txt": "mine"}, spec)
        result = await sandbox.exec(["sh", "-c", "mkdir empty; ls home/me"], timeout_s=TIMEOUT_S)
        assert result.stdout == "tools\n"
        return [entry.name for entry in read_archive(await sandbox.export(["."]))]

    assert act(export) == ["empty", "own.txt"]


def test_a_command_inherits_nothing_and_sees_no_mount_of_the_machine(tmp_path: Path) -> None:
    async def look(provider: NamespaceSandboxes) -> tuple[str, str]:
        sandbox = await provider.create({})
        shown = await sandbox.exec(["ls", "/proc/self/fd"], timeout_s=TIMEOUT_S)
        mounts = await sandbox.exec(["cat", "/proc/self/mountinfo"], timeout_s=TIMEOUT_S)
        return shown.stdout, mounts.stdout

    shown, mounts = act(look, tmp_path)
    assert shown == "0\n1\n2\n3\n"  # the last is the listing's own
    assert str(tmp_path) not in mounts
    assert "/stage" not in mounts
    assert {line.split()[4] for line in mounts.splitlines()} >= {"/", "/proc", "/dev", "/usr"}


REACH_OUT = """
import socket
for family, address in ((40, (2, 1024)), (38, None), (17, None)):
    try:
        socket.socket(family, 1 if family != 17 else 3)
        print('opened', family)
    except OSError as error:
        print(error.errno)
"""


def test_sockets_that_no_namespace_holds_back_are_refused() -> None:
    async def look(provider: NamespaceSandboxes) -> str:
        sandbox = await provider.create({})
        return (await sandbox.exec(["python3", "-c", REACH_OUT], timeout_s=TIMEOUT_S)).stdout

    assert act(look) == "97\n" * 3  # EAFNOSUPPORT: AF_VSOCK would reach the host of a virtual machine


POWERS = """
exec 2>&1
echo 1 > /proc/sys/kernel/panic && echo wrote panic
echo 3 > /proc/sys/vm/drop_caches && echo wrote drop_caches
mount -t tmpfs none /mnt && echo mounted
mkdir /tmp/x && chroot /tmp/x && echo changed root
unshare -U true && echo made a namespace
mknod /tmp/disk b 254 0 && echo made a device
kill -9 1; kill -STOP 1; prlimit --pid 1 --cpu=1 && echo limited init
test -d /proc/1 && echo alive
"""


@pytest.mark.parametrize("spec", [SandboxSpec(), ROOT], ids=["agent", "root"])
def test_neither_the_agent_nor_the_sandboxes_root_has_power_over_the_machine(spec: SandboxSpec) -> None:
    before = Path("/proc/sys/kernel/panic").read_text(encoding="utf-8")
    result = shell(POWERS, spec)
    assert Path("/proc/sys/kernel/panic").read_text(encoding="utf-8") == before
    words = {line.partition(" ")[0] for line in result.stdout.splitlines()}
    assert words.isdisjoint({"wrote", "mounted", "changed", "made", "limited"})
    assert result.stdout.endswith("alive\n")


def test_the_agent_is_a_user_of_its_own_on_the_machine() -> None:
    async def look(provider: NamespaceSandboxes) -> list[int]:
        sandboxes = [await provider.create({}) for _ in range(2)]
        sleeps = [asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60)) for sandbox in sandboxes]
        users = {owner(process) for process in await until_running(provider.launcher_pid, "sleep", 2)}
        for sleep in sleeps:
            sleep.cancel()
        await asyncio.wait(sleeps)
        return sorted(users)

    if os.geteuid() != 0:
        pytest.skip("without root there is one user")
    first, second = act(look)
    assert first >= 0x70000000
    assert second - first >= 0x10000


# --- What can be reached ------------------------------------------------------------------------------------------

TALK = """
import socket
from concurrent.futures import ThreadPoolExecutor
def say(text, host='{host}'):
    with socket.create_connection((host, {port}), timeout=20) as server:
        server.sendall(text)
        server.shutdown(socket.SHUT_WR)
        return b''.join(iter(lambda: server.recv(65536), b''))
with ThreadPoolExecutor(30) as pool:
    answers = list(pool.map(say, [b'%d' % n for n in range(100)]))
print(answers == [(b'%d' % n)[::-1] for n in range(100)], len(say(bytes(3_000_000))))
with socket.socket() as own:
    own.bind(('192.0.2.1', 0))  # which can be reached, too, so it is the loopback's
    print(socket.gethostbyname('pypi.internal')[:7])
"""


async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write((await reader.read())[::-1])
    writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_many_connections_are_carried_to_a_place_that_is_allowed(host: str) -> None:
    async def talk() -> str:
        server = await asyncio.start_server(reverse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        provider = NamespaceSandboxes()
        try:
            allow = (f"{host}:{port}", "192.0.2.1:80", "pypi.internal:443")
            sandbox = await provider.create({}, SandboxSpec(allow=allow))
            code = TALK.format(host=host, port=port)
            result = await sandbox.exec(["python3", "-c", code], timeout_s=TIMEOUT_S)
            assert result.stderr == ""
            return result.stdout
        finally:
            await provider.close()
            server.close()
            await server.wait_closed()

    assert asyncio.run(talk()) == "True 3000000\n127.77.\n"


def test_programs_that_are_shown_are_found(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho tool\n", encoding="utf-8")
    for path in (tmp_path, tool.parent, tool):
        path.chmod(0o755)

    async def use() -> ExecResult:
        provider = NamespaceSandboxes()
        spec = SandboxSpec(mounts={"/harness": tmp_path} | environment_mounts(tmp_path))
        try:
            script = f"tool; /harness/bin/tool; {tool}; echo x > /harness/x"
            return await (await provider.create({}, spec)).exec(["sh", "-c", script], timeout_s=TIMEOUT_S)
        finally:
            await provider.close()

    result = asyncio.run(use())
    assert result.stdout == "tool\ntool\ntool\n"
    assert "Read-only" in result.stderr


# --- What goes on -------------------------------------------------------------------------------------------------


def test_what_a_daemon_prints_is_read_for_as_long_as_it_prints() -> None:
    async def listen(provider: NamespaceSandboxes) -> str:
        sandbox = await provider.create({})
        script = "(while :; do echo 0123456789012345678901234567890123456789; done) & echo started"
        first = await sandbox.exec(["sh", "-c", f"{script}; echo $! > pid"], timeout_s=TIMEOUT_S)
        assert first.stdout.startswith("started") or "started\n" in first.stdout
        await asyncio.sleep(0.3)
        return (await sandbox.exec(["sh", "-c", "kill -0 $(cat pid) && echo alive"], timeout_s=TIMEOUT_S)).stdout

    assert act(listen) == "alive\n"


def test_a_time_limit_ends_the_session_and_nothing_else() -> None:
    async def limit(provider: NamespaceSandboxes) -> tuple[bool, str]:
        sandbox = await provider.create({})
        keep = "setsid sleep 600 >/dev/null 2>&1 & echo $! > kept"
        await sandbox.exec(["sh", "-c", keep], timeout_s=TIMEOUT_S)
        run = "trap '' TERM INT; sleep 601 & sleep 602 & (sleep 603) & wait; sleep 604"
        late = await sandbox.exec(["sh", "-c", run], timeout_s=0.5)
        left = await sandbox.exec(["sh", "-c", "ps -eo args | grep -o 'sleep 60[0-9]' | sort -u"], timeout_s=TIMEOUT_S)
        return late.timed_out, left.stdout

    assert act(limit) == (True, "sleep 600\n")


def test_limits_hold_for_the_sum_of_all_commands() -> None:
    spec = SandboxSpec(limits=SandboxLimits(processes=20))

    async def crowd(provider: NamespaceSandboxes) -> list[int]:
        sandbox = await provider.create({}, spec)
        sleepers = "for n in $(seq 8); do sleep 60 & done"
        await asyncio.gather(*(sandbox.exec(["sh", "-c", sleepers], timeout_s=TIMEOUT_S) for _ in range(4)))
        return [int((await sandbox.stats()).processes)]

    async def claims(provider: NamespaceSandboxes) -> frozenset[Capability]:
        return await provider.capabilities()

    if Capability.MEMORY_LIMIT not in act(claims):
        pytest.skip("processes are not counted without control groups")
    (count,) = act(crowd)
    assert 10 <= count <= 20


# --- Images -------------------------------------------------------------------------------------------------------


def test_a_layer_of_programs_lies_over_the_machines_own(tmp_path: Path) -> None:
    tool = tmp_path / "layer" / "usr" / "local" / "bin" / "own-tool"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho own\n", encoding="utf-8")
    for path in (tmp_path, *tool.parents[:4], tool):
        path.chmod(0o755)

    async def run(provider: NamespaceSandboxes) -> str:
        if Capability.IMAGES not in await provider.capabilities():
            pytest.skip("only the machine's root can build images")
        sandbox = await provider.create({}, SandboxSpec(image=Image(layers=(tmp_path / "layer",))))
        use = "own-tool; test -x /usr/bin/env && echo theirs"
        return (await sandbox.exec(["sh", "-c", use], timeout_s=TIMEOUT_S)).stdout

    assert act(run) == "own\ntheirs\n"


@pytest.mark.parametrize("spec", [SandboxSpec(), ROOT], ids=["agent", "root"])
def test_a_link_in_a_layer_leads_to_nothing_of_the_machine(tmp_path: Path, spec: SandboxSpec) -> None:
    machines, lower, upper = tmp_path / "machines", tmp_path / "lower", tmp_path / "upper"
    (upper / "usr").mkdir(parents=True)  # over the link, which would be no place for programs
    lower.mkdir()
    (lower / "usr").symlink_to(machines)
    machines.mkdir()
    (machines / "secret").write_text("told", encoding="utf-8")
    for path in (tmp_path, machines, lower, upper, upper / "usr"):
        path.chmod(0o755)

    async def look(provider: NamespaceSandboxes) -> ExecResult:
        if Capability.IMAGES not in await provider.capabilities():
            pytest.skip("only the machine's root can build images")
        sandbox = await provider.create({}, replace(spec, image=Image(layers=(lower, upper))))
        return await sandbox.exec(["cat", "/usr/secret"], timeout_s=TIMEOUT_S)

    seen = act(look)
    assert seen.stdout == ""
    assert "No such file" in seen.stderr


def test_without_root_what_cannot_be_held_to_is_refused() -> None:
    async def build(provider: NamespaceSandboxes) -> None:
        if Capability.IMAGES in await provider.capabilities():
            pytest.skip("we are root")
        with pytest.raises(Unsupported, match="as root"):
            await provider.create({}, ROOT)
        with pytest.raises(Unsupported, match="as root"):
            await (await provider.create({})).snapshot()

    act(build)


# --- What is left -------------------------------------------------------------------------------------------------


def test_nothing_is_left_after_many_sandboxes(tmp_path: Path) -> None:
    async def cycle(provider: NamespaceSandboxes, number: int) -> None:
        sandbox = await provider.create({"a": "b"})
        await sandbox.exec(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & trap '' TERM; echo x > left"])
        if number % 10 == 0:
            (fork,) = await sandbox.fork()
            await fork.exec(["true"])
            await fork.close()
        await sandbox.close()

    async def many(provider: NamespaceSandboxes) -> list[int]:
        await asyncio.gather(*(cycle(provider, number) for number in range(10)))
        before = await settled(lambda: remains(provider))
        for start in range(0, CYCLES, 10):
            await asyncio.gather(*(cycle(provider, start + number) for number in range(10)))
        return await seen(lambda: grown(before, remains(provider)), [])

    def remains(provider: NamespaceSandboxes) -> list[int]:
        assert provider.launcher_pid is not None
        return [
            len(children(provider.launcher_pid)),
            sum(not name.startswith("user:") for name in opened(provider.launcher_pid)),  # those are used again
            len(list(Path("/proc/self/fd").iterdir())),
            len(groups(provider.launcher_pid)),
            len(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()),
            sum(1 for _ in tmp_path.rglob("layer-*")),
        ]

    assert act(many, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_closing_a_provider_ends_everything(tmp_path: Path) -> None:
    async def use(provider: NamespaceSandboxes) -> tuple[int, NamespaceSandbox]:
        sandbox = await provider.create({})
        await sandbox.exec(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"])
        assert provider.launcher_pid is not None
        return provider.launcher_pid, sandbox

    launcher, sandbox = act(use, tmp_path)
    assert not Path(f"/proc/{launcher}").exists()
    assert groups(launcher) == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SandboxError):
        asyncio.run(sandbox.exec(["true"]))


# --- Trouble ------------------------------------------------------------------------------------------------------


def test_a_first_process_that_is_killed_takes_its_sandbox_with_it_and_no_other() -> None:
    async def kill(provider: NamespaceSandboxes) -> str:
        doomed, other = await provider.create({}), await provider.create({})
        asleep = asyncio.ensure_future(doomed.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.3)
        os.kill(min(await until_running(provider.launcher_pid, "init", 2)), signal.SIGKILL)
        with pytest.raises(SandboxError, match="died"):
            await asleep
        with pytest.raises(SandboxError, match="died"):
            await doomed.read_file("x")
        await doomed.close()
        return (await other.exec(["echo", "other"], timeout_s=TIMEOUT_S)).stdout

    assert act(kill) == "other\n"


def test_a_launcher_that_is_killed_takes_all_with_it_and_is_replaced() -> None:
    async def kill(provider: NamespaceSandboxes) -> tuple[list[int], str]:
        sandbox = await provider.create({})
        running = asyncio.ensure_future(sandbox.exec(["sleep", "61"], timeout_s=60))
        await asyncio.sleep(0.3)
        launcher = provider.launcher_pid
        assert launcher is not None
        below = await settled(lambda: children(launcher))
        os.kill(launcher, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await running
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        again = await provider.create({})
        output = (await again.exec(["echo", "again"], timeout_s=TIMEOUT_S)).stdout
        await sandbox.close()
        return [process for process in below if await outlives(process)], output

    assert act(kill) == ([], "again\n")


def test_a_command_that_does_not_end_when_it_is_killed_fails_its_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sandboxes.ns.sandbox.GRACE_S", 0.5)

    async def freeze(provider: NamespaceSandboxes) -> None:
        sandbox = await provider.create({})
        launcher = provider.launcher_pid
        assert launcher is not None
        running = asyncio.ensure_future(sandbox.exec(["sleep", "61"], timeout_s=0.5))
        await asyncio.sleep(0.2)
        os.kill(launcher, signal.SIGSTOP)
        try:
            with pytest.raises(SandboxError, match="did not end within"):
                await running
        finally:
            os.kill(launcher, signal.SIGCONT)

    act(freeze)


def test_a_launcher_that_is_killed_while_it_makes_sandboxes_leaves_none() -> None:
    async def kill(provider: NamespaceSandboxes) -> list[int]:
        left: list[int] = []
        for number in range(KILLS):
            await provider.create({})
            launcher = provider.launcher_pid
            assert launcher is not None
            making = [asyncio.ensure_future(provider.create({})) for _ in range(4)]
            await asyncio.sleep(number / KILLS * MAKING_S)
            os.kill(launcher, signal.SIGSTOP)
            below = children(launcher)
            os.kill(launcher, signal.SIGKILL)
            await asyncio.gather(*making, return_exceptions=True)
            left += await survivors(below)
        return left

    assert act(kill) == []


def test_a_caller_cancelled_as_a_launcher_dies_is_cancelled() -> None:
    async def kill(provider: NamespaceSandboxes) -> bool:
        await provider.create({})
        launcher = provider.launcher_pid
        assert launcher is not None
        os.kill(launcher, signal.SIGSTOP)
        making = asyncio.ensure_future(provider.create({}))
        await asyncio.sleep(0.01)
        os.kill(launcher, signal.SIGKILL)
        while "(zombie)" not in state(launcher):
            pass  # and hear nothing of it
        making.cancel()
        await asyncio.wait([making])
        return making.cancelled()

    assert act(kill)


LAUNCH = """
import asyncio, sys
from pathlib import Path
from etude.sandboxes.ns.provider import NamespaceSandboxes
async def main():
    provider = NamespaceSandboxes(scratch=Path(sys.argv[1]))
    sandbox = await provider.create({})
    await sandbox.exec(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo up"])
    print(provider.launcher_pid, flush=True)
    await sandbox.exec(["sleep", "62"], timeout_s=60)
asyncio.run(main())
"""


def test_a_provider_that_is_killed_takes_all_with_it_and_its_folder_is_swept(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as provider:
        assert provider.stdout is not None
        launcher = int(provider.stdout.readline())
        below = [launcher, *children(launcher)]
        provider.kill()
    assert asyncio.run(survivors(below)) == []
    assert groups(launcher) == []
    assert len(list(tmp_path.iterdir())) == 1

    async def sweep(provider: NamespaceSandboxes) -> None:
        await provider.create({})

    act(sweep, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_groups_of_a_launcher_that_was_killed_are_swept_by_the_next() -> None:
    async def kill(provider: NamespaceSandboxes) -> tuple[int, list[Path]]:
        await provider.create({})
        launcher = provider.launcher_pid
        assert launcher is not None
        left = len(groups(launcher))
        os.kill(launcher, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{launcher}").exists())
        await provider.create({})
        return left, groups(launcher)

    left, after = act(kill)
    assert after == []
    assert left > 0 or os.geteuid() != 0


def test_a_launcher_that_was_killed_unnoticed_has_a_successor() -> None:
    async def kill(provider: NamespaceSandboxes) -> str:
        await provider.create({})
        launcher = provider.launcher_pid
        assert launcher is not None
        os.kill(launcher, signal.SIGKILL)
        wait_until(lambda: "(zombie)" in state(launcher), fault=lambda: "it lives")  # the event loop stands still
        sandbox = await provider.create({})
        return (await sandbox.exec(["echo", "made"], timeout_s=TIMEOUT_S)).stdout

    assert act(kill) == "made\n"


def test_a_launcher_that_is_killed_before_it_answers_has_a_successor() -> None:
    async def kill(provider: NamespaceSandboxes) -> str:
        await provider.create({})
        launcher = provider.launcher_pid
        assert launcher is not None
        os.kill(launcher, signal.SIGSTOP)  # it is sent the request, and reads nothing
        making = asyncio.create_task(provider.create({}))
        await asyncio.wait({making}, timeout=0.1)
        assert not making.done()
        os.kill(launcher, signal.SIGKILL)
        return (await (await making).exec(["echo", "made"], timeout_s=TIMEOUT_S)).stdout

    assert act(kill) == "made\n"


def test_a_sandbox_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "agent").symlink_to("/tmp")  # what an image has there is made the agent's, later than the rest
    mounted, layered = SandboxSpec(mounts={"/tool": tmp_path / "nowhere"}), SandboxSpec(image=Image(layers=(tmp_path,)))

    def remains(provider: NamespaceSandboxes) -> list[int]:
        return [len(children(provider.launcher_pid)), len(groups(provider.launcher_pid))]

    async def fail(provider: NamespaceSandboxes) -> list[int]:
        await provider.create({})
        before = await settled(lambda: remains(provider))
        for files in ({"../out": ""}, {"a": "", "a/b": ""}):
            with pytest.raises(ValueError, match="sandbox"):
                await provider.create(files)
        for spec in (mounted, layered):
            with pytest.raises(SandboxError):
                await provider.create({}, spec)
        return await seen(lambda: grown(before, remains(provider)), [])

    assert act(fail) == []


def test_cancelled_copies_leave_nothing() -> None:
    async def give_up(provider: NamespaceSandboxes) -> None:
        sandbox = await provider.create({})
        before = await settled(lambda: len(children(provider.launcher_pid)))
        for _ in range(TRIES):  # until one is given up before all copies are made
            forking = asyncio.ensure_future(sandbox.fork(12))
            while not forking.done() and len(children(provider.launcher_pid)) < before + 4:
                await asyncio.sleep(0.001)
            forking.cancel()
            await asyncio.wait([forking])
            if forking.cancelled():
                break
            for copy in forking.result():
                await copy.close()
        else:
            raise AssertionError(f"of {TRIES} tries all were done before they were given up")
        await until(lambda: len(children(provider.launcher_pid)) <= before)

    act(give_up)


def grown(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Increases of counts; a decrease is no fault, as something was still being removed before."""
    return [later - earlier for earlier, later in zip(before, now, strict=True) if later > earlier]


def groups(launcher: int | None) -> list[Path]:
    """The control groups of a launcher; ``os.walk`` skips groups of others that vanish meanwhile."""
    walk = os.walk("/sys/fs/cgroup")
    return [Path(parent) / name for parent, names, _ in walk for name in fnmatch.filter(names, f"etude-*-{launcher}-*")]
