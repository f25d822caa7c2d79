"""A whole run in virtual time: the shells of production over modelled engines, agents, sandboxes and a trainer.

    recipe, calibration, regions ──▶ Dispatcher, RolloutRunner, Schedule, Breaker, Admission, Ledger (SQLite), ─▶ events
                                     RegionalSessions, Regions, EnginePool, Router

What decides is not copied: it is the code of a run, unchanged. Two runs of one seed are the same to the last event.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import final

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
"""Interval at which the rollouts process asks which version is served."""
STATS_S = 5.0
"""Interval at which an engine reports its load."""
MEMORY = Path("/dev/shm")
"""A folder in memory, where there is one: a simulated ledger need not survive anything."""
GRADING = "grading_s"
"""Measure of a played session: the seconds that its grading takes."""
CHECKS = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=None),))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionModel:
    """A region of a simulated run."""

    name: str
    engines: int
    rtt_s: float = 0.0
    """Round trip from home."""
    arrival_s: float = 0.0
    """From a version's publication until it is in the region's own store."""
    lent: "Lent | None" = None
    """Engines that are there at times; ``None``: all are always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Engines that production lends in a part of each day, in seconds."""

    share: float
    """Share of the region's engines, below 1."""
    day_s: float
    begin_s: float
    end_s: float
    """Before ``begin_s`` where it is on the next day."""

    def scaled(self, factor: float) -> "Lent":
        """The same in a simulation whose seconds are longer by a factor."""
        day_s, begin_s, end_s = (seconds / factor for seconds in (self.day_s, self.begin_s, self.end_s))
        return replace(self, day_s=day_s, begin_s=begin_s, end_s=end_s)

    def left_s(self, now_s: float) -> tuple[bool, float]:
        """True where they are lent, and how long that stays so."""
        at_s = now_s % self.day_s
        to_begin_s, to_end_s = ((edge_s - at_s) % self.day_s or self.day_s for edge_s in (self.begin_s, self.end_s))
        return to_end_s < to_begin_s, min(to_begin_s, to_end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEvents:
    """All that a simulated run left behind."""

    logged: tuple[Logged, ...]
    """Events of trainer and engines, in virtual time."""
    rollouts: tuple[Logged, ...]
    """Events of the rollouts process, likewise."""
    sandboxes: tuple[tuple[float, int], ...]
    """Time → sandboxes that were open."""

    @property
    def steps(self) -> list[Logged]:
        """The trainer's steps as they ended."""
        return [each for each in self.logged if isinstance(each.event, StepDone)]

    @property
    def most_sandboxes(self) -> int:
        """Most that were open at a time."""
        return max((count for _, count in self.sandboxes), default=0)

    @property
    def all(self) -> list[Logged]:
        """All of them in order, as the events of a run are read."""
        return sorted([*self.logged, *self.rollouts], key=lambda each: each.at_s)


@final
class SimulatedRun:
    """A run in the time of the running loop; its parts may be killed and started again while it goes on."""

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
        """``poll_s`` is the interval at which a process looks for what it waits for; ``None``: as in a real run."""
        self.config = config
        self._poll_s = poll_s
        self._calibration = calibration
        self._models = {model.name: model for model in regions}
        self._folder = folder
        self.random = Random(seed)
        engines = sum(model.engines for model in regions)
        self.processors = Processors(calibration.cores)
        """Processors that trainer, agents, graders and, on one machine, engines share."""
        self.regions = {
            model.name: ModelledRegion(
                model.name,
                calibration.engine,
                engines=model.engines,
                rtt_s=model.rtt_s,
                places=-(-config.rollouts.concurrency * model.engines // engines),
                processors=self.processors if len(regions) == 1 else Processors(calibration.cores),
            )
            for model in regions
        }
        self.store = ModelledStore()
        self.store.followers.append(self._announce)
        self.sandboxes = ModelledSandboxes(self)
        self.late_s = dict.fromkeys(self.regions, 0.0)
        """Region → seconds by which a version that is published now takes longer to it."""
        self.logged: list[Logged] = []
        self._occupied: list[tuple[float, int]] = []
        self._background: set[asyncio.Task[None]] = set()

    async def play(self, *, until_s: float | None = None) -> SimulatedEvents:
        """Run all steps, or those of a number of seconds, each part once."""
        now = LoopClock().now
        with EventLog(self._folder / "events", "rollouts", now=now) as events, self.open_ledger() as ledger:
            self.start_background()
            try:
                await self._take_steps(ledger, events, until_s)
            finally:
                await self.stop_background()
        return self.events()

    async def _take_steps(self, ledger: Ledger, events: EventLog, until_s: float | None) -> None:
        """Be trainer and rollouts process, to the last step or so long."""
        with suppress(TimeoutError), self.open_ledger() as trainers:
            async with asyncio.timeout(until_s), asyncio.TaskGroup() as group:
                group.create_task(self.roll(ledger, events))
                await self.train(trainers)

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
        """Be the trainer process."""
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
        """Be a rollouts process, until all groups are complete; ``openers`` are its ways to the regions."""
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
            serving_version=lambda: sessions.heard,
        )
        reporting = asyncio.create_task(self._report(sessions))
        try:
            await dispatcher.train(self.config.trainer.steps)
        finally:
            reporting.cancel()

    def start_background(self) -> None:
        """Start what is beside both processes: the polls of gateways, the reports of engines."""
        for name, region in self.regions.items():
            self._spawn(region.pool.watch())
            if (lent := self._models[name].lent) is not None:
                self._spawn(lend(region, lent))
        self._spawn(self._measure())

    async def stop_background(self) -> None:
        """Stop it."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def work(self, task: Task) -> RolloutWork:
        """The work of a rollout of a task."""
        position = int(task.task_id)
        groups = self.config.rollouts.groups_per_step * self.config.trainer.steps
        return self._calibration.workload.draw(min(1.0, position / groups), position, self.random)

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
                if region.is_cut:
                    sessions.lose(name)
                else:
                    sessions.report(name, region.report)
            await asyncio.sleep(self._poll_s or REPORT_S)

    async def _measure(self) -> None:
        """Report the load of engines, and the sandboxes that are open."""
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
    """Harness and grader of a simulated run: turns, tokens and seconds of its workload."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Play one session."""
        work = self._run.work(task)
        region = self._run.regions[session.session_id.partition("/")[0]]
        tokens, prompt_tokens = work.sampled_tokens // work.turns, work.prompt_tokens // work.turns
        for _ in range(work.turns):
            await self._run.processors.run(self._run.call_s)
            await region.call(session, prompt_tokens=prompt_tokens, tokens=tokens)
            await sandbox.exec([str(work.tools_s / work.turns)])
        return HarnessResult(reason="submit", counts={}, measures={GRADING: work.grading_s})

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Grade one, one of two times as a success."""
        await self._run.processors.run(result.measures[GRADING])
        return Grade(value=float(self._run.random.random() < 0.5), parts={})

    async def unused(self, task: Task, session: Session) -> str:
        """Never called: :meth:`run` plays."""
        raise NotImplementedError


@final
class ModelledSandboxes:
    """Sandboxes that take a time to be there, and whose commands take theirs."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.made = FakeSandboxes(on_exec=self._compute)

    async def _compute(self, argv: Sequence[str]) -> None:
        """Run the only command there is: the seconds that it takes."""
        await self._run.processors.run(float(argv[0]))

    def __len__(self) -> int:
        """Sandboxes that are open."""
        return len(self.made)

    async def open(self, task: Task, *, gateway: str) -> FakeSandbox:
        """Make one."""
        await self._run.processors.run(self._run.work(task).sandbox_s)
        return await self.made.open(task, gateway=gateway)


async def lend(region: ModelledRegion, lent: Lent) -> None:
    """Let a region have fewer places while production has its engines, day after day.

    Calls of an engine that is given back go on in others, token by token (``docs/deploying.md``).
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
    until_s: float | None = None,
) -> SimulatedEvents:
    """Run all steps of a recipe in virtual time, or those of so many seconds of it; ``poll_s`` is as
    :class:`SimulatedRun` takes it.
    """

    async def main(folder: Path) -> SimulatedEvents:
        run = SimulatedRun(config, calibration, regions, folder, seed=seed, poll_s=poll_s)
        return await run.play(until_s=until_s)

    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="etude-plan-") as name:
        return run_virtually(main(Path(name)))


def skipped_steps(config: RunConfig) -> int:
    """Steps at either end of a run in which its pipeline fills and runs dry."""
    return config.rollouts.max_staleness + 1
