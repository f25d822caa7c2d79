"""The provider of a run's sandboxes."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.config.tasks import RemoteOptions, SandboxConfig, TaskConfig
from etude.errors import ConfigError
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.run.task_sandboxes import (
    EnvironmentTaskSandboxes,
    PlainTaskSandboxes,
    base_store,
    image_store,
    open_provider,
    pool_limits,
)
from etude.sandbox_spec import EnvironmentSpec, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.providers import KEY_VARIABLE
from etude.sandboxes.remote.hosts import HostedSandboxes
from etude.sandboxes.warm_pool import SandboxPool, WarmPoolLimits
from etude.types import Split, Task
from records import CHECKS
from waiting import until

GATEWAY = "http://near:8500/v1"


def task(environment: EnvironmentSpec | None = None) -> Task:
    return Task(
        task_id="t",
        family="f",
        template="t",
        split=Split.TRAIN,
        prompt="",
        files={"a.py": "x = 1"},
        checks=CHECKS,
        environment=environment,
    )


def test_a_plain_task_is_the_files() -> None:
    async def act() -> str | None:
        return await (await PlainTaskSandboxes(FakeSandboxes()).open(task())).read_file("a.py")

    assert asyncio.run(act()) == "x = 1"


def test_a_plain_task_is_no_machine() -> None:
    with pytest.raises(ConfigError, match=r"sandboxes\.kind = 'ns'"):
        asyncio.run(PlainTaskSandboxes(FakeSandboxes()).open(task(EnvironmentSpec(image="f00"))))


def test_a_tasks_task_is_opened_and_closed_with_its_provider(tmp_path: Path) -> None:
    provider = FakeSandboxes()

    async def act() -> str | None:
        sandboxes = EnvironmentTaskSandboxes(provider, ImageStore(tmp_path))
        text = await (await sandboxes.open(task(EnvironmentSpec()))).read_file("a.py")
        assert len(provider) == 1
        await sandboxes.close()
        return text

    assert asyncio.run(act()) == "x = 1"
    assert len(provider) == 0


def test_a_task_is_announced_as_it_will_be_asked_for(tmp_path: Path) -> None:
    async def act() -> int:
        pool = SandboxPool(FakeSandboxes(), WarmPoolLimits(live=40, warm=1, reserve_bytes=0, start_bytes=0))
        sandboxes = EnvironmentTaskSandboxes(pool, ImageStore(tmp_path), reaches=True)
        await (await sandboxes.open_empty(GATEWAY)).close()
        sandboxes.announce(task(), 8)
        sandboxes.announce(task(EnvironmentSpec(image="missing")), 8)  # who opens it is told
        await until(lambda: pool.stats().warm == 8)
        for _ in range(8):
            await sandboxes.open(task(), gateway=GATEWAY)
        warm = pool.stats().warm_leases
        await sandboxes.close()
        return warm

    assert asyncio.run(act()) == 8


def test_each_sandbox_reaches_the_gateway_of_its_own_session_and_no_other(tmp_path: Path) -> None:
    class Noted(FakeSandboxes):
        async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
            specs.append(spec or SandboxSpec())
            return await super().create(files, spec)

    async def act() -> None:
        for reaches in (True, False):
            sandboxes = EnvironmentTaskSandboxes(Noted(), ImageStore(tmp_path), reaches=reaches)
            for gateway in (GATEWAY, "https://far:9"):
                await sandboxes.open(task(EnvironmentSpec(allow=("pypi:1",))), gateway=gateway)
            await sandboxes.close()

    specs: list[SandboxSpec] = []
    asyncio.run(act())
    assert [spec.allow for spec in specs] == [("pypi:1", "near:8500"), ("pypi:1", "far:9"), ("pypi:1",), ("pypi:1",)]


def test_a_pool_of_remote_sandboxes_starts_as_many_as_it_holds() -> None:
    remote = RemoteOptions(urls=("http://a", "http://b"))
    limits = pool_limits(SandboxConfig(kind="remote", pool_size=20_000, options=remote))
    assert (limits.live, limits.starting, limits.start_bytes, limits.reserve_bytes) == (20_000, 20_000, 0, 0)
    assert limits.waiting >= limits.live
    assert pool_limits(SandboxConfig(kind="ns", pool_size=64)).starting < 64


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="f00"):
        asyncio.run(
            EnvironmentTaskSandboxes(FakeSandboxes(), ImageStore(tmp_path)).open(task(EnvironmentSpec(image="f00")))
        )


def test_images_lie_beside_tasks_where_there_are_any(tmp_path: Path) -> None:
    config = SandboxConfig(kind="ns", images=str(tmp_path / "own"))
    tasks = TaskConfig(family="repository", folder=str(tmp_path / "tasks"))
    assert image_store(config, tasks).folder == base_store(config).folder == tmp_path / "own"
    (tmp_path / "tasks" / "images").mkdir(parents=True)
    assert image_store(config, tasks).folder == tmp_path / "tasks" / "images"


def test_providers_that_cannot_be_had_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(tmp_path)
    with pytest.raises(ConfigError, match="use ns"):
        open_provider(SandboxConfig(), store)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        open_provider(SandboxConfig(kind="remote", options=RemoteOptions(url="http://127.0.0.1:1")), store)
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    hosts = RemoteOptions(urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    assert isinstance(open_provider(SandboxConfig(kind="remote", options=hosts), store), HostedSandboxes)
    with pytest.raises(ConfigError, match=r"has no server.*sandboxes.options.url"):
        open_provider(SandboxConfig(kind="remote", options=RemoteOptions()), store)
