"""What every sandbox provider promises, and what it must prove before it claims a capability."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import pytest

from etude.errors import SandboxError
from etude.protocols import ExecResult, Sandbox
from etude.sandboxes.bubble import BubbleSandboxes
from etude.sandboxes.isolation import PROGRAM_LIMITS
from etude.sandboxes.local import OUTPUT_LIMIT_BYTES, LocalSandboxes

T = TypeVar("T")
Provider: TypeAlias = LocalSandboxes | BubbleSandboxes

LOCAL: dict[str, Callable[[Path], LocalSandboxes]] = {
    "local": lambda scratch: LocalSandboxes(1, scratch),
    "local without namespaces": lambda scratch: LocalSandboxes(1, scratch, isolate=False),
}
"""Those that fork the interpreter they have, which differs from a new one in a few ways."""
PROVIDERS: dict[str, Callable[[Path], Provider]] = {
    **LOCAL,
    "bubblewrap": lambda scratch: BubbleSandboxes(scratch=scratch, limits=PROGRAM_LIMITS),
}

NO_FILE = r"sandbox|is not a file"


P = TypeVar("P", bound=Provider)


class World(Generic[P]):
    """A provider with an event loop of its own."""

    def __init__(self, provider: P, runner: asyncio.Runner, scratch: Path) -> None:
        self.provider = provider
        self.scratch = scratch
        self._runner = runner

    def play(self, scenario: Callable[[Sandbox], Awaitable[T]], files: Mapping[str, str] | None = None) -> T:
        """Act out a scenario in a fresh sandbox."""

        async def act() -> T:
            sandbox = await self.provider.create(files or {})
            try:
                return await scenario(sandbox)
            finally:
                await sandbox.close()

        return self._runner.run(act())

    def python(self, code: str, *, stdin: str = "", timeout_s: float = 10.0) -> ExecResult:
        """Run a program in a fresh sandbox."""
        return self.play(lambda sandbox: sandbox.exec(["python", "-c", code], stdin=stdin, timeout_s=timeout_s))

    def require(self, capability: str) -> None:
        """Skip the test where the provider does not claim a capability."""
        if not self.provider.capabilities[capability]:
            pytest.skip(f"does not claim {capability}")


@pytest.fixture(scope="module", params=PROVIDERS)
def world(request: pytest.FixtureRequest) -> Iterator[World[Provider]]:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    yield from worlds(PROVIDERS[request.param])


@pytest.fixture(scope="module", params=LOCAL)
def local(request: pytest.FixtureRequest) -> Iterator[World[LocalSandboxes]]:
    yield from worlds(LOCAL[request.param])


def worlds(make: Callable[[Path], P]) -> Iterator[World[P]]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        scratch = Path(folder)
        scratch.chmod(0o711)  # without chroot, the commands' user must get there
        world = World(make(scratch), runner, scratch)
        world.python("")
        yield world
        runner.run(world.provider.close())
        assert list(scratch.iterdir()) == []


# --- A command and its result -------------------------------------------------------------------------------------


def test_a_program_reads_stdin_and_its_arguments(world: World[Provider]) -> None:
    files = {"echo.py": "import sys\nprint(sys.argv, __name__, input())"}
    result = world.play(lambda sandbox: sandbox.exec(["python3", "echo.py", "a"], stdin="hello\n"), files)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "['echo.py', 'a'] __main__ hello\n", "")
    assert not result.timed_out
    assert not result.truncated


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('bye')", 1, "bye\n"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", 137, ""),
        ("import sys; print('oops', file=sys.stderr)", 0, "oops\n"),
    ],
)
def test_exit_codes_are_those_of_an_interpreter(world: World[Provider], code: str, exit_code: int, stderr: str) -> None:
    result = world.python(code)
    assert (result.exit_code, result.stderr) == (exit_code, stderr)


def test_an_exception_leaves_a_traceback_of_the_program_alone(world: World[Provider]) -> None:
    files = {"bad.py": "def f():\n    return 1 / 0\n\nf()\n"}
    result = world.play(lambda sandbox: sandbox.exec(["python", "bad.py"]), files)
    assert result.exit_code == 1
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert result.stderr.count("File ") == 2
    assert "return 1 / 0" in result.stderr


def test_modules_of_the_sandbox_can_be_imported(world: World[Provider]) -> None:
    files = {"pkg/part.py": "value = 42", "main.py": "from pkg.part import value\nprint(value)"}
    assert world.play(lambda sandbox: sandbox.exec(["python", "main.py"]), files).stdout == "42\n"


@pytest.mark.parametrize(("argv", "exit_code"), [(["no-such-program"], 127), (["python", "no-such-file.py"], 2)])
def test_a_missing_program_is_a_result(world: World[Provider], argv: list[str], exit_code: int) -> None:
    result = world.play(lambda sandbox: sandbox.exec(argv))
    assert result.exit_code == exit_code
    assert argv[-1] in result.stderr


def test_a_command_line_that_does_not_fit_is_the_callers_error(world: World[Provider]) -> None:
    with pytest.raises(SandboxError, match="use a file or stdin"):
        world.python("#" * 200_000)
    assert world.python("print(input())", stdin="x" * 60_000).stdout == "x" * 60_000 + "\n"


def test_hashing_is_the_same_everywhere(local: World[LocalSandboxes]) -> None:
    assert len({local.python("print(hash('word'))").stdout for _ in range(2)}) == 1


# --- Limits -------------------------------------------------------------------------------------------------------


def test_an_endless_loop_is_killed_at_its_deadline(world: World[Provider]) -> None:
    result = world.python("print('started', flush=True)\nwhile True: pass", timeout_s=1.0)
    assert result.timed_out
    assert (result.exit_code, result.stdout) == (137, "started\n")
    assert 1.0 <= result.seconds < 3


def test_a_flood_of_output_is_cut(world: World[Provider]) -> None:
    result = world.python("for _ in range(100): print('x' * 9999)")
    assert (result.exit_code, result.truncated) == (0, True)
    assert len(result.stdout) == OUTPUT_LIMIT_BYTES


def test_a_flood_without_end_still_meets_its_deadline(world: World[Provider]) -> None:
    result = world.python("while True: print('x' * 9999)", timeout_s=1.0)
    assert (result.timed_out, result.truncated) == (True, True)


def test_a_memory_bomb_fails_in_its_own_process(world: World[Provider]) -> None:
    result = world.python("x = bytearray(1 << 30)")
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


def test_a_file_cannot_grow_without_bound(world: World[Provider]) -> None:
    result = world.python("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    assert "File too large" in result.stderr


def test_processes_cannot_use_up_the_machine(world: World[Provider]) -> None:
    world.require("process_limit")
    result = world.python(
        "import os, time\n"
        "for count in range(1000):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    print(count, flush=True)\n"
    )
    assert "BlockingIOError" in result.stderr
    assert len(result.stdout.splitlines()) < 100


LEFTOVER = """
import os, signal, time
for detach in (False, True):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if detach:
            os.setsid()
            if os.fork():
                os._exit(0)
        while True:
            with open(f"alive{detach}", "a") as file:
                file.write("x")
            time.sleep(0.01)
time.sleep(0.1)
"""


def test_nothing_outlives_its_command(world: World[Provider]) -> None:
    async def watch(sandbox: Sandbox) -> list[tuple[str | None, str | None]]:
        result = await sandbox.exec(["python", "-c", LEFTOVER])
        assert result.exit_code == 0
        seen = []
        for _ in range(2):
            seen.append((await sandbox.read_file("aliveFalse"), await sandbox.read_file("aliveTrue")))
            await asyncio.sleep(0.05)
        return seen

    before, after = world.play(watch)
    assert all(before)
    assert before == after


def test_no_zombie_is_left(local: World[LocalSandboxes]) -> None:
    local.python(LEFTOVER)
    below = [child for worker in local.provider.worker_pids for child in descendants(worker)]
    assert len(below) == 1  # the zygote


# --- Files --------------------------------------------------------------------------------------------------------


def test_files_are_written_read_and_replaced(world: World[Provider]) -> None:
    async def edit(sandbox: Sandbox) -> list[str | None]:
        await sandbox.write_file("a/b/c.txt", "one, long")
        first = await sandbox.read_file("a/b/c.txt")
        await sandbox.write_file("a/b/c.txt", "two")
        assert (await sandbox.exec(["python", "-c", "open('a/b/c.txt', 'a').write('!')"])).exit_code == 0
        return [first, await sandbox.read_file("a/b/c.txt"), await sandbox.read_file("a/none")]

    assert world.play(edit) == ["one, long", "two!", None]


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "link", "folder/x", "pipe", "f", "", ".", "a\0b"])
def test_no_path_leads_out_of_the_sandbox_or_to_what_is_no_file(world: World[Provider], path: str) -> None:
    async def escape(sandbox: Sandbox) -> None:
        plant = (
            "import os\n"
            "os.symlink('/etc/passwd', 'link'); os.symlink('/tmp', 'folder'); os.mkfifo('pipe'); os.mkdir('f')\n"
        )
        assert (await sandbox.exec(["python", "-c", plant])).exit_code == 0
        with pytest.raises(ValueError, match=NO_FILE):
            await sandbox.read_file(path)
        with pytest.raises(ValueError, match=NO_FILE):
            await sandbox.write_file(path, "x")

    world.play(escape)


def test_a_sandbox_with_a_bad_path_is_not_made(world: World[Provider]) -> None:
    async def nothing(sandbox: Sandbox) -> None:
        raise AssertionError("made")

    with pytest.raises(ValueError, match="does not stay inside"):
        world.play(nothing, {"good.py": "", "../bad.py": ""})
    assert sandbox_folders(world.scratch) == []


def test_close_removes_everything_however_deep_and_locked(world: World[Provider]) -> None:
    dig = "import os\nfor _ in range(1200):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w'); os.chmod('.', 0)\n"

    async def leave(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["python", "-c", dig])).exit_code == 0
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.exec(["python", "-c", ""])

    world.play(leave)
    assert sandbox_folders(world.scratch) == []


# --- Capabilities -------------------------------------------------------------------------------------------------


def test_sandboxes_and_the_machine_do_not_see_each_other(local: World[LocalSandboxes]) -> None:
    local.require("chroot")
    look = "import os\nprint(os.getcwd(), sorted(os.listdir('/')), os.path.exists('/etc/passwd'))"

    async def look_around(sandbox: Sandbox) -> str:
        other = await local.provider.create({"secret": ""})
        result = await sandbox.exec(["python", "-c", look])
        await other.close()
        return result.stdout

    assert local.play(look_around, {"mine": ""}) == "/ ['mine'] False\n"


def test_nobody_breaks_out_of_the_root(local: World[LocalSandboxes]) -> None:
    local.require("chroot")
    result = local.python(
        "import os\nos.mkdir('d')\n"
        "try:\n    os.chroot('d')\nexcept PermissionError:\n    print('refused')\n"
        "os.chdir('../../../..')\nprint(os.listdir('.'), os.getuid() != 0)"
    )
    assert result.stdout == "refused\n['d'] True\n"


def test_there_is_no_network(local: World[LocalSandboxes]) -> None:
    local.require("network_off")
    # The module is not loaded behind chroot, the system call is there all the same.
    result = local.python(
        "import sys\n"
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "s = libc.socket(2, 1, 0)\n"
        "address = bytes([2, 0, 0, 53, 127, 0, 0, 1]) + bytes(8)\n"
        "print(libc.connect(s, address, 16), ctypes.get_errno())\n"
    )
    assert result.stdout == "-1 101\n"  # ENETUNREACH


def test_no_other_process_is_within_reach(local: World[LocalSandboxes]) -> None:
    local.require("process_namespace")
    result = local.python(
        "import os, signal\n"
        f"for process in (1, {os.getpid()}, {local.provider.worker_pids[0]}):\n"
        "    try:\n"
        "        os.kill(process, signal.SIGKILL)\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
    )
    assert result.stdout.count("ProcessLookupError") == 2
    assert local.python("print('alive')").stdout == "alive\n"


def test_a_command_finds_nothing_of_the_provider(local: World[LocalSandboxes]) -> None:
    result = local.python("import os, sys\nprint(sorted(os.environ), [m for m in sys.modules if 'etude' in m])")
    assert result.stdout == "['HOME', 'LANG', 'PATH'] []\n"
    assert local.python("import os\nfor fd in range(3, 99): os.fstat(fd)").stderr.endswith("Bad file descriptor\n")


# --- Trouble ------------------------------------------------------------------------------------------------------


def test_a_killed_worker_fails_its_command_and_is_replaced(local: World[LocalSandboxes]) -> None:
    async def kill(sandbox: Sandbox) -> str:
        sleeper = asyncio.ensure_future(sandbox.exec(["python", "-c", "import time; time.sleep(60)"], timeout_s=60))
        await asyncio.sleep(0.1)
        os.kill(local.provider.worker_pids[0], signal.SIGKILL)
        with pytest.raises(SandboxError, match="died"):
            await sleeper
        return (await sandbox.exec(["python", "-c", "print('back')"])).stdout

    assert local.play(kill) == "back\n"


def test_giving_up_a_command_kills_it(local: World[LocalSandboxes]) -> None:
    async def cancel(sandbox: Sandbox) -> str:
        old = local.provider.worker_pids
        sleeper = asyncio.ensure_future(sandbox.exec(["python", "-c", "import time; time.sleep(60)"], timeout_s=60))
        await asyncio.sleep(0.1)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        output = (await sandbox.exec(["python", "-c", "print('next')"])).stdout
        assert not any(map(is_running, old))
        return output

    assert local.play(cancel) == "next\n"


@pytest.mark.parametrize("make", LOCAL.values(), ids=LOCAL.keys())
def test_closing_the_provider_leaves_neither_process_nor_file(
    make: Callable[[Path], LocalSandboxes], tmp_path: Path
) -> None:
    async def use() -> list[int]:
        provider = make(tmp_path)
        sandbox = await provider.create({"a": "b"})
        processes = [*provider.worker_pids, *(child for pid in provider.worker_pids for child in descendants(pid))]
        assert len(processes) == 2
        await provider.close()
        await provider.close()
        with pytest.raises(SandboxError):
            await provider.create({})
        with pytest.raises(SandboxError):
            await sandbox.exec(["python", "-c", ""])
        return processes

    processes = asyncio.run(use())
    assert not any(map(is_running, processes))
    assert list(tmp_path.iterdir()) == []


def sandbox_folders(scratch: Path) -> list[Path]:
    """The sandboxes that a provider has on disk."""
    return list(scratch.glob("*/[0-9]*"))


def is_running(process: int) -> bool:
    """Whether there is such a process, be it a zombie."""
    return Path(f"/proc/{process}").exists()


def descendants(process: int) -> list[int]:
    """All processes below one, zombies included."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
    return [*map(int, children), *(below for child in children for below in descendants(int(child)))]
