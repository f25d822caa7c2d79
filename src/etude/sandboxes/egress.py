"""Egress of a sandbox on the host's side: connections to the allowed destinations.

Allowing a name means trusting its owner, who decides where it resolves to. If a name resolves to this machine, by any
of its addresses, or to a cloud's metadata service, which provides credentials, the connection is rejected. An address
that is allowed explicitly is accepted, since it was intended.
"""

import asyncio
import errno
import functools
import ipaddress
import socket
from collections.abc import Sequence

from etude.sandboxes.ns.root import AllowedPlace

CONNECT_TIMEOUT_S = 10.0
"""Timeout of a connection to a destination; a disconnected caller may retry."""
MAX_CONNECTIONS = 64
"""Maximum number of concurrent connections of one sandbox; further ones are closed at once."""
COPY_BYTES = 1 << 16
METADATA = frozenset({"fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "100.100.100.200", "168.63.129.16"})
"""Metadata services whose addresses are not link-local: of Amazon, Google and Oracle by IPv6, Alibaba and Azure."""


class EgressProxy:
    """All outgoing connections of one sandbox."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[None]] = set()

    async def open(self, places: Sequence[AllowedPlace], listeners: Sequence[int]) -> None:
        """Accept connections for each destination on its listener, and take ownership of the listener."""
        for place, descriptor in zip(places, listeners, strict=True):
            accept = functools.partial(self._accept, place)
            listener = socket.socket(fileno=descriptor)
            self._servers.append(await asyncio.start_server(accept, sock=listener, limit=COPY_BYTES))

    async def close(self) -> None:
        """Close every connection and listener; calling it twice is harmless."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def _accept(self, place: AllowedPlace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._carrying) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(_carry(place, reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)


async def _carry(place: AllowedPlace, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy in both directions until both have ended; an error in either closes both."""
    ends = [writer]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answers, beyond = await connect(place.host, place.port)
        ends.append(beyond)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, beyond))
            both.create_task(_copy(answers, writer))
    except (OSError, ExceptionGroup):
        writer.transport.abort()  # the caller sees a closed connection; it knows the destination
    except asyncio.CancelledError:
        for end in ends:
            end.transport.abort()
        raise
    finally:
        for end in ends:
            end.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the end of ``source``, and pass the end on. Raises ``OSError`` if either connection fails."""
    while data := await source.read(COPY_BYTES):
        sink.write(data)
        await sink.drain()
    sink.write_eof()


def is_inward(host: str) -> bool:
    """True for localhost and for loopback, link-local, unspecified and metadata addresses; false for other names."""
    if host == "localhost":
        return True
    address = _literal(host)
    if address is None:
        return False
    return address.is_loopback or address.is_link_local or address.is_unspecified or str(address) in METADATA


def is_private(host: str) -> bool:
    """True for what :func:`is_inward` is true for, and for addresses of private networks; false for other names."""
    address = _literal(host)
    return is_inward(host) or (address is not None and not address.is_global)


def is_own(address: str) -> bool:
    """True for an address of this machine: what is sent there comes from there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((address, 9))
        except OSError:
            return False  # no way leads there
        return bool(probe.getsockname()[0] == address)


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, IPv4 as such; ``None`` for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an allowed destination. Raises ``OSError`` if no address accepts, or a name resolves to an inward
    address.
    """
    if host == "localhost" or _literal(host) is not None:
        return await asyncio.open_connection(host, port)
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in answers))
    for address in addresses:
        if is_inward(address) or is_own(address):
            raise OSError(errno.EACCES, f"{host} leads to {address}, which is this machine or its neighbour")
    for address in addresses[:-1]:
        try:
            return await asyncio.open_connection(address, port)
        except OSError:
            continue  # the next one may accept
    return await asyncio.open_connection(addresses[-1], port)
