"""Which process of a run listens on which port.

Ports are decided once per start of a run, so that a process that is restarted comes back where it was.
"""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.errors import PortInUseError, RunFolderError

HOST = "127.0.0.1"
"""A run on one machine talks over loopback only."""
PUBLIC = "gateway-public"
"""The gateway's door for others, where there is one."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The listening processes of one run, kept in a file."""

    file: Path

    def reserve(self, config: RunConfig) -> None:
        """Decide where engine and gateway listen. Raises :class:`~etude.errors.PortInUseError`.

        A gateway that others than this run may reach has a door of its own for them.
        """
        wanted = {"engine": config.engine.port, "gateway": 0 if config.gateway.public else config.gateway.port}
        if config.gateway.public:
            wanted[PUBLIC] = config.gateway.port
        with contextlib.ExitStack() as probes:  # held together, or two processes could get one port
            ports = {process: probes.enter_context(probe_port(port)) for process, port in wanted.items()}
        self.file.write_text(json.dumps(ports), encoding="utf-8")

    def port(self, process: str) -> int:
        """The port of a process. Raises :class:`~etude.errors.RunFolderError` before :meth:`reserve`."""
        if not self.file.exists():
            raise RunFolderError(f"{self.file} is missing: start with `etude run --resume {self.file.parent}`")
        return int(json.loads(self.file.read_text(encoding="utf-8"))[process])

    def url(self, process: str) -> str:
        """Base URL of a process."""
        return f"http://{HOST}:{self.port(process)}"


@contextlib.contextmanager
def probe_port(wanted: int) -> Iterator[int]:
    """Hold ``wanted``, or any free port for 0. Raises :class:`~etude.errors.PortInUseError` when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            raise PortInUseError(f"port {wanted} on {HOST} is in use: free it, or set port = 0 to pick one") from error
        yield int(probe.getsockname()[1])
