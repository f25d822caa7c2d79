"""What contract tests share."""

from collections.abc import Iterator

import pytest

from providers import PROVIDERS, Stage
from providers import stage as set_stage


@pytest.fixture(scope="session", params=PROVIDERS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Each provider of sandboxes in turn, the same one for all tests: some take seconds to start."""
    if reason := PROVIDERS[request.param].missing():
        pytest.skip(reason)
    yield from set_stage(request.param, PROVIDERS[request.param].make)
