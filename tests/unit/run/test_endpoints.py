"""Ports are chosen once, and every process gets them."""

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, PortInUseError, RunFolderError
from etude.run.endpoints import HOST, Endpoints
from etude.run.process_name import ENGINE, GATEWAY, ProcessName
from waiting import WAIT_S

TRIES = 3
"""Another process may take a port just when it is free."""


def test_free_ports_differ_and_are_remembered(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "endpoints.json")
    endpoints.reserve(RunConfig())
    ports = {endpoints.port(process) for process in (ENGINE, GATEWAY)}
    assert len(ports) == 2
    assert Endpoints(tmp_path / "endpoints.json").url(ENGINE) == f"http://{HOST}:{endpoints.port(ENGINE)}"


def test_a_reserved_port_can_be_listened_on(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "endpoints.json")

    def listened_on() -> bool:
        endpoints.reserve(RunConfig())
        with socket.socket() as server, suppress(OSError):
            server.bind((HOST, endpoints.port(ENGINE)))
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
            return endpoints.public_port(GATEWAY) == port != endpoints.port(GATEWAY)
        return False

    assert any(has_both() for _ in range(TRIES))


def test_before_the_start_no_one_knows_a_port(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="--resume"):
        Endpoints(tmp_path / "endpoints.json").port(ENGINE)


def test_each_replica_has_a_port_of_its_own_and_one_that_was_asked_for_is_counted_up_from(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path / "endpoints.json")

    def has_all() -> bool:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port: int = free.getsockname()[1]
        config = parse_config({"engine": {"replicas": 3}, "gateway": {"replicas": 2, "port": port}}, source="test")
        with suppress(PortInUseError):
            endpoints.reserve(config)
            return [*map(endpoints.port, endpoints.urls("gateway"))] == [port, port + 1]
        return False

    assert any(has_all() for _ in range(TRIES))
    assert [str(name) for name in endpoints.urls("serve")] == ["serve", "serve-1", "serve-2"]
    assert len({*endpoints.urls("serve").values(), *endpoints.urls("gateway").values()}) == 5
    with pytest.raises(RunFolderError, match=r"no serve-3, only serve, .*engine\.replicas"):
        endpoints.url(ProcessName(command="serve", replica=3))


def test_replicas_without_room_for_their_ports_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.port=65535 and engine\.replicas=2: .* 65536"):
        parse_config({"engine": {"port": 65535, "replicas": 2}}, source="test")
