"""Ray clusters of this machine, for tests: of one node, or of one in each of several network namespaces."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

RAY = Path(sys.executable).with_name("ray")
START_S = 120.0


def ray_is_missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    return "" if importlib.util.find_spec("ray") and RAY.is_file() else "Ray is not installed: make test-all"


@contextlib.contextmanager
def ray_cluster(*, labels: str, cpus: int = 4) -> Iterator[str]:
    """The address of a cluster of this machine alone, which takes tokens; this process has the token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie below it
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-of-the-tests-that-is-long-enough"}
    before = {name: os.environ.get(name) for name in token}
    os.environ.update(token)
    head = subprocess.Popen(
        [RAY, "start", "--head", "--node-ip-address", "127.0.0.1", "--port", str(port), "--include-dashboard", "false",
         "--labels", labels, "--num-cpus", str(cpus), "--object-store-memory", "100000000", "--temp-dir", str(folder),
         "--disable-usage-stats", "--block"],
        stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "RAY_enable_autoscaler_v2": "0"},
    )  # fmt: skip
    try:
        _await(port, head)
        yield f"127.0.0.1:{port}"
    finally:
        import ray

        ray.shutdown()
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, 9)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _await(port: int, head: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert head.poll() is None, f"ray start ended with {head.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise AssertionError("Ray did not start in time")


HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_initial_delay_ms": "1000",
}
"""Time until a head considers a node lost: 4 s instead of 19."""
ENTER = (
    "mkdir -p /tmp/ray; mount -t tmpfs -o size=1g tmpfs /tmp/ray; mount -t tmpfs -o size=1g tmpfs /dev/shm; "
    'ip link set lo up; exec "$@"'
)
"""Options that make a namespace a separate machine for Ray: its own sockets and shared memory."""


@dataclass
class Machines:
    """Machines with a Ray node each; the first is the head."""

    addresses: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def popen(self, name: str, command: Sequence[str], *, stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a program on a machine."""
        enter = ["nsenter", "--target", str(self.nodes[name].pid), "--mount", "--net", "--", *command]
        return subprocess.Popen(enter, stdout=stdout, start_new_session=True)

    def kill(self, name: str) -> None:
        """Lose a machine: all its processes at once."""
        _ip("link", "del", _link(name), check=False)
        pids = subprocess.run(["ip", "netns", "pids", _namespace(name)], capture_output=True, check=False)
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)


@contextlib.contextmanager
def machines(regions: Mapping[str, str]) -> Iterator[Machines]:
    """Machine → its region, a label of its node; the first machine has the head. Needs root."""
    made, bridge = Machines(), f"etr{os.getpid()}"
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    try:
        for number, (name, region) in enumerate(regions.items(), 1):
            made.addresses[name] = address = f"10.97.0.{number}"
            _ip("netns", "add", _namespace(name))
            _ip("link", "add", _link(name), "type", "veth", "peer", "name", "eth0", "netns", _namespace(name))
            _ip("link", "set", _link(name), "master", bridge, "up")
            _ip("-n", _namespace(name), "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", _namespace(name), "link", "set", "eth0", "up")
            head = f"{made.addresses[next(iter(regions))]}:6379"
            role = ["--head", "--port", "6379", "--include-dashboard", "false"] if number == 1 else ["--address", head]
            if number == 2:
                _await_head(made, next(iter(regions)))
            made.nodes[name] = subprocess.Popen(
                ["ip", "netns", "exec", _namespace(name), "unshare", "-m", "bash", "-c", ENTER, "--", str(RAY), "start",
                 *role, "--node-ip-address", address, "--labels", f"region={region}", "--num-cpus", "2",
                 "--object-store-memory", "100000000", "--disable-usage-stats", "--block"],
                env={**os.environ, **HEALTH_CHECKS, "RAY_enable_autoscaler_v2": "0"},
                stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        yield made
    finally:
        for name in made.addresses:
            made.kill(name)
            _ip("netns", "del", _namespace(name), check=False)
        for node in made.nodes.values():
            node.wait()
        _ip("link", "del", bridge, check=False)


def _await_head(made: Machines, name: str) -> None:
    """Wait until the head accepts nodes, and programs on its machine find it: a file announces that some time later."""
    deadline_s = time.monotonic() + START_S
    probe = f"exec 3<>/dev/tcp/{made.addresses[name]}/6379 2>&- && test -s /tmp/ray/ray_current_cluster"
    while made.popen(name, ["bash", "-c", probe], stdout=subprocess.DEVNULL).wait() != 0:
        assert time.monotonic() < deadline_s, "the head did not start in time"
        time.sleep(0.5)


def _namespace(machine: str) -> str:
    return f"etude-{os.getpid()}-{machine}"


def _link(machine: str) -> str:
    return f"e{os.getpid()}{machine}"[:15]


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)
