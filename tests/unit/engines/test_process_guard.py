"""A guarded process ends with its parent, and a process group ends when its first process dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.engines import process_guard
from waiting import WAIT_S, wait_until

FAMILY = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
"""A command with a child, whose process id it prints."""


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, process_guard.__file__, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def family(process: subprocess.Popen[bytes]) -> list[int]:
    """The command and its child."""
    assert process.stdout is not None
    child = int(process.stdout.readline())
    parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    return [parent, child]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["close", "terminate", "kill the command"])
def test_all_processes_end_at_once(end: str) -> None:
    with start(sys.executable, "-c", FAMILY) as process:
        pids = family(process)
        if end == "close":
            assert process.stdin is not None
            process.stdin.close()
        elif end == "terminate":
            process.terminate()
        else:
            os.kill(pids[0], signal.SIGKILL)
        assert process.wait(WAIT_S) == 128 + (signal.SIGKILL if end == "kill the command" else signal.SIGTERM)
        wait_until(lambda: not any(map(is_alive, pids)))


def test_all_end_when_we_are_killed() -> None:
    us = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()"
    command = [sys.executable, "-c", us, sys.executable, process_guard.__file__, sys.executable, "-c", FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        pids = family(process)
        process.kill()
        wait_until(lambda: not any(map(is_alive, pids)))


def test_the_status_is_the_commands() -> None:
    with start(sys.executable, "-c", "raise SystemExit(7)") as process:
        assert process.wait(WAIT_S) == 7
