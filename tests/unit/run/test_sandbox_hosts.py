"""The sandbox hosts of a fleet: found in all regions while they are there, and only if they have the hosts' key."""

import asyncio
from pathlib import Path

import pytest

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.loading import default_recipe
from etude.errors import ConfigError
from etude.run.folder import RunFolder
from etude.run.placement import remember_fleet
from etude.run.process_name import SANDBOXES, ProcessName
from etude.run.region_stores import ADDRESS_VARIABLE, open_directory
from etude.run.sandbox_hosts import announced, fleet_hosts
from etude.sandboxes.providers import KEY_VARIABLE

KEY = "the key of all sandbox hosts of a fleet"
FAR = ProcessName(command="sandboxes", replica=1, region="far")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.0.0.1")


def fleet_run(path: Path) -> RunFolder:
    """A run on two regions."""
    folder = RunFolder.create(path / "run", default_recipe(["sandboxes.kind=remote"]))
    home = RegionConfig(name="home", store=str(folder.path), engines=1)
    far = RegionConfig(name="far", store=str(path / "far"), sandbox_hosts=2)
    remember_fleet(folder, FleetConfig(home="home", regions=(home, far)))
    return folder


async def urls(folder: RunFolder) -> list[list[str]]:
    """The hosts of each region, as a rollouts process finds them."""
    return [sorted(await find()) for find in fleet_hosts(folder, folder.config().sandboxes)]


def test_hosts_are_found_in_their_region_until_they_leave(tmp_path: Path) -> None:
    folder = fleet_run(tmp_path)

    async def act() -> None:
        assert await urls(folder) == [[], []]
        async with announced(str(folder.path), SANDBOXES, 8700):
            async with announced(str(tmp_path / "far"), FAR, 8701):
                assert await urls(folder) == [["http://10.0.0.1:8700"], ["http://10.0.0.1:8701"]]
            assert await urls(folder) == [["http://10.0.0.1:8700"], []]

    asyncio.run(act())


def test_a_host_is_found_by_who_has_its_key_and_signs_no_entry_of_a_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gateway = fleet_run(tmp_path), ProcessName(command="gateway")

    async def act() -> None:
        async with announced(str(folder.path), SANDBOXES, 8700), announced(str(folder.path), gateway, 8500):
            assert open_directory(folder, "").urls("gateway") == {}
            assert await urls(folder) == [["http://10.0.0.1:8700"], []]
            monkeypatch.setenv(KEY_VARIABLE, "the key of all sandbox hosts of another fleet")
            assert await urls(folder) == [[], []]
            open_directory(folder, "").announce(SANDBOXES, "http://10.6.6.6:8700")
            assert await urls(folder) == [[], []]

    asyncio.run(act())


def test_a_key_that_could_be_guessed_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "short")
    folder = fleet_run(tmp_path)
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} has 5 characters"):
        fleet_hosts(folder, folder.config().sandboxes)


def test_a_recipe_with_one_server_or_its_own_sandboxes_looks_for_no_hosts(tmp_path: Path) -> None:
    folder = fleet_run(tmp_path)
    for settings in (["sandboxes.kind=ns"], ["sandboxes.kind=remote", "sandboxes.options.url=http://a"]):
        assert fleet_hosts(folder, default_recipe(settings).sandboxes) == ()
    alone = RunFolder.create(tmp_path / "alone", default_recipe(["sandboxes.kind=remote"]))
    assert fleet_hosts(alone, alone.config().sandboxes) == ()
