"""Publishers and receivers as processes, killed at any moment, over a log in a local folder."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.objects import ObjectStore
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.pull import Receiver
from etude.weights.retention import collect
from synthetic_updates import alike, synthetic_version
from waiting import wait_until

KILLS = 12

FORK_SERVER = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from etude.weights.chunks import Layout
from etude.weights.publish import DeltaEncoding
from etude.weights.codecs.gaps import GAPS
from etude.weights.frames import parse
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import Receiver
from synthetic_updates import alike, synthetic_version
from etude.weights.replica import Replica
from etude.objects import ObjectStore

def publish(log):
    options = PublishOptions(codec="gaps", chunk_numbers=100, pack_bytes=500, encoders=2, uploads=2, anchor_every=5)
    with Publisher(log, options) as publisher:
        newest = log.latest()
        version = 0 if newest is None else newest  # again, as a trainer does that does not know how far it came
        while True:
            publisher.publish(synthetic_version(version), version=version, step=version).result(20)
            version += 1

def receive(log):
    lease = log.lease(f"reader-{os.getpid()}")
    with Receiver(log) as receiver:
        while True:
            for target in (None, 0, 3, None, 1):
                receiver.prefetch()
                receiver.advance(target)
                lease.renew(receiver.version)
                if not alike(receiver.weights().state, synthetic_version(receiver.version)):
                    os._exit(3)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
replica, target = Replica.copy_of(Layout.of(synthetic_version(0)), synthetic_version(0)), synthetic_version(1)
for chunk in replica.layout.chunks:  # compiles all there is to compile, once for all children
    move = replica.advance(chunk, target, GAPS)
    other = Replica.empty(replica.layout)
    other.apply(chunk, parse(replica.full(chunk)))
    if move:
        replica.undo(move)
        replica.apply(chunk, parse(move.frame))
print("ready", flush=True)
for line in sys.stdin:
    role, folder = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            {"publish": publish, "receive": receive}[role](WeightLog(ObjectStore(folder)))
        finally:
            os._exit(2)
    print(pid, flush=True)
"""
"""Forks a child for each line of its input, so that not each of them has to import and compile everything."""

Start = Callable[[str, Path], int]
"""Starts a process in a role over a folder and gives its id."""


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    process = subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
    )
    children, lines = process.stdin, process.stdout
    assert children is not None and lines is not None
    assert lines.readline() == "ready\n"

    def fork(role: str, folder: Path) -> int:
        children.write(f"{role} {folder}\n")
        return int(lines.readline())

    yield fork
    children.close()
    assert process.wait(10) == 0
    lines.close()


def kill(pid: int, after_s: float = 0) -> None:
    """Kill a process after a while; it must not have ended by itself."""
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)  # fails if it is gone
    wait_until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_sound(log: WeightLog, first: int) -> int | None:
    """Every version from ``first`` on can be had, bit for bit; returns the newest."""
    with Receiver(log) as receiver:
        for version in [version for version in log.versions() if version >= first]:
            assert receiver.advance(version).faults == ()
            version_held = receiver.weights()
            assert version_held.digest == state_digest(version_held.state)
            assert alike(version_held.state, synthetic_version(version))
        return receiver.version


def newest_of(log: WeightLog) -> int:
    newest = log.latest()
    return -1 if newest is None else newest


def wait_for_version(log: WeightLog, version: int) -> None:
    wait_until(lambda: newest_of(log) >= version)


def test_killed_publishers_leave_a_log_that_the_next_one_goes_on_with(start: Start, tmp_path: Path) -> None:
    draw, log = random.Random(11), WeightLog(ObjectStore(str(tmp_path)))
    for _ in range(KILLS // 2):
        kill(start("publish", tmp_path), draw.uniform(0, 0.2))  # at any moment, its first ones too
        versions_seen, publisher = newest_of(log), start("publish", tmp_path)
        wait_for_version(log, versions_seen + 2)
        kill(publisher, draw.uniform(0, 0.2))
        assert_sound(log, versions_seen + 1)
    assert log.versions() == list(range(newest_of(log) + 1))
    assert_sound(log, 0)


def test_killed_receivers_leave_no_trace_but_leases(start: Start, tmp_path: Path) -> None:
    draw, store = random.Random(12), ObjectStore(str(tmp_path))
    log = WeightLog(store)
    publisher = start("publish", tmp_path)
    wait_until(lambda: len(log.versions()) >= 6)
    kill(publisher)
    survivors = {folder: store.list(folder) for folder in ("commits", "links", "packs", "layouts")}
    for _ in range(KILLS):
        kill(start("receive", tmp_path), draw.uniform(0.02, 0.2))
        assert {folder: store.list(folder) for folder in survivors} == survivors
    receiver = start("receive", tmp_path)
    wait_until(lambda: store.list("leases") != [])
    kill(receiver)
    assert_sound(log, 0)
    assert len(store.list("leases")) <= 3 * (KILLS + 1)
    time.sleep(0.02)
    collect(log, keep=0, grace_s=0.01, lease_s=0.01)
    assert store.list("leases") == []
    assert assert_sound(log, 0) is not None
