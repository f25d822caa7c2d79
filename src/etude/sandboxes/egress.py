"""Where a way out of a sandbox ends, on the machine's side.

Who allows a name trusts what is called so, and where it leads is whatever the owner of that name says today. One that
leads to this machine itself, or to the address at which clouds give credentials away, is not followed. An address that
was allowed as such is: then somebody meant it.
"""

import asyncio
import errno
import ipaddress
import socket


def is_inward(host: str) -> bool:
    """Whether a host, if it is no other name, is this machine or a neighbour that no router stands before."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_link_local or address.is_unspecified


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to an allowed place. Raises ``OSError`` where none accepts, or a name leads inwards."""
    if is_inward(host):
        return await asyncio.open_connection(host, port)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    for address in addresses:
        if is_inward(address):
            raise OSError(errno.EACCES, f"{host} leads to {address}, which is this machine or its neighbour")
    for address in addresses[:-1]:
        try:
            return await asyncio.open_connection(address, port)
        except OSError:
            continue  # the next one may accept
    return await asyncio.open_connection(addresses[-1], port)
