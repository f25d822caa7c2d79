"""Doing to a simulated run what its scenario says, each at its time.

- consumes: the faults of a scenario
- produces: what happened, to whom and when; violations by engines that are called while they are down
- woken by: time
- on shutdown: its caller cancels what it spawned
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import final

from bench.simulation.connections import Breakage, LedgerServer
from bench.simulation.invariants import Rule
from bench.simulation.processes import SimulatedProcess
from bench.simulation.scenario import Fault, Kind, Scenario
from etude.gateway.routing.router import EngineState
from etude.rollouts.fake import LoopClock
from etude.simulation.region import ModelledRegion
from etude.simulation.run import SimulatedRun

LOOK_S = 0.5
"""Polling interval of a stopped engine or an unavailable store."""
IDLE_S = 0.1
"""Between two looks for a moment at which an engine has nothing to do."""
NOTICED_S = 1.5
"""Time in which a gateway notices that an engine is dead, which it polls twice a second."""


@final
class Injector:
    """The faults of one run."""

    def __init__(
        self,
        scenario: Scenario,
        run: SimulatedRun,
        server: LedgerServer,
        trainer: SimulatedProcess,
        fillers: Sequence[SimulatedProcess],
        note: Callable[[Rule, str], None],
    ) -> None:
        """``fillers`` are the rollouts processes; ``note`` takes violations."""
        self._scenario = scenario
        self._run = run
        self._server = server
        self._trainer = trainer
        self._fillers = list(fillers)
        self._note = note
        self.injected: list[tuple[float, str]] = []
        """Time and words of each fault that came."""
        self.spawned: list[asyncio.Task[None]] = []
        self._until_s: dict[tuple[Kind, str], float] = {}
        self._deaths = Counter[tuple[str, int]]()

    async def inject_all(self) -> None:
        """Let all faults happen, each at its time."""
        for fault in self._scenario.faults:
            await asyncio.sleep(max(0.0, fault.at_s - LoopClock().now()))
            victim = self._inject(fault)
            if victim is not None:
                self._record(fault, victim)

    def _record(self, fault: Fault, victim: str) -> None:
        self.injected.append((LoopClock().now(), f"{fault.kind} {victim}".strip()))

    def _inject(self, fault: Fault) -> str | None:
        """Let it happen; returns to whom, ``None`` where it could not or comes later."""
        names = list(self._run.regions)
        region = self._run.regions[names[int(fault.pick * len(names))]]
        filler = self._fillers[int(fault.pick * len(self._fillers))]
        match fault.kind:
            case Kind.KILL_ROLLOUTS:
                return self._kill(filler, fault)
            case Kind.KILL_TRAINER:
                return self._kill(self._trainer, fault)
            case Kind.KILL_MACHINE:
                for process in [self._trainer, *self._fillers]:
                    process.kill(fault.hold_s)
            case Kind.LOSE_ROLLOUTS:
                filler = self._fillers[-1]
                if len(self._fillers) == 1 or filler.is_lost:
                    return None
                filler.is_lost = True
                filler.kill(0.0)
                return filler.name
            case Kind.KILL_GATEWAY:
                region.sessions.forget()
                return region.name
            case Kind.KILL_ENGINE | Kind.OLD_ENGINE:
                return self._harm_engine(fault)
            case Kind.CUT_REGION:
                region.is_disconnected = True
                self._later(fault, region.name, lambda: setattr(region, "is_disconnected", False))
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
                victim = [self._trainer, *self._fillers][int(fault.pick * len([self._trainer, *self._fillers]))]
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

    def _harm_engine(self, fault: Fault) -> str | None:
        engines = [(region, n) for region in self._run.regions.values() for n in range(len(region.engines))]
        region, number = engines[int(fault.pick * len(engines))]
        if fault.kind is Kind.OLD_ENGINE:
            self._spawn(self._age(region, number, fault))
            return None
        if region.engines[number].is_down:
            return None
        self._die(region, number)
        self._spawn(self._restart(region, number, fault))
        self._spawn(self._check_unused(region, number))
        return f"{number} of {region.name}"

    def _die(self, region: ModelledRegion, number: int) -> None:
        region.engines[number].die()
        self._deaths[region.name, number] += 1

    async def _age(self, region: ModelledRegion, number: int, fault: Fault) -> None:
        """Give an engine older weights, once there are some and no call would tell of it."""
        engine = region.engines[number]
        while engine.is_down or engine.running or engine.waiting or not region.stored:
            await asyncio.sleep(IDLE_S)
        self._die(region, number)
        self._record(fault, f"{number} of {region.name}")
        await self._restart(region, number, fault)

    async def _restart(self, region: ModelledRegion, number: int, fault: Fault) -> None:
        """Bring an engine back with what its region has or with what it had on its disk, which may be older; it follows
        the others then.
        """
        engine = region.engines[number]
        await asyncio.sleep(fault.hold_s)
        while fault.kind is Kind.KILL_ENGINE and self._run.store.is_away:
            await asyncio.sleep(LOOK_S)
        engine.restart(max(0, region.stored - fault.moment - (fault.kind is Kind.OLD_ENGINE)))
        await asyncio.sleep(self._scenario.calibration.swap_s + LOOK_S)
        if not engine.is_down and engine.version < region.stored:
            engine.swap(region.stored)

    async def _check_unused(self, region: ModelledRegion, number: int) -> None:
        """Note calls that go to a dead engine though another one of its region is healthy and as new."""
        engine, death = region.engines[number], self._deaths[region.name, number]

        def is_still_down() -> bool:
            return engine.is_down and self._deaths[region.name, number] == death

        await asyncio.sleep(NOTICED_S)
        while is_still_down():
            before, could = engine.refused, self._able(region, number)
            await asyncio.sleep(LOOK_S)
            if is_still_down() and engine.refused > before and could & self._able(region, number):
                self._note(Rule.DEAD_ENGINE, f"engine {number} of {region.name} was called while it was down")

    def _able(self, region: ModelledRegion, number: int) -> set[tuple[int, int]]:
        """Other engines that could take any call of a region, each with how often it died so far."""
        views = region.pool.list()
        newest = max((view.health.version for view in views if view.health is not None), default=-1)
        return {
            (other, self._deaths[region.name, other])
            for other, view in enumerate(views)
            if view.state is EngineState.HEALTHY and view.health is not None and view.health.version == newest
            if other != number and not region.engines[other].is_down
        }

    def _later(self, fault: Fault, victim: str, heal: Callable[[], None]) -> None:
        """Heal it when its time is over, unless another fault of its kind is still active."""
        key, until_s = (fault.kind, victim), LoopClock().now() + fault.hold_s
        self._until_s[key] = max(until_s, self._until_s.get(key, 0.0))

        async def wait() -> None:
            await asyncio.sleep(fault.hold_s)
            if LoopClock().now() >= self._until_s[key]:
                heal()

        self._spawn(wait())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self.spawned.append(asyncio.ensure_future(work))
