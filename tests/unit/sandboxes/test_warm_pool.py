"""The pool over a provider that is slow, fails, hangs and loses sandboxes: all waits end, and nothing is left over."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from command_results import ended
from etude.errors import SandboxError, SandboxesBusy, Unsupported
from etude.protocols import ExecResult
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.memory_pressure import MachineMemory
from etude.sandboxes.warm_pool import PooledSandbox, SandboxPool, WarmPoolLimits
from waiting import until

PLENTY = MachineMemory(available_bytes=1e15)
COLD = WarmPoolLimits(warm=0, start_s=5.0, close_s=5.0)


class FailingProvider:
    """A provider of plain sandboxes that raises the errors it is given."""

    def __init__(self) -> None:
        self.alive: set[PlainSandbox] = set()
        self.made = 0
        self.most_starting = 0
        self.specs: list[SandboxSpec] = []
        self.start_s = 0.0
        self.errors: list[Exception] = []
        self.closed = False
        self._starting = 0

    async def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.FORK})

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> "PlainSandbox":
        assert not files, "a warm sandbox has no files yet"
        self._starting += 1
        self.most_starting = max(self.most_starting, self._starting)
        try:
            await asyncio.sleep(self.start_s)
        finally:
            self._starting -= 1
        if self.errors:
            raise self.errors.pop()
        self.specs.append(spec or SandboxSpec())
        return self.make()

    def make(self) -> "PlainSandbox":
        self.made += 1
        made = PlainSandbox(self)
        self.alive.add(made)
        return made

    async def close(self) -> None:
        assert not self.alive, "the pool closes its sandboxes itself"
        self.closed = True


class PlainSandbox:
    """Files, and a command that may take its time."""

    def __init__(self, provider: FailingProvider) -> None:
        self.provider = provider
        self.files: dict[str, str] = {}
        self.close_failures: list[Exception] = []
        self.dead = False

    async def exec(self, argv: Sequence[str], **_: object) -> ExecResult:
        await asyncio.sleep(float(argv[0]))
        return ended()

    async def read_file(self, path: str) -> str | None:
        return self.files.get(path)

    async def write_file(self, path: str, text: str) -> None:
        if ".." in path:
            raise ValueError(f"{path!r} does not stay inside")
        self.files[path] = text

    async def export(self, paths: Sequence[str], *, limit_bytes: int = 0) -> bytes:
        return repr((paths, limit_bytes)).encode()

    async def load(self, tar: bytes) -> None:
        self.files["tar"] = tar.decode()

    async def stats(self) -> SandboxStats:
        if self.dead:
            raise SandboxError("it was killed")
        return SandboxStats(memory_bytes=1e6, disk_bytes=0.0, processes=1.0, cpu_s=0.0, age_s=0.0)

    async def kill_processes(self) -> None:
        self.files["killed"] = "yes"

    async def snapshot(self) -> Image:
        return Image(digest="of a sandbox")

    async def fork(self, count: int = 1) -> "Sequence[PlainSandbox]":
        if self.provider.errors:
            raise self.provider.errors.pop()
        return [self.provider.make() for _ in range(count)]

    async def close(self) -> None:
        if self.close_failures:
            raise self.close_failures.pop()
        self.provider.alive.discard(self)


def play(
    scenario: Callable[[SandboxPool, FailingProvider], Awaitable[None]],
    limits: WarmPoolLimits = COLD,
    memory: Callable[[], MachineMemory] = lambda: PLENTY,
) -> FailingProvider:
    """Act a scenario out, then close the pool: nothing may be left."""
    provider = FailingProvider()

    async def act() -> None:
        pool = SandboxPool(provider, limits, memory=memory)
        try:
            async with asyncio.timeout(20):
                await scenario(pool, provider)
        finally:
            await pool.close()
            await pool.close()
        now = pool.stats()
        assert now.starting + now.warm + now.leased + now.removing + now.waiting == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(act())
    assert provider.closed
    assert not provider.alive
    return provider


def test_a_sandbox_has_its_files_and_every_call_reaches_it() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        sandbox = await pool.create({"a": "1"}, SandboxSpec(ttl_s=9.0))
        assert await sandbox.read_file("a") == "1"
        assert (await sandbox.exec(["0"])).exit_code == 0
        await sandbox.load(b"x")
        assert await sandbox.read_file("tar") == "x"
        assert await sandbox.export(["p"], limit_bytes=7) == b"(['p'], 7)"
        assert (await sandbox.snapshot()).digest == "of a sandbox"
        assert (await sandbox.stats()).memory_bytes == 1e6
        await sandbox.close()
        await sandbox.close()
        assert not provider.alive
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.exec(["0"])
        assert await pool.capabilities() == {Capability.FORK}

    assert play(scenario).specs[0].ttl_s > 9.0  # it may be warm for a while before it is leased


def test_warm_sandboxes_are_kept_for_a_spec_in_use_and_none_is_given_twice() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        leased = [await pool.create({})]
        await until(lambda: pool.stats().warm == 3)
        provider.start_s = 60.0  # only what is warm can be had
        leased += [await pool.create({}) for _ in range(3)]
        assert pool.stats().warm_leases == 3
        assert len({lease.inner for lease in leased}) == 4

    play(scenario, WarmPoolLimits(warm=3, starting=8))


def test_an_announced_burst_is_made_ready_and_forgotten_as_it_comes() -> None:
    spec = SandboxSpec(allow=("a:1",))

    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        pool.announce(spec, 30)
        await until(lambda: pool.stats().warm == 16)  # of 20 places, 4 are kept for urgent requests
        leased = [await pool.create({}, spec) for _ in range(16)]
        assert pool.stats().warm_leases == 16
        for lease in leased:
            await lease.close()
        await until(lambda: pool.stats().warm == 14)  # those that were announced and did not come yet
        leased = [await pool.create({}, spec) for _ in range(14)]
        await leased[0].close()
        await until(lambda: pool.stats().warm == 1)
        assert all(made.allow == spec.allow for made in provider.specs)

    play(scenario, WarmPoolLimits(live=20, warm=1, starting=3))


def test_warm_sandboxes_make_room_for_other_specs_and_for_the_machine() -> None:
    left = [1e15]

    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        await pool.create({})
        await until(lambda: pool.stats().warm == 2)
        for number in range(2):
            await pool.create({}, SandboxSpec(allow=(f"a:{number + 1}",)))
        assert pool.stats().leased == 3
        await (await pool.create({}, SandboxSpec(allow=("a:9",)))).close()
        await until(lambda: pool.stats().warm > 0)
        left[0] = 0.0
        await until(lambda: pool.stats().warm == 0)
        assert pool.stats().leased == 3

    limits = WarmPoolLimits(live=4, reserved=0, warm=2)
    play(scenario, limits, lambda: MachineMemory(available_bytes=left[0]))


def test_nothing_is_started_without_memory_but_the_first() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        await pool.create({})
        with pytest.raises(SandboxesBusy):
            await pool.create({})
        assert provider.made == 1

    play(scenario, WarmPoolLimits(wait_s=0.4), lambda: MachineMemory(available_bytes=0.0))


def test_starts_are_bounded_and_every_request_is_served_in_turn() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        provider.start_s = 0.005
        served: list[int] = []

        async def one(number: int) -> None:
            sandbox = await pool.create({})
            served.append(number)
            await sandbox.close()

        await asyncio.gather(*(one(number) for number in range(60)))
        assert served == sorted(served)

    assert play(scenario, WarmPoolLimits(warm=0, live=8, reserved=0, starting=3)).most_starting == 3


def test_a_grader_is_served_while_rollouts_hold_everything() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        leased = [await pool.create({}) for _ in range(2)]
        waiting = asyncio.ensure_future(pool.create({}))
        grading = await pool.urgent().create({})
        with pytest.raises(SandboxesBusy, match=r"within 0\.3 s"):
            await waiting
        await grading.close()
        assert len(provider.alive) == 2
        await leased[0].close()

    play(scenario, WarmPoolLimits(live=3, reserved=1, warm=0, wait_s=0.3))


def test_too_many_requests_are_refused() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        await pool.create({})
        waiting = asyncio.ensure_future(pool.create({}))
        await asyncio.sleep(0.01)
        with pytest.raises(SandboxesBusy, match=r"1 requests .* wait already"):
            await pool.create({})
        waiting.cancel()
        await asyncio.wait([waiting])

    play(scenario, WarmPoolLimits(live=1, warm=0, waiting=1))


def test_a_start_that_fails_is_tried_again() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        provider.errors = [SandboxError("busy disk"), OSError("odd")]
        await pool.create({})
        assert pool.stats().start_failures == 2
        assert pool.stats().trouble == "busy disk"

    play(scenario)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (SandboxError("no disk"), SandboxError, "no disk"),
        (Unsupported("no VM here: use ns"), Unsupported, "use ns"),
        (KeyError("bug"), Unsupported, "KeyError"),
    ],
)
def test_a_request_for_what_cannot_be_made_gets_the_error(
    error: Exception, kind: type[SandboxError], words: str
) -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        provider.errors = [error] * 3
        with pytest.raises(kind, match=words) as caught:
            await pool.create({})
        assert type(caught.value) is kind
        assert caught.value.__cause__ is error

    play(scenario, WarmPoolLimits(warm=0, tries=3))


def test_a_start_that_hangs_is_given_up() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        provider.start_s = 60.0
        with pytest.raises(SandboxError, match=r"no sandbox started within 0\.05 s"):
            await pool.create({})

    play(scenario, WarmPoolLimits(warm=0, start_s=0.05, tries=1))


def test_a_sandbox_that_died_while_it_was_warm_is_not_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sandboxes.warm_pool.FRESH_S", 0.0)

    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        await (await pool.create({})).close()
        await until(lambda: pool.stats().warm == 2)
        for sandbox in provider.alive:
            sandbox.dead = True
        assert await (await pool.create({"a": "b"})).read_file("a") == "b"
        assert pool.stats().deaths == 2

    play(scenario, WarmPoolLimits(warm=2))


def test_a_lease_ends_with_its_time_to_live() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        sandbox = await pool.create({}, SandboxSpec(ttl_s=0.05))
        await until(lambda: not provider.alive)
        with pytest.raises(SandboxError, match="time to live"):
            await sandbox.read_file("a")

    play(scenario)


def test_a_bad_file_name_is_the_callers_error_and_keeps_no_place() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        with pytest.raises(ValueError, match="stay inside"):
            await pool.create({"good": "", "../bad": ""})
        assert not provider.alive

    play(scenario)


def test_a_cancelled_request_keeps_no_place() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        provider.start_s = 0.1
        waiting = [asyncio.ensure_future(pool.create({})) for _ in range(3)]
        await asyncio.sleep(0.02)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await until(lambda: pool.stats().starting == 0)
        await pool.create({})
        assert pool.stats().leased == 1

    play(scenario)


def test_forks_are_leases_of_their_own() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        sandbox = await pool.create({})
        first, second = await sandbox.fork(2)
        await sandbox.close()
        await first.write_file("a", "1")
        assert (await first.read_file("a"), await second.read_file("a")) == ("1", None)
        assert pool.stats().leased == 2
        with pytest.raises(ValueError, match="count=0"):
            await first.fork(0)
        with pytest.raises(SandboxesBusy, match="no room for 3 copies"):
            await first.fork(3)
        provider.errors = [Unsupported("no forks")]
        with pytest.raises(Unsupported, match="no forks"):
            await first.fork(1)
        assert pool.stats().leased == 2

    play(scenario, WarmPoolLimits(live=4, reserved=0, warm=0))


def test_a_removal_that_fails_is_tried_again_and_at_last_counted() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        lucky = await pool.create({})
        next(iter(provider.alive)).close_failures = [OSError("busy")]
        await lucky.close()
        assert (len(provider.alive), pool.stats().unclosed) == (0, 0)
        unlucky = await pool.create({})
        sandbox = next(iter(provider.alive))
        sandbox.close_failures = [OSError("busy")] * 2
        await unlucky.close()
        assert pool.stats().unclosed == 1
        assert "OSError: busy" in pool.stats().trouble
        await sandbox.close()

    play(scenario, WarmPoolLimits(warm=0, tries=2))


def test_closing_fails_requests_and_ends_leases() -> None:
    async def scenario(pool: SandboxPool, provider: FailingProvider) -> None:
        lease: PooledSandbox = await pool.create({})
        provider.start_s = 60.0
        waiting = asyncio.ensure_future(pool.create({}))
        await until(lambda: pool.stats().starting == 1)
        await pool.close()
        with pytest.raises(SandboxError, match="the pool of sandboxes is closed"):
            await waiting
        with pytest.raises(SandboxError, match="the pool of sandboxes is closed"):
            await lease.read_file("a")
        with pytest.raises(SandboxError, match="the pool of sandboxes is closed"):
            await pool.create({})

    play(scenario)
