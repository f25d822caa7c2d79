"""The HTTP servers of an engine or a gateway, at addresses that callers can find.

on one machine    loopback, at the port of the endpoints table; where the recipe has a host or TLS, one more for others
on a fleet        the machine's own address, with the recipe's TLS; then the region's directory says so. Started again
                  at the same address it has the same port. A pod's port is given, as its manifest names it
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit

from aiohttp import web

from etude.config.inference import EngineConfig, GatewayConfig
from etude.run.connections import Connections
from etude.run.directory import Directory
from etude.run.endpoints import HOST
from etude.run.folder import RunFolder
from etude.run.placement import fleet_of
from etude.run.process_name import ProcessName
from etude.run.region_stores import open_directory, own_address, own_port
from etude.run.serving import SHUTDOWN_S, listening, tls_context
from etude.run.store_outages import StoreOutages


@asynccontextmanager
async def run_listener(
    folder: RunFolder,
    name: ProcessName,
    make_app: Callable[[], web.Application | web.Server],
    section: EngineConfig | GatewayConfig,
    outages: StoreOutages,
    *,
    shutdown_s: float = SHUTDOWN_S,
) -> AsyncIterator[str]:
    """Serve as a process of a run while the context is open; yields the URL for the run's other processes.

    ``section`` is the recipe's of such a process. Raises :class:`~etude.errors.PortInUseError`, and
    :class:`~etude.errors.ConfigError` for a certificate that cannot be used.
    """
    key = "engine" if isinstance(section, EngineConfig) else "gateway"
    tls, connections = tls_context(key, section.tls_cert, section.tls_key), Connections()
    async with AsyncExitStack() as stack:

        async def listen(port: int, host: str, tls: ssl.SSLContext | None) -> int:
            server = listening(make_app(), port, host=host, tls=tls, shutdown_s=shutdown_s, connections=connections)
            return await stack.enter_async_context(server)

        if fleet_of(folder) is None:
            await listen(folder.endpoints.port(name), HOST, None)
            if section.public:
                await listen(folder.endpoints.public_port(name), section.host, tls)
            yield folder.endpoints.url(name)
            return
        address, directory = own_address(), open_directory(folder, name.region, outages)
        port = own_port() or (section.port and section.port + name.replica)
        port = await listen(port or await asyncio.to_thread(_last_port, directory, name, address), address, tls)
        url = f"{'http' if tls is None else 'https'}://{address}:{port}"
        await asyncio.to_thread(directory.announce, name, url)
        yield url


def _last_port(directory: Directory, name: ProcessName, address: str) -> int:
    """The port of this process before, if that was at the same address and it is free; else 0, for any.

    So callers find it at the same address, and holders of a session lost with it get that error at once.
    """
    last = urlsplit(directory.urls(name.command).get(name, ""))
    if last.hostname != address or not last.port:
        return 0
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, last.port))
        return last.port
    return 0
