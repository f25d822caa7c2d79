"""The launcher ``local``: all processes of all regions are children of this one, on this machine."""

from collections.abc import Mapping
from typing import final

from etude.config.section import Section
from etude.fleet.launcher import LaunchContext
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.launchers.fork_server import fork_server
from etude.run.launchers.host_process import HostProcess, host_process, stop_all

LOOPBACK = "127.0.0.1"
"""Rendezvous address of a group's members."""


@final
class LocalLauncher:
    """Starts processes on this machine. They end with this process, however it ends."""

    def __init__(self, options: Section, context: LaunchContext) -> None:
        """``options`` is empty."""
        self._folder = context.folder
        self._processes: dict[str, HostProcess] = {}

    @property
    def spans_regions(self) -> bool:
        """True: this machine hosts all regions."""
        return True

    def place(self, spec: ProcessSpec) -> None:
        """Start a process unless it runs. It inherits its secrets from this process's environment."""
        process = self._processes.get(spec.name)
        if process is not None and not process.has_ended:
            return
        group = {} if spec.group is None else spec.group.rendezvous(LOOPBACK)
        self._processes[spec.name] = host_process(spec, self._folder, group, fork_server())

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop processes with SIGTERM, then SIGKILL."""
        stop_all([self._processes.pop(name) for name in names if name in self._processes], grace_s)

    def look(self) -> Mapping[str, ProcessStatus]:
        """The current status of all processes."""
        return {name: process.status() for name, process in self._processes.items()}
