"""The network of a namespace sandbox from inside: its loopback, and a listener for each place that it may reach.

    command ──connect──▶ 127.77.0.1:443 ──listener──▶ provider (etude.sandboxes.ns.egress) ──▶ pypi.internal:443

A name that may be reached resolves to an address of the loopback, by ``/etc/hosts``; an address that may be reached is
given to the loopback. Listeners are made in there and accepted from outside, so nothing of the machine is inside. Owns
addresses. Pure; standard library alone.
"""

import ipaddress
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

NAMES_NETWORK = ipaddress.IPv4Network("127.77.0.0/16")
"""Where names are, in order; 127.0.0.1 stays the sandbox's own."""
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, IFF_UP_RUNNING = 0x8914, 0x8916, 0x891C, 0x41
MAX_PLACES = 64
"""Of one sandbox: each has a listener in the provider's process."""


class Place(NamedTuple):
    """One place that may be reached."""

    host: str
    port: int
    address: str
    """What it is inside: of the loopback."""


def places(allow: Sequence[str]) -> tuple[Place, ...]:
    """Where the places of a list ``host:port`` are inside. ``ValueError`` for a port that none can have, or too many.

    A name has the same address for each of its ports.
    """
    if len(allow) > MAX_PLACES:
        raise ValueError(f"{len(allow)} places in allow, at most {MAX_PLACES}: put a proxy of yours before them")
    found: dict[str, str] = {"localhost": "127.0.0.1"}
    result = []
    for text in dict.fromkeys(allow):
        host, _, port = text.rpartition(":")
        if not 0 < int(port) < 1 << 16:
            raise ValueError(f"allow={text!r}: there is no port {port}")
        if host not in found:
            found[host] = _literal(host) or str(NAMES_NETWORK[len(found)])
        result.append(Place(host, int(port), found[host]))
    return tuple(result)


def hosts_text(known: Sequence[Place], hostname: str) -> str:
    """What ``/etc/hosts`` says inside."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback", f"127.0.1.1 {hostname}"]
    lines += dict.fromkeys(f"{place.address} {place.host}" for place in known if place.host not in _silent(place))
    return "\n".join(lines) + "\n"


class Request(NamedTuple):
    """An ``ioctl`` of a socket."""

    kind: int
    data: bytes
    about: str


def network_requests(known: Sequence[Place]) -> list[Request]:
    """What raises the loopback of a network namespace and gives it the addresses of places."""
    requests = [Request(SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP_RUNNING), "the loopback")]
    added = sorted({place.address for place in known if not place.address.startswith("127.")})
    for number, address in enumerate(added):
        alias = f"lo:{number}".encode()
        requests += [
            Request(kind, struct.pack("16sHH4s16x", alias, socket.AF_INET, 0, socket.inet_aton(text)), address)
            for kind, text in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.255"))
        ]
    return requests


def socket_address(place: Place) -> bytes:
    """Where a place is inside, as the kernel takes it."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", place.port, socket.inet_aton(place.address))


def _literal(host: str) -> str | None:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        return None


def _silent(place: Place) -> tuple[str, ...]:
    """Hosts that no line is needed for."""
    return place.address, "localhost"
