"""A launcher over the demo's machines, as anybody may write one: ``launcher = "bench.fleet.launcher:MachineLauncher"``.

    supervisor of a region ──place──▶ the region's machine with the fewest processes ──▶ HostProcess, in its namespace

What Ray does in a cluster, without Ray: a process goes to a machine that lives, members of a group to machines of their
own. Processes end with their supervisor. The machines are read from a file that ``FLEET_MACHINES`` names.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import final

from bench.fleet.namespaces import enter_command, is_alive
from etude.config.section import Section
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.launchers.host_process import HostProcess, command_line, stop_all
from etude.run.region_stores import ADDRESS_VARIABLE
from etude.run.working_folder import WORK_VARIABLE

MACHINES_VARIABLE = "FLEET_MACHINES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of the demo."""

    name: str
    region: str
    init: int
    """The process that keeps its namespace open; the machine is lost when that ends."""
    address: str
    work: str
    """Its disk."""

    @property
    def environment(self) -> dict[str, str]:
        """What tells processes of étude which machine they are on."""
        return {ADDRESS_VARIABLE: self.address, WORK_VARIABLE: self.work}


def write_machines(file: Path, machines: Mapping[str, Machine]) -> None:
    """Write what :func:`read_machines` reads."""
    file.write_text(json.dumps([asdict(machine) for machine in machines.values()]), encoding="utf-8")


def read_machines(file: Path) -> list[Machine]:
    """All machines, those that are lost included."""
    return [Machine(**fields) for fields in json.loads(file.read_text(encoding="utf-8"))]


@final
class MachineLauncher:
    """Starts processes on the machines of their region. They end with this process."""

    def __init__(self, options: Section, context: LaunchContext) -> None:
        """There are no options."""
        self._machines = read_machines(Path(os.environ[MACHINES_VARIABLE]))
        self._processes: dict[str, tuple[Machine, ProcessSpec, HostProcess]] = {}

    @property
    def spans_regions(self) -> bool:
        """False: each region has a supervisor of its own."""
        return False

    def place(self, spec: ProcessSpec) -> None:
        """Start a process, unless it runs."""
        running = self._processes.get(spec.name)
        if running is not None and not running[2].has_ended:
            return
        machine = self._choose(spec)
        logs = Path(machine.work) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        process = HostProcess(
            replace(spec, command=tuple(enter_command(machine.init, command_line(spec)))),
            log=logs / f"{spec.name}.log",
            heartbeat=Path(machine.work) / f".{spec.name}.beat",
            environment={**machine.environment, **self._rendezvous(spec, machine)},
        )
        self._processes[spec.name] = machine, spec, process

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes: first by signal, then by kill."""
        stop_all([self._processes.pop(name)[2] for name in names if name in self._processes], grace_s)

    def look(self) -> Mapping[str, ProcessStatus]:
        """Describe them right now."""
        return {
            name: replace(process.status(), host=machine.name)
            for name, (machine, _, process) in self._processes.items()
        }

    def _choose(self, spec: ProcessSpec) -> Machine:
        """The machine that has the fewest processes, and none of the same group; of equal ones the last."""
        machines = [each for each in self._machines if each.region == spec.region and is_alive(each.init)]
        others = {name: entry for name, entry in self._processes.items() if name != spec.name}

        def load(machine: Machine) -> tuple[int, int]:
            there = [other for at, other, process in others.values() if at == machine and not process.has_ended]
            mates = sum(spec.group is not None and other.unit == spec.unit for other in there)
            return mates, len(there)

        return min(reversed(machines), key=load)

    def _rendezvous(self, spec: ProcessSpec, machine: Machine) -> dict[str, str]:
        """How the members of a group meet, at the machine of the first one."""
        if spec.group is None:
            return {}
        first = next(
            (at for at, other, _ in self._processes.values() if other.group and other.unit == spec.unit
             and other.group.rank == 0),
            machine,
        )  # fmt: skip
        return spec.group.rendezvous((machine if spec.group.rank == 0 else first).address)
