"""A simulated run under fire: its processes are killed and started again, its machines and links fail, all is judged.

    scenario ──▶ SimulatedRun, each process kept alive by a supervisor ◀── faults, at their times
                      └──▶ a view of ledger and versions, again and again ──▶ violations

Everything that decides is production's (:mod:`etude.simulation.run`), here with leases too. Time is virtual; one seed
is one run, to its last event.
"""

import asyncio
import hashlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from bench.faults.audit import Closing, Computed, Ending, Evidence, Terms, Weights
from bench.faults.snapshot import QUESTIONS, snapshot_of
from bench.simulation.connections import Breakage, FaultyDatabase, Killed, LedgerServer, Life, ProcessSessions
from bench.simulation.invariants import LeaseFact, Remains, Rule, RunView, Violation, at_end, between
from bench.simulation.scenario import LEASE_S, Fault, Kind, Scenario
from etude.errors import FencedError, InfrastructureError
from etude.gateway.routing.router import EngineState
from etude.ledger.changes import TRAIN, TRAINER
from etude.ledger.database import LedgerUnavailable
from etude.ledger.leases import BEATS_PER_TERM
from etude.ledger.ledger import Ledger
from etude.ledger.open import open_database
from etude.ledger.states import GroupState
from etude.ledger.transactions import Transactions
from etude.rollouts.fake import LoopClock, run_virtually
from etude.simulation.engine import ModelledEngine
from etude.simulation.region import ModelledRegion
from etude.simulation.run import SimulatedRun
from etude.telemetry.events import GroupAdmitted, Logged, RolloutClosed, StepDone
from etude.telemetry.log import EventLog, EventReader

LOOK_S = 0.5
"""Between two views of a run."""
POLL_S = 0.1
"""Interval at which trainer and rollouts look for a batch and a version: longer than in a real run, as looking is most
of what a simulated run costs.
"""
LONGEST_S = 240.0
"""Virtual time in which a run has to end: several times what the slowest of a thousand seeds took."""
RESTART_S = 0.5
"""Until a process that ended with an error is started again."""
FOUND_S = 1.5
"""Time in which a gateway finds an engine dead, which it polls twice a second."""
LEASES = "SELECT name, holder, token, beats FROM leases"
PLACE = "machine"
"""Holder of all leases: a process that is started again has the name of the one before."""
Main = Callable[[Life], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a simulated run."""

    seed: int
    violations: tuple[Violation, ...]
    injected: tuple[tuple[float, str], ...]
    """Time and words of each fault that came."""
    restarts: int
    seconds: float
    """Virtual ones."""
    digest: str
    """Of all events, with their times."""


@final
class SimulatedProcess:
    """A process that is started again whenever it dies, and the supervisor that does that."""

    def __init__(self, name: str, main: Main) -> None:
        self.name = name
        self.life = Life()
        self.restarts = 0
        self.pause_s = RESTART_S
        """Until it is started again, if it is killed."""
        self.left_open: list[str] = []
        """Sessions that it did not end though it ended by itself."""
        self.is_lost = False
        """True once it is gone for good."""
        self.is_silent = False
        """True while its signs of life get lost."""
        self._main = main

    def kill(self, pause_s: float) -> None:
        """``kill -9``."""
        self.pause_s = pause_s
        self.life.dead.set()

    async def supervise(self) -> None:
        """Keep it alive until it ends by itself. Raises what is a bug of it, or an error of the user."""
        while not await self._live():
            if self.is_lost:
                return
            self.restarts += 1
            await asyncio.sleep(self.pause_s)
            self.pause_s, self.life = RESTART_S, Life()

    async def _live(self) -> bool:
        """Return true once it ended by itself."""
        life = self.life
        working, dying = asyncio.ensure_future(self._main(life)), asyncio.ensure_future(life.dead.wait())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, dying):
                task.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)
        if life.dead.is_set():
            return False
        self.left_open += sorted(life.opened)
        with suppress(InfrastructureError, FencedError):
            working.result()
            return True
        return False


@final
class FaultyRun:
    """One scenario, played in the time of the running loop."""

    def __init__(self, scenario: Scenario, folder: Path, ledger: Path) -> None:
        """``ledger`` is an empty one, which is copied."""
        self._scenario = scenario
        self._folder = folder
        shutil.copy(ledger, folder / "ledger.db")
        self._run = SimulatedRun(
            scenario.config,
            scenario.calibration,
            scenario.regions,
            folder,
            seed=scenario.seed,
            poll_s=POLL_S,
        )
        self._server = LedgerServer()
        self._published: list[int] = []
        self._run.store.followers.append(self._published.append)
        self._trainer = SimulatedProcess("train", self._train)
        self._fillers = [self._filler(f"rollouts-{number}") for number in range(scenario.processes)]
        self._violations: list[Violation] = []
        self._injected: list[tuple[float, str]] = []
        self._until_s: dict[tuple[Kind, str], float] = {}
        self._spawned: list[asyncio.Task[None]] = []

    async def play(self) -> Outcome:
        """Play it to its end, and judge."""
        with closing(sqlite3.connect(self._folder / "ledger.db", isolation_level=None)) as db:
            self._run.start_background()
            self._spawn(self._inject_all())
            view = self._view(db)
            looking = asyncio.ensure_future(self._look(db, view))
            try:
                async with asyncio.timeout(LONGEST_S):
                    await self._supervise_all()
            except TimeoutError:
                self._note(Rule.STUCK, f"no end within {LONGEST_S:g} s; {self._progress(db)}")
            except Exception as error:  # of any kind: it is what is looked for
                self._note(Rule.CRASHED, f"{type(error).__name__}: {error}")
            seconds = LoopClock().now()
            for task in (looking, *self._spawned):
                task.cancel()
            await asyncio.gather(looking, *self._spawned, return_exceptions=True)
            await self._run.stop_background()
            if not looking.cancelled() and (error := looking.exception()) is not None:
                raise error
            if not self._violations:
                self._violations += at_end(self._remains(db), self._scenario.config)
        return Outcome(
            seed=self._scenario.seed,
            violations=tuple(dict.fromkeys(self._violations)),
            injected=tuple(self._injected),
            restarts=sum(process.restarts for process in self._processes),
            seconds=seconds,
            digest=self._digest(),
        )

    # ── its processes ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _processes(self) -> list[SimulatedProcess]:
        return [self._trainer, *self._fillers]

    async def _supervise_all(self) -> None:
        works = [asyncio.ensure_future(process.supervise()) for process in self._processes]
        try:
            await asyncio.gather(*works)
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    def _filler(self, name: str) -> SimulatedProcess:
        """A process that fills slots."""

        async def main(life: Life) -> None:
            openers = {each: ProcessSessions(region, life) for each, region in self._run.regions.items()}
            with EventLog(self._folder / "events", name, now=LoopClock().now) as events:
                async with self._leased(process, life) as ledger:
                    await self._run.roll(ledger, events, openers)

        process = SimulatedProcess(name, main)
        return process

    async def _train(self, life: Life) -> None:
        async with self._leased(self._trainer, life) as ledger:
            await self._run.train(ledger)

    @asynccontextmanager
    async def _leased(self, process: SimulatedProcess, life: Life) -> AsyncIterator[Ledger]:
        """As :func:`etude.ledger.heartbeat.leased`, without its thread."""
        name = TRAINER if process is self._trainer else process.name
        with self._connect(life) as ledger:
            while (lease := ledger.leases.take(name, PLACE)) is None:
                await asyncio.sleep(LEASE_S / BEATS_PER_TERM / 2)
            beating = asyncio.ensure_future(self._beat(process, life, lambda own: own.leases.beat(lease)))
            try:
                yield ledger
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            with suppress(FencedError, LedgerUnavailable):
                ledger.leases.release()

    async def _beat(self, process: SimulatedProcess, life: Life, beat: Callable[[Ledger], None]) -> None:
        with suppress(FencedError), self._connect(life, breaks=False) as ledger:
            while True:
                await asyncio.sleep(LEASE_S / BEATS_PER_TERM)
                if not process.is_silent:
                    with suppress(LedgerUnavailable):
                        beat(ledger)

    def _connect(self, life: Life, *, breaks: bool = True) -> Ledger:
        database = open_database(self._folder / "ledger.db", retry_timeout_s=1.0)
        transactions = Transactions(FaultyDatabase(database, self._server, life, breaks=breaks), retry_timeout_s=0.0)
        return Ledger(transactions, term_s=LEASE_S, clock=LoopClock())

    # ── what goes wrong ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _inject_all(self) -> None:
        for fault in self._scenario.faults:
            await asyncio.sleep(max(0.0, fault.at_s - LoopClock().now()))
            words = self._inject(fault)
            self._injected.append((LoopClock().now(), f"{fault.kind} {words}".strip()))

    def _inject(self, fault: Fault) -> str:
        """Let it happen; returns the words that tell to whom."""
        names = list(self._run.regions)
        region = self._run.regions[names[int(fault.pick * len(names))]]
        filler = self._fillers[int(fault.pick * len(self._fillers))]
        match fault.kind:
            case Kind.KILL_ROLLOUTS:
                return self._kill(filler, fault)
            case Kind.KILL_TRAINER:
                return self._kill(self._trainer, fault)
            case Kind.KILL_MACHINE:
                for process in self._processes:
                    process.kill(fault.hold_s)
            case Kind.LOSE_ROLLOUTS:
                if len(self._fillers) > 1:
                    filler = self._fillers[-1]
                    filler.is_lost = True
                    filler.kill(0.0)
                    return filler.name
            case Kind.KILL_GATEWAY:
                region.sessions.forget()
                return region.name
            case Kind.KILL_ENGINE:
                return self._kill_engine(fault)
            case Kind.CUT_REGION:
                region.is_cut = True
                self._later(fault, region.name, lambda: setattr(region, "is_cut", False))
                return region.name
            case Kind.SLOW_LINK:
                model = next(model for model in self._scenario.regions if model.name == region.name)
                region.rtt_s = model.rtt_s + 0.2 + fault.pick
                self._later(fault, region.name, lambda: setattr(region, "rtt_s", model.rtt_s))
                return region.name
            case Kind.LATE_WEIGHTS:
                self._run.late_s[region.name] = fault.hold_s
                self._later(fault, region.name, lambda: self._run.late_s.update({region.name: 0.0}))
                return region.name
            case Kind.STORE_AWAY:
                self._run.store.is_away = True
                self._later(fault, "", lambda: setattr(self._run.store, "is_away", False))
            case Kind.LEDGER_DOWN:
                self._server.is_down = True
                self._later(fault, "", lambda: setattr(self._server, "is_down", False))
            case Kind.LOST_REPLY:
                victim = self._processes[int(fault.pick * len(self._processes))]
                victim.life.breakage = Breakage(fault.moment, is_kept=fault.is_kept, is_fatal=False)
                return f"{victim.name}, {'kept' if fault.is_kept else 'not kept'}"
            case Kind.NO_SANDBOXES:
                self._run.sandboxes.made.broken = "no room"
                self._later(fault, "", lambda: setattr(self._run.sandboxes.made, "broken", ""))
            case Kind.NO_HEARTBEATS:
                filler.is_silent = True
                self._later(fault, filler.name, lambda: setattr(filler, "is_silent", False))
                return filler.name
        return ""

    def _kill(self, process: SimulatedProcess, fault: Fault) -> str:
        if not fault.moment:
            process.kill(fault.hold_s)
            return process.name
        process.pause_s = fault.hold_s
        process.life.breakage = Breakage(fault.moment - 1, is_kept=fault.is_kept, is_fatal=True)
        return f"{process.name} {'after' if fault.is_kept else 'before'} its commit {fault.moment}"

    def _kill_engine(self, fault: Fault) -> str:
        engines = [(region, n) for region in self._run.regions.values() for n in range(len(region.engines))]
        region, number = engines[int(fault.pick * len(engines))]
        engine = region.engines[number]
        if not engine.is_down:
            engine.die()
            self._spawn(self._restart(region, engine, fault))
            self._spawn(self._check_unused(region, number))
        return f"{number} of {region.name}"

    async def _restart(self, region: ModelledRegion, engine: ModelledEngine, fault: Fault) -> None:
        """Bring an engine back with what its region has or with what it had on its disk, which may be older; it follows
        the others then.
        """
        await asyncio.sleep(fault.hold_s)
        while self._run.store.is_away:
            await asyncio.sleep(LOOK_S)
        arrived = max(each.version for each in region.engines)
        engine.restart(max(0, arrived - fault.moment))
        await asyncio.sleep(self._scenario.calibration.swap_s + LOOK_S)
        newest = max(each.version for each in region.engines)
        if not engine.is_down and engine.version < newest:
            engine.swap(newest)

    async def _check_unused(self, region: ModelledRegion, number: int) -> None:
        """Note calls that go to a dead engine though another one of its region is healthy and as new."""
        engine = region.engines[number]
        await asyncio.sleep(FOUND_S)
        while engine.is_down:
            before, could = engine.refused, self._could_serve(region, number)
            await asyncio.sleep(LOOK_S)
            if engine.is_down and engine.refused > before and could and self._could_serve(region, number):
                self._note(Rule.DEAD_ENGINE, f"engine {number} of {region.name} was called while it was down")

    def _could_serve(self, region: ModelledRegion, number: int) -> bool:
        views = region.pool.list()
        newest = max((view.health.version for view in views if view.health is not None), default=-1)
        return any(
            view.state is EngineState.HEALTHY and view.health is not None and view.health.version == newest
            for other, view in enumerate(views)
            if other != number
        )

    def _later(self, fault: Fault, victim: str, heal: Callable[[], None]) -> None:
        """Heal it when its time is over, unless another fault of its kind goes on."""
        key, until_s = (fault.kind, victim), LoopClock().now() + fault.hold_s
        self._until_s[key] = max(until_s, self._until_s.get(key, 0.0))

        async def wait() -> None:
            await asyncio.sleep(fault.hold_s)
            if LoopClock().now() >= self._until_s[key]:
                heal()

        self._spawn(wait())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._spawned.append(asyncio.ensure_future(work))

    # ── what is seen of it ──────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, rule: Rule, what: str) -> None:
        self._violations.append(Violation(rule, what))

    async def _look(self, db: sqlite3.Connection, view: RunView) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            before, view = view, self._view(db)
            self._violations += between(before, view, self._scenario.config)

    def _view(self, db: sqlite3.Connection) -> RunView:
        answers = [db.execute(question).fetchall() for question in QUESTIONS]
        leases = {name: LeaseFact(holder=h, token=t, beats=b) for name, h, t, b in db.execute(LEASES)}
        return RunView(
            at_s=LoopClock().now(),
            snapshot=snapshot_of(answers),
            leases=leases,
            published=self._run.store.newest,
        )

    def _progress(self, db: sqlite3.Connection) -> str:
        snapshot = self._view(db).snapshot
        return f"{len(snapshot.steps_done)} of {self._scenario.config.trainer.steps} steps are done"

    def _remains(self, db: sqlite3.Connection) -> Remains:
        config, view = self._scenario.config, self._view(db)
        with Ledger.open(self._folder / "ledger.db") as ledger:
            groups, drawn = list(ledger.groups(TRAIN)), ledger.progress().drawn
        evidence = Evidence(
            terms=Terms(
                steps=config.trainer.steps,
                groups_per_step=config.rollouts.groups_per_step,
                max_turns=0,
                max_attempts=config.rollouts.max_attempts,
            ),
            snapshot=view.snapshot,
            drawn=tuple((str(position), 1) for position in range(drawn)),
            endings=tuple(
                Ending(
                    rollout_id=rollout.rollout_id,
                    reason=rollout.reason,
                    turns=len(rollout.turns),
                    last_finish=rollout.turns[-1].finish if rollout.turns else None,
                )
                for group in groups
                for rollout in group.rollouts
            ),
            closings=tuple(_closings(self._events())),
            computed=tuple(_computed(self._run.logged)),
            weights=Weights(
                versions=(0, *sorted(self._published)),
                faults=(),
                published=str(self._run.store.newest),
                lineage=str(max(view.snapshot.steps_done, default=0)),
            ),
        )
        consumed = {index for index, group in view.snapshot.groups.items() if group.state == GroupState.CONSUMED}
        return Remains(
            evidence=evidence,
            trained=[group for group in groups if group.index in consumed],
            published=self._published,
            sessions=[session for process in self._fillers for session in process.left_open],
            admitted={
                each.event.group_index: each.event.version
                for each in self._events()
                if isinstance(each.event, GroupAdmitted)
            },
            sandboxes=len(self._run.sandboxes),
        )

    def _events(self) -> list[Logged]:
        """Events of all rollouts processes."""
        return EventReader(self._folder / "events").new()

    def _digest(self) -> str:
        """Names that are drawn at random stand for the order in which they came."""
        names, whole = dict[str, str](), hashlib.sha256()
        for each in (*self._run.logged, *self._events()):
            event = each.event
            if isinstance(event, RolloutClosed):
                event = replace(event, rollout_id=names.setdefault(event.rollout_id, str(len(names))))
            whole.update(repr((each.at_s, each.process, event)).encode())
        whole.update(repr(self._injected).encode())
        return whole.hexdigest()


def _closings(events: list[Logged]) -> Iterator[Closing]:
    for logged in events:
        if isinstance(logged.event, RolloutClosed):
            event = logged.event
            yield Closing(rollout_id=event.rollout_id, status=event.status, reward=event.reward)


def _computed(events: list[Logged]) -> Iterator[Computed]:
    for logged in events:
        if isinstance(logged.event, StepDone):
            step = logged.event
            yield Computed(step.step, (step.metrics["staleness_tokens"], *map(float, step.groups)))


def empty_ledger(folder: Path) -> Path:
    """A ledger in which nothing happened; to open one takes longer than to copy it."""
    place = folder / "empty.db"
    with Ledger.open(place):
        pass
    with closing(sqlite3.connect(place)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return place


def play(scenario: Scenario, folder: Path, ledger: Path) -> Outcome:
    """Play a scenario in a folder of its own below ``folder``, which is removed."""
    place = folder / f"seed-{scenario.seed}"
    place.mkdir()
    try:
        return run_virtually(_play(scenario, place, ledger))
    finally:
        shutil.rmtree(place)


async def _play(scenario: Scenario, folder: Path, ledger: Path) -> Outcome:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of killed processes
    return await FaultyRun(scenario, folder, ledger).play()
