"""Real hosts of a fleet, which join and leave while a client makes sandboxes: nothing is restarted for it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from etude.config.fleet import FleetConfig, RegionConfig
from etude.config.loading import default_recipe
from etude.errors import SandboxError
from etude.run.folder import RunFolder
from etude.run.placement import remember_fleet
from etude.run.region_stores import ADDRESS_VARIABLE
from etude.run.sandbox_hosts import fleet_hosts
from etude.sandboxes.remote.hosts import USUAL_TIMES, HostedSandboxes, SandboxLoad
from sandbox_hosts import KEY, START_S, VARIABLE, HostProcess
from waiting import until, wait_until

TIMES = replace(USUAL_TIMES, look_s=0.2, answer_s=30.0, find_s=0.2, room_s=START_S)
STOPPED = 128 + signal.SIGTERM

pytestmark = pytest.mark.timeout(3 * START_S)


class Fleet:
    """A run on two regions, in each of which hosts with room for one sandbox can be started."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.stores = {"home": folder / "run", "far": folder / "far"}
        self._run = RunFolder.create(self.stores["home"], default_recipe(["sandboxes.kind=remote"]))
        home, far = (RegionConfig(name=name, store=str(store), engines=1) for name, store in self.stores.items())
        remember_fleet(self._run, FleetConfig(home="home", regions=(home, far)))

    def start(self, region: str) -> HostProcess:
        """Start a host in a region."""
        where = ["--region", region] if region != "home" else []
        options = ["--sandboxes", "1", "--announce", str(self.stores[region]), *where]
        host = HostProcess(self._folder / f"{region}.log", *options)
        self._stack.callback(lambda: host.stop(signal.SIGKILL) if host.is_running else None)
        return host

    def play(self, scenario: Callable[[HostedSandboxes], Awaitable[None]]) -> None:
        """Act out a scenario with the hosts of all regions."""

        async def act() -> None:
            find = fleet_hosts(self._run, self._run.config().sandboxes)
            provider = HostedSandboxes((), KEY, find=find, times=TIMES)
            try:
                await scenario(provider)
            finally:
                await provider.close()

        asyncio.run(act())


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


@pytest.mark.heavy("two processes of étude, and namespaces", missing=os.geteuid() != 0)
def test_a_request_that_waits_for_room_is_served_by_a_host_that_joins(fleet: Fleet) -> None:
    async def join(provider: HostedSandboxes) -> None:
        first = fleet.start("home")
        await provider.create({})
        waiting = asyncio.create_task(provider.create({"a": "b"}))
        await until(lambda: provider.load() == SandboxLoad(demand=2, capacity=1))
        fleet.start("far")
        assert await (await waiting).read_file("a") == "b"
        assert first.is_running and provider.faults()

    fleet.play(join)


@pytest.mark.heavy("two processes of étude, and namespaces", missing=os.geteuid() != 0)
def test_a_host_that_is_stopped_waits_for_its_sandboxes_for_a_while_and_is_gone(fleet: Fleet) -> None:
    async def leave(provider: HostedSandboxes) -> None:
        far = fleet.start("far")
        sandbox = await provider.create({"a": "b"})
        far.process.send_signal(signal.SIGTERM)
        await until(lambda: "stopping: 1 sandboxes are open" in far.text())
        assert await sandbox.read_file("a") == "b"
        home = fleet.start("home")
        other = await provider.create({"a": "c"})
        await sandbox.close()
        wait_until(lambda: not far.is_running)
        assert far.process.returncode == STOPPED
        await until(lambda: provider.load() == SandboxLoad(demand=1, capacity=1))
        running = asyncio.create_task(other.exec(["sleep", "600"], timeout_s=900))
        await asyncio.sleep(0.5)
        home.stop()
        with pytest.raises(SandboxError):
            await running
        await until(lambda: provider.load() == SandboxLoad(demand=0, capacity=0))
        assert provider.faults() == {}, "it is no host of the fleet any more"

    fleet.play(leave)
