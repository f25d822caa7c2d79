"""A launcher over the demo's machines, as anybody may write one: ``launcher = "bench.fleet.launcher:MachineLauncher"``.

    supervisor of a region ──place──▶ agent of the region's machine with the fewest processes ──▶ process

What Ray does in a cluster, without Ray: a process goes to a machine that lives, members of a group to machines of their
own, and supervisors may come and go. The machines are read from a file that ``FLEET_MACHINES`` names; the region is
that of the machine on which the supervisor runs.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from bench.fleet.agent import ask
from etude.config.section import Section
from etude.fleet.launcher import LaunchContext, LauncherUnavailable
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.region_stores import ADDRESS_VARIABLE
from etude.run.working_folder import WORK_VARIABLE

MACHINES_VARIABLE = "FLEET_MACHINES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of the demo."""

    name: str
    region: str
    init: int
    """Its agent, which keeps its namespaces open; the machine is lost when that ends."""
    address: str
    work: str
    """Its disk."""
    socket: str
    """Address of its agent."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment that identifies the machine to étude's processes."""
        return {ADDRESS_VARIABLE: self.address, WORK_VARIABLE: self.work}


def write_machines(file: Path, machines: Mapping[str, Machine]) -> None:
    """Write what :func:`read_machines` reads, at once."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(machine) for machine in machines.values()]), encoding="utf-8")
    partial.replace(file)


def read_machines(file: Path) -> list[Machine]:
    """All machines, those that are lost included."""
    return [Machine(**fields) for fields in json.loads(file.read_text(encoding="utf-8"))]


@final
class MachineLauncher:
    """Has processes started on the machines of this region. What runs there is known there alone."""

    def __init__(self, options: Section, context: LaunchContext) -> None:
        """There are no options."""
        self._file = Path(os.environ[MACHINES_VARIABLE])
        self._address = os.environ[ADDRESS_VARIABLE]

    @property
    def spans_regions(self) -> bool:
        """False: each region has a supervisor of its own."""
        return False

    def place(self, spec: ProcessSpec) -> None:
        """Start a process, unless it runs."""
        there = self._look()
        for machine, processes in there.items():
            if spec.name in processes:
                if processes[spec.name].exit_status is not None:
                    _ask(machine, "place", spec, self._rendezvous(spec, machine, there))
                return
        if not there:
            raise LauncherUnavailable("no machine of this region answers")
        machine = _choose(spec, there)
        _ask(machine, "place", spec, self._rendezvous(spec, machine, there))

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes: first by signal, then by kill."""
        machines = list(self._look())
        with ThreadPoolExecutor(max(1, len(machines))) as threads:
            list(threads.map(lambda machine: _ask(machine, "remove", names, grace_s), machines))

    def look(self) -> Mapping[str, ProcessStatus]:
        """Describe them right now; those of a machine that was lost are gone."""
        return {
            name: replace(status, host=machine.name)
            for machine, processes in self._look().items()
            for name, status in processes.items()
        }

    def _look(self) -> dict[Machine, dict[str, ProcessStatus]]:
        """The answering machines of this region, and the processes on each."""
        machines = read_machines(self._file)
        region = next(machine.region for machine in machines if machine.address == self._address)
        answers = {machine: _ask(machine, "look") for machine in machines if machine.region == region}
        return {machine: processes for machine, processes in answers.items() if processes is not None}

    def _rendezvous(
        self, spec: ProcessSpec, machine: Machine, there: Mapping[Machine, Mapping[str, ProcessStatus]]
    ) -> dict[str, str]:
        """Address of the first member of a group, which is placed first and which the others connect to."""
        if spec.group is None:
            return {}
        first = next((each for each, processes in there.items() if spec.group.name in processes), machine)
        return spec.group.rendezvous((machine if spec.group.rank == 0 else first).address)


def _choose(spec: ProcessSpec, there: Mapping[Machine, Mapping[str, ProcessStatus]]) -> Machine:
    """The machine that has the fewest processes, and none of the same group; of equal ones the last."""

    def load(machine: Machine) -> tuple[int, int]:
        running = [name for name, status in there[machine].items() if status.exit_status is None]
        mates = sum(spec.group is not None and name.partition("-")[0] == spec.group.name for name in running)
        return mates, len(running)

    return min(reversed(list(there)), key=load)


def _ask(machine: Machine, verb: str, *arguments: object) -> Any:
    """Send a request to the agent of a machine; ``None`` if the machine is lost."""
    try:
        return ask(machine.socket, verb, *arguments)
    except (OSError, EOFError):
        return None
