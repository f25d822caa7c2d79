"""The decisions of a supervisor: what runs is compared with what is to run, and what differs is placed or removed.

    specs + statuses + now ──step──▶ actions: kill, remove, place, and what people are told

Pure. It keeps only what it saw itself, so that another one that begins with the same specs takes over from what a
launcher sees: what runs is adopted, what is missing is placed. Each process is a unit of its own; a group is one unit,
which is restarted whole.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from etude.errors import EtudeError, InfrastructureError
from etude.fleet.restarts import DEATHS_WINDOW_S, Outcome, Restarts, Silence
from etude.fleet.specs import ProcessSpec, ProcessStatus

LOST_S = 15.0
"""Longest time that a machine may not answer before its processes are placed on another one."""
PENDING_S = 30.0
"""Time after which people are told that no machine has room for a process."""
REGISTERED_S = 5.0
"""Longest time that a launcher may take to show what it has just placed."""


@dataclass(slots=True, kw_only=True)
class Actions:
    """Results of one reconciliation, in the order in which they are to be executed."""

    kill: list[str] = field(default_factory=list)
    """Processes that are silent, or that a dead member of their group leaves behind."""
    remove: list[str] = field(default_factory=list)
    """Processes that are not to run, and get their time to end."""
    place: list[ProcessSpec] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """Lines for people."""
    room_pauses: dict[str, float] = field(default_factory=dict)
    """Process that found a full disk → seconds until it is started again."""


@final
class Unit:
    """One process, or one group that restarts together, and what was seen of it."""

    def __init__(self, members: Sequence[ProcessSpec]) -> None:
        self.members = tuple(members)
        self.restarts = Restarts()
        self.done: set[str] = set()
        self.is_changed = False
        """True if what runs was placed by other specs."""
        self.placed_s: float | None = None
        """Time at which it was last placed, or adopted; ``None`` while it is not to run."""
        self.again_s: float | None = None
        """Time at which it is started again; ``None`` unless it waits for room on a disk."""
        self.silences: dict[str, tuple[str, Silence]] = {}
        """Member → its incarnation, and the silence of that."""
        self.absent_s: dict[str, float] = {}
        """Member → time since which its machine is lost, or no machine had room for it."""
        self.reported: set[str] = set()
        """Members of which was said that no machine has room for them."""

    def silence(self, name: str, status: ProcessStatus, now_s: float) -> Silence:
        """The silence of a member; that of a new incarnation begins anew."""
        incarnation, silence = self.silences.get(name, ("", None))
        if silence is None or incarnation != status.incarnation:
            silence = Silence(status.beat, now_s)
            self.silences[name] = status.incarnation, silence
        return silence

    def absence(self, name: str, now_s: float) -> float:
        """Seconds for which a member has been out of sight."""
        return now_s - self.absent_s.setdefault(name, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """One step: what is seen, when, and the actions that follow so far."""

    statuses: Mapping[str, ProcessStatus]
    now_s: float
    actions: Actions = field(default_factory=Actions)

    def restart(self, unit: Unit) -> None:
        """Start a unit again: what is left of it is killed, and all of it is placed.

        A single process that ended is started where it was: to find it a machine anew takes longer than its start.
        """
        unit.again_s, unit.placed_s, unit.is_changed = None, self.now_s, False
        unit.done.clear()
        unit.absent_s.clear()
        left = [spec.name for spec in unit.members if spec.name in self.statuses]
        if len(unit.members) > 1 or any(self.statuses[name].exit_status is None for name in left):
            self.actions.kill += left
        self.actions.place += unit.members

    def drain(self, unit: Unit) -> None:
        """Let a unit end."""
        unit.again_s, unit.placed_s, unit.is_changed = None, None, False
        self.actions.remove += [spec.name for spec in unit.members if spec.name in self.statuses]


@final
class Reconciler:
    """Compares specs with statuses, step by step, for one supervisor."""

    def __init__(self, specs: Sequence[ProcessSpec], *, heartbeat_timeout_s: float) -> None:
        """A process that gives no heartbeat for ``heartbeat_timeout_s`` is killed and started again."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._units: list[Unit] = []
        self._names: set[str] = set()
        self._take(specs)

    @property
    def done(self) -> frozenset[str]:
        """Processes that had an end and have reached it."""
        return frozenset(name for unit in self._units for name in unit.done)

    def follow(self, specs: Sequence[ProcessSpec]) -> None:
        """Compare with other specs from now on: what is no longer among them is removed, and what differs restarted."""
        self._take(specs)

    def _take(self, specs: Sequence[ProcessSpec]) -> None:
        """Make a unit of all that restarts together; what is as before stays as it is."""
        members: dict[str, list[ProcessSpec]] = {}
        for spec in specs:
            members.setdefault(spec.unit, []).append(spec)
        before = {unit.members[0].unit: unit for unit in self._units}
        self._units = []
        for name, its in members.items():
            old = before.get(name)
            unit = old if old is not None and old.members == tuple(its) else Unit(its)
            if old is not None and unit is not old:
                unit.is_changed = True
            self._units.append(unit)
        self._names = {spec.name for spec in specs}

    def step(
        self, statuses: Mapping[str, ProcessStatus], now_s: float, *, drained: Collection[str] = frozenset()
    ) -> Actions:
        """Compare once, at monotonic seconds ``now_s``; units with a ``drained`` member are not to run.

        Raises :class:`~etude.errors.EtudeError` for a process that met something that no restart repairs, and
        :class:`~etude.errors.InfrastructureError` for one that dies, or falls silent, again and again.
        """
        reconciliation = Reconciliation(statuses=statuses, now_s=now_s)
        reconciliation.actions.remove += [name for name in statuses if name not in self._names]
        for unit in self._units:
            is_seen = any(spec.name in statuses for spec in unit.members)
            if not {spec.name for spec in unit.members}.isdisjoint(drained):
                reconciliation.drain(unit)
            elif unit.is_changed:
                reconciliation.restart(unit)
            elif unit.again_s is not None:
                if now_s >= unit.again_s:
                    reconciliation.restart(unit)
            elif unit.placed_s is None and not is_seen:
                reconciliation.restart(unit)
            else:
                unit.placed_s = now_s if unit.placed_s is None else unit.placed_s
                self._check(unit, reconciliation)
        return reconciliation.actions

    def _check(self, unit: Unit, reconciliation: Reconciliation) -> None:
        """Look at each member of a unit that is to run, until something is wrong with one."""
        for spec in unit.members:
            status = reconciliation.statuses.get(spec.name)
            if spec.name in unit.done or self._is_well(unit, spec, status, reconciliation):
                continue
            code = None if status is None else status.exit_status
            match unit.restarts.ended(code, reconciliation.now_s, ends=spec.ends):
                case Outcome.DONE:
                    unit.done.add(spec.name)
                    continue
                case Outcome.USER_ERROR:
                    raise EtudeError(f"{spec.name} gave up: {_last_line(status)}")
                case Outcome.TOO_MANY_DEATHS:
                    log = "" if status is None else f"; see {status.log}"
                    raise InfrastructureError(
                        f"{spec.name} died {unit.restarts.deaths} times in {DEATHS_WINDOW_S:g} s, last with status "
                        f"{code}: {_last_line(status)}{log}"
                    )
                case Outcome.AWAIT_ROOM:
                    pause_s = unit.restarts.room_pause_s(reconciliation.now_s - (unit.placed_s or reconciliation.now_s))
                    reconciliation.actions.room_pauses[spec.name] = pause_s
                    unit.again_s = reconciliation.now_s + pause_s
                case Outcome.RESTART:
                    reconciliation.actions.notices.append(_restarted(unit, spec, status))
                    reconciliation.restart(unit)
            return

    def _is_well(
        self, unit: Unit, spec: ProcessSpec, status: ProcessStatus | None, reconciliation: Reconciliation
    ) -> bool:
        """True while there is nothing to decide about a member: it runs, or is given time."""
        now_s = reconciliation.now_s
        if status is None:
            return unit.placed_s is not None and now_s - unit.placed_s < REGISTERED_S
        if status.exit_status is not None:
            return False
        if status.is_pending:
            self._report_pending(unit, spec, reconciliation)
            return True
        if status.is_lost:
            return unit.absence(spec.name, now_s) <= LOST_S
        unit.absent_s.pop(spec.name, None)
        if (silent_s := self._overlong_silence(unit, spec, status, now_s)) is None:
            return True
        message = f"{spec.name} gave no sign of life for {silent_s:.0f} s and was killed"
        reconciliation.actions.notices.append(message)
        if unit.restarts.silent(silent_s, now_s):
            raise InfrastructureError(
                f"{message}, for the {unit.restarts.silences}th time; see {status.log}, or allow it more with "
                f"heartbeat_timeout_s"
            )
        reconciliation.restart(unit)
        return True

    def _overlong_silence(self, unit: Unit, spec: ProcessSpec, status: ProcessStatus, now_s: float) -> float | None:
        silence = unit.silence(spec.name, status, now_s)
        silent_s = silence.look(status.beat, now_s)
        return silent_s if silence.is_too_long(silent_s, self._heartbeat_timeout_s) else None

    def _report_pending(self, unit: Unit, spec: ProcessSpec, reconciliation: Reconciliation) -> None:
        if unit.absence(spec.name, reconciliation.now_s) <= PENDING_S or spec.name in unit.reported:
            return
        unit.reported.add(spec.name)
        reconciliation.actions.notices.append(
            f"{spec.name} waits: no machine of region {spec.region!r} has {spec.resources.cpus:g} CPUs and "
            f"{spec.resources.gpus} GPUs free; add one, or ask for less in [resources.{spec.command[1]}] of the fleet"
        )


def _restarted(unit: Unit, spec: ProcessSpec, status: ProcessStatus | None) -> str:
    """Tell people of the end of a process, and what follows."""
    code = None if status is None else status.exit_status
    end = f"{spec.name} is gone with its machine" if code is None else f"{spec.name} ended with status {code}"
    others = ", ".join(member.name for member in unit.members if member is not spec)
    return f"{end} and is started again{f', and so are {others}' if others else ''}: {_last_line(status)}"


def _last_line(status: ProcessStatus | None) -> str:
    return "it said nothing" if status is None or not status.last_line else status.last_line
