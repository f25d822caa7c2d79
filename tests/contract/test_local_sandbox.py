"""Local sandboxes beyond the contract: a warm interpreter, its limits, and workers that are replaced."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import etude
from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability
from etude.sandboxes.folders import Folder
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.ns.seccomp import AUDIT_ARCHITECTURES, CALL_NUMBERS, NO_CALL
from providers import TIMEOUT_S, Stage, output, python
from providers import stage as set_stage
from waiting import WAIT_S

LOCAL: dict[str, Callable[[Path], LocalSandboxes]] = {
    "local": lambda scratch: LocalSandboxes(1, scratch),
    "local without namespaces": lambda scratch: LocalSandboxes(1, scratch, isolate=False),
}


@pytest.fixture(scope="module", params=LOCAL)
def local(request: pytest.FixtureRequest) -> Iterator[Stage]:
    yield from set_stage(request.param, LOCAL[request.param])


def workers(stage: Stage) -> tuple[int, ...]:
    assert isinstance(stage.provider, LocalSandboxes)
    return stage.provider.worker_pids


def test_hashing_is_the_same_everywhere(local: Stage) -> None:
    assert len({local.python("print(hash('word'))").stdout for _ in range(2)}) == 1


def test_a_command_finds_nothing_of_the_provider(local: Stage) -> None:
    result = local.python("import os, sys\nprint(sorted(os.environ), [m for m in sys.modules if 'etude' in m])")
    assert result.stdout == "['HOME', 'LANG', 'PATH'] []\n"
    assert local.python("import os\nfor fd in range(3, 99): os.fstat(fd)").stderr.endswith("Bad file descriptor\n")


# --- Limits of each command ---------------------------------------------------------------------------------------


def test_a_memory_bomb_fails_in_its_own_process(local: Stage) -> None:
    result = local.python("x = bytearray(1 << 30)")
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


def test_a_file_cannot_grow_without_bound(local: Stage) -> None:
    result = local.python("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    assert "File too large" in result.stderr


def test_processes_cannot_use_up_the_machine(local: Stage) -> None:
    local.need(Capability.PROCESSES_APART)
    result = local.python(
        "import os, time\n"
        "for count in range(1000):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    print(count, flush=True)\n"
    )
    assert "BlockingIOError" in result.stderr
    assert len(result.stdout.splitlines()) < 100


ORPHANS = """
import os, time
for detach in (False, True):
    if os.fork() == 0:
        if detach:
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(60)
time.sleep(0.1)
"""


def test_no_zombie_is_left(local: Stage) -> None:
    assert local.python(ORPHANS).exit_code == 0
    below = [child for worker in workers(local) for child in descendants(worker)]
    assert len(below) == 1  # the zygote


# --- Confinement --------------------------------------------------------------------------------------------------


def test_a_root_holds_nothing_of_the_machine(local: Stage) -> None:
    local.need(Capability.CONFINED)
    result = local.python("import os\nprint(os.getcwd(), sorted(os.listdir('/')), os.path.exists('/etc/passwd'))")
    assert result.stdout == "/work ['home', 'tmp', 'work'] False\n"


def test_no_command_breaks_out_of_the_root(local: Stage) -> None:
    local.need(Capability.CONFINED)
    result = local.python(
        "import os\nos.mkdir('d')\n"
        "try:\n    os.chroot('d')\nexcept PermissionError:\n    print('refused')\n"
        "os.chdir('../../../..')\nprint(sorted(os.listdir('.')), os.getuid() != 0)"
    )
    assert result.stdout == "refused\n['home', 'tmp', 'work'] True\n"


# --- What one sandbox does to the next, which has the same worker ----------------------------------------------------

MEDDLE = """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
for process in {1, os.getppid()}:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_DATA, resource.RLIMIT_CPU):
        try:
            resource.prlimit(process, kind, (0, 0))
            print('limited', process, kind)
        except OSError:
            pass
if os.getppid() == 1:
    for attempt in ("os.setpriority(os.PRIO_PROCESS, 1, 19)", "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
                    "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))", "os.sched_setaffinity(1, {0})"):
        try:
            eval(attempt)
            print(attempt)
        except OSError:
            pass
    for number in set(range(1, 65)) - {9, 19, 32, 33}:
        os.kill(1, number)
for which, who, idle in ((1, 1, 3 << 13), (3, os.getuid(), 3 << 13)):
    if os.getppid() == 1 and libc.syscall(IOPRIO_SET, which, who, idle) == 0:
        print('ioprio', which)
"""
STATE = """
import os, resource
limits = [resource.getrlimit(kind) for kind in range(16)]
scheduled = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))
print([limit for kind, limit in enumerate(limits) if kind != resource.RLIMIT_CPU], scheduled)
"""


def call_number(call: str) -> int:
    return CALL_NUMBERS[call][list(AUDIT_ARCHITECTURES).index(os.uname().machine)]


async def in_turn(stage: Stage, *programs: str) -> list[str]:
    """Output of programs, each in a fresh sandbox that is closed before the next one is created."""
    printed = []
    for program in programs:
        sandbox = await stage.provider.create({})
        try:
            printed.append((await python(sandbox, program)).stdout)
        finally:
            await sandbox.close()
    return printed


def test_a_command_cannot_change_the_process_that_later_ones_come_from(local: Stage) -> None:
    meddle = MEDDLE.replace("IOPRIO_SET", str(call_number("ioprio_set")))
    before, worked, after = local.run(in_turn(local, STATE, meddle, STATE))
    assert (worked, after) == ("", before)


def test_a_command_leaves_other_workers_what_the_kernel_counts_for_their_user(local: Stage) -> None:
    local.need(Capability.PROCESSES_APART)
    take = (
        "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\nwatches = timers = 0\n"
        "while libc.inotify_init1(0) >= 0: watches += 1\n"
        "event, number = (ctypes.c_int * 16)(0, 0, 34, 0), ctypes.c_void_p()\n"
        "while libc.timer_create(1, event, ctypes.byref(number)) == 0: timers += 1\n"
        "print(watches, timers)"
    )
    watches, timers = map(int, local.python(take).stdout.split())
    assert 1 <= watches <= 16
    assert 1 <= timers <= 256


def test_a_command_limits_and_schedules_itself(local: Stage) -> None:
    program = (
        "import os, resource, signal\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\nos.nice(1)\n"
        "os.sched_setaffinity(0, os.sched_getaffinity(0))\nresource.prlimit(0, resource.RLIMIT_FSIZE, (5, 5))\n"
        "print(resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_FSIZE))\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    assert local.python(program).stdout == "(9, 9) (5, 5)\nTrue\n"


HIDE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
memory = libc.shmget(77, 4096, 0o1600)
if memory >= 0:
    ctypes.memmove(libc.shmat(memory, None, 0), b'hidden', 6)
libc.msgsnd(libc.msgget(77, 0o1600), b'\\1' + bytes(7) + b'hidden', 6, 0)
libc.semctl(libc.semget(77, 1, 0o1600), 0, 16, 6)
libc.syscall(ADD_KEY, b'user', b'etude', b'hidden', 6, -4)
queue = libc.mq_open(b'/etude', 0o102, 0o600, None)
if queue >= 0:
    libc.mq_send(queue, b'hidden', 6, 0)
"""
SEEK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
found = {name: getattr(libc, name)(77, *rest) for name, rest in
         {'shmget': (0, 0), 'msgget': (0,), 'semget': (0, 0)}.items()}
found['mq_open'] = libc.mq_open(b'/etude', 0)
found['key'] = libc.syscall(KEYCTL, 10, -4, b'user', b'etude', 0)
print([name for name, number in found.items() if number >= 0])
"""


def test_nothing_in_the_kernel_outlives_a_command(local: Stage) -> None:
    hide = HIDE.replace("ADD_KEY", str(call_number("add_key")))
    seek = SEEK.replace("KEYCTL", str(call_number("keyctl")))
    assert local.run(in_turn(local, hide, seek))[1] == "[]\n"


SURFACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in NUMBERS.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38):
        print(name, ctypes.get_errno())
for family in (16, 17, 38, 40):
    if libc.socket(family, 3 if family in (16, 17) else 1, 0) >= 0:
        print('socket', family)
"""


def test_calls_that_honest_programs_do_without_are_refused(local: Stage) -> None:
    calls = ["userfaultfd", "io_uring_setup", "keyctl", "add_key", "request_key", "fanotify_init", "modify_ldt", "bpf"]
    numbers = {call: call_number(call) for call in calls if call_number(call) != NO_CALL}
    result = local.python(SURFACE.replace("NUMBERS", repr(numbers)))
    assert (result.stdout, result.stderr) == ("", "")


REMEMBER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
end = libc.sbrk(0)
ours, theirs = os.pipe()
for page in range(end - (16 << 20), end, 4096):
    if libc.write(theirs, ctypes.c_void_p(page), 4096) == 4096 and b'hid' + b'den words' in os.read(ours, 4096):
        print('found')
"""
"""Looks through the heap that it shares, copy on write, with the process that all commands are forked from."""


def test_no_command_finds_anothers_arguments_in_its_memory(local: Stage) -> None:
    secret = f"{'hidden words ' * 400!r}"
    assert local.run(in_turn(local, secret, REMEMBER))[1] == ""


def test_a_worker_that_could_not_start_a_command_is_replaced(local: Stage, tmp_path: Path) -> None:
    async def lose() -> str:
        provider = LOCAL[local.name](tmp_path)
        try:
            lost, other = await provider.create({}), await provider.create({})
            old = provider.worker_pids
            lost.folder.path.rename(tmp_path / "elsewhere")
            with pytest.raises(SandboxError, match="no process"):
                await lost.exec(["python", "-c", ""])
            (tmp_path / "elsewhere").rename(lost.folder.path)
            assert not any(map(is_running, old))
            return await output(other, "print('next')")
        finally:
            await provider.close()

    tmp_path.chmod(0o711)
    assert asyncio.run(lose()) == "next\n"


NO_FILTERS = """
import asyncio, ctypes, struct, sys
from pathlib import Path
libc = ctypes.CDLL(None)
code = ctypes.create_string_buffer(b''.join(struct.pack('<HBBI', *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 3, PRCTL), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, 0x50001),
    (0x06, 0, 0, 0x7FFF0000))))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack('HP', 6, ctypes.addressof(code)), 0, 0) == 0
from etude.sandboxes.local.provider import LocalSandboxes
async def main():
    provider = LocalSandboxes(1, Path(sys.argv[1]))
    print(*sorted(await provider.capabilities()))
    print((await (await provider.create({})).exec(["python", "-c", "print('runs')"], timeout_s=30)).stdout)
    await provider.close()
asyncio.run(main())
"""
"""Runs where the kernel takes no filter of system calls any more."""


def test_what_takes_the_filter_is_not_claimed_without_it(tmp_path: Path) -> None:
    program = NO_FILTERS.replace("PRCTL", {"x86_64": "157", "aarch64": "167"}[os.uname().machine])
    tmp_path.chmod(0o711)
    environment = {"PYTHONPATH": str(Path(etude.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    claims, printed, _ = done.stdout.split("\n", 2)
    assert not {Capability.NETWORK_OFF, Capability.PROCESSES_APART} & set(claims.split())
    assert printed == "runs"


# --- Trouble ------------------------------------------------------------------------------------------------------

SLEEP = "import time; time.sleep(60)"


def test_a_killed_worker_fails_its_command_and_is_replaced(local: Stage) -> None:
    async def kill(sandbox: Sandbox) -> str:
        sleeper = asyncio.ensure_future(python(sandbox, SLEEP))
        await asyncio.sleep(0.2)
        os.kill(workers(local)[0], signal.SIGKILL)
        with pytest.raises(SandboxError, match="died"):
            await sleeper
        return await output(sandbox, "print('back')")

    assert local.play(kill) == "back\n"


def test_giving_up_a_command_ends_its_worker(local: Stage) -> None:
    async def cancel(sandbox: Sandbox) -> str:
        old = workers(local)
        sleeper = asyncio.ensure_future(python(sandbox, SLEEP))
        await asyncio.sleep(0.2)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        assert not any(map(is_running, old))
        return await output(sandbox, "print('next')")

    assert local.play(cancel) == "next\n"


def test_a_command_that_is_cancelled_as_its_turn_comes_is_cancelled(local: Stage) -> None:
    """A cancellation takes effect at every stage of the handover of the worker to the command."""

    async def cancel(sandbox: Sandbox) -> bool:
        cancelled = []
        for turns in range(6):
            first = asyncio.ensure_future(sandbox.exec(["true"], timeout_s=TIMEOUT_S))
            second = asyncio.ensure_future(python(sandbox, SLEEP))
            await first
            for _ in range(turns):
                await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            cancelled.append(second.cancelled())
        return all(cancelled)

    assert local.play(cancel)


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


class SlowFolder(Folder):
    """Waits a while before it writes."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder.path, owner=folder.owner, inside=folder.inside, workdir=folder.workdir)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def unpack(self, tar: bytes) -> None:
        self._wait()
        super().unpack(tar)

    def copy_to(self, other: Folder) -> None:
        self._wait()
        super().copy_to(other)

    def _wait(self) -> None:
        self.begun.set()
        self.go_on.wait(WAIT_S)


@pytest.mark.parametrize("writes", ["load", "fork"])
def test_files_that_are_being_written_are_removed_though_no_caller_waits(writes: str, tmp_path: Path) -> None:
    async def give_up() -> tuple[bool, bool]:
        provider = LocalSandboxes(1, tmp_path)
        sandbox = await provider.create({"a": "b"})
        tar = await sandbox.export(["a"])
        slow = sandbox.folder = SlowFolder(sandbox.folder)
        writing = asyncio.ensure_future(sandbox.load(tar) if writes == "load" else sandbox.fork())
        while not slow.begun.is_set():
            await asyncio.sleep(0.001)
        writing.cancel()
        closing = asyncio.ensure_future(provider.close())
        too_early, _ = await asyncio.wait([closing], timeout=0.2)
        slow.go_on.set()
        await closing
        await asyncio.wait([writing])
        return bool(too_early), writing.cancelled()

    assert asyncio.run(give_up()) == (False, True)
    assert list(tmp_path.iterdir()) == []


def test_closing_the_provider_goes_on_past_a_sandbox_that_cannot_be_closed(tmp_path: Path) -> None:
    async def use() -> tuple[int, ...]:
        provider = LocalSandboxes(1, tmp_path)
        lost, _ = await provider.create({}), await provider.create({})
        processes = provider.worker_pids
        shutil.rmtree(lost.folder.path)
        with pytest.raises(FileNotFoundError):
            await provider.close()
        return processes

    assert not any(map(is_running, asyncio.run(use())))
    assert list(tmp_path.iterdir()) == []


def is_running(process: int) -> bool:
    """Return true if the process exists, even as a zombie."""
    return Path(f"/proc/{process}").exists()


def descendants(process: int) -> list[int]:
    """All processes below one, zombies included."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
    return [*map(int, children), *(below for child in children for below in descendants(int(child)))]
