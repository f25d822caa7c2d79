"""The HTTP server of an engine or a gateway, where the run's other processes find it.

on one machine    loopback, at the port of the endpoints table
on a fleet        the machine's own address, at the recipe's port or any; then the region's directory says so
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from etude.run.connections import Connections
from etude.run.folder import RunFolder
from etude.run.process_name import ProcessName
from etude.run.region_stores import fleet_of, open_directory, own_address
from etude.run.serving import SHUTDOWN_S, listening
from etude.run.store_outages import StoreOutages


@asynccontextmanager
async def run_listener(
    folder: RunFolder,
    name: ProcessName,
    app: web.Application | web.Server,
    outages: StoreOutages,
    *,
    port: int,
    shutdown_s: float = SHUTDOWN_S,
    connections: Connections | None = None,
) -> AsyncIterator[str]:
    """Serve ``app`` as a process of a run while the context is open; yields its URL.

    ``port`` is the recipe's, 0 for any. Raises :class:`~etude.errors.PortInUseError`.
    """
    if fleet_of(folder) is None:
        here = folder.endpoints.port(name)
        async with listening(app, here, shutdown_s=shutdown_s, connections=connections):
            yield folder.endpoints.url(name)
        return
    address, wanted = own_address(), port and port + name.replica
    async with listening(app, wanted, host=address, shutdown_s=shutdown_s, connections=connections) as bound:
        url = f"http://{address}:{bound}"
        await asyncio.to_thread(open_directory(folder, name.region, outages).announce, name, url)
        yield url
