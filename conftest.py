"""What holds for all tests."""

import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from bench.programs import PYTHON_PATH

settings.register_profile(
    "ours",
    deadline=None,  # how long an example takes says more of the machine than of the code
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("ETUDE_LONG"),  # the same examples for every change; ETUDE_LONG=1 looks for new ones
)
settings.load_profile("ours")


def pytest_sessionstart() -> None:
    """Let SIGINT reach the processes that tests start, also where pytest itself was started with it ignored.

    Shells do that to background jobs, and children would inherit it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = PYTHON_PATH  # benches start programs of their own, which are not installed


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Where a server answers that speaks S3 and has one bucket."""
    from moto.server import ThreadedMotoServer  # takes a second, which only these tests need

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    bucket = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
    with urllib.request.urlopen(bucket, timeout=30):
        yield f"http://{host}:{port}"
    server.stop()
