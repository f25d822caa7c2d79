"""The first process of a sandbox: it names itself, sleeps, and shows nothing."""

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.sandboxes.ns.syscalls import init_program, open_init
from waiting import wait_until

MACHINE = platform.machine()


def start(program: int) -> int:
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.execve(program, ("/sbin/init",), {})
        finally:
            os._exit(1)
    return process


def status(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.skipif(sys.platform != "linux", reason="it is a Linux program")
def test_it_names_itself_and_sleeps_with_signals_as_they_were() -> None:
    process = start(open_init(MACHINE))
    try:
        wait_until(lambda: (now := status(process))["Name"] == "init" and now["State"].startswith("S"))
        now = status(process)
        assert int(now["SigIgn"], 16) & 1 << signal.SIGCHLD - 1
        assert int(now["VmRSS"].split()[0]) < 64
        assert Path(f"/proc/{process}/cmdline").read_bytes() == b"/sbin/init\0"
    finally:
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_it_is_small_and_has_no_interpreter(machine: str) -> None:
    program = init_program(machine)
    assert program.startswith(b"\x7fELF")
    assert len(program) < 256
    assert program.endswith(b"init\0")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_it_runs_on_each_processor_it_was_written_for(machine: str, tmp_path: Path) -> None:
    emulator = [] if machine == MACHINE else [shutil.which(f"qemu-{machine}") or shutil.which(f"qemu-{machine}-static")]
    if None in emulator:
        pytest.skip(f"qemu-{machine} is not installed: apt-get install qemu-user")
    file = tmp_path / "init"
    file.write_bytes(init_program(machine))
    file.chmod(0o755)
    running = subprocess.Popen([*(str(word) for word in emulator), str(file)])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
    finally:
        running.kill()
        running.wait()


def test_it_can_be_executed_and_not_be_read() -> None:
    assert os.fstat(open_init(MACHINE)).st_mode & 0o777 == 0o111


def test_a_processor_it_was_not_written_for_is_an_error() -> None:
    with pytest.raises(KeyError):
        init_program("m68k")
