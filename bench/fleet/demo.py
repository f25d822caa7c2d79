"""One run on a fleet: started, wronged on a timeline, watched to its end, audited.

    home: etude run --at URL --fleet … ─┐
    each region: etude fleet run … ─────┴──▶ events ──▶ when is the next fault due, when is the last one over
                                                 └────▶ figures

Owns processes, time and the record of each fault. What a fault means is :mod:`bench.fleet.figures`'s.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from bench import programs
from bench.fleet.audit import audit_at_home
from bench.fleet.figures import FaultRecord, recovery
from bench.fleet.machines import Fleet, living, processes, store_url
from bench.fleet.namespaces import kill_all
from bench.fleet.observed import Observed, of_kind
from bench.fleet.plan import HOME, FaultKind, FleetPlan, PlannedFault
from bench.fleet.ray_nodes import RESOURCES
from bench.report import so_far
from bench.starts import starting_from
from etude.errors import InfrastructureError
from etude.telemetry.events import EngineStats, Logged, StepDone, WeightsPublished

RECIPE = programs.ROOT / "recipes" / "quickstart"
MACHINES, RAY = "machines", "ray"
LAUNCHERS: Mapping[str, str] = {MACHINES: "bench.fleet.launcher:MachineLauncher", RAY: "ray"}
"""Launcher of the demo → its name in ``fleet.toml``."""
PACKS = "weights/packs"
"""Folders of a store with what weight versions consist of."""
POLL_S = 0.5
"""Polling interval; the times of what happened are read from events."""
FIRST_STEP = 2
"""Step before which no fault happens."""
GAP_S = 3.0
"""Between the end of a fault and the next one, at least."""
FAULT_S = 240.0
"""After this time a fault counts as one that the fleet did not get over."""
RESTART_S = 1.0
"""Delay before a killed supervisor is restarted, as by a service manager."""
REGION_S = 2.0
"""Until the supervisor of a region that ended is started again."""


@dataclass(slots=True, kw_only=True)
class DemoLog:
    """Record of a demo."""

    events: Sequence[Logged] = ()
    records: list[FaultRecord] = field(default_factory=list)
    skipped: list[PlannedFault] = field(default_factory=list)
    """Faults that the run was over before."""
    weights_sent: Mapping[str, int] = field(default_factory=dict)
    """Region → bytes of weights that home's store sent there, records and polls aside."""
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    """Region → bytes on the link from home, everything included."""
    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Violations that the auditor found, by its goals."""
    interrupted: bool = False
    status: int | None = None
    """Exit status of the run; ``None`` if it was not finished in time."""
    began_s: float = 0.0
    seconds: float = 0.0


@final
class Demo:
    """Drives one run on a fleet."""

    def __init__(
        self,
        fleet: Fleet,
        scratch: Path,
        *,
        launcher: str = MACHINES,
        start: Path,
        seed: int,
        deadline_s: float,
        tell: Callable[[str], None],
    ) -> None:
        """``launcher`` is one of :data:`LAUNCHERS`, ``start`` the model that RL begins with. ``tell`` is given what
        people want to know at once; the run has until ``deadline_s``.
        """
        self._launcher = launcher
        self._fleet = fleet
        self._plan: FleetPlan = fleet.plan
        self._scratch = scratch
        self._start = start
        self._seed = seed
        self._deadline_s = deadline_s
        self._tell = tell
        self._observed = Observed(scratch / "disks")
        self._due = list(self._plan.faults)
        self._log = DemoLog()
        self._regions: dict[str, subprocess.Popen[bytes]] = {}
        self._home: subprocess.Popen[bytes] | None = None
        self._calm_s: float | None = None
        """Since when nothing is wrong; ``None`` before all regions sample."""
        self._steps = 0

    def run(self) -> DemoLog:
        """Go through all of it. Raises :class:`~etude.errors.InfrastructureError` where the run ends with an error."""
        self._log.began_s = time.time()
        toml = self._scratch / "fleet.toml"
        toml.write_text(fleet_toml(self._plan, self._launcher), encoding="utf-8")
        self._home = self._start_home(toml)
        with so_far() as measured:
            self._watch()
        self._log.interrupted = measured.interrupted
        self._observed.update()
        self._close_faults()
        status = self._home.poll()
        self._log.status, self._log.skipped = status, self._due
        self._log.events = self._observed.events
        self._log.seconds = time.time() - self._log.began_s
        if status not in (0, None, 3):
            raise InfrastructureError(f"bench fleet: the run ended with {status}: {self.tail('home')}")
        self._measure()
        return self._log

    def _watch(self) -> None:
        """Until the run ends or is late: keep the regions' supervisors, let faults happen, undo them."""
        assert self._home is not None
        while self._home.poll() is None and not self._is_late:
            self._observed.update()
            self._tell_steps()
            if of_kind(self._observed.events, WeightsPublished):
                self._keep_regions()
            self._close_faults()
            while self._is_due():
                self._strike(self._due.pop(0))
            time.sleep(POLL_S)

    def tail(self, site: str) -> str:
        """The last lines that the supervisor of a site printed."""
        return self._log_file(site).read_text(encoding="utf-8", errors="replace")[-600:].strip()

    @property
    def _is_late(self) -> bool:
        return time.time() - self._log.began_s > self._deadline_s

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_home(self, toml: Path) -> subprocess.Popen[bytes]:
        own = (*starting_from(self._start), *self._plan.settings, f"trainer.steps={self._plan.steps}")
        settings = [word for setting in own for word in ("--set", setting)]
        where = ["--at", self._fleet.url, "--fleet", str(toml), "--ledger", self._fleet.ledger]
        command = [*etude("run"), str(RECIPE), "--seed", str(self._seed), *where, *settings]
        return self._fleet.start(HOME, command, self._log_file(HOME))

    def _keep_regions(self) -> None:
        """Start the supervisor of each region, and start it again when it ended."""
        for region in self._plan.regions:
            supervisor = self._regions.get(region.name)
            if not self._fleet.lives(region.name) or (supervisor is not None and supervisor.poll() is None):
                continue
            if supervisor is not None:
                self._tell(f"the supervisor of {region.name} ended and is started again: {self.tail(region.name)}")
                time.sleep(REGION_S)
            command = [*etude("fleet", "run"), "--run", self._fleet.url, "--region", region.name]
            self._regions[region.name] = self._fleet.start(region.name, command, self._log_file(region.name))

    def _log_file(self, site: str) -> Path:
        return self._scratch / f"supervisor-{site}.log"

    def _tell_steps(self) -> None:
        steps = len({logged.event.step for logged in self._observed.events if isinstance(logged.event, StepDone)})
        if steps != self._steps:
            self._steps = steps
            self._tell(f"step {steps} of {self._plan.steps}")

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_due(self) -> bool:
        """True if the next fault may come: all regions sample, and nothing was wrong for long enough."""
        if self._calm_s is None:
            sampling = {logged.process for logged in of_kind(self._observed.events, EngineStats)}
            if self._steps >= FIRST_STEP and len(sampling) >= len(self._plan.regions):
                self._calm_s = time.time()
            return False
        if not self._due:
            return False
        fault = self._due[0]
        if fault.joins:
            return True
        is_over = all(each.recovered_s is not None for each in self._open())
        return is_over and time.time() - self._calm_s >= max(GAP_S, fault.lasts_s)

    def _open(self) -> list[FaultRecord]:
        """Faults that are not over yet, without those that are given up."""
        now_s = time.time()
        return [each for each in self._log.records
                if each.recovered_s is None and now_s - each.struck_s < FAULT_S + each.fault.lasts_s]  # fmt: skip

    def _close_faults(self) -> None:
        """Undo faults whose time is over, and record those that ended."""
        for record in self._open():
            lasted_s = time.time() - record.struck_s
            if record.fault.lasts_s and record.healed_s is None and lasted_s >= record.fault.lasts_s:
                self._fleet.heal(record.fault.region)
                record.healed_s = time.time()
            if (recovered_s := recovery(record, self._observed.events)) is not None:
                record.recovered_s, self._calm_s = recovered_s, time.time()
                self._tell(f"{record.fault.kind} ({record.fault.region}): over after {record.over_s:.1f} s")

    def _strike(self, fault: PlannedFault) -> None:
        """Let a fault happen."""
        self._tell(f"{fault.kind}: {fault.region}")
        self._log.records.append(FaultRecord(fault=fault, struck_s=time.time()))
        match fault.kind:
            case FaultKind.ENGINE_KILLED:
                self._kill(fault.region, "serve")
            case FaultKind.RELAY_KILLED:
                self._kill(fault.region, "relay", most=1)
            case FaultKind.MACHINE_KILLED:
                self._fleet.kill_machine(self._machine_of(fault.region, "serve"))
            case FaultKind.REGION_CUT:
                self._fleet.cut(fault.region)
            case FaultKind.TRAINER_NODE_LOST:
                self._fleet.kill_machine(self._machine_of(HOME, "train", avoid=HOME))
            case FaultKind.SUPERVISOR_KILLED:
                assert self._home is not None
                self._home.kill()
                self._home.wait()
                time.sleep(RESTART_S)
                command = [*etude("run"), "--resume", self._fleet.url]
                self._home = self._fleet.start(HOME, command, self._log_file(HOME))

    def _kill(self, region: str, word: str, most: int = sys.maxsize) -> None:
        """``kill -9`` processes of a command in a region."""
        pids = [pid for site in living(self._fleet, region) for pid in processes(self._fleet, site, word)]
        kill_all(sorted(pids)[:most])

    def _machine_of(self, region: str, word: str, avoid: str = "") -> str:
        """The machine that runs a command, not ``avoid``. Raises ``InfrastructureError`` for none."""
        for site in living(self._fleet, region):
            if site != avoid and processes(self._fleet, site, word):
                return site
        raise InfrastructureError(f"bench fleet: no machine of {region} runs {word}")

    # ── what it came to ─────────────────────────────────────────────────────────────────────────────────────────────

    def _measure(self) -> None:
        sent = self._fleet.sent(HOME)["sent"]
        machines = self._fleet.machines.values()
        self._log.weights_sent = {
            region.name: sum(sent.get(f"{each.address} {PACKS}", 0) for each in machines if each.region == region.name)
            for region in self._plan.regions
        }
        self._log.link_bytes = {region.name: self._fleet.traffic_bytes(region.name) for region in self._plan.regions}
        if self._log.status is not None:
            self._log.findings = audit_at_home(self._fleet, self._scratch)


def etude(*words: str) -> list[str]:
    """A command of étude's."""
    return [sys.executable, "-m", "etude", *words]


def fleet_toml(plan: FleetPlan, launcher: str) -> str:
    """The fleet as `etude run --fleet` reads it."""
    lines = [
        f'launcher = "{LAUNCHERS[launcher]}"',
        f'home = "{HOME}"',
        "[trainer]",
        f"nodes = {plan.trainer_nodes}",
        "[[regions]]",
        f'name = "{HOME}"',
        f'store = "{store_url(HOME)}"',
        "gateways = 1",
    ]
    if launcher == RAY:
        lines += [line for command, cpus in RESOURCES.items() for line in (f"[resources.{command}]", f"cpus = {cpus}")]
    for region in plan.regions:
        lines += ["[[regions]]", f'name = "{region.name}"', f'store = "{store_url(region.name)}"', "engines = 1"]
    return "\n".join(lines) + "\n"
