"""Servers of a fleet's processes: a restarted server has the same address."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.recipe import RunConfig
from etude.run.folder import RunFolder
from etude.run.listener import run_listener
from etude.run.placement import remember_fleet
from etude.run.process_name import ENGINE
from etude.run.region_stores import ADDRESS_VARIABLE, open_directory
from etude.run.store_outages import StoreOutages


def test_a_process_that_is_started_again_has_its_url_again_unless_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    home = RegionConfig(name="home", store=str(tmp_path / "home"), engines=1)
    remember_fleet(folder, FleetConfig(home="home", regions=(home,)))
    section = folder.config().engine

    async def urls() -> list[str]:
        with StoreOutages(folder.store, 0.0) as outages:
            listener = partial(run_listener, folder, ENGINE, web.Application, section, outages)
            async with listener() as first, listener() as while_it_runs:
                pass
            async with listener() as again:
                return [first, while_it_runs, again]

    first, while_it_runs, again = asyncio.run(urls())
    assert first != while_it_runs == again
    assert open_directory(folder, "").urls("serve") == {ENGINE: again}
