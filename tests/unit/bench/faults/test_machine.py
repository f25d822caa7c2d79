"""A fault gives processes the operating system's own errors, only while it lasts and only in the affected processes."""

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bench.faults.machine import Machine, compile_preload, missing

pytestmark = pytest.mark.heavy("a C compiler", missing=missing() is not None)

PROGRAM = r"""
import http.client, os, sqlite3, sys, time
import obstore
from obstore.store import LocalStore
run = os.environ["FAULTS_FOLDER"]
store = LocalStore(run + "/store")
db = sqlite3.connect(run + "/ledger.db", isolation_level=None)
def write(path, mode, data=b"a" * 100):
    with open(path, mode, buffering=0) as file:
        return file.write(data)
def stored():
    obstore.put(store, "key", b"1")
    return obstore.get(store, "key").bytes().to_bytes()
def ask(port):
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", "/")
    return connection.getresponse().read()
commands = {
    "time": time.time,
    "counted": time.monotonic,
    "append": lambda: write(run + "/log", "ab"),
    "create": lambda: write(run + "/new", "xb") and os.unlink(run + "/new"),
    "elsewhere": lambda: write(os.path.dirname(run) + "/elsewhere", "ab"),
    "record": lambda: db.execute("CREATE TABLE IF NOT EXISTS t (a)") and db.execute("INSERT INTO t VALUES (1)") and 1,
    "store": stored,
}
for line in sys.stdin:
    command, *arguments = line.split()
    try:
        print("done", ask(*arguments) if command == "ask" else commands[command](), flush=True)
    except Exception as error:
        print("failed", " ".join(str(error).split())[:300], flush=True)
"""


class Subject:
    """A program on the machine."""

    def __init__(self, machine: Machine) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **machine.environment},
        )

    def does(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_preload(tmp_path_factory.mktemp("preload"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "run" / "store").mkdir(parents=True)
    machine = Machine(tmp_path / "run", tmp_path / "run" / "store", tmp_path / "page", library)
    yield machine
    machine.close()


@pytest.fixture
def subject(machine: Machine) -> Iterator[Subject]:
    subject = Subject(machine)
    yield subject
    subject.process.communicate()


def test_a_full_disk_takes_what_fits_and_is_as_good_as_new_afterwards(machine: Machine, subject: Subject) -> None:
    everything = ("append", "create", "record", "store")
    assert [subject.does(command).split()[0] for command in everything] == ["done"] * 4
    with machine.full_disk(130):
        assert subject.does("append") == "done 100"
        assert subject.does("append") == "done 30"
        for command in ("append", "create", "store"):
            assert "No space left on device" in subject.does(command)
        assert subject.does("record").startswith("failed")
        assert subject.does("elsewhere") == "done 100"
    assert [subject.does(command).split()[0] for command in everything] == ["done"] * 4


def test_ill_storage_fails_alone(machine: Machine, subject: Subject) -> None:
    with machine.ill_store():
        assert subject.does("store").startswith("failed")
        assert subject.does("append") == "done 100"
        assert subject.does("record") == "done 1"
    assert subject.does("store") == "done b'1'"


def test_slow_storage_takes_its_time(machine: Machine, subject: Subject) -> None:
    subject.does("store")
    with machine.slow_store(0.1):
        began_s = time.monotonic()
        assert subject.does("store") == "done b'1'"
        assert time.monotonic() - began_s > 0.2  # it opens at least two files


def is_ahead(subject: Subject, seconds: float) -> bool:
    """Return true if the program's clock is ``seconds`` ahead of ours, within the duration of the query."""
    before_s = time.time()
    said_s = float(subject.does("time").split()[1])
    return before_s - 0.1 <= said_s - seconds <= time.time() + 0.1


def test_a_clock_jumps_both_ways_and_only_the_time_of_day(machine: Machine, subject: Subject) -> None:
    counted_s = float(subject.does("counted").split()[1])
    for seconds in (-86_400.5, 7_200.0):
        with machine.jumped_clock(seconds):
            assert is_ahead(subject, seconds)
            assert 0 <= float(subject.does("counted").split()[1]) - counted_s < 3600
    assert is_ahead(subject, 0.0)


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_connections_lead_elsewhere_for_those_on_the_machine(machine: Machine, subject: Subject) -> None:
    with HTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        machine.lead(1, 9, server.server_address[1])
        assert subject.does("ask 9") == "done b'hello'"
        assert subject.does("ask 10").startswith("failed")
        with pytest.raises(OSError):
            http.client.HTTPConnection("127.0.0.1", 9, timeout=5).request("GET", "/")
        server.shutdown()
        thread.join()
