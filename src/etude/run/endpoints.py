"""Ports on which the processes of a run listen.

Ports are decided once per start of a run, so that a process that is restarted comes back where it was.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.errors import PortInUseError, RunFolderError

HOST = "127.0.0.1"
"""A run on one machine talks over loopback only."""
PUBLIC = "gateway-public"
"""The gateway's port for clients other than this run, where there is one."""
POLL_S = 0.1
"""Interval at which a taken port is tried again."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The listening processes of one run, kept in a file."""

    file: Path

    def reserve(self, config: RunConfig, *, wait_s: float = 0.0) -> None:
        """Decide where engine and gateway listen. Raises :class:`~etude.errors.PortInUseError`.

        Waits up to ``wait_s`` for a port on which a predecessor still lets calls end.
        """
        self.file.write_text(json.dumps(probe_ports(config, wait_s=wait_s)), encoding="utf-8")

    def port(self, process: str) -> int:
        """The port of a process. Raises :class:`~etude.errors.RunFolderError` before :meth:`reserve`."""
        if not self.file.exists():
            raise RunFolderError(f"{self.file} is missing: start with `etude run --resume {self.file.parent}`")
        return int(json.loads(self.file.read_text(encoding="utf-8"))[process])

    def url(self, process: str) -> str:
        """Base URL of a process."""
        return f"http://{HOST}:{self.port(process)}"


def probe_ports(config: RunConfig, *, wait_s: float = 0.0) -> dict[str, int]:
    """Ports for engine and gateway, as the recipe has them. Raises :class:`~etude.errors.PortInUseError`.

    A gateway that others than this run may reach has a port of its own for them.
    """
    requested = {"engine": config.engine.port, "gateway": 0 if config.gateway.public else config.gateway.port}
    if config.gateway.public:
        requested[PUBLIC] = config.gateway.port
    with contextlib.ExitStack() as probes:  # held together, or two processes could get one port
        return {
            process: probes.enter_context(probe_port(port, wait_s=wait_s, key=f"{process.partition('-')[0]}.port"))
            for process, port in requested.items()
        }


@contextlib.contextmanager
def probe_port(requested: int, *, wait_s: float = 0.0, key: str = "port") -> Iterator[int]:
    """Hold a port, any free one for 0. Raises :class:`~etude.errors.PortInUseError` naming the recipe's ``key`` when it
    stays taken.
    """
    deadline_s = time.monotonic() + wait_s
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:
                probe.bind((HOST, requested))
                break
            except OSError as error:
                if time.monotonic() >= deadline_s:
                    raise PortInUseError(
                        f"{key} = {requested}: that port of {HOST} is in use: free it, or set {key} = 0 to pick one"
                    ) from error
            time.sleep(POLL_S)
        yield int(probe.getsockname()[1])
