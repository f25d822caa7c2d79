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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from bench.faults.audit import Closing, Computed, Ending, Evidence, Terms, Weights
from bench.faults.snapshot import QUESTIONS, snapshot_of
from bench.simulation.connections import FaultyDatabase, LedgerServer, Life, ProcessSessions
from bench.simulation.injector import Injector
from bench.simulation.invariants import LeaseFact, Remains, Rule, RunView, Violation, at_end, between
from bench.simulation.processes import SimulatedProcess
from bench.simulation.scenario import LEASE_S, Scenario
from etude.errors import FencedError
from etude.ledger.changes import TRAIN, TRAINER
from etude.ledger.database import LedgerUnavailable
from etude.ledger.leases import BEATS_PER_TERM
from etude.ledger.ledger import Ledger
from etude.ledger.open import open_database
from etude.ledger.states import GroupState
from etude.ledger.transactions import Transactions
from etude.rollouts.fake import LoopClock, run_virtually
from etude.simulation.run import SimulatedRun
from etude.telemetry.events import GroupAdmitted, Logged, RolloutClosed, StepDone
from etude.telemetry.log import EventLog, EventReader

LOOK_S = 0.5
"""Between two views of a run."""
POLL_S = 0.1
"""Polling interval of trainer and rollouts: longer than in a real run, since polling is most of the cost of a
simulation."""
LONGEST_S = 240.0
"""Maximum virtual time of a run: several times that of the slowest of a thousand seeds."""
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Frequency of the checks of a run, and time after which it counts as stuck."""

    look_s: float = LOOK_S
    poll_s: float = POLL_S
    longest_s: float = LONGEST_S


EVERY_EVENT = Pace()
"""The pace of short runs."""
LEASES = "SELECT name, holder, token, beats FROM leases"
PLACE = "machine"
"""Holder of all leases: a process that is started again has the name of the one before."""


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
    """Digest of all events, with their times."""


@final
class FaultyRun:
    """One scenario, played in the time of the running loop."""

    def __init__(self, scenario: Scenario, folder: Path, ledger: Path, pace: Pace = EVERY_EVENT) -> None:
        """``ledger`` is an empty one, which is copied."""
        self._scenario = scenario
        self._pace = pace
        self._folder = folder
        shutil.copy(ledger, folder / "ledger.db")
        self._run = SimulatedRun(
            scenario.config,
            scenario.calibration,
            scenario.regions,
            folder,
            seed=scenario.seed,
            poll_s=pace.poll_s,
        )
        self._server = LedgerServer()
        self._published: list[int] = []
        self._run.store.followers.append(self._published.append)
        self._trainer = SimulatedProcess("train", self._train)
        self._fillers = [self._filler(f"rollouts-{number}") for number in range(scenario.processes)]
        self._violations: list[Violation] = []
        self._injector = Injector(scenario, self._run, self._server, self._trainer, self._fillers, self._note)

    async def play(self) -> Outcome:
        """Play it to its end, and judge."""
        with closing(sqlite3.connect(self._folder / "ledger.db", isolation_level=None)) as db:
            self._run.start_background()
            injecting = asyncio.ensure_future(self._injector.inject_all())
            view = self._view(db)
            looking = asyncio.ensure_future(self._look(db, view))
            await self._supervise_all(db)
            seconds = LoopClock().now()
            for task in (injecting, looking, *self._injector.spawned):
                task.cancel()
            await asyncio.gather(injecting, looking, *self._injector.spawned, return_exceptions=True)
            await self._run.stop_background()
            if not looking.cancelled():
                looking.result()
            if not self._violations:
                self._violations += at_end(self._remains(db), self._scenario.config)
        return Outcome(
            seed=self._scenario.seed,
            violations=tuple(dict.fromkeys(self._violations)),
            injected=tuple(self._injector.injected),
            restarts=self.restarts,
            seconds=seconds,
            digest=self._digest(),
        )

    @property
    def newest(self) -> int:
        """The newest version."""
        return self._run.store.newest

    @property
    def restarts(self) -> int:
        """Number of restarts of a process."""
        return sum(process.restarts for process in self._processes)

    # ── its processes ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _processes(self) -> list[SimulatedProcess]:
        return [self._trainer, *self._fillers]

    async def _supervise_all(self, db: sqlite3.Connection) -> None:
        """Until all have ended by themselves, or one with a bug, or it takes too long."""
        works = [asyncio.ensure_future(process.supervise()) for process in self._processes]
        done, late = await asyncio.wait(works, timeout=self._pace.longest_s, return_when=asyncio.FIRST_EXCEPTION)
        crashes = [error for work in done if (error := work.exception()) is not None]
        for error in crashes:
            self._note(Rule.CRASHED, f"{type(error).__name__}: {error}")
        if late and not crashes:
            self._note(Rule.STUCK, f"no end within {self._pace.longest_s:g} s; {self._progress(db)}")
        for work in late:
            work.cancel()
        await asyncio.gather(*late, return_exceptions=True)

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

    # ── what is seen of it ──────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, rule: Rule, what: str) -> None:
        self._violations.append(Violation(rule, what))

    async def _look(self, db: sqlite3.Connection, view: RunView) -> None:
        while True:
            await asyncio.sleep(self._pace.look_s)
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
        whole.update(repr(self._injector.injected).encode())
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
