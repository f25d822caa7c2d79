"""Databases inside of sandboxes: up when the agent starts, each with a state of its own, and an error when not."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import ConfigError, SandboxError, Unsupported
from etude.protocols import Sandbox
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.sandbox_spec import Capability, EnvironmentSpec, Image, SandboxLimits, SandboxSpec, Service, ServiceKind
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.ns.sandbox import NamespaceSandbox
from etude.sandboxes.services import DATABASE, OWNER, ServicedSandboxes, sandbox_spec, template_digest, variables

ROWS = Service(kind=ServiceKind.POSTGRES, setup="CREATE TABLE t (i integer); INSERT INTO t VALUES (1), (2), (3);")
KEYS = Service(kind=ServiceKind.REDIS, setup="SET greeting hello\nRPUSH queue a b c\n")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandboxes(runner: asyncio.Runner, postgresql: None) -> Iterator[ServicedSandboxes]:
    """One provider for all tests, since an empty cluster takes a second; skips where it cannot be had."""
    if not shutil.which("redis-server"):
        pytest.skip("Redis is not installed: apt-get install redis-server")
    made = ServicedSandboxes(NamespaceSandboxes(), templates=2)
    try:
        if not runner.run(made.capabilities()):
            pytest.skip("no sandboxes of namespaces on this machine")
        yield made
    finally:
        runner.run(made.close())


async def output(sandbox: Sandbox, *argv: str) -> str:
    """Output of a command that the agent runs."""
    result = await sandbox.exec(argv, timeout_s=60.0)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


async def sql(sandbox: Sandbox, statement: str) -> str:
    """Output of ``psql``, which finds the database without arguments."""
    return await output(sandbox, "psql", "-XqAt", "-c", statement)


def test_services_are_up_hold_their_setup_and_are_forked_for_every_sandbox(
    runner: asyncio.Runner, sandboxes: ServicedSandboxes
) -> None:
    async def act() -> None:
        services = (ROWS, KEYS)
        made: Sequence[Sandbox] = await asyncio.gather(
            *(sandboxes.create({"a.txt": f"{i}"}, None, services) for i in range(4))
        )
        for i, sandbox in enumerate(made):
            await sql(sandbox, f"INSERT INTO t SELECT 100 FROM generate_series(1, {i})")
            await output(sandbox, "redis-cli", "append", "greeting", f" {i}")
        for i, sandbox in enumerate(made):
            assert await sql(sandbox, "SELECT count(*) FROM t") == str(3 + i)
            assert await output(sandbox, "redis-cli", "get", "greeting") == f"hello {i}"
            assert await output(sandbox, "redis-cli", "llen", "queue") == "3"
            assert await sandbox.read_file("a.txt") == str(i)
        assert await output(made[0], "sh", "-c", 'psql "$DATABASE_URL" -At -c "SELECT current_user"') == OWNER
        assert await output(made[0], "sh", "-c", 'redis-cli -u "$REDIS_URL" ping') == "PONG"
        assert await output(made[0], "ls", "-A", ".") == "a.txt"
        assert await sql(made[0], "SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user") == "f|f"
        assert await sql(made[0], "SELECT current_database()") == DATABASE

    runner.run(act())


def test_a_server_that_refuses_or_does_not_come_up_is_an_error_with_its_reason_every_time(
    runner: asyncio.Runner, sandboxes: ServicedSandboxes
) -> None:
    async def act() -> None:
        for _ in range(2):
            with pytest.raises(SandboxError, match=r"postgres: setup failed.*nothing_there"):
                await sandboxes.create({}, None, (replace(ROWS, setup="SELECT * FROM nothing_there;"),))
        with pytest.raises(SandboxError, match=r"redis: setup failed"):
            await sandboxes.create({}, None, (replace(KEYS, setup="NONSENSE 1\n"),))
        cramped = SandboxSpec(limits=SandboxLimits(processes=4))
        with pytest.raises(SandboxError, match=r"(?s)postgres: start failed.*(could not fork|Resource temporarily)"):
            await sandboxes.create({}, cramped, (ROWS,))
        assert await sql(await sandboxes.create({}, None, (ROWS,)), "SELECT 1") == "1"

    runner.run(act())


def test_more_states_than_are_kept_come_and_go(runner: asyncio.Runner, sandboxes: ServicedSandboxes) -> None:
    async def act() -> None:
        kinds = [replace(KEYS, setup=f"SET n {i}\n") for i in range(4)]
        for _ in range(2):
            made = await asyncio.gather(*(sandboxes.create({}, None, (kind,)) for kind in kinds))
            assert [await output(sandbox, "redis-cli", "get", "n") for sandbox in made] == ["0", "1", "2", "3"]
            await asyncio.gather(*(sandbox.close() for sandbox in made))

    runner.run(act())


def test_a_template_that_is_gone_is_made_again(runner: asyncio.Runner, sandboxes: ServicedSandboxes) -> None:
    made: list[NamespaceSandbox] = []

    class Watched(NamespaceSandboxes):
        """Records the sandboxes that it makes: a bare one, then templates."""

        async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> NamespaceSandbox:
            made.append(await super().create(files, spec))
            return made[-1]

    async def act() -> None:
        watched = ServicedSandboxes(Watched())
        try:
            for _ in range(2):
                sandbox = await watched.create({}, None, (KEYS,))
                assert await output(sandbox, "redis-cli", "get", "greeting") == "hello"
                await made[-1].close()  # as its time to live would
        finally:
            await watched.close()

    runner.run(act())
    assert len(made) == 3


class Unhurried(FakeSandboxes):
    """Closes its sandboxes, except copies, only when it may ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def capabilities(self) -> frozenset[Capability]:
        return frozenset(Capability)

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        sandbox = UnhurriedSandbox(files, self._open.discard, self._open.add)
        sandbox.go_on = self.go_on
        self._open.add(sandbox)
        return sandbox


class UnhurriedSandbox(FakeSandbox):
    go_on: asyncio.Event

    async def snapshot(self) -> Image:
        return Image()

    async def close(self) -> None:
        await self.go_on.wait()
        await super().close()


class Forgetful(Unhurried):
    """Loses its snapshots on request, like a host after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.installed = 0
        self.lost: set[str] = set()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        image = spec.image.digest if spec else ""
        if image in self.lost:
            raise SandboxError(f"{image} is gone, with the host that kept it")
        sandbox = ForgetfulSandbox(files, self._open.discard, self._open.add)
        sandbox.go_on, sandbox.provider = self.go_on, self
        self._open.add(sandbox)
        return sandbox


class ForgetfulSandbox(UnhurriedSandbox):
    provider: Forgetful

    async def snapshot(self) -> Image:
        self.provider.installed += 1
        return Image(digest=f"snapshot-{self.provider.installed}")


def test_a_bare_image_that_is_gone_with_its_host_is_made_again() -> None:
    async def act() -> int:
        inner = Forgetful()
        sandboxes = ServicedSandboxes(inner)
        await sandboxes.create({}, None, (KEYS,))
        inner.lost.add("snapshot-1")
        other = replace(KEYS, setup="SET n 1")
        with pytest.raises(SandboxError, match="is gone"):
            await sandboxes.create({}, None, (other,))
        await sandboxes.create({}, None, (other,))
        await sandboxes.close()
        return inner.installed

    assert asyncio.run(act()) == 2


def test_only_close_waits_for_the_end_of_an_evicted_state() -> None:
    async def act() -> tuple[int, bool]:
        inner = Unhurried()
        sandboxes = ServicedSandboxes(inner, templates=1)
        await (await sandboxes.create({}, None, (KEYS,))).close()
        inner.go_on.clear()
        async with asyncio.timeout(5):
            await sandboxes.create({}, None, (replace(KEYS, setup="SET n 1"),))
        there = len(inner)
        closing = asyncio.ensure_future(sandboxes.close())
        await asyncio.wait([closing], timeout=0.01)
        is_early = closing.done()
        inner.go_on.set()
        await closing
        return there, is_early

    assert asyncio.run(act()) == (3, False)  # both states and the copy; not before the first state is gone


def test_without_services_it_is_the_provider_itself() -> None:
    async def act() -> None:
        sandboxes = ServicedSandboxes(LocalSandboxes(1))
        try:
            assert await sandboxes.capabilities() == await LocalSandboxes(1).capabilities()
            sandbox = await sandboxes.create({"a": "b"})
            assert await sandbox.read_file("a") == "b"
            with pytest.raises(Unsupported, match="services"):
                await sandboxes.create({}, None, (KEYS,))
        finally:
            await sandboxes.close()
        with pytest.raises(SandboxError, match="closed"):
            await sandboxes.create({})

    asyncio.run(act())


def test_two_services_of_a_kind_are_refused() -> None:
    assert variables(()) == {}
    assert variables((ROWS, KEYS)).keys() >= {"PGHOST", "PGDATABASE", "DATABASE_URL", "REDIS_URL"}
    with pytest.raises(ValueError, match="redis more than once"):
        variables((KEYS, ROWS, KEYS))


def test_templates_differ_by_all_that_makes_a_sandbox_differ() -> None:
    specs = [
        SandboxSpec(),
        SandboxSpec(environment={"A": "1"}),
        SandboxSpec(limits=SandboxLimits(processes=7)),
        SandboxSpec(image=Image(layers=(Path("/x"),))),
        SandboxSpec(allow=("host:1",)),
    ]
    services: list[tuple[Service, ...]] = [(ROWS,), (KEYS,), (ROWS, KEYS), (replace(ROWS, setup="SELECT 1"),)]
    digests = {template_digest(spec, chosen) for spec in specs for chosen in services}
    assert len(digests) == len(specs) * len(services)
    assert template_digest(SandboxSpec(), (ROWS,)) in digests


def test_a_environment_says_how_its_sandbox_is() -> None:
    environment = EnvironmentSpec(
        workdir="/app", allow=("host:1",), variables={"A": "1"}, limits=SandboxLimits(processes=7)
    )
    spec = sandbox_spec(environment)
    assert spec.image.workdir == "/app"
    assert (spec.allow, spec.environment, spec.limits) == (environment.allow, environment.variables, environment.limits)
    image = Image(digest="d", layers=(Path("/x"),))
    assert sandbox_spec(replace(environment, image="d"), image).image == replace(image, workdir="/app")
    with pytest.raises(ConfigError, match="image d"):
        sandbox_spec(replace(environment, image="d"))


def test_some_state_has_to_be_kept() -> None:
    with pytest.raises(ValueError, match="templates=0"):
        ServicedSandboxes(LocalSandboxes(1), templates=0)
