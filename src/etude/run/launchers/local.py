"""The launcher ``local``: all processes of all regions are children of this one, on this machine."""

from collections.abc import Mapping
from typing import final

from etude.config.section import Section
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.launchers.host_process import HostProcess, host_process, stop_all

LOOPBACK = "127.0.0.1"
"""Address at which the members of a group meet."""


@final
class LocalLauncher:
    """Starts processes here. They end with this process, however it ends."""

    def __init__(self, options: Section, context: LaunchContext) -> None:
        """There are no options."""
        self._folder = context.folder
        self._processes: dict[str, HostProcess] = {}

    @property
    def spans_regions(self) -> bool:
        """True: this machine stands for all."""
        return True

    def place(self, spec: ProcessSpec) -> None:
        """Start a process, unless it runs. Its secrets are in the environment of this one."""
        process = self._processes.get(spec.name)
        if process is not None and not process.has_ended:
            return
        group = {} if spec.group is None else spec.group.rendezvous(LOOPBACK)
        self._processes[spec.name] = host_process(spec, self._folder, group)

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes: first by signal, then by kill."""
        stop_all([self._processes.pop(name) for name in names if name in self._processes], grace_s)

    def look(self) -> Mapping[str, ProcessStatus]:
        """Describe them right now."""
        return {name: process.status() for name, process in self._processes.items()}
