"""Processes of a run end when requested."""

import inspect
import signal
import subprocess
import sys

import pytest

from etude.engines import process_guard, server_process
from etude.run import gateway
from etude.run.processes import PREDECESSOR_S
from etude.run.serving import STOP_S, run_until_signal

PROGRAM = """
import asyncio, time
from etude.run.serving import run_until_signal

async def dull():
    await asyncio.sleep(60)

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def in_a_thread():
    await asyncio.to_thread(time.sleep, 60)

async def without_the_loop():
    time.sleep(60)

async def main():
    print("up", flush=True)
    await {work}()

run_until_signal(main(), cleanup_s={cleanup_s})
"""


@pytest.mark.parametrize(
    ("number", "work", "cleanup_s"),
    [
        (signal.SIGINT, "dull", 60.0),
        (signal.SIGTERM, "stubborn", 0.2),
        (signal.SIGINT, "in_a_thread", 0.2),
        (signal.SIGTERM, "without_the_loop", 0.2),
    ],
)
def test_a_process_ends_by_a_signal_whatever_it_is_at(number: signal.Signals, work: str, cleanup_s: float) -> None:
    program = PROGRAM.format(work=work, cleanup_s=cleanup_s)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        _, text = process.communicate(timeout=30)
    assert (process.returncode, text) == (128 + number, b"")


EARLY = """
import os, signal, uvloop
from etude.run.serving import run_until_signal

new_event_loop = uvloop.new_event_loop

def signalled():
    os.kill(os.getpid(), signal.SIGTERM)
    return new_event_loop()

async def main():
    raise AssertionError("it was started")

uvloop.new_event_loop = signalled
run_until_signal(main())
"""
"""A program that gets a signal while its event loop is made."""


def test_a_signal_before_the_loop_runs_ends_a_process_as_later_ones_do() -> None:
    ended = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, check=False, timeout=30)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, b"")


def test_who_was_left_behind_is_gone_before_its_successor_gives_up() -> None:
    assert inspect.signature(run_until_signal).parameters["cleanup_s"].default < PREDECESSOR_S


def test_a_process_has_time_for_what_it_does_before_it_ends() -> None:
    assert process_guard.STOP_S < server_process.STOP_S < STOP_S
    servers, rounds = 2, 2  # one door after the other; each waits, cancels, and waits again
    assert gateway.DRAIN_SHARE * STOP_S + servers * rounds * gateway.DRAINED_S < STOP_S
