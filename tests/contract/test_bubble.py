"""What bubblewrap sandboxes promise beyond the contract: a real system, one door, and nothing else of the machine."""

import asyncio
import glob
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import ConfigError, SandboxError
from etude.protocols import ExecResult, Sandbox
from etude.sandboxes.bubble import DOOR_URL, BubbleSandboxes
from etude.sandboxes.ns_base import environment_mounts
from etude.worlds import WORKDIR

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

T = TypeVar("T")


class Echo:
    """A server that answers every connection with what it was sent, backwards."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                connection.sendall(stream.read()[::-1])


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def play(provider: BubbleSandboxes, scenario: Callable[[Sandbox], Awaitable[T]]) -> T:
    """Act out a scenario in a fresh sandbox of a provider that is closed afterwards."""

    async def act() -> T:
        try:
            return await scenario(await provider.create({"mine.txt": "mine"}))
        finally:
            await provider.close()

    return asyncio.run(act())


def shell(provider: BubbleSandboxes, script: str, *, timeout_s: float = 20.0) -> ExecResult:
    return play(provider, lambda sandbox: sandbox.exec(["sh", "-c", script], timeout_s=timeout_s))


def python(provider: BubbleSandboxes, code: str, *, timeout_s: float = 20.0) -> ExecResult:
    return play(provider, lambda sandbox: sandbox.exec(["python3", "-c", code], timeout_s=timeout_s))


# --- the door -----------------------------------------------------------------------------------------------------

TALK = """
import socket
def say(text):
    with socket.create_connection(("127.0.0.1", {port}), timeout=10) as server:
        server.sendall(text)
        server.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: server.recv(65536), b""))
"""


def talk(port: int = int(DOOR_URL.rpartition(":")[2])) -> str:
    return TALK.format(port=port)


def test_the_door_leads_to_its_address(echo: Echo) -> None:
    code = talk() + "print(say(b'abc'), len(say(bytes(3_000_000))))"
    assert python(BubbleSandboxes(door=f"http://127.0.0.1:{echo.port}/"), code).stdout == "b'cba' 3000000\n"


def test_many_use_the_door_at_once(echo: Echo) -> None:
    code = talk() + (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(40) as pool:\n"
        "    answers = list(pool.map(say, [b'%d' % n for n in range(200)]))\n"
        "print(answers == [(b'%d' % n)[::-1] for n in range(200)])\n"
    )
    assert python(BubbleSandboxes(door=f"http://127.0.0.1:{echo.port}"), code).stdout == "True\n"


def test_a_door_to_nobody_ends_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = talk() + "try:\n    print(say(b'abc'))\nexcept OSError as error:\n    print(error.errno)"
    result = python(BubbleSandboxes(door=f"http://127.0.0.1:{port}"), code)
    assert result.stdout in ("b''\n", "104\n", "32\n")


def test_nothing_but_the_door_can_be_reached(echo: Echo) -> None:
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(b"\0etude-test-abstract")
    abstract.listen()
    code = (
        "import socket\n"
        "def reach(family, address):\n"
        "    with socket.socket(family) as s:\n"
        "        s.settimeout(3)\n"
        "        try:\n            s.connect(address)\n            print('reached', address)\n"
        "        except OSError as error:\n            print(type(error).__name__)\n"
        f"reach(socket.AF_INET, ('127.0.0.1', {echo.port}))\n"
        "reach(socket.AF_INET, ('192.0.2.1', 80))\n"
        "reach(socket.AF_INET6, ('::1', 80))\n"
        "reach(socket.AF_UNIX, b'\\0etude-test-abstract')\n"
        "print(socket.if_nameindex())\n"
    )
    with abstract:
        result = python(BubbleSandboxes(door=f"http://127.0.0.1:{echo.port}"), code)
    assert "reached" not in result.stdout
    assert result.stdout.endswith("[(1, 'lo')]\n")
    assert len(result.stdout.splitlines()) == 5


def test_without_a_door_there_is_none() -> None:
    result = python(BubbleSandboxes(), talk() + "say(b'abc')")
    assert "ConnectionRefusedError" in result.stderr


@pytest.mark.parametrize("url", ["gateway:80", "ftp://127.0.0.1", ""])
def test_a_door_leads_to_a_web_address(url: str) -> None:
    with pytest.raises(ValueError, match="door"):
        BubbleSandboxes(door=url)


# --- what is seen -------------------------------------------------------------------------------------------------


def test_files_of_the_machine_are_unseen(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    look = f"cat {tmp_path}/secret.txt; cat {__file__}; cat /etc/shadow; ls -A /tmp ~ /home; ls -A {WORKDIR}"
    result = shell(BubbleSandboxes(), look)
    assert result.stdout == "/home:\nagent\n\n/home/agent:\n\n/tmp:\nmine.txt\n"
    assert result.stderr.count("No such file") == 3


def test_the_system_is_there_and_cannot_be_written() -> None:
    script = "id -un; hostname; touch /usr/x /etc/x /x /proc/sys/vm/drop_caches; echo 1 > /proc/sys/vm/drop_caches"
    result = shell(BubbleSandboxes(), script)
    assert result.stdout == "agent\nsandbox\n"
    assert len(result.stderr.splitlines()) >= 3


def test_work_home_and_tmp_can_be_written_and_only_work_stays() -> None:
    async def twice(sandbox: Sandbox) -> tuple[str, str | None]:
        first = await sandbox.exec(["sh", "-c", f"cd {WORKDIR} && for f in a ~/b /tmp/c; do echo x > $f; done"])
        assert (first.exit_code, first.stderr) == (0, "")
        second = await sandbox.exec(["sh", "-c", "ls a ~/b /tmp/c; pwd"])
        return second.stdout, await sandbox.read_file("a")

    assert play(BubbleSandboxes(), twice) == (f"a\n{WORKDIR}\n", "x\n")


def test_a_mount_is_seen_where_it_is_and_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    tmp_path.chmod(0o755)
    mounts = {"/harness": tmp_path} | environment_mounts(tmp_path)
    result = shell(BubbleSandboxes(mounts=mounts), f"tool; /harness/bin/tool; {tool}; echo x > /harness/x")
    assert result.stdout == "tool\ntool\ntool\n"
    assert "Read-only" in result.stderr


def test_a_python_environment_brings_its_python() -> None:
    mounts = environment_mounts(Path(sys.prefix))
    assert str(Path(sys.prefix)) in mounts
    base = Path(sys.base_prefix)
    assert base.is_relative_to("/usr") or str(base) in mounts


def test_a_mount_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        BubbleSandboxes(mounts={"/harness": tmp_path / "nowhere"})


def test_a_machine_without_bubblewrap_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        BubbleSandboxes(program="no-such-bwrap")


# --- who a command is ---------------------------------------------------------------------------------------------

POWERS = """
import os, re
status = open("/proc/self/status").read()
print(re.findall(r"Cap(?:Eff|Prm|Inh|Amb):\\t(\\w+)|NoNewPrivs:\\t(\\d)", status), os.getuid() != 0)
for path in ("/proc/1/environ", "/proc/1/fd", "/proc/1/mem"):
    try:
        os.listdir(path) if path.endswith("fd") else open(path, "rb").read(1)
        print("saw", path)
    except OSError as error:
        print(type(error).__name__)
import ctypes
print(ctypes.CDLL(None).unshare(0x10000000))
print([fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3])
print(sorted(os.environ))
"""


def test_a_command_has_no_powers_and_nothing_of_the_provider() -> None:
    result = python(BubbleSandboxes(), POWERS)
    none, set_once = ("0" * 16, ""), ("", "1")
    expected = [str([none, none, none, none, set_once]) + " True", *["PermissionError"] * 3, "-1", "[]"]
    assert result.stdout.splitlines()[:-1] == expected
    assert "PYTHONPATH" not in result.stdout


def test_a_command_cannot_end_process_1() -> None:
    result = python(BubbleSandboxes(), "import os\nfor n in (2, 9, 15):\n    os.kill(1, n)\nprint('alive')")
    assert (result.stdout, result.exit_code) == ("alive\n", 0)


def test_orphans_are_collected() -> None:
    """Else a harness that leaves many would meet its limit of processes."""
    code = (
        "import os, time\n"
        "for _ in range(30):\n    if os.fork() == 0:\n        os.fork()\n        os._exit(0)\n    os.wait()\n"
        "time.sleep(2.5)\n"
        "print(sum(open(f'/proc/{p}/stat').read().split()[2] == 'Z' for p in os.listdir('/proc') if p.isdigit()))\n"
    )
    assert python(BubbleSandboxes(), code).stdout == "0\n"


# --- ends ---------------------------------------------------------------------------------------------------------

STAY = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nif os.fork(): time.sleep(60)\nos.setsid()\n"
STAY += "while True:\n    open('alive', 'a').write('x')\n    time.sleep(0.01)\n"


def test_giving_up_a_command_ends_all_of_it() -> None:
    async def give_up(sandbox: Sandbox) -> bool:
        running = asyncio.ensure_future(sandbox.exec(["python3", "-c", STAY], timeout_s=60))
        while not await sandbox.read_file("alive"):
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        before = await sandbox.read_file("alive")
        await asyncio.sleep(0.2)
        return before == await sandbox.read_file("alive")

    assert play(BubbleSandboxes(), give_up)


LAUNCH = """
import asyncio, sys
from pathlib import Path
from etude.sandboxes.bubble import BubbleSandboxes
async def main():
    sandbox = await BubbleSandboxes(scratch=Path(sys.argv[1])).create({})
    await sandbox.exec(["python3", "-c", sys.argv[2]], timeout_s=60)
asyncio.run(main())
"""


def test_a_command_dies_with_its_provider() -> None:
    async def watch() -> None:
        with tempfile.TemporaryDirectory() as folder:
            provider = await asyncio.create_subprocess_exec(sys.executable, "-c", LAUNCH, folder, STAY)
            try:
                alive = await appearance(Path(folder), "*/000001/alive")
            finally:
                os.kill(provider.pid, signal.SIGKILL)
                await provider.wait()
            size = -1
            for _ in range(50):
                if alive.stat().st_size == size:
                    return
                size = alive.stat().st_size
                await asyncio.sleep(0.2)
            raise AssertionError("the command goes on without its provider")

    asyncio.run(watch())


async def appearance(folder: Path, pattern: str) -> Path:
    """The first file of a pattern, once there is one."""
    for _ in range(200):
        if found := glob.glob(str(folder / pattern)):  # noqa: PTH207 - of files that come and go
            return Path(found[0])
        await asyncio.sleep(0.1)
    raise AssertionError(f"no {pattern} in {folder}")


def test_a_bubble_that_cannot_be_made_is_an_error_of_the_sandbox(tmp_path: Path) -> None:
    source = tmp_path / "soon-gone"
    source.mkdir()

    async def too_late(sandbox: Sandbox) -> None:
        source.rmdir()
        with pytest.raises(SandboxError, match="soon-gone"):
            await sandbox.exec(["true"])

    play(BubbleSandboxes(mounts={"/harness": source}), too_late)


def test_sandboxes_made_together_share_one_folder_and_door(tmp_path: Path, echo: Echo) -> None:
    async def use() -> list[str]:
        provider = BubbleSandboxes(scratch=tmp_path, door=f"http://127.0.0.1:{echo.port}")
        try:
            sandboxes = await asyncio.gather(*(provider.create({}) for _ in range(5)))
            said = [
                sandbox.exec(["python3", "-c", talk() + "print(say(b'abc'))"], timeout_s=20) for sandbox in sandboxes
            ]
            return [result.stdout for result in await asyncio.gather(*said)]
        finally:
            await provider.close()

    assert asyncio.run(use()) == ["b'cba'\n"] * 5
    assert list(tmp_path.iterdir()) == []


def test_closing_the_provider_leaves_no_file(tmp_path: Path, echo: Echo) -> None:
    async def use() -> None:
        provider = BubbleSandboxes(scratch=tmp_path, door=f"http://127.0.0.1:{echo.port}")
        sandbox = await provider.create({"a": "b"})
        await sandbox.exec(["true"])
        await provider.close()
        await provider.close()
        with pytest.raises(SandboxError, match="closed"):
            await provider.create({})
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.exec(["true"])

    asyncio.run(use())
    assert list(tmp_path.iterdir()) == []
