"""One run under fire: real processes, started, wronged at points of their progress, resumed, and watched.

    strike what is due ─▶ heal what has lasted ─▶ resume what has ended ─▶ read the ledger snapshot ─▶ …
                                                                               │
    until the run is done, or has stood still for longer than any wait in it may take ◀──┘

Owns time and the record of each fault, of runs on one machine and on a fleet alike. What a fault does is
:mod:`bench.faults.injector`'s and :mod:`bench.faults.fleet_run`'s, what is wrong with the ledger snapshot
:mod:`bench.faults.audit`'s.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol, final

from bench.faults.audit import Finding, LedgerSnapshot, Wrong, compare
from bench.faults.evidence import read_snapshot
from bench.faults.injector import Damage, NoVictim, damageable
from bench.faults.schedule import OFFLINE, Fault, FaultSchedule, Kind
from bench.faults.supervisor import GONE_S, kill_all, wait_for_end
from etude.errors import ExitCode, InfrastructureError
from etude.run.folder import RunFolder

POLL_S = 0.05
"""Polling interval."""
SETTLE_S = 0.5
"""A fault is got over when the run gets on this long after it had gone: sooner, a death may not have been noticed."""
DOWN = OFFLINE | {Kind.KILL_SUPERVISOR}
"""Kinds that take the whole run down."""
ENDS = frozenset({ExitCode.DONE, ExitCode.NOTHING_LEARNT})
"""Exit statuses of a run that came to its end: so few steps may teach nothing."""


class RunSupervisor(Protocol):
    """The supervisor of a run, across its incarnations."""

    resumes: int
    """Number of restarts."""

    @property
    def status(self) -> int | None:
        """Exit status; ``None`` while it runs, or cannot be reached because of a fault."""
        ...

    @property
    def output(self) -> str:
        """Output of the current incarnation."""
        ...

    @property
    def starts(self) -> int:
        """Processes that all incarnations have started."""
        ...

    def resume(self) -> None:
        """Start the next incarnation."""
        ...

    def kill(self) -> list[int]:
        """``kill -9``; returns the processes that are left without it."""
        ...

    def stop_all(self) -> None:
        """Leave no process behind, whatever state it is in."""
        ...


class FaultInjector(Protocol):
    """Lets faults happen to one run."""

    def begin(self, fault: Fault) -> AbstractContextManager[None]:
        """A fault of a run that is up; entering it raises :class:`~bench.faults.injector.NoVictim` while it cannot."""
        ...

    def damage(self, fault: Fault) -> Damage | None:
        """Change files of a stopped run; ``None`` if that cannot be undone. Raises in the same way."""
        ...

    def keep_up(self) -> None:
        """Follow the run; called again and again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a run before it counts as stuck."""

    still_s: float = 240.0
    """Maximum time without progress. The longest wait that its recipe and the code allow is a sixth of that; the rest
    is for starts of processes on a busy machine."""
    vain_endings: int = 8
    """Maximum number of consecutive ends with a named error and without progress in between."""
    again_s: float = 0.5
    """Pause before it is resumed then: what made it end may still be going on."""


@dataclass(slots=True, kw_only=True)
class FaultRecord:
    """Outcome of one fault."""

    fault: Fault
    struck_s: float
    """When it came, on the chaos run's clock."""
    starts: int
    """Processes that the supervisors had started until then."""
    resumes: int
    healed_s: float | None = None
    recovered_s: float | None = None
    """When the run got on for the first time after the fault had gone."""
    how: str = ""
    """``went on``, ``restarted`` (a process) or ``resumed`` (the whole run)."""


@dataclass(slots=True, kw_only=True)
class RunLog:
    """Record of one chaos run."""

    records: list[FaultRecord] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    """The errors with which the run ended, and was resumed."""
    resumes: int = 0
    finished: bool = False
    seconds: float = 0.0


@final
class ChaosRun:
    """Drives one run through its faults."""

    def __init__(
        self,
        schedule: FaultSchedule,
        folder: RunFolder,
        supervisor: RunSupervisor,
        injector: FaultInjector,
        bounds: Bounds | None = None,
        on_recovery: Callable[[FaultRecord], None] = lambda _: None,
    ) -> None:
        """``on_recovery`` is called immediately for each fault that the run has recovered from."""
        self._bounds = bounds or Bounds()
        self._folder = folder
        self._on_recovery = on_recovery
        self._due = list(schedule.faults)
        self._due_since_s: float | None = None
        self._open: list[tuple[float, FaultRecord, AbstractContextManager[None]]] = []
        self._damages: list[Damage] = []
        self._log = RunLog()
        self._snapshot = LedgerSnapshot()
        self._moved_s = time.monotonic()
        self._vain_endings = 0
        self._supervisor = supervisor
        self._injector = injector

    @property
    def snapshot(self) -> LedgerSnapshot:
        """The ledger, as it was read last."""
        return self._snapshot

    def run(self) -> RunLog:
        """Go through all of it; returns within the bounds above, whatever happens."""
        began_s = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self._supervisor.stop_all)
            stack.callback(self._heal)
            while not self._log.finished and not self._is_stuck():
                self._injector.keep_up()
                self._strike()
                self._heal(time.monotonic())
                self._look()
                if (status := self._supervisor.status) is not None:
                    self._follow_up(status)
                time.sleep(POLL_S)
        self._undo(self._damages)
        self._look()
        self._log.resumes = self._supervisor.resumes
        self._log.seconds = time.monotonic() - began_s
        return self._log

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _strike(self) -> None:
        """Inject all faults that are due; those without a victim, or not possible yet, wait."""
        with suppress(NoVictim, InfrastructureError):
            while self._due and self._is_due(self._due[0]):
                fault = self._due[0]
                if fault.kind in DOWN:
                    self._strike_down(self._due_at_once(fault.at))
                    continue
                context = self._injector.begin(fault)
                context.__enter__()
                self._open.append((time.monotonic() + fault.hold_s, self._tell(fault), context))

    def _is_due(self, fault: Fault) -> bool:
        if not self._snapshot.groups or self._snapshot.graded < fault.at or self._supervisor.status is not None:
            return False
        if self._due_since_s is None:
            self._due_since_s = time.monotonic()
        return time.monotonic() - self._due_since_s >= fault.delay_s

    def _tell(self, fault: Fault) -> FaultRecord:
        """Begin the record of a fault that was due."""
        self._due.remove(fault)
        self._due_since_s = None
        starts, resumes = self._supervisor.starts, self._supervisor.resumes
        record = FaultRecord(fault=fault, struck_s=time.monotonic(), starts=starts, resumes=resumes)
        self._log.records.append(record)
        return record

    def _due_at_once(self, at: int) -> list[Fault]:
        """All that takes the run down at one point. Raises :class:`NoVictim` while a file for it is missing."""
        at_once = [fault for fault in self._due if fault.at == at and fault.kind in DOWN]
        if not all(damageable(self._folder, fault.kind) for fault in at_once if fault.kind in OFFLINE):
            raise NoVictim
        return at_once

    def _strike_down(self, faults: Sequence[Fault]) -> None:
        """Kill the supervisor, apply the due faults to files, and resume."""
        orphans = self._supervisor.kill()
        records = []
        if any(fault.kind in OFFLINE for fault in faults):
            kill_all(orphans)  # all at once, as with the machine: politely ended, they would tidy their files up
            self._heal()
            if left := wait_for_end(orphans):
                self._find(f"processes {left} outlived their supervisor by {GONE_S:g} s")
        for fault in faults:
            with suppress(NoVictim):  # its file went with the processes: it waits for the next one
                if fault.kind in OFFLINE and (damage := self._injector.damage(fault)) is not None:
                    self._damages.append(damage)
                records.append(self._tell(fault))
        for record in records:
            record.healed_s = time.monotonic()
        self._supervisor.resume()

    def _heal(self, now_s: float = math.inf) -> None:
        """End the faults whose time is over."""
        for entry in [entry for entry in self._open if entry[0] <= now_s]:
            self._open.remove(entry)
            _, record, context = entry
            context.__exit__(None, None, None)
            record.healed_s = time.monotonic()

    def _undo(self, damages: Sequence[Damage]) -> None:
        for damage in reversed(damages):  # a file that was damaged twice
            damage.undo()
        self._damages = [damage for damage in self._damages if damage not in damages]

    # ── the run ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow_up(self, status: int) -> None:
        """Handle a supervisor that ended by itself: the run is done, or its error is recorded and it is resumed."""
        if status in ENDS:
            self._log.finished = True
            return
        output = self._supervisor.output
        lines = [line for line in output.splitlines() if line.startswith("etude: ")]
        if "Traceback (most recent call last)" in output or not lines:
            self._find(f"it ended with status {status} and without a named error: {output.strip()[-600:]}")
        else:
            self._log.endings.append(lines[-1].removeprefix("etude: "))
        named = [damage for damage in self._damages if damage.is_named(output)]
        self._undo(named or self._damages)
        self._vain_endings += 1
        time.sleep(self._bounds.again_s)
        self._supervisor.resume()

    def _is_stuck(self) -> bool:
        """True if the run has used up its limits; recorded once."""
        still_s = time.monotonic() - self._moved_s
        if still_s > self._bounds.still_s:
            self._find(f"nothing happened for {still_s:.0f} s; due: {self._due[:1]}, open: {len(self._open)}")
        elif self._vain_endings > self._bounds.vain_endings:
            self._find(f"it ended {self._vain_endings} times in a row: {self._log.endings[-1:]}")
        else:
            return False
        return True

    def _find(self, what: str) -> None:
        self._log.findings.append(Finding(Wrong.UNBOUNDED_WAITS, what))

    def _look(self) -> None:
        """Read the ledger snapshot: whether all is there that was, and whether the run got on."""
        snapshot = read_snapshot(self._folder)
        if snapshot is None:
            return
        self._log.findings += compare(self._snapshot, snapshot)
        moved = snapshot.progress != self._snapshot.progress
        self._snapshot = snapshot
        now_s = time.monotonic()
        if moved:
            self._moved_s, self._vain_endings = now_s, 0
        if moved or self._log.finished:
            for record in self._log.records:
                self._close(record, now_s)

    def _close(self, record: FaultRecord, now_s: float) -> None:
        """Note how a fault that is over was got over."""
        if record.how or record.healed_s is None or (now_s - record.healed_s < SETTLE_S and not self._log.finished):
            return
        record.recovered_s = now_s
        if self._supervisor.resumes > record.resumes:
            record.how = "resumed"
        else:
            record.how = "restarted" if self._supervisor.starts > record.starts else "went on"
        self._on_recovery(record)
        if record.fault.kind is Kind.FREEZE and record.how == "went on":
            self._find("a frozen process was not replaced")
