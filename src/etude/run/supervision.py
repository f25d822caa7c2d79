"""The supervisor observes the processes of a run through a launcher and executes what the reconciler decides.

The reaction to a process that dies, stops its heartbeat or finds a full disk is decided in
:mod:`etude.fleet.reconciler` and :mod:`etude.fleet.restarts`; the ledger, the weight store and the checkpoints make a
restart safe for each of them. Each start is an event, and each restart is reported at once, with its reason.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from etude.config.fleet import FleetConfig
from etude.fleet.launcher import LauncherUnavailable
from etude.fleet.reconciler import Reconciler
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.folder import RunFolder
from etude.run.lending import RegionLenders
from etude.run.placement import RunPlacement
from etude.run.serving import STOP_S
from etude.storage import fullest
from etude.telemetry.events import ProcessStarted
from etude.telemetry.log import EventLog

GROUP_GRACE_S = 3.0
"""Grace time before SIGKILL for the other members of a group after one died, or for a process without heartbeat."""
RECALL_GRACE_S = 0.5
"""Grace time for an engine whose machine production takes back: its calls continue on other engines anyway."""
OUTAGE_S = 600.0
"""Longest time for which a launcher's machines may be unreachable; their processes continue meanwhile."""


@final
class Supervisor:
    """The concurrent processes of one run, across their restarts."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        placement: RunPlacement,
        folder: RunFolder,
        events: EventLog,
        notify: Callable[[str], None] = lambda _: None,
        *,
        heartbeat_timeout_s: float,
    ) -> None:
        """Adopt the processes that already run; the first :meth:`check` places the rest. On a fleet, whose state is in
        ``placement``, the set of processes follows the desired state.

        ``notify`` reports to the user what happens to processes, at once, even if nothing can be written to disk.
        """
        self._specs = tuple(specs)
        self._launcher = placement.launcher
        self._folder = folder
        self._events = events
        self._notify = notify
        self._state = placement.state
        self.fleet = placement.fleet
        """The fleet currently followed."""
        self._specs_of = placement.specs_of
        self._lenders = RegionLenders(folder.path, notify)
        self._lenders.follow(placement.fleet, specs)
        self._reconciler = Reconciler(specs, heartbeat_timeout_s=heartbeat_timeout_s)
        self._incarnations: dict[str, set[str]] = {spec.name: set() for spec in specs}
        self._unreachable_s: float | None = None
        self.statuses: Mapping[str, ProcessStatus] = {}
        """The last observed status of all processes."""

    def check(self) -> bool:
        """Observe the processes and restart dead ones. Return true once all processes that have an end are done; false
        if none has an end.

        Raises :class:`~etude.errors.EtudeError` if a restart would not help, and
        :class:`~etude.fleet.launcher.LauncherUnavailable` after an outage of :data:`OUTAGE_S`.
        """
        if self._state is not None and (desired := self._state.changed()) is not None:
            self._follow(desired.fleet, self._specs_of(desired))
        try:
            self._reconcile()
            self._unreachable_s = None
        except LauncherUnavailable as error:
            self._wait_for_launcher(error)
        drained = self._drained
        ending = {spec.name for spec in self._specs if spec.ends and spec.name not in drained}
        return bool(ending) and ending <= self._reconciler.done

    @property
    def memory_bytes(self) -> int:
        """Resident memory of all processes, where it is known."""
        return sum(status.memory_bytes for status in self.statuses.values())

    def stop(self) -> None:
        """Stop all processes at once: first by a signal, then by SIGKILL."""
        self._lenders.close()
        self._launcher.remove(*(spec.name for spec in self._specs), grace_s=STOP_S)

    @property
    def _drained(self) -> frozenset[str]:
        """Processes that must not run: drained by a user, or because production has their machines."""
        withheld = self._lenders.withheld
        return withheld if self._state is None else withheld | self._state.drained

    def _follow(self, fleet: FleetConfig, specs: Sequence[ProcessSpec]) -> None:
        """Change the set of processes to run, and report the change."""
        before, after = ({spec.name for spec in some} for some in (self._specs, specs))
        changes = [f"{word} {', '.join(sorted(names))}" for word, names in
                   (("added:", after - before), ("removed:", before - after)) if names]  # fmt: skip
        if tuple(specs) != self._specs:
            self._notify(f"the fleet has changed; {'; '.join(changes) or 'changed: the settings of its processes'}")
        for name in after - before:
            self._incarnations.setdefault(name, set())
        self._specs, self.fleet = tuple(specs), fleet
        self._lenders.follow(fleet, specs)
        self._reconciler.follow(specs)

    def _reconcile(self) -> None:
        self.statuses = self._launcher.look()
        self._record_starts()
        self._lenders.see(name for name, status in self.statuses.items() if _has_machine(status))
        actions = self._reconciler.step(self.statuses, time.monotonic(), drained=self._drained)
        for line in actions.notices:
            self._notify(line)
        for name, pause_s in actions.room_pauses.items():
            self._notify_room(name, pause_s)
        if actions.kill:
            self._launcher.remove(*actions.kill, grace_s=GROUP_GRACE_S)
        recalled = self._lenders.withheld.intersection(actions.remove)
        if recalled:
            self._launcher.remove(*recalled, grace_s=RECALL_GRACE_S)
        if others := [name for name in actions.remove if name not in recalled]:
            self._launcher.remove(*others, grace_s=STOP_S)
        for spec in actions.place:
            self._launcher.place(spec)
        if actions.place:
            self.statuses = self._launcher.look()
            self._record_starts()
        if self._state is not None:
            self._state.report(self.statuses)

    def _record_starts(self) -> None:
        """Write an event for each incarnation that is seen for the first time."""
        for name, status in self.statuses.items():
            seen = self._incarnations.get(name)
            if seen is not None and status.pid and status.incarnation not in seen:
                self._events.write(ProcessStarted(process=name, pid=status.pid, restarts=len(seen)))
                seen.add(status.incarnation)

    def _notify_room(self, name: str, pause_s: float) -> None:
        folder, free_bytes = fullest([self._folder.path])
        self._notify(
            f"{name} waits for free space on a disk: {folder} has {free_bytes:,} bytes free. Nothing is lost: free "
            f"some space there, and {name} continues (next attempt in {pause_s:g} s)"
        )

    def _wait_for_launcher(self, error: LauncherUnavailable) -> None:
        """Report the outage once, and raise the error after :data:`OUTAGE_S`."""
        now_s = time.monotonic()
        if self._unreachable_s is None:
            self._unreachable_s = now_s
            self._notify(f"{error}; its processes continue to run, and the launcher is tried again for {OUTAGE_S:g} s")
        if now_s - self._unreachable_s > OUTAGE_S:
            raise error


def _has_machine(status: ProcessStatus) -> bool:
    return status.exit_status is None and not status.is_pending
