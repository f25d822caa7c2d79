"""A whole run in virtual time: the production code over modelled engines, agents, sandboxes and a trainer.

    recipe, calibration, regions ──▶ Dispatcher, RolloutRunner, Schedule, Breaker, Admission, Ledger (SQLite), ─▶ events
                                     RegionalSessions, Regions, EnginePool, Router

All decisions are made by the unchanged code of a run, not by a copy. Two runs of one seed are identical in every event.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TypeAlias, final

from etude.config.recipe import RunConfig
from etude.fleet.regions import Regions
from etude.ledger.ledger import Ledger, TaskDraw
from etude.protocols import Grade, HarnessResult, Sandbox, Session
from etude.rollouts.dispatcher import Dispatcher
from etude.rollouts.fake import FakeSandbox, FakeSandboxes, LoopClock, RolloutFakes, run_virtually
from etude.rollouts.regional_sessions import RegionalSessions
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.worker import SessionOpener
from etude.simulation.calibration import RunCalibration
from etude.simulation.processors import Processors
from etude.simulation.region import ModelledRegion
from etude.simulation.trainer import POLL_S, ModelledStore, ModelledTrainer
from etude.simulation.workload import RolloutWork
from etude.telemetry.events import EngineStats, Event, Logged, StepDone
from etude.telemetry.log import EventLog, EventReader
from etude.types import Case, FunctionChecks, Split, Task

REPORT_S = 0.05
"""Interval at which the rollouts process polls the served version."""
STATS_S = 5.0
"""Interval at which an engine reports its load."""
MEMORY = Path("/dev/shm")
"""A folder in memory, if available: a simulated ledger need not be durable."""
CHECK_S = 300.0
"""Interval at which a run checks whether its events are enough."""
GRADING = "grading_s"
"""Measure of a simulated session: the seconds that its grading takes."""
IsEnough: TypeAlias = Callable[[Sequence[Logged]], bool]
CHECKS = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=None),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The end of a simulation before its last step, if any."""

    until_s: float | None = None
    """Virtual time at which it ends."""
    is_enough: IsEnough | None = None
    """Ends it as soon as this is true of the events of trainer and engines."""


LAST_STEP = Stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionModel:
    """A region of a simulated run."""

    name: str
    engines: int
    rtt_s: float = 0.0
    """Round-trip time from home."""
    arrival_s: float = 0.0
    """From a version's publication until it is in the region's own store."""
    shares_cores: bool = False
    """Its engines compute on the processors of trainer, agents and graders."""
    lent: "Lent | None" = None
    """Engines that are available only at times; ``None``: all are always available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Engines that production lends during a part of each day; times in seconds."""

    share: float
    """Share of the region's engines, below 1."""
    day_s: float
    begin_s: float
    end_s: float
    """Less than ``begin_s`` if it is on the next day."""

    def scaled(self, factor: float) -> "Lent":
        """The same with all times multiplied by a factor."""
        day_s, begin_s, end_s = (seconds / factor for seconds in (self.day_s, self.begin_s, self.end_s))
        return replace(self, day_s=day_s, begin_s=begin_s, end_s=end_s)

    def left_s(self, now_s: float) -> tuple[bool, float]:
        """True while they are lent, and the seconds until that changes."""
        at_s = now_s % self.day_s
        to_begin_s, to_end_s = ((edge_s - at_s) % self.day_s or self.day_s for edge_s in (self.begin_s, self.end_s))
        return to_end_s < to_begin_s, min(to_begin_s, to_end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEvents:
    """The records of a simulated run."""

    logged: tuple[Logged, ...]
    """Events of trainer and engines, in virtual time."""
    rollouts: tuple[Logged, ...]
    """Events of the rollouts process, in virtual time."""
    sandboxes: tuple[tuple[float, int], ...]
    """Pairs of time and number of open sandboxes."""

    @property
    def steps(self) -> list[Logged]:
        """The trainer's steps, in the order of their ends."""
        return [each for each in self.logged if isinstance(each.event, StepDone)]

    @property
    def most_sandboxes(self) -> int:
        """Largest number of sandboxes open at a time."""
        return max((count for _, count in self.sandboxes), default=0)

    @property
    def all(self) -> list[Logged]:
        """All events in order, as they are read from a run."""
        return sorted([*self.logged, *self.rollouts], key=lambda each: each.at_s)


@final
class SimulatedRun:
    """A run in the time of the running loop; its parts may be killed and restarted during the run."""

    def __init__(
        self,
        config: RunConfig,
        calibration: RunCalibration,
        regions: Sequence[RegionModel],
        folder: Path,
        *,
        seed: int = 0,
        poll_s: float | None = None,
    ) -> None:
        """``poll_s`` is the polling interval of processes; ``None``: as in a real run."""
        self.config = config
        self._poll_s = poll_s
        self._calibration = calibration
        self._models = {model.name: model for model in regions}
        self._folder = folder
        self.random = Random(seed)
        self._seed = seed
        self._drawn = Counter[tuple[str, int]]()
        engines = sum(model.engines for model in regions)
        self.processors = Processors(calibration.cores)
        """Processors that trainer, agents, graders, and engines of a region that says so, share."""
        self.regions = {
            model.name: ModelledRegion(
                model.name,
                calibration.engine,
                engines=model.engines,
                rtt_s=model.rtt_s,
                capacity=-(-config.rollouts.concurrency * model.engines // engines),
                processors=self.processors if model.shares_cores else Processors(calibration.cores),
            )
            for model in regions
        }
        self.store = ModelledStore()
        self.store.followers.append(self._announce)
        self.sandboxes = ModelledSandboxes(self)
        self.late_s = dict.fromkeys(self.regions, 0.0)
        """Region → additional delay, in seconds, of a version published now."""
        self.logged: list[Logged] = []
        self._occupied: list[tuple[float, int]] = []
        self._background: set[asyncio.Task[None]] = set()

    async def play(self, stop: Stop = LAST_STEP) -> SimulatedEvents:
        """Run all steps, or those until ``stop``, with one instance of each part."""
        now = LoopClock().now
        with EventLog(self._folder / "events", "rollouts", now=now) as events, self.open_ledger() as ledger:
            self.start_background()
            try:
                await self._take_steps(ledger, events, stop)
            finally:
                await self.stop_background()
        return self.events()

    async def _take_steps(self, ledger: Ledger, events: EventLog, stop: Stop) -> None:
        """Run trainer and rollouts process, to the last step or until ``stop``."""
        with suppress(TimeoutError), self.open_ledger() as trainers:
            async with asyncio.timeout(stop.until_s) as limit, asyncio.TaskGroup() as group:
                if stop.is_enough is not None:
                    self._spawn(self._end_when(stop.is_enough, limit))
                group.create_task(self.roll(ledger, events))
                await self.train(trainers)

    async def _end_when(self, is_enough: IsEnough, limit: asyncio.Timeout) -> None:
        while not is_enough(self.logged):
            await asyncio.sleep(CHECK_S)
        limit.reschedule(asyncio.get_running_loop().time())

    def events(self) -> SimulatedEvents:
        """Events up to now."""
        return SimulatedEvents(
            logged=tuple(self.logged),
            rollouts=tuple(EventReader(self._folder / "events").new()),
            sandboxes=tuple(self._occupied),
        )

    def open_ledger(self) -> Ledger:
        """A process's own connection."""
        return Ledger.open(self._folder / "ledger.db", self.config.ledger, LoopClock())

    async def train(self, ledger: Ledger) -> None:
        """Run the trainer process."""
        write = self._writer("train")
        trainer = ModelledTrainer(
            self.config,
            self._calibration.trainer,
            ledger=ledger,
            store=self.store,
            processors=self.processors,
            write=write,
        )
        await trainer.run(poll_s=self._poll_s or POLL_S)

    async def roll(self, ledger: Ledger, events: EventLog, openers: Mapping[str, SessionOpener] | None = None) -> None:
        """Run a rollouts process until all groups are complete; ``openers`` connect to the regions."""
        sessions = RegionalSessions(Regions(self.regions), openers or self.regions, LoopClock())
        agents = ModelledAgents(self)
        context = replace(
            RolloutFakes(agents.unused, lambda task: 0.0).context,
            sessions=sessions,
            sandboxes=self.sandboxes,
            harness=agents,
            grader=agents,
            limits=RolloutLimits.of(self.config.rollouts, self.config.harness),
            version_changed=sessions.version_changed,
        )
        dispatcher = Dispatcher(
            self.config.rollouts,
            ledger=ledger,
            draw=draw_task,
            context=context,
            events=events,
            serving_version=lambda: sessions.admitted_version,
        )
        reporting = asyncio.create_task(self._report(sessions))
        try:
            await dispatcher.train(self.config.trainer.steps)
        finally:
            reporting.cancel()

    def start_background(self) -> None:
        """Start the background tasks: the polls of gateways, the reports of engines."""
        for name, region in self.regions.items():
            self._spawn(region.pool.watch())
            if (lent := self._models[name].lent) is not None:
                self._spawn(lend(region, lent))
        self._spawn(self._measure())

    async def stop_background(self) -> None:
        """Stop the background tasks."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def work(self, task: Task, part: str) -> RolloutWork:
        """The work of a task's next rollout, for a ``part`` of it. The n-th rollout of a group is the same in every
        simulation of one seed, so that fleets are compared on the same work.
        """
        position = int(task.task_id)
        groups = self.config.rollouts.groups_per_step * self.config.trainer.steps
        self._drawn[part, position] += 1
        random = Random(f"{self._seed} {part} {position} {self._drawn[part, position]}")
        return self._calibration.workload.draw(min(1.0, position / groups), position, random)

    @property
    def call_s(self) -> float:
        """Seconds of a model call outside of the engine."""
        return self._calibration.call_s

    def _announce(self, version: int) -> None:
        for name, region in self.regions.items():
            arrival_s = self._models[name].arrival_s + self.late_s[name]
            self._spawn(region.receive(version, arrival_s + self._calibration.swap_s))

    async def _report(self, sessions: RegionalSessions) -> None:
        while True:
            for name, region in self.regions.items():
                if region.is_disconnected:
                    sessions.lose(name)
                else:
                    sessions.report(name, region.report)
            await asyncio.sleep(self._poll_s or REPORT_S)

    async def _measure(self) -> None:
        """Report the load of engines and the number of open sandboxes."""
        engines = [(f"{name}-{n}", e) for name, region in self.regions.items() for n, e in enumerate(region.engines)]
        before = {name: (0.0, 0.0, 0, 0.0) for name, _ in engines}
        while True:
            await asyncio.sleep(STATS_S)
            self._occupied.append((LoopClock().now(), len(self.sandboxes)))
            for name, engine in engines:
                now = engine.measure(), engine.generated_tokens, engine.prompt_tokens, engine.steps
                busy_s, generated, read, steps = (new - old for new, old in zip(now, before[name], strict=True))
                before[name] = now
                stats = EngineStats(
                    busy_s=busy_s,
                    window_s=STATS_S,
                    generated_tokens=round(generated),
                    prefill_tokens=int(read),
                    reused_tokens=0,
                    running=engine.running,
                    waiting=engine.waiting,
                    steps=round(steps),
                )
                self._writer(f"serve-{name}")(stats)

    def _writer(self, process: str) -> Callable[[Event], None]:
        def write(event: Event) -> None:
            self.logged.append(Logged(at_s=LoopClock().now(), process=process, event=event))

        return write

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@final
class ModelledAgents:
    """Harness and grader of a simulated run, with the turns, tokens and seconds of its workload."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Simulate one session."""
        work = self._run.work(task, "agent")
        region = self._run.regions[session.session_id.partition("/")[0]]
        tokens, prompt_tokens = work.turn_tokens, work.prompt_tokens // work.turns
        for _ in range(work.turns):
            await self._run.processors.run(self._run.call_s)
            await region.call(session, prompt_tokens=prompt_tokens, tokens=tokens)
            await sandbox.exec([str(work.tools_s / work.turns)])
        return HarnessResult(reason="submit", counts={}, measures={GRADING: work.grading_s})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade one session, half of them as successes."""
        await self._run.processors.run(result.measures[GRADING])
        return Grade(value=float(self._run.random.random() < 0.5), parts={})

    async def unused(self, task: Task, session: Session) -> str:
        """Never called: :meth:`run` replaces it."""
        raise NotImplementedError


@final
class ModelledSandboxes:
    """Sandboxes with modelled times for start and commands."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.made = FakeSandboxes(on_exec=self._compute)

    async def _compute(self, argv: Sequence[str]) -> None:
        """Run the only command: it waits for a number of seconds."""
        await self._run.processors.run(float(argv[0]))

    def __len__(self) -> int:
        """Number of open sandboxes."""
        return len(self.made)

    async def open(self, task: Task, *, gateway: str) -> FakeSandbox:
        """Make one."""
        await self._run.processors.run(self._run.work(task, "sandbox").sandbox_s)
        return await self.made.open(task, gateway=gateway)


async def lend(region: ModelledRegion, lent: Lent) -> None:
    """Reduce a region's places while production has its engines, every day. Calls of a returned engine continue in
    others, token by token (``docs/deploying.md``).
    """
    rates = [engine.rates for engine in region.engines]
    while True:
        is_there, left_s = lent.left_s(LoopClock().now())
        for engine, whole in zip(region.engines, rates, strict=True):
            engine.change(whole if is_there else whole.with_places(1 - lent.share))
        await asyncio.sleep(left_s)


def draw_task(position: int) -> TaskDraw:
    """A task at a position of endless training data."""
    return TaskDraw(
        task=Task(
            task_id=str(position),
            family="simulated",
            template="simulated",
            split=Split.TRAIN,
            prompt="",
            files={},
            checks=CHECKS,
        )
    )


def simulate(
    config: RunConfig,
    calibration: RunCalibration,
    regions: Sequence[RegionModel],
    *,
    seed: int = 0,
    poll_s: float | None = None,
    stop: Stop = LAST_STEP,
) -> SimulatedEvents:
    """Run all steps of a recipe in virtual time, or those until ``stop``; ``poll_s`` as in :class:`SimulatedRun`."""

    async def main(folder: Path) -> SimulatedEvents:
        run = SimulatedRun(config, calibration, regions, folder, seed=seed, poll_s=poll_s)
        return await run.play(stop)

    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="etude-plan-") as name:
        return run_virtually(main(Path(name)))


def skipped_steps(config: RunConfig) -> int:
    """Number of steps at each end of a run in which its pipeline fills or drains."""
    return config.rollouts.max_staleness + 1
