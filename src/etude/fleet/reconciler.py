"""The decisions of a supervisor: compares the running processes with the desired ones and places or removes the
difference.

    specs + statuses + now ──step──▶ actions: kill, remove, place, and notices

Pure. Its state consists only of its own observations, so a successor with the same specs takes over from a launcher's
statuses: running processes are adopted, missing ones are placed. Each single process is a unit; a group is one unit,
which restarts as a whole.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from etude.errors import EtudeError, InfrastructureError
from etude.fleet.restarts import DEATHS_WINDOW_S, Outcome, Restarts, Silence
from etude.fleet.specs import ProcessSpec, ProcessStatus

LOST_S = 15.0
"""Longest time without an answer from a machine before its processes are placed on another one."""
PENDING_S = 30.0
"""Time after which a notice reports that no machine has resources for a process."""
REGISTERED_S = 5.0
"""Longest delay until a launcher shows a process that it has just placed."""


@dataclass(slots=True, kw_only=True)
class Actions:
    """Results of one reconciliation, in the order in which they are to be executed."""

    kill: list[str] = field(default_factory=list)
    """Processes without heartbeat, and the other members of a group with a dead one."""
    remove: list[str] = field(default_factory=list)
    """Processes that must not run, to be stopped with a grace time."""
    place: list[ProcessSpec] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """Lines for the user."""
    room_pauses: dict[str, float] = field(default_factory=dict)
    """Process that found a full disk → seconds until its restart."""


@final
class Unit:
    """One process, or one group that restarts together, with its observations."""

    def __init__(self, members: Sequence[ProcessSpec]) -> None:
        self.members = tuple(members)
        self.restarts = Restarts()
        self.done: set[str] = set()
        self.is_changed = False
        """True if the running processes were placed with different specs."""
        self.placed_s: float | None = None
        """Time at which it was last placed, or adopted; ``None`` while it must not run."""
        self.again_s: float | None = None
        """Time of its next start; ``None`` unless it waits for disk space."""
        self.silences: dict[str, tuple[str, Silence]] = {}
        """Member → its incarnation and the silence of that incarnation."""
        self.absent_s: dict[str, float] = {}
        """Member → time since which its machine is lost or no machine has resources for it."""
        self.reported: set[str] = set()
        """Members already reported as without a machine, until they have one."""

    def silence(self, name: str, status: ProcessStatus, now_s: float) -> Silence:
        """The silence of a member; a new incarnation starts a new one."""
        incarnation, silence = self.silences.get(name, ("", None))
        if silence is None or incarnation != status.incarnation:
            silence = Silence(status.beat, now_s)
            self.silences[name] = status.incarnation, silence
        return silence

    def age_s(self, now_s: float) -> float:
        """Seconds since it was last placed, or adopted; it must run."""
        assert self.placed_s is not None
        return now_s - self.placed_s

    def absence(self, name: str, now_s: float) -> float:
        """Seconds for which a member has not been visible."""
        return now_s - self.absent_s.setdefault(name, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """One step: statuses, time, and the actions so far."""

    statuses: Mapping[str, ProcessStatus]
    now_s: float
    actions: Actions = field(default_factory=Actions)

    def restart(self, unit: Unit) -> None:
        """Restart a unit: kill its remaining processes and place all of its members.

        A single process that ended is restarted on its machine, since a new placement takes longer than its start.
        """
        unit.again_s, unit.placed_s, unit.is_changed = None, self.now_s, False
        unit.done.clear()
        unit.absent_s.clear()
        left = [spec.name for spec in unit.members if spec.name in self.statuses]
        if len(unit.members) > 1 or any(self.statuses[name].exit_status is None for name in left):
            self.actions.kill += left
        self.actions.place += unit.members

    def drain(self, unit: Unit) -> None:
        """Stop a unit with a grace time."""
        unit.again_s, unit.placed_s, unit.is_changed = None, None, False
        self.actions.remove += [spec.name for spec in unit.members if spec.name in self.statuses]


@final
class Reconciler:
    """Compares specs with statuses, step by step, for one supervisor."""

    def __init__(self, specs: Sequence[ProcessSpec], *, heartbeat_timeout_s: float) -> None:
        """A process without a heartbeat for ``heartbeat_timeout_s`` is killed and restarted."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._units: list[Unit] = []
        self._names: set[str] = set()
        self._take(specs)

    @property
    def done(self) -> frozenset[str]:
        """Finite processes that are done."""
        return frozenset(name for unit in self._units for name in unit.done)

    def follow(self, specs: Sequence[ProcessSpec]) -> None:
        """Use new specs from now on: processes missing there are removed, and changed ones restarted."""
        self._take(specs)

    def _take(self, specs: Sequence[ProcessSpec]) -> None:
        """Build units of processes that restart together; unchanged units stay."""
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
        """Compare once, at monotonic seconds ``now_s``; units with a ``drained`` member must not run.

        Raises :class:`~etude.errors.EtudeError` for a process with an error that no restart repairs, and
        :class:`~etude.errors.InfrastructureError` for one that repeatedly dies or loses its heartbeat.
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
        """Check each member of a unit that must run, until one has a problem."""
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
                    pause_s = unit.restarts.room_pause_s(unit.age_s(reconciliation.now_s))
                    reconciliation.actions.room_pauses[spec.name] = pause_s
                    unit.again_s = reconciliation.now_s + pause_s
                case Outcome.RESTART:
                    reconciliation.actions.notices.append(_restarted(unit, spec, status))
                    reconciliation.restart(unit)
            return

    def _is_well(
        self, unit: Unit, spec: ProcessSpec, status: ProcessStatus | None, reconciliation: Reconciliation
    ) -> bool:
        """True while there is nothing to decide about a member: it runs, or its timeout has not passed."""
        now_s = reconciliation.now_s
        if status is None:
            return unit.age_s(now_s) < REGISTERED_S
        if status.exit_status is not None:
            return False
        if status.is_pending:
            self._report_pending(unit, spec, reconciliation)
            return True
        if status.is_lost:
            return unit.absence(spec.name, now_s) <= LOST_S
        unit.absent_s.pop(spec.name, None)
        unit.reported.discard(spec.name)
        if (silent_s := self._overlong_silence(unit, spec, status, now_s)) is None:
            return True
        message = f"{spec.name} gave no sign of life for {silent_s:.0f} s and was killed"
        reconciliation.actions.notices.append(message)
        if unit.restarts.record_silence(silent_s, now_s):
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
    """The notice about the end of a process and its consequence."""
    code = None if status is None else status.exit_status
    end = f"{spec.name} is gone with its machine" if code is None else f"{spec.name} ended with status {code}"
    others = ", ".join(member.name for member in unit.members if member is not spec)
    return f"{end} and is restarted{f', and so are {others}' if others else ''}: {_last_line(status)}"


def _last_line(status: ProcessStatus | None) -> str:
    return "no output" if status is None or not status.last_line else status.last_line
