"""The first process of a machine: it keeps the namespaces open, and holds the processes that are placed there.

    python -m bench.fleet.agent SOCKET DISK        serve until killed
    ask(SOCKET, "place", spec, environment)        from :class:`~bench.fleet.launcher.MachineLauncher`

What a node of Ray does, without Ray: processes end with their machine, not with the supervisor that had them placed.
"""

import sys
from collections.abc import Mapping
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, final

from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.launchers.host_process import HostProcess, host_process, stop_all

FAMILY = "AF_UNIX"
"""Sockets in the file system, which all machines of the demo share; who may use one is the file's owner's to say."""


@final
class Agent:
    """The processes of one machine, with logs and heartbeats on its disk."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._processes: dict[str, HostProcess] = {}

    def place(self, spec: ProcessSpec, environment: Mapping[str, str]) -> None:
        """Start a process, unless it runs."""
        running = self._processes.get(spec.name)
        if running is None or running.has_ended:
            self._processes[spec.name] = host_process(spec, self._disk, environment)

    def remove(self, names: tuple[str, ...], grace_s: float) -> None:
        """Stop processes: first by signal, then by kill."""
        stop_all([self._processes.pop(name) for name in names if name in self._processes], grace_s)

    def look(self) -> dict[str, ProcessStatus]:
        """Describe all right now."""
        return {name: process.status() for name, process in self._processes.items()}


def ask(socket: str, verb: str, *arguments: object) -> Any:
    """Have an agent do something; returns what it answers. Raises ``OSError`` or ``EOFError`` where its machine is
    lost.
    """
    with Client(socket, FAMILY) as connection:
        connection.send((verb, arguments))
        return connection.recv()


def serve(socket: str, disk: Path) -> None:
    """Answer, one after another, until killed."""
    agent = Agent(disk)
    with Listener(socket, FAMILY) as listener:
        while True:
            try:
                with listener.accept() as connection:
                    verb, arguments = connection.recv()
                    connection.send(getattr(agent, verb)(*arguments))
            except (OSError, EOFError):  # the supervisor was killed in the middle of a sentence
                continue


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
