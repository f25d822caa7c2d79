"""The pool over a provider that is slow, fails, hangs and loses sandboxes: nobody waits for ever, nothing is left."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

import pytest

from etude.errors import SandboxError, Unsupported
from etude.protocols import ExecResult
from etude.rollouts.fake import LoopClock, run_virtually
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.pool.inventory import Memory
from etude.sandboxes.pool.lifecycle import SandboxesBusy
from etude.sandboxes.pool.provider import SandboxPool
from etude.sandboxes.pool.slots import PoolLimits
from waiting import until

PLENTY = Memory(available_bytes=1e15)
COLD = PoolLimits(warm=0, start_s=5.0, close_s=5.0)


class Workshop:
    """A provider of sandboxes that do nothing, and that fails as it is told."""

    def __init__(self) -> None:
        self.alive: set[Toy] = set()
        self.made = 0
        self.most_starting = 0
        self.specs: list[SandboxSpec] = []
        self.start_s = 0.0
        self.refusals: list[Exception] = []
        self.closed = False
        self._starting = 0

    async def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.FORK})

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> "Toy":
        assert not files, "a warm sandbox has no files yet"
        self._starting += 1
        self.most_starting = max(self.most_starting, self._starting)
        try:
            await asyncio.sleep(self.start_s)
        finally:
            self._starting -= 1
        if self.refusals:
            raise self.refusals.pop()
        self.specs.append(spec or SandboxSpec())
        return self.make()

    def make(self) -> "Toy":
        self.made += 1
        toy = Toy(self)
        self.alive.add(toy)
        return toy

    async def close(self) -> None:
        assert not self.alive, "the pool closes its sandboxes itself"
        self.closed = True


class Toy:
    """Files, and a command that may take its time."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.files: dict[str, str] = {}
        self.close_failures: list[Exception] = []
        self.dead = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 5.0,
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        await asyncio.sleep(float(argv[0]))
        return ExecResult(exit_code=0, stdout="", stderr="", timed_out=False, truncated=False, seconds=0.0)

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
        return Image(digest="of a toy")

    async def fork(self, count: int = 1) -> "Sequence[Toy]":
        if self.workshop.refusals:
            raise self.workshop.refusals.pop()
        return [self.workshop.make() for _ in range(count)]

    async def close(self) -> None:
        if self.close_failures:
            raise self.close_failures.pop()
        self.workshop.alive.discard(self)


def play(
    story: Callable[[SandboxPool, Workshop], Awaitable[None]],
    limits: PoolLimits = COLD,
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run,
) -> Workshop:
    """Tell a story, then close the pool: nothing may be left."""
    workshop = Workshop()

    async def act() -> None:
        pool = SandboxPool(workshop, limits, clock=LoopClock(), memory=lambda: PLENTY)
        try:
            async with asyncio.timeout(20):
                await story(pool, workshop)
        finally:
            await pool.close()
            await pool.close()
        now = pool.snapshot()
        assert now.starting + now.warm + now.leased + now.draining + now.waiting == 0
        assert len(asyncio.all_tasks()) == 1

    run(act())
    assert workshop.closed
    assert not workshop.alive
    return workshop


def test_a_sandbox_has_its_files_and_every_call_reaches_it() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        sandbox = await pool.create({"a": "1"}, SandboxSpec(ttl_s=9.0))
        assert await sandbox.read_file("a") == "1"
        assert (await sandbox.exec(["0"])).exit_code == 0
        await sandbox.load(b"x")
        assert await sandbox.read_file("tar") == "x"
        assert await sandbox.export(["p"], limit_bytes=7) == b"(['p'], 7)"
        assert (await sandbox.snapshot()).digest == "of a toy"
        assert (await sandbox.stats()).memory_bytes == 1e6
        await sandbox.close()
        await sandbox.close()
        assert not workshop.alive
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.exec(["0"])
        assert await pool.capabilities() == {Capability.FORK}

    workshop = play(story)
    assert workshop.specs[0].ttl_s > 9.0  # it may wait before it is leased


def test_what_was_announced_is_warm_and_used_once() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        workshop.start_s = 0.05
        pool.announce(SandboxSpec(), 4)
        await (await pool.create({})).close()
        await until(lambda: pool.snapshot().warm == 3)
        made = workshop.made
        for _ in range(3):
            await (await pool.create({})).close()
        counters = pool.snapshot().counters
        assert counters.granted_warm == 3
        assert workshop.made >= made
        assert counters.started == counters.granted + pool.snapshot().warm

    play(story, PoolLimits(warm=3, starting=8))


def test_starts_are_bounded_and_everyone_is_served() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        workshop.start_s = 0.005

        async def one() -> None:
            await (await pool.create({})).close()

        await asyncio.gather(*(one() for _ in range(60)))
        assert pool.snapshot().counters.granted == 60

    assert play(story, PoolLimits(warm=0, live=8, starting=3)).most_starting == 3


def test_a_grader_is_served_while_rollouts_hold_everything() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        held = [await pool.create({}) for _ in range(2)]
        waiting = asyncio.ensure_future(pool.claimant("rollouts", wait_s=0.3).create({}))
        grading = pool.claimant("grading", priority=-1)
        async with asyncio.timeout(5):
            await grading.create({})
        with pytest.raises(SandboxesBusy, match=r"within 0\.3 s: try again in 1 s") as caught:
            await waiting
        assert caught.value.retry_after_s == 1
        await grading.close()
        assert len(workshop.alive) == 2
        await held[0].close()

    play(story, PoolLimits(live=3, reserved=1, warm=0))


def test_a_start_that_fails_is_tried_again() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        workshop.refusals = [SandboxError("busy disk"), OSError("odd")]
        await pool.create({})
        assert pool.snapshot().counters.start_failures == 2
        assert pool.snapshot().trouble == "busy disk"

    play(story)


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        (SandboxError("no disk"), SandboxError, "no disk"),
        (Unsupported("no VM here: use ns"), Unsupported, "use ns"),
        (KeyError("bug"), Unsupported, "KeyError"),
    ],
)
def test_who_waits_for_what_cannot_be_made_is_told_why(
    refusal: Exception, kind: type[SandboxError], words: str
) -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        workshop.refusals = [refusal] * 3
        with pytest.raises(kind, match=words) as caught:
            await pool.create({})
        assert type(caught.value) is kind
        assert caught.value.__cause__ is refusal

    play(story, PoolLimits(warm=0, tries=3))


def test_a_start_that_hangs_is_given_up() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        workshop.start_s = 60.0
        with pytest.raises(SandboxError, match=r"no sandbox started within 0\.05 s"):
            await pool.create({})

    play(story, PoolLimits(warm=0, start_s=0.05, tries=1))


def test_one_that_died_while_it_waited_is_not_handed_out() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        pool.announce(SandboxSpec(), 3)
        await (await pool.create({})).close()
        await until(lambda: pool.snapshot().warm == 2)
        for toy in workshop.alive:
            toy.dead = True
        await until(lambda: pool.snapshot().counters.died == 2)
        assert await (await pool.create({"a": "b"})).read_file("a") == "b"

    play(story, PoolLimits(warm=2))


def test_a_silent_holder_loses_its_sandbox_and_is_told() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        silent, busy, beating = [await pool.create({}) for _ in range(3)]
        command = asyncio.ensure_future(busy.exec(["0.6"], timeout_s=5.0))
        for _ in range(30):
            await asyncio.sleep(0.02)
            beating.beat()
        assert len(workshop.alive) == 2
        with pytest.raises(SandboxError, match="taken away: its holder gave no sign of life"):
            await silent.read_file("a")
        await command
        assert await busy.read_file("a") is None
        await silent.close()

    play(story, PoolLimits(warm=0, silence_s=0.2), run_virtually)  # a pause of the machine is no silence


def test_a_lease_ends_with_its_time_to_live() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        sandbox = await pool.create({}, SandboxSpec(ttl_s=0.05))
        await until(lambda: not workshop.alive)
        with pytest.raises(SandboxError, match="time to live"):
            await sandbox.read_file("a")

    play(story)


def test_a_bad_file_name_is_the_callers_error_and_keeps_no_place() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        with pytest.raises(ValueError, match="stay inside"):
            await pool.create({"good": "", "../bad": ""})
        assert not workshop.alive

    play(story)


def test_who_gives_up_waiting_keeps_no_place() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        workshop.start_s = 0.1
        waiting = [asyncio.ensure_future(pool.create({})) for _ in range(3)]
        await asyncio.sleep(0.02)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        await until(lambda: pool.snapshot().starting == 0)
        await pool.create({})
        assert pool.snapshot().leased == 1

    play(story)


def test_forks_are_leases_of_their_own() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        sandbox = await pool.create({})
        first, second = await sandbox.fork(2)
        await sandbox.close()
        await first.write_file("a", "1")
        assert (await first.read_file("a"), await second.read_file("a")) == ("1", None)
        assert pool.snapshot().leased == 2
        with pytest.raises(ValueError, match="count=0"):
            await first.fork(0)
        with pytest.raises(SandboxesBusy, match="no room for 3 copies"):
            await first.fork(3)
        workshop.refusals = [Unsupported("no forks")]
        with pytest.raises(Unsupported, match="no forks"):
            await first.fork(1)
        await until(lambda: pool.snapshot().draining == 0)
        assert pool.snapshot().leased == 2

    play(story, PoolLimits(live=4, reserved=0, warm=0))


def test_a_removal_that_fails_is_tried_again_and_at_last_counted() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        lucky = await pool.create({})
        next(iter(workshop.alive)).close_failures = [OSError("busy")]
        await lucky.close()
        assert (len(workshop.alive), pool.snapshot().counters.unclosed) == (0, 0)
        unlucky = await pool.create({})
        toy = next(iter(workshop.alive))
        toy.close_failures = [OSError("busy")] * 2
        await unlucky.close()
        assert pool.snapshot().counters.unclosed == 1
        assert "OSError: busy" in pool.snapshot().trouble
        await toy.close()

    play(story, PoolLimits(warm=0, tries=2))


def test_closing_fails_whoever_waits_and_takes_what_is_held() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        held = await pool.create({})
        workshop.start_s = 60.0
        waiting = asyncio.ensure_future(pool.create({}))
        await until(lambda: pool.snapshot().starting == 1)
        await pool.close()
        with pytest.raises(SandboxError, match="the pool of sandboxes is closed"):
            await waiting
        with pytest.raises(SandboxError, match="the pool of sandboxes is closed"):
            await held.read_file("a")
        with pytest.raises(SandboxError, match="the pool of sandboxes is closed"):
            await pool.create({})

    play(story)


def test_a_snapshot_is_plain_numbers_that_do_not_move() -> None:
    async def story(pool: SandboxPool, workshop: Workshop) -> None:
        before = pool.snapshot()
        await pool.create({})
        after = pool.snapshot()
        assert (before.leased, before.counters.granted) == (0, 0)
        assert (after.leased, after.counters.granted, after.counters.asked) == (1, 1, 1)
        assert after.available_bytes == 1e15
        assert math.isnan(after.stalled)

    play(story)
