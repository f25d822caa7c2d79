"""The URLs at which the processes of a run listen.

Ports are chosen once per start of a run, so that a restarted process has the same address.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import PortInUseError, RunFolderError
from etude.fsync import write_whole
from etude.run.process_name import ENGINE, GATEWAY, PRODUCT, PRODUCTION, ProcessName

if TYPE_CHECKING:
    from etude.config.inference import EngineConfig, GatewayConfig
    from etude.config.recipe import RunConfig

HOST = "127.0.0.1"
"""Address of a run on one machine, which only uses loopback."""
POLL_S = 0.1
"""Interval at which a port in use is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of a run's listening processes."""

    own: Mapping[ProcessName, int]
    """Ports for the run's own processes, on loopback."""
    public: Mapping[ProcessName, int]
    """Ports for external clients, if those are allowed."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The listening processes of one run, kept in a file: ``{"urls": {name: …}, "public_ports": {name: …}}``."""

    file: Path

    def reserve(self, config: "RunConfig", *, wait_s: float = 0.0) -> None:
        """Choose the ports of engines and gateways. Raises :class:`~etude.errors.PortInUseError`.

        Waits up to ``wait_s`` for a port on which a predecessor still finishes calls.
        """
        ports = probe_ports(config, wait_s=wait_s)
        table = {
            "urls": {str(name): f"http://{HOST}:{port}" for name, port in ports.own.items()},
            "public_ports": {str(name): port for name, port in ports.public.items()},
        }
        write_whole(self.file, (json.dumps(table, indent=2) + "\n").encode())

    def url(self, name: ProcessName) -> str:
        """Base URL of a process. Raises :class:`~etude.errors.RunFolderError` before :meth:`reserve`, and for a process
        that the run does not have.
        """
        return str(self._row("urls", name))

    def urls(self, command: str) -> dict[ProcessName, str]:
        """Base URL of each process of one command. Raises like :meth:`url`."""
        urls = {ProcessName.parse(text): str(url) for text, url in self._read()["urls"].items()}
        return {name: url for name, url in sorted(urls.items()) if name.command == command}

    def port(self, name: ProcessName) -> int:
        """The port of a process. Raises like :meth:`url`."""
        return int(self.url(name).rpartition(":")[2])

    def public_port(self, name: ProcessName) -> int:
        """The port of a process for clients other than this run. Raises like :meth:`url`."""
        return int(self._row("public_ports", name))

    def _row(self, part: str, name: ProcessName) -> Any:
        rows = self._read()[part]
        if str(name) not in rows:
            raise RunFolderError(
                f"{self.file} has no {name}, only {', '.join(rows) or 'none'}: a run has as many processes as "
                f"engine.replicas and gateway.replicas say"
            )
        return rows[str(name)]

    def _read(self) -> dict[str, dict[str, Any]]:
        fix = f"start with `etude run --resume {self.file.parent}`"
        if not self.file.exists():
            raise RunFolderError(f"{self.file} is missing: {fix}")
        table: dict[str, dict[str, Any]] = json.loads(self.file.read_text(encoding="utf-8"))
        if not {"urls", "public_ports"} <= table.keys():
            raise RunFolderError(f"{self.file} is of an older étude: {fix}")
        return table


def listeners(config: "RunConfig") -> dict[ProcessName, int]:
    """Engines and gateways of a run on one machine, each with the recipe's port, 0 for any; replicas have consecutive
    ports. If versions are released, users have a separate gateway, which takes the gateway's port; engines for users
    take any port.
    """
    release, engine, gateway = config.release, config.engine, config.gateway
    numbers = {ENGINE.command: (engine.port, engine.replicas), GATEWAY.command: (gateway.port, gateway.replicas)}
    if release.enabled:
        numbers[GATEWAY.command] = (0, gateway.replicas)
        numbers |= {PRODUCT.command: (gateway.port, 1), PRODUCTION.command: (0, release.engines)}
    return {
        ProcessName(command=command, replica=replica): port and port + replica
        for command, (port, replicas) in numbers.items()
        for replica in range(replicas)
    }


def _sections(config: "RunConfig") -> Mapping[str, "EngineConfig | GatewayConfig"]:
    """Listening command → its section."""
    engine, gateway = config.engine, config.gateway
    return {ENGINE.command: engine, PRODUCTION.command: engine, GATEWAY.command: gateway, PRODUCT.command: gateway}


def probe_ports(config: "RunConfig", *, wait_s: float = 0.0) -> Ports:
    """Choose ports for engines and gateways by the recipe. Raises :class:`~etude.errors.PortInUseError`.

    A process with external clients has a separate port for them.
    """
    requested, sections = listeners(config), _sections(config)
    public = {name: port for name, port in requested.items() if sections[name.command].public}
    with contextlib.ExitStack() as probes:  # held together, or two processes could get one port

        def probe(name: ProcessName, port: int) -> int:
            key = "engine.port" if sections[name.command] is config.engine else "gateway.port"
            return probes.enter_context(probe_port(port, wait_s=wait_s, key=key))

        return Ports(
            public={name: probe(name, port) for name, port in public.items()},
            own={name: probe(name, 0 if name in public else port) for name, port in requested.items()},
        )


@contextlib.contextmanager
def probe_port(requested: int, *, wait_s: float = 0.0, key: str = "port") -> Iterator[int]:
    """Hold a port, any free one for 0. Raises :class:`~etude.errors.PortInUseError` naming the recipe's ``key`` if it
    stays in use.
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
