"""The stores of a fleet's regions, by the run's own fleet.toml."""

from pathlib import Path

import pytest

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, RunFolderError
from etude.run.folder import RunFolder
from etude.run.placement import fleet_of, region_store, remember_fleet
from etude.run.process_name import ProcessName
from etude.run.region_stores import PORT_VARIABLE, open_directory, own_port, weights_url


def test_a_region_has_its_weights_and_its_processes_in_its_own_store(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    assert fleet_of(folder) is None
    assert weights_url(folder, "") == folder.store
    home = RegionConfig(name="home", store=str(tmp_path / "home"))
    away = RegionConfig(name="eu", store=f"{tmp_path}/eu/", engines=1)
    remember_fleet(folder, FleetConfig(home="home", regions=(home, away)))
    assert fleet_of(folder) == FleetConfig(home="home", regions=(home, away))
    assert weights_url(folder, "eu") == str(tmp_path / "eu" / "weights")
    assert weights_url(folder, "") == folder.store  # the run's own
    engine = ProcessName(command="serve", region="eu")
    open_directory(folder, "eu").announce(engine, "http://10.0.0.1:1")
    assert open_directory(folder, "eu").urls("serve") == {engine: "http://10.0.0.1:1"}
    assert open_directory(folder, "").urls("serve") == {}
    with pytest.raises(RunFolderError, match="no region 'us', only home, eu"):
        region_store(folder, "us")


def test_a_port_of_the_environment_is_a_number_of_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    assert own_port() == 0
    monkeypatch.setenv(PORT_VARIABLE, " 65535 ")
    assert own_port() == 65_535
    for wrong in ("http", "-1", "65536", "8.0", "²"):
        monkeypatch.setenv(PORT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"ETUDE_PORT='{wrong}' is no port: give a number"):
            own_port()
