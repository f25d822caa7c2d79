"""Four regions, far apart: with the table of regions their engines are busy alike; without it the nearest takes all.

Everything that decides is the product's: dispatcher, runner, schedule, breaker, admission, ledger, table of regions,
pools and routers of engines. Modelled are engines, agents, a trainer, and how long a version takes to a region. Time is
virtual.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np

from etude.aio import never
from etude.config.recipe import LedgerConfig
from etude.config.rollouts import RolloutConfig
from etude.errors import EngineUnavailable
from etude.fleet.regions import RegionReport, Regions
from etude.gateway.routing.pool import CallOptions, EnginePool
from etude.gateway.routing.router import EngineEntry, HealthLimits, Router
from etude.ledger.ledger import Ledger
from etude.protocols import (
    Completion,
    EngineHealth,
    Grade,
    HarnessResult,
    SamplingParams,
    Sandbox,
    Session,
    TokenChunk,
    turn_of,
)
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import FakeSessions, LoopClock, RolloutFakes, run_virtually
from etude.rollouts.regional_sessions import RegionalSessions
from etude.rollouts.worker import RolloutContext, SessionOpener
from etude.telemetry.log import EventLog
from etude.types import Finish, RolloutStatus, Task, TokenIds, Turn
from ledgers import new_task

CONFIG = RolloutConfig(groups_per_step=16, group_size=4, max_staleness=2, concurrency=192, max_attempts=8)
"""The window has 192 rollouts."""
STEPS, STEP_S = 8, 4.0
PLACES = 48
"""Rollouts of one region."""
ENGINES = 2
"""Of one region."""
DISTANCES = {"near": 0.0, "coast": 0.08, "overseas": 0.15, "antipodes": 0.25}
"""Region → seconds of a round trip."""
ARRIVALS_S = {"near": 1.0, "coast": 2.0, "overseas": 3.5, "antipodes": 6.0}
"""Region → time from the publication of a version until it is served there."""
PEAK, TOP = 1600.0, 100.0
"""Tokens per second of an engine, and of one sequence in it."""
CHUNK_TOKENS = 64
"""Tokens that are sampled at one speed."""
REPORT_S = 0.25
CUT, CUT_AT_S, NOTICED_S, CUT_S, BACK_S = "overseas", 55.0, 1.0, 20.0, 30.0
"""The region that is cut off, when, after how long that is known, for how long, and by when it is in use again."""

ONE = np.ones(1, np.int32)
MEMORY = Path("/dev/shm")


@dataclass
class Engine:
    """An engine with continuous batching: running sequences share its capacity equally."""

    version: int = 0
    tokens: int = 0
    running: int = 0

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        self.running += 1
        try:
            for start in range(0, params.max_tokens, CHUNK_TOKENS):
                chunk = min(CHUNK_TOKENS, params.max_tokens - start)
                await asyncio.sleep(chunk / min(TOP, PEAK / self.running))
                self.tokens += chunk
        finally:
            self.running -= 1
        return Completion(
            token_ids=ONE, logprobs=-ONE.astype(np.float32), versions=self.version * ONE, finish=Finish.STOP
        )

    def stream(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> AsyncGenerator[TokenChunk, None]:
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        return EngineHealth(version=self.version, digest=f"digest {self.version}", running=self.running, waiting=0)


@dataclass
class Region:
    """Engines behind a gateway's pool, and the gateway's sessions."""

    name: str
    clock: LoopClock
    engines: list[Engine] = field(default_factory=lambda: [Engine() for _ in range(ENGINES)])
    sessions: FakeSessions = field(default_factory=FakeSessions)
    versions: dict[str, int | None] = field(default_factory=dict)
    is_disconnected: bool = False

    def __post_init__(self) -> None:
        by_url = {f"http://{self.name}-{index}": engine for index, engine in enumerate(self.engines)}
        self.pool = EnginePool(by_url.__getitem__, Router(HealthLimits(max_lag=8)), self.clock, seed=1)
        for url in by_url:
            self.pool.add(EngineEntry(name=url, url=url, region=self.name))

    async def open(self, *, min_version: int | None = None) -> Session:
        if self.is_disconnected:
            raise EngineUnavailable("no way there")
        opened = await self.sessions.open()
        session = replace(opened, session_id=f"{self.name}/{opened.session_id}")
        self.versions[session.session_id] = min_version
        return session

    async def fork(self, session_id: str) -> tuple[Session, int]:
        raise NotImplementedError

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        del self.versions[session_id]
        return await self.sessions.close(session_id.partition("/")[2])

    async def discard(self, session_id: str) -> None:
        await self.close(session_id)

    async def lost(self, session_id: str) -> NoReturn:
        await never()

    async def call(self, session: Session, tokens: int) -> None:
        """One turn."""
        await self._way()
        params, options = SamplingParams(max_tokens=tokens), CallOptions(min_version=self.versions[session.session_id])
        completion = await self.pool.generate(ONE, params, session=session.session_id, options=options)
        await self._way()
        inner = replace(session, session_id=session.session_id.partition("/")[2])
        self.sessions.capture(inner, turn_of(ONE, params, completion))

    async def receive(self, version: int) -> None:
        """A version arrives; all engines serve it at once."""
        await self.clock.sleep(ARRIVALS_S[self.name])
        await self._way()
        self.pool.announce(version, f"digest {version}")
        for engine in self.engines:
            engine.version = max(version, engine.version)

    async def _way(self) -> None:
        """Wait for half a round trip, and while the link is cut, until it is back."""
        await self.clock.sleep(DISTANCES[self.name] / 2)
        while self.is_disconnected:
            await self.clock.sleep(REPORT_S)

    @property
    def tokens(self) -> int:
        return sum(engine.tokens for engine in self.engines)

    @property
    def report(self) -> RegionReport:
        return RegionReport(version=min(engine.version for engine in self.engines), capacity=PLACES)


class Agents:
    """The harness of all regions, and the grader."""

    def __init__(self, regions: dict[str, Region], seed: int) -> None:
        self._regions = regions
        self._random = Random(seed)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        region = self._regions[session.session_id.partition("/")[0]]
        for _ in range(max(1, round(self._random.lognormvariate(math.log(3), 0.5)))):
            await asyncio.sleep(self._random.lognormvariate(math.log(1.0), 0.5))
            await region.call(session, max(16, round(self._random.lognormvariate(math.log(200), 0.6))))
        return HarnessResult(reason="submit", counts={})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        return Grade(value=self._random.random(), parts={})


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    busy: dict[str, float]
    """Region → share of the time and of what its engines can do that they sampled."""
    staleness: int
    """The highest."""
    given: tuple[int, ...] = ()
    """Sessions that the region which is cut off was given: by the time when that is known, when it is healed, later."""
    failed: int = 0
    """Attempts."""
    seconds: float = 0.0
    """Virtual time of all steps."""

    @property
    def balance(self) -> float:
        return min(self.busy.values()) / max(self.busy.values())


class Fleet:
    """A run over the regions."""

    def __init__(self, folder: Path) -> None:
        self.clock = LoopClock()
        self.regions = {name: Region(name, self.clock) for name in DISTANCES}
        self._folder = folder
        self._given: list[int] = []
        self._agents = Agents(self.regions, seed=1)
        self._background: list[asyncio.Task[None]] = []
        for region in self.regions.values():
            region.pool.announce(0, "digest 0")

    async def with_table(self, *, cuts: bool = False) -> Outcome:
        """One dispatcher beside the ledger, and the table; ``cuts`` a region off for a while."""
        table = Regions(self.regions)
        sessions = RegionalSessions(table, self.regions, self.clock)
        if cuts:
            self._spawn(self._cut(table))
        with Ledger.open(self._folder / "ledger.db") as ledger:
            self._spawn(self._report(sessions))
            dispatcher = self._dispatcher(
                ledger, sessions, CONFIG, lambda: sessions.admitted_version, sessions.version_changed
            )
            return await self._run(ledger, [dispatcher])

    async def without(self) -> Outcome:
        """Run a dispatcher for each region, where the first to hear of a version takes the admission window."""
        config = CONFIG.model_copy(update={"concurrency": PLACES})
        with ExitStack() as stack:
            dispatchers = []
            for region in self.regions.values():
                ledger = stack.enter_context(Ledger.open(self._folder / "ledger.db", LedgerConfig(), self.clock))
                lease = ledger.leases.take(f"rollouts-{region.name}", region.name)
                assert lease is not None
                dispatchers.append(self._dispatcher(ledger, region, config, partial(_version, region)))
            beating = stack.enter_context(Ledger.open(self._folder / "ledger.db", LedgerConfig(), self.clock))
            self._spawn(self._beat(beating))
            return await self._run(beating, dispatchers)

    def _dispatcher(
        self,
        ledger: Ledger,
        sessions: SessionOpener,
        config: RolloutConfig,
        version: Callable[[], int],
        changed: Callable[[int], Awaitable[None]] | None = None,
    ) -> Dispatcher:
        context: RolloutContext = replace(
            RolloutFakes(_unused, lambda task: 0.0).context,
            sessions=sessions,
            harness=self._agents,
            grader=self._agents,
            version_changed=changed,
        )
        events = EventLog(self._folder / "events", f"rollouts-{ledger.leases.worker}")
        return Dispatcher(
            config,
            ledger=ledger,
            draw=new_task,
            context=context,
            events=events,
            serving_version=version,
        )

    async def _run(self, ledger: Ledger, dispatchers: list[Dispatcher]) -> Outcome:
        began_s, staleness = self.clock.now(), 0
        for region in self.regions.values():
            self._spawn(region.pool.watch())
        rolling = [asyncio.create_task(dispatcher.train(STEPS)) for dispatcher in dispatchers]
        for step in range(1, STEPS + 1):
            while (batch := ledger.claim_batch(step, CONFIG.groups_per_step)) is None:
                await asyncio.sleep(REPORT_S)
                for each in rolling:
                    if each.done():
                        each.result()
            turns = [turn for group in batch for rollout in group.rollouts for turn in rollout.turns]
            staleness = max(staleness, *(step - 1 - int(turn.versions.min()) for turn in turns))
            await asyncio.sleep(STEP_S)
            ledger.commit_step(step)
            for region in self.regions.values():
                self._spawn(region.receive(step))
        seconds = self.clock.now() - began_s
        for task in (*rolling, *self._background):
            task.cancel()
        await asyncio.gather(*rolling, *self._background, return_exceptions=True)
        busy = {name: region.tokens / (PEAK * ENGINES * seconds) for name, region in self.regions.items()}
        failed = ledger.rollout_counts("train").get(RolloutStatus.FAILED_INFRA, 0)
        return Outcome(busy=busy, staleness=staleness, given=tuple(self._given), failed=failed, seconds=seconds)

    async def _cut(self, table: Regions) -> None:
        """Cut a region's link for a while; calls take longer by that time."""
        for is_disconnected, pause_s in ((False, CUT_AT_S), (True, NOTICED_S), (True, CUT_S), (False, BACK_S)):
            self.regions[CUT].is_disconnected = is_disconnected
            await asyncio.sleep(pause_s)
            (view,) = [view for view in table.views(self.clock.now()) if view.name == CUT]
            self._given.append(view.given)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._background.append(asyncio.create_task(work))

    async def _report(self, sessions: RegionalSessions) -> None:
        while True:
            for name, region in self.regions.items():
                if region.is_disconnected:
                    sessions.lose(name)
                else:
                    sessions.report(name, region.report)
            await asyncio.sleep(REPORT_S)

    async def _beat(self, ledger: Ledger) -> None:
        while True:
            await asyncio.sleep(1.0)
            for name in self.regions:
                ledger.leases.beat(ledger.leases.look(f"rollouts-{name}"))


def _version(region: Region) -> int:
    return region.report.version


async def _unused(task: Task, session: Session) -> str:
    raise NotImplementedError


def run(go: Callable[[Fleet], Coroutine[None, None, Outcome]]) -> Outcome:
    async def main(folder: Path) -> Outcome:
        return await go(Fleet(folder))

    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        return run_virtually(main(Path(name)))


def test_engines_of_all_regions_are_busy_alike() -> None:
    outcome = run(lambda fleet: fleet.with_table())
    assert outcome.balance >= 0.8, outcome
    assert outcome.staleness <= CONFIG.max_staleness


def test_without_the_table_the_nearest_region_takes_most() -> None:
    outcome = run(lambda fleet: fleet.without())
    assert outcome.balance < 0.5, outcome
    assert outcome.staleness <= CONFIG.max_staleness


def test_a_region_that_is_cut_off_is_left_out_and_comes_back() -> None:
    outcome = run(lambda fleet: fleet.with_table(cuts=True))
    _, noticed, healed, later = outcome.given
    assert noticed == healed < later, outcome
    assert 0 < outcome.failed <= outcome.given[0], "what was open there begins again elsewhere, once"
    whole = run(lambda fleet: fleet.with_table())
    assert outcome.seconds < whole.seconds + 0.4 * CUT_S, "the others do not wait for a region that is away"
    assert outcome.staleness <= CONFIG.max_staleness
