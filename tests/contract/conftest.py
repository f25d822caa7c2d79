"""Fixtures of the contract tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from databases import Server, temporary_server
from ledgers import NewPlace, new_places
from providers import PROVIDERS, Stage
from providers import stage as set_stage


def heavy(name: str, needs: str) -> ParameterSet:
    """A parameter whose test is left to ``make test-all`` if it ``needs`` something."""
    return pytest.param(name, marks=[pytest.mark.heavy(needs)] if needs else [])


@pytest.fixture(scope="session", params=[heavy(name, candidate.heavy) for name, candidate in PROVIDERS.items()])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Each provider of sandboxes in turn, the same one for all tests: some take seconds to start."""
    if reason := PROVIDERS[request.param].missing():
        pytest.skip(reason)
    yield from set_stage(request.param, PROVIDERS[request.param].make)


@pytest.fixture(scope="session")
def postgres(postgresql: None) -> Iterator[Server]:
    """One server for all ledgers, each in a schema of its own."""
    with temporary_server() as server:
        yield server


@pytest.fixture(params=["sqlite", heavy("postgresql", "PostgreSQL")])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> NewPlace:
    """A function that creates places for ledgers; parametrised by database."""
    database: str = request.param
    return new_places(database, tmp_path, request.getfixturevalue("postgres") if database == "postgresql" else None)


@pytest.fixture
def place(new_place: NewPlace) -> str:
    """The place of one new ledger."""
    return new_place()
