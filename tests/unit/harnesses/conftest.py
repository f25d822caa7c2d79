"""The stage of the coding agent's tests."""

from collections.abc import Iterator

import pytest

from playhouse import Playhouse


@pytest.fixture(scope="module")
def stage() -> Iterator[Playhouse]:
    house = Playhouse()
    yield house
    house.close()


@pytest.fixture
def house(stage: Playhouse) -> Playhouse:
    stage.requests.clear()
    stage.headers.clear()
    return stage
