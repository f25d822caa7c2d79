"""Egress from a sandbox: a name of this machine is refused, and an allowed address is reached."""

import asyncio
import socket
from typing import Any

import pytest

from etude.sandboxes import egress


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "127.0.0.1",
            "127.9.8.7",
            "0.0.0.0",
            "::1",
            "::ffff:127.0.0.1",
            "169.254.169.254",
            "fe80::1%eth0",
        ),
        *("fd00:ec2::254", "fd00:ec2:0::254", "100.100.100.200", "::ffff:100.100.100.200"),
    ],
)
def test_what_is_inward(host: str) -> None:
    assert egress.is_inward(host)


@pytest.mark.parametrize("host", ["pypi.org", "10.0.0.7", "192.168.1.1", "8.8.8.8", "2001:db8::1", "localhost.example"])
def test_what_is_not(host: str) -> None:
    assert not egress.is_inward(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "192.168.1.1", "100.64.0.1", "fc00::1", "localhost"])
def test_what_is_private(host: str) -> None:
    assert egress.is_private(host)


@pytest.mark.parametrize("host", ["pypi.org", "8.8.8.8", "2606:4700::1111"])
def test_what_is_public(host: str) -> None:
    assert not egress.is_private(host)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Names lead to ``addresses``."""

    async def resolved(_loop: object, _host: str, port: int, **_wishes: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolved)


async def say_hello(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def heard(host: str) -> bytes:
    """The greeting of a server of this machine that is reached as ``host``."""
    async with await asyncio.start_server(say_hello, "0.0.0.0", 0) as server:
        reader, writer = await egress.connect(host, server.sockets[0].getsockname()[1])
        reply = await reader.read()
        writer.close()
        return reply


def test_an_address_that_was_allowed_is_reached() -> None:
    assert asyncio.run(heard("127.0.0.1")) == b"hello"


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["198.51.100.1", "169.254.169.254"]])
def test_a_name_that_leads_inwards_is_not_followed(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    resolving(monkeypatch, *addresses)
    with pytest.raises(OSError, match=f"rebound.example leads to {addresses[-1]}"):
        asyncio.run(heard("rebound.example"))


def test_a_name_that_leads_to_this_machine_from_outside_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only the loopback's addresses were known for those of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback's")
        own = probe.getsockname()[0]
    assert asyncio.run(heard(own)) == b"hello"
    resolving(monkeypatch, own)
    with pytest.raises(OSError, match=f"rebound.example leads to {own}"):
        asyncio.run(heard("rebound.example"))


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "198.51.100.1", "198.51.100.2")
    names: list[str] = []

    async def refuse(host: str, *_: object, **__: object) -> None:
        names.append(host)
        raise OSError(f"{host} refuses")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    with pytest.raises(OSError, match=r"198\.51\.100\.2 refuses"):
        asyncio.run(egress.connect("far.example", 80))
    assert names == ["198.51.100.1", "198.51.100.2"]
