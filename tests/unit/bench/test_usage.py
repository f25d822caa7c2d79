"""Resource use of other processes, their children included."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.usage import age_s, cpu_s, descendants, family, peak_bytes, threads

PROGRAM = """
import subprocess, sys, time
end = time.process_time() + 0.2
while time.process_time() < end: pass
print('worked', flush=True)
child = subprocess.Popen([sys.executable, '-c', "block = bytearray(64 << 20); print('there', flush=True); input()"])
child.wait()
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("\n")


def test_a_process_and_its_children_are_counted(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    assert program.stdout.readline() == "worked\n"
    assert cpu_s([program.pid]) >= 0.2
    assert 0.2 <= age_s(program.pid) < age_s(os.getpid())
    assert program.stdout.readline() == "there\n"
    (child,) = descendants(program.pid)
    assert family(program.pid) == [program.pid, child]
    assert program.pid in descendants(os.getpid())
    assert peak_bytes([program.pid, child]) > peak_bytes([child]) > 64 << 20


def test_what_has_ended_takes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_s([process.pid]) == peak_bytes([process.pid]) == 0
    assert descendants(process.pid) == []
    assert threads(process.pid) == []


def test_children_that_end_while_they_are_counted_are_left_out() -> None:
    forks = "import os, time\nwhile True: os.fork() or os._exit(0); os.wait()"
    with subprocess.Popen([sys.executable, "-c", forks]) as process:
        try:
            for _ in range(2000):
                assert len(descendants(process.pid)) <= 1
        finally:
            process.kill()
