"""Settings and fixtures of all tests, and the two tiers: `make test`, and what is marked ``heavy``: `make test-all`."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from s3_server import S3Server

settings.register_profile(
    "ours",
    deadline=None,  # how long an example takes says more of the machine than of the code
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("ETUDE_LONG"),  # the same examples for every change; ETUDE_LONG=1 looks for new ones
)
settings.load_profile("ours")

HEAVY_FIXTURES = {"postgresql": "PostgreSQL"}
"""Fixture → what it needs that `make test` does not ask for."""
LONGEST = "test_fault_campaign.py"
"""The file that takes longest: ten minutes and more."""
UNTIL_VARIABLE = "ETUDE_TESTS_UNTIL"
"""A Unix time in the environment: tests that have not begun by then are skipped, and `-rs` names them."""


def pytest_sessionstart() -> None:
    """Let SIGINT reach the processes that tests start, also where pytest itself was started with it ignored.

    Shells do that to background jobs, and children would inherit it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that use one of ``HEAVY_FIXTURES`` to `make test-all`; skip heavy ones whose needs are missing.

    ``LONGEST`` comes first: it runs at a low priority beside the others, and no worker is left with it at the end.
    """
    items.sort(key=lambda item: item.path.name != LONGEST)
    for item in items:
        for mark in item.iter_markers("heavy"):
            if mark.kwargs.get("missing"):
                item.add_marker(pytest.mark.skip(reason=f"it needs {mark.args[0]}"))
        for name in HEAVY_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.heavy(HEAVY_FIXTURES[name]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip what has not begun when the time of ``UNTIL_VARIABLE`` has come."""
    until = os.environ.get(UNTIL_VARIABLE)
    if until and time.time() > float(until):
        pytest.skip(f"not begun by {UNTIL_VARIABLE}")


@pytest.fixture(scope="session")
def postgresql() -> None:
    """Skip where PostgreSQL is not installed."""
    if not any(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The URL of a server that speaks S3 and has one bucket."""
    server = S3Server()
    try:
        server.make_bucket()
        yield server.endpoint
    finally:
        server.stop()
