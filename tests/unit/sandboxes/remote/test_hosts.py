"""Several hosts: who dies loses nothing but its sandboxes, who drains ends with its last one, and many leases hold."""

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import ConfigError, InfrastructureError, SandboxError, SandboxesBusy, Unsupported
from etude.protocols import SandboxProvider
from etude.rollouts.fake import FakeSandboxes
from etude.run.serving import listening
from etude.sandbox_spec import Capability, Image, SandboxSpec
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.memory_pressure import MachineMemory
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.hosts import HostedSandboxes, HostTimes, SandboxLoad
from etude.sandboxes.remote.placement import SANDBOX_BYTES
from etude.sandboxes.remote.principals import Permissions, Quota, SandboxClient, limits_of_many
from etude.sandboxes.remote.server import SandboxServer, ServerLimits
from etude.sandboxes.warm_pool import SandboxPool, WarmPoolLimits
from sandbox_hosts import KEY, VARIABLE, HostProcess, hosts
from waiting import until, wait_until

T = TypeVar("T")
GIB = 1 << 30
LOOK_S = 0.05
TIMES = HostTimes(look_s=LOOK_S, answer_s=30.0, gone_s=0.5, find_s=LOOK_S)
"""A host that is there is found to be, however busy this machine is."""
SPEC = SandboxSpec()
SLEEP, NAP = (["python3", "-c", f"import time; time.sleep({seconds})"] for seconds in (100, 9))


class Host:
    """A server in this process: with so much memory, images of these digests, and a provider."""

    def __init__(
        self,
        provider: SandboxProvider | None = None,
        *,
        memory_bytes: float = 64 * GIB,
        images: Sequence[str] = (),
        quota: Quota | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.provider = FakeSandboxes() if provider is None else provider
        self.memory_bytes = memory_bytes
        self.images = images
        self.quota, self.limits = quota or Quota(), limits
        self.port = 0
        self.start()

    def start(self) -> None:
        """A server of its own: another one is the host started anew."""
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        permissions = Permissions(images=self._image)
        client = SandboxClient(digest=digest, permissions=permissions, quota=self.quota, is_operator=True)
        self.server = SandboxServer(self.provider, {"one": client}, limits=self.limits, memory=self._memory)
        self._listening = AsyncExitStack()

    async def listen(self) -> None:
        """Listen, on the same port as before."""
        self.port = await self._listening.enter_async_context(listening(self.server.app(), self.port, shutdown_s=0.1))

    async def leave(self) -> None:
        """Stop listening, and close open connections."""
        await self._listening.aclose()

    def _memory(self) -> MachineMemory:
        return MachineMemory(available_bytes=self.memory_bytes)

    def _image(self, digest: str) -> Image:
        if digest not in self.images:
            raise ConfigError(f"image {digest!r} is not in the store")
        return Image(digest=digest)


def play(
    scenario: Callable[[HostedSandboxes], Awaitable[T]], *machines: Host, times: HostTimes = TIMES, connections: int = 0
) -> T:
    """Act out a scenario with some hosts."""

    async def act() -> T:
        for host in machines:
            await host.listen()
        urls = [f"http://127.0.0.1:{host.port}" for host in machines]
        provider = HostedSandboxes(urls, KEY, times=times, connections=connections)
        try:
            return await scenario(provider)
        finally:
            await provider.close()
            for host in machines:
                await host.leave()
                await host.provider.close()

    return asyncio.run(act())


def counts(machines: Sequence[Host]) -> list[int]:
    return [len(host.server) for host in machines]


def with_image(digest: str) -> SandboxSpec:
    return SandboxSpec(image=Image(digest=digest))


def test_sandboxes_go_where_memory_is_free() -> None:
    machines = [Host(memory_bytes=2 * GIB), Host(memory_bytes=8 * GIB), Host(memory_bytes=GIB / 4)]

    async def spread(provider: HostedSandboxes) -> None:
        await asyncio.gather(*(provider.create({}) for _ in range(60)))
        few, many, none = counts(machines)
        assert few < many
        assert (few + many, none) == (60, 0)

    play(spread, *machines)


def test_an_image_is_made_where_it_is_known_and_missed_where_no_host_knows_it() -> None:
    machines = [Host(memory_bytes=64 * GIB), Host(memory_bytes=GIB, images=["here"])]

    async def find(provider: HostedSandboxes) -> None:
        for _ in range(3):
            await provider.create({}, with_image("here"))
        assert counts(machines) == [0, 3]
        for _ in range(2):
            with pytest.raises(ConfigError, match="elsewhere"):
                await provider.create({}, with_image("elsewhere"))

    play(find, *machines)


def test_a_full_host_is_passed_over_and_waited_for_when_all_are_full() -> None:
    quota = Quota(sandboxes=2)
    machines = [Host(quota=quota), Host(quota=quota)]

    async def fill(provider: HostedSandboxes) -> None:
        made = await asyncio.gather(*(provider.create({}) for _ in range(4)))
        assert counts(machines) == [2, 2]
        waiting = asyncio.create_task(provider.create({}))
        await asyncio.sleep(4 * LOOK_S)
        assert not waiting.done()
        await made[0].close()
        await waiting

    play(fill, *machines)

    async def give_up(provider: HostedSandboxes) -> None:
        with pytest.raises(SandboxesBusy, match=r"no host .* had room within 0\.2 s: .*it is full"):
            await provider.create({})

    play(give_up, Host(memory_bytes=0), times=replace(TIMES, room_s=0.2))


class Broken(FakeSandboxes):
    """Makes nothing, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = "its disk is full"


def test_a_host_that_cannot_make_any_is_no_trap() -> None:
    machines = [Host(Broken(), memory_bytes=64 * GIB), Host(memory_bytes=8 * GIB)]

    async def make(provider: HostedSandboxes) -> None:
        for _ in range(8):
            await provider.create({})

    play(make, *machines)

    async def fail(provider: HostedSandboxes) -> None:
        with pytest.raises(SandboxError, match="its disk is full"):
            await provider.create({})

    play(fail, Host(Broken()), Host(Broken()))


def test_a_host_that_leaves_loses_its_sandboxes_and_is_used_again_when_it_is_back() -> None:
    machines = [Host(), Host()]

    async def lose(provider: HostedSandboxes) -> None:
        made = await asyncio.gather(*(provider.create({"a": "b"}) for _ in range(8)))
        assert counts(machines) == [4, 4]
        await machines[0].leave()
        texts = await asyncio.gather(*(sandbox.read_file("a") for sandbox in made), return_exceptions=True)
        errors = [text for text in texts if isinstance(text, BaseException)]
        assert texts.count("b") == len(errors) == 4
        assert all(isinstance(error, InfrastructureError) for error in errors)
        for _ in range(3):
            await provider.create({})
        assert counts(machines) == [0, 7]
        machines[0].start()
        await machines[0].listen()
        await until(lambda: not provider.faults())
        for _ in range(3):
            await provider.create({})
        assert len(machines[0].server) > 0
        lost = [sandbox for sandbox, text in zip(made, texts, strict=True) if text != "b"]
        with pytest.raises(SandboxError, match=r"started anew|gave no answer"):
            await lost[0].read_file("a")

    play(lose, *machines)


def test_calls_under_way_on_a_silent_host_are_given_up_long_before_their_own_deadline() -> None:
    async def act() -> None:
        host = Host(LocalSandboxes(1))
        await host.listen()
        under_way = asyncio.Event()
        silent = False

        # A network between us and the host, which can go down.
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", host.port)
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                if b"/exec" in data:
                    under_way.set()
                await until(lambda: not silent)
                target.write(data)
            target.close()

        network = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = network.sockets[0].getsockname()[1]
        times = replace(TIMES, answer_s=1.0, gone_s=2.0)
        provider = HostedSandboxes([f"http://127.0.0.1:{port}"], KEY, times=times)
        try:
            sandbox = await provider.create({})
            running = asyncio.create_task(sandbox.exec(SLEEP, timeout_s=300))
            await under_way.wait()
            silent = True
            with pytest.raises(SandboxError, match="gave no answer for 2 s"):
                await running
            silent = False
            await until(lambda: not provider.faults())
            assert await (await provider.create({"a": "b"})).read_file("a") == "b"
        finally:
            await provider.close()
            network.close()
            await host.leave()
            await host.provider.close()

    asyncio.run(act())


def test_a_drained_host_serves_those_it_has_and_ends_with_the_last() -> None:
    machines = [Host(), Host(memory_bytes=GIB)]

    async def drain(provider: HostedSandboxes) -> None:
        last = await provider.create({"a": "b"})
        assert counts(machines) == [1, 0]
        operator = RemoteSandboxes(f"http://127.0.0.1:{machines[0].port}", KEY)
        drained = asyncio.create_task(machines[0].server.drained())
        assert (await operator.drain()).sandboxes == 1
        for _ in range(3):
            await provider.create({})
        with pytest.raises(SandboxesBusy, match="being drained"):
            await last.fork()
        assert await last.read_file("a") == "b"
        assert counts(machines) == [1, 3]
        assert not drained.done()
        await last.close()
        await drained
        await operator.close()

    play(drain, *machines)


def test_only_an_operator_drains() -> None:
    host = Host()
    client = SandboxClient(digest=hashlib.sha256(KEY.encode()).hexdigest())
    host.server = SandboxServer(host.provider, {"one": client})

    async def knock(provider: HostedSandboxes) -> None:
        tenant = RemoteSandboxes(f"http://127.0.0.1:{host.port}", KEY)
        with pytest.raises(ConfigError, match="operator = true"):
            await tenant.drain()
        await tenant.close()

    play(knock, host)


def test_a_fork_and_a_snapshot_stay_on_their_host_and_go_with_it() -> None:
    machines = [Host(NamespaceSandboxes()), Host(NamespaceSandboxes(), memory_bytes=GIB)]

    async def stay(provider: HostedSandboxes) -> None:
        claims = await provider.capabilities()
        if not {Capability.SNAPSHOT, Capability.FORK} <= claims:
            pytest.skip("ns has no snapshots on this machine")
        first = await provider.create({"a": "b"})
        image = await first.snapshot()
        machines[0].memory_bytes = GIB
        machines[1].memory_bytes = 64 * GIB
        await asyncio.sleep(3 * LOOK_S)
        copy = await provider.create({}, SandboxSpec(image=image))
        (fork,) = await first.fork()
        assert counts(machines) == [3, 0]
        assert await copy.read_file("a") == await fork.read_file("a") == "b"
        await machines[0].leave()
        machines[0].start()
        await machines[0].listen()
        with pytest.raises(SandboxError):
            await provider.create({}, SandboxSpec(image=image))
        await until(lambda: not provider.faults())
        with pytest.raises(SandboxError, match="is gone"):
            await provider.create({}, SandboxSpec(image=image))

    play(stay, *machines)


def test_an_announced_burst_is_warm_on_every_host_before_it_comes() -> None:
    limits = WarmPoolLimits(live=40, starting=4, reserve_bytes=0, start_bytes=0)
    pools = [SandboxPool(FakeSandboxes(), limits) for _ in range(2)]
    machines = [Host(pool) for pool in pools]

    async def burst(provider: HostedSandboxes) -> None:
        await provider.announce(SPEC, 48)
        await until(lambda: [pool.stats().warm for pool in pools] == [24, 24])
        await asyncio.gather(*(provider.create({}) for _ in range(48)))
        assert [pool.stats().warm_leases for pool in pools] == [24, 24]

    play(burst, *machines)


def test_a_sandbox_that_is_over_is_known_with_the_next_heartbeat() -> None:
    async def act() -> None:
        host = Host(limits=ServerLimits(lease_s=0.4))
        await host.listen()
        client = RemoteSandboxes(f"http://127.0.0.1:{host.port}", KEY)
        sandbox = await client.create({}, SandboxSpec(ttl_s=0.1))
        await until(lambda: len(client) == 0)
        with pytest.raises(SandboxError, match="time to live is over"):
            await sandbox.read_file("a")
        await client.close()
        await host.leave()

    asyncio.run(act())


@pytest.mark.heavy("ten seconds, of leases that must be long on a busy machine")
def test_heartbeats_get_through_while_commands_take_up_all_connections() -> None:
    machines = [Host(LocalSandboxes(2), limits=ServerLimits(lease_s=4.0, requests=2))]

    async def fill(provider: HostedSandboxes) -> None:
        resting = await provider.create({"a": "b"})
        busy = [await provider.create({}) for _ in range(2)]
        await asyncio.gather(*(sandbox.exec(NAP, timeout_s=30) for sandbox in busy))
        assert await resting.read_file("a") == "b"

    play(fill, *machines, connections=2)


def test_a_host_that_refuses_us_is_named_at_once_and_one_that_is_away_is_not_waited_for() -> None:
    async def refuse() -> None:
        host = Host()
        await host.listen()
        url = f"http://127.0.0.1:{host.port}"
        provider = HostedSandboxes([url], "another key")
        with pytest.raises(ConfigError, match=rf"{url}: this key is not known"):
            await provider.create({})
        await provider.close()
        provider = HostedSandboxes([url, "http://127.0.0.1:1"], KEY, times=TIMES)
        await provider.create({})
        await provider.close()
        provider = HostedSandboxes(["http://127.0.0.1:1"], KEY, times=TIMES)
        with pytest.raises(
            SandboxError, match=r"no host of sandboxes answers: http://127.0.0.1:1: .*cannot be reached"
        ):
            await provider.create({})
        await provider.close()
        await host.leave()

    asyncio.run(refuse())


def test_what_a_host_refuses_is_refused_as_it_is_by_one() -> None:
    async def ask(provider: HostedSandboxes) -> None:
        with pytest.raises(Unsupported, match="may not reach"):
            await provider.create({}, SandboxSpec(allow=("pypi.org:443",)))

    play(ask, Host(), Host())


class Region:
    """The directory of a region, in which hosts are found unless it is unavailable."""

    def __init__(self, *machines: Host) -> None:
        self.machines = set(machines)
        self.is_away = False
        self.reads = 0

    async def find(self) -> Sequence[str]:
        self.reads += 1
        if self.is_away:
            raise InfrastructureError("the store does not answer")
        return [f"http://127.0.0.1:{host.port}" for host in self.machines]

    async def is_read(self) -> None:
        """Wait until a provider has used what is there now."""
        after = self.reads + 2
        await until(lambda: self.reads >= after)


def follow(
    scenario: Callable[[HostedSandboxes], Awaitable[None]], *machines: Host, regions: Sequence[Region], named: int = 0
) -> None:
    """Act out a scenario with hosts of which the first are named, and others found in regions."""

    async def act() -> None:
        for host in machines:
            await host.listen()
        urls = [f"http://127.0.0.1:{host.port}" for host in machines[:named]]
        provider = HostedSandboxes(urls, KEY, find=[region.find for region in regions], times=TIMES)
        try:
            await scenario(provider)
        finally:
            await provider.close()
            for host in machines:
                await host.leave()

    asyncio.run(act())


def test_a_request_that_waits_for_room_uses_a_host_that_joins() -> None:
    quota = Quota(sandboxes=1)
    first, second = Host(quota=quota), Host(quota=quota)
    near, far = Region(first), Region()

    async def join(provider: HostedSandboxes) -> None:
        await provider.create({})
        waiting = asyncio.create_task(provider.create({"a": "b"}))
        await far.is_read()
        assert not waiting.done()
        far.machines.add(second)
        assert await (await waiting).read_file("a") == "b"
        assert counts([first, second]) == [1, 1]

    follow(join, first, second, regions=[near, far])


def test_the_first_request_waits_for_the_first_host_of_a_fleet() -> None:
    host, region = Host(), Region()

    async def join(provider: HostedSandboxes) -> None:
        waiting = asyncio.create_task(provider.create({}))
        await region.is_read()
        assert not waiting.done()
        region.machines.add(host)
        await waiting

    follow(join, host, regions=[region])


def test_calls_on_a_host_that_leaves_fail_and_its_work_goes_to_others() -> None:
    machines = [Host(LocalSandboxes(1), memory_bytes=64 * GIB), Host(memory_bytes=GIB)]
    region = Region(machines[0])

    async def leave(provider: HostedSandboxes) -> None:
        sandbox = await provider.create({"a": "b"})
        running = asyncio.create_task(sandbox.exec(SLEEP, timeout_s=300))
        await region.is_read()
        assert counts(machines) == [1, 0]
        region.machines.clear()
        with pytest.raises(SandboxError, match="has left"):
            await running
        with pytest.raises(SandboxError, match="has left"):
            await sandbox.read_file("a")
        for _ in range(2):
            await provider.create({})
        assert (len(machines[1].server), provider.faults()) == (2, {})
        region.machines.add(machines[0])
        await region.is_read()
        await until(lambda: not provider.faults())
        assert await (await provider.create({"a": "again"})).read_file("a") == "again"

    follow(leave, *reversed(machines), regions=[region], named=1)
    asyncio.run(machines[0].provider.close())


def test_a_host_of_a_directory_that_rejects_the_key_stops_nothing() -> None:
    machines = [Host(), Host()]
    digest = hashlib.sha256(b"the key of another run").hexdigest()
    machines[0].server = SandboxServer(machines[0].provider, {"one": SandboxClient(digest=digest)})

    async def make(provider: HostedSandboxes) -> None:
        await provider.create({})
        assert counts(machines) == [0, 1]

    follow(make, *machines, regions=[Region(*machines)])


def test_hosts_stay_while_their_directory_is_unavailable() -> None:
    host = Host()
    regions = [Region(host), Region()]
    regions[1].is_away = True

    async def stay(provider: HostedSandboxes) -> None:
        sandbox = await provider.create({"a": "b"})
        regions[0].is_away = True
        await regions[0].is_read()
        assert await sandbox.read_file("a") == "b"
        await provider.create({})

    follow(stay, host, regions=regions)


def test_the_load_is_what_is_requested_and_what_there_is_room_for() -> None:
    small, large = Host(quota=Quota(sandboxes=3)), Host(memory_bytes=GIB, limits=ServerLimits(reserve_bytes=0))
    region = Region(small)

    async def fill(provider: HostedSandboxes) -> None:
        first = await provider.create({})
        await until(lambda: provider.load() == SandboxLoad(demand=1, capacity=3))
        others = [asyncio.create_task(provider.create({})) for _ in range(4)]
        await until(lambda: provider.load() == SandboxLoad(demand=5, capacity=3))
        region.machines.add(large)
        await asyncio.gather(*others)
        await until(lambda: provider.load() == SandboxLoad(demand=5, capacity=5 + GIB // SANDBOX_BYTES))
        await first.close()
        await until(lambda: provider.load() == SandboxLoad(demand=4, capacity=5 + GIB // SANDBOX_BYTES))

    follow(fill, small, large, regions=[region])


@pytest.mark.parametrize("urls", [["http://a", "http://a/"], ["x:80"], []])
def test_hosts_that_are_none_are_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        HostedSandboxes(urls, KEY)


@pytest.mark.heavy("half a minute: 20,000 sandboxes")
def test_twenty_thousand_leases_are_held_and_renewed_in_pages() -> None:
    many = 20_000
    quota = Quota(sandboxes=many, total=limits_of_many(many))
    machines = [Host(quota=quota, limits=ServerLimits(lease_s=12.0))]

    async def hold(provider: HostedSandboxes) -> None:
        made = [await provider.create({"a": "b"})]
        while len(made) < many:
            made += await made[0].fork(min(64, many - len(made)))
        await asyncio.sleep(30)  # more than two leases
        assert counts(machines) == [many]
        for sandbox in (made[0], made[10_001], made[-1]):
            assert await sandbox.read_file("a") == "b"
        await machines[0].leave()
        await until(lambda: bool(provider.faults()))  # else each is closed on its own

    play(hold, *machines)


@pytest.mark.heavy("three processes of étude, and namespaces")
def test_real_hosts_one_killed_and_one_drained(tmp_path: Path) -> None:
    async def use(running: list[HostProcess]) -> None:
        urls = [host.address()[0] for host in running]
        provider = HostedSandboxes(urls, KEY, times=HostTimes(look_s=0.2, gone_s=2.0))
        made = [await provider.create({"a": str(number)}) for number in range(9)]
        commands = [asyncio.create_task(sandbox.exec(["sleep", "600"], timeout_s=900)) for sandbox in made]
        await asyncio.sleep(1.0)
        running[0].stop(signal.SIGKILL)
        await asyncio.wait(commands, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
        lost = [command for command in commands if command.done()]
        assert lost
        assert all(isinstance(command.exception(), InfrastructureError) for command in lost)
        again = [await provider.create({"a": "again"}) for _ in range(6)]
        assert [await sandbox.read_file("a") for sandbox in again] == ["again"] * 6
        drain = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "etude", "sandboxes", "drain", urls[1]), env={**os.environ, VARIABLE: KEY}
        )
        await until(lambda: any("being drained" in fault for fault in provider.faults().values()))
        assert running[1].is_running
        after = await provider.create({})
        for command in commands:
            command.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in (*made, *again)))
        assert await drain.wait() == 0
        wait_until(lambda: not running[1].is_running)
        assert running[1].process.returncode == 0
        back = HostProcess(tmp_path / "back.log", port=running[0].address()[1])
        try:
            back.address()
            await until(lambda: urls[0] not in provider.faults())
            await asyncio.gather(*(provider.create({}) for _ in range(8)))
            operator = RemoteSandboxes(urls[0], KEY)
            assert (await operator.report(10.0)).sandboxes > 0
            await operator.close()
            await after.close()
            await provider.close()
        finally:
            back.stop()

    with hosts(tmp_path, 3) as running:
        asyncio.run(use(running))
