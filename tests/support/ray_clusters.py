"""Ray clusters of this machine, for tests."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
    import time

    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert head.poll() is None, f"ray start ended with {head.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise AssertionError("Ray did not start in time")
