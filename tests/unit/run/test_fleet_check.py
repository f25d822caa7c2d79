"""Looking at a fleet's places: sound ones, and each fault by its name."""

import asyncio
from pathlib import Path

import pytest

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.loading import default_recipe
from etude.fleet.state import Observed
from etude.gateway.http.auth import Scope
from etude.objects import ObjectStore
from etude.run.fleet_check import StoreMeasurement, compare_versions, is_alike, look_at_fleet, measure_store
from etude.run.folder import RunFolder
from etude.run.keys import RUN_KEY_VARIABLE, KeyRole
from etude.run.machine_info import versions
from etude.run.placement import fleet_objects, remember_fleet
from etude.run.preflight import MachineFinding
from etude.run.process_name import ProcessName
from etude.run.region_stores import open_directory
from gateways import MAX_LENGTH, fake_engine, gateway_in_a_thread, key_of, template

EU = ProcessName(command="gateway", region="eu")


def look(fleet: FleetConfig, folder: RunFolder | None) -> dict[str, MachineFinding]:
    async def run() -> dict[str, MachineFinding]:
        return {finding.name: finding async for finding in look_at_fleet(fleet, folder)}

    return asyncio.run(run())


def test_a_store_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    assert abs(measure_store(store).clock_s) < 60
    assert store.list("") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"round_trip_s": 0.9}, "slow to answer"),
        ({"get_bytes_per_s": 1e6}, "slow to transfer"),
        ({"clock_s": -90.0}, "its clock is 90 s behind this machine's"),
    ],
)
def test_the_faults_of_a_store_are_in_words(change: dict[str, float], words: str) -> None:
    sound = {"round_trip_s": 0.1, "put_bytes_per_s": 1e8, "get_bytes_per_s": 1e8, "clock_s": 0.1}
    assert list(StoreMeasurement(**sound).faults) == []
    assert list(StoreMeasurement(**{**sound, **change}).faults) == [words]


def test_a_fleet_without_a_run_is_looked_at_by_its_stores(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    home = RegionConfig(name="home", store=str(tmp_path / "home"))
    findings = look(
        FleetConfig(home="home", regions=(home, RegionConfig(name="eu", store=f"{tmp_path}/eu", engines=1))), None
    )
    assert "refuses to overwrite" in findings["home: store"].words
    assert not findings["eu: store"].works
    assert f"{tmp_path}/eu" in findings["eu: store"].words


def test_versions_that_differ_between_sites_are_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    regions = [RegionConfig(name=name, store=str(tmp_path / name), engines=1) for name in ("run", "eu", "ap")]
    fleet = FleetConfig(home="run", regions=tuple(regions))
    remember_fleet(folder, fleet)
    for name, torch in (("", versions()["torch"]), ("eu", "0.0.1")):
        seen = Observed(generation=1, host="m", statuses={}, versions={**versions(), "torch": torch})
        fleet_objects(folder, name).observe(seen)
    finding = look(fleet, folder)["versions"]
    assert not finding.works
    assert f"torch differs: {versions()['torch']} (here, run); 0.0.1 (eu)" in finding.words
    assert finding.words.endswith("unknown in ap, whose supervisor has not reported")
    alike = {"here": versions(), "eu": versions()}
    assert is_alike(alike) and "differs" not in compare_versions(alike)


def test_gateways_that_are_missing_or_have_another_key_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    (tmp_path / "eu" / "weights").mkdir(parents=True)
    home = RegionConfig(name="home", store=str(tmp_path / "run"))
    fleet = FleetConfig(home="home", regions=(home, RegionConfig(name="eu", store=str(tmp_path / "eu"), engines=1)))
    remember_fleet(folder, fleet)
    open_directory(folder, "eu").announce(ProcessName(command="serve", region="eu"), "http://127.0.0.1:1")
    assert look(fleet, folder)["eu: gateways"].words == "0 of 1 have announced their URL"

    keys = (key_of("run", folder.key(KeyRole.ADMIN), Scope.ADMIN),)
    with gateway_in_a_thread(template(), fake_engine(), keys, MAX_LENGTH) as url:
        open_directory(folder, "eu").announce(EU, url)
        findings = look(fleet, folder)
        assert findings["eu: weights"].works
        assert findings[str(EU)].works
        assert findings[str(EU)].words.endswith("weights 0, 1 of 1 engines healthy")
        monkeypatch.setenv(RUN_KEY_VARIABLE, "x" * 32)
        assert "none signed with this run's key" in look(fleet, folder)["eu: gateways"].words
        open_directory(folder, "eu").announce(EU, url)
        assert "rejects the admin key" in look(fleet, folder)[str(EU)].words
    assert not look(fleet, folder)[str(EU)].works
