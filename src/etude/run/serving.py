"""What every long-running process of a run does alike: die with its parent, stop on a signal, listen on a port."""

import asyncio
import contextlib
import ctypes
import signal
from collections.abc import AsyncIterator, Coroutine

import uvloop
from aiohttp import web

from etude.errors import PortInUseError
from etude.run.endpoints import HOST

PR_SET_PDEATHSIG = 1
"""``prctl`` option: the kernel sends us a signal when our parent dies."""
SHUTDOWN_S = 2.0
"""How long open requests may take once a process was told to stop."""


def die_with_parent() -> None:
    """Let the kernel end this process when the supervisor dies, however it dies (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_until_signal(main: Coroutine[None, None, None]) -> None:
    """Run ``main`` to its end, or cancel it on SIGTERM or SIGINT and let it clean up."""

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(supervised())


@contextlib.asynccontextmanager
async def listening(app: web.Application, port: int) -> AsyncIterator[None]:
    """Serve ``app`` on loopback while the context is open. Raises :class:`~etude.errors.PortInUseError`."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port, reuse_address=True).start()
        except OSError as error:
            raise PortInUseError(f"port {port} on {HOST} is in use: free it, or set port = 0 to pick one") from error
        yield
    finally:
        await runner.cleanup()
