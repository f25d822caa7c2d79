"""Ports are decided once and told to everybody."""

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import PortInUseError, RunFolderError
from etude.run.endpoints import HOST, PUBLIC, Endpoints
from waiting import WAIT_S

TRIES = 3
"""Another process may take a port just when it is free."""


def test_free_ports_differ_and_are_remembered(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "endpoints.json")
    endpoints.reserve(RunConfig())
    ports = {endpoints.port(process) for process in ("engine", "gateway")}
    assert len(ports) == 2
    assert Endpoints(tmp_path / "endpoints.json").url("engine") == f"http://{HOST}:{endpoints.port('engine')}"


def test_a_reserved_port_can_be_listened_on(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "endpoints.json")

    def listened_on() -> bool:
        endpoints.reserve(RunConfig())
        with socket.socket() as server, suppress(OSError):
            server.bind((HOST, endpoints.port("engine")))
            return True
        return False

    assert any(listened_on() for _ in range(TRIES))


def test_a_taken_port_is_refused_by_number_unless_it_is_waited_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = parse_config({"gateway": {"port": port}}, source="test")
        with pytest.raises(PortInUseError, match=str(port)):
            Endpoints(tmp_path / "endpoints.json").reserve(config)
        freed = threading.Timer(0.1, taken.close)
        freed.start()
        Endpoints(tmp_path / "endpoints.json").reserve(config, wait_s=WAIT_S)
        freed.join()


def test_a_gateway_for_others_has_a_server_of_its_own(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "endpoints.json")

    def has_both() -> bool:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port: int = free.getsockname()[1]
        with suppress(PortInUseError):
            endpoints.reserve(parse_config({"gateway": {"host": "0.0.0.0", "port": port}}, source="test"))
            return endpoints.port(PUBLIC) == port != endpoints.port("gateway")
        return False

    assert any(has_both() for _ in range(TRIES))


def test_before_the_start_no_one_knows_a_port(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="--resume"):
        Endpoints(tmp_path / "endpoints.json").port("engine")
