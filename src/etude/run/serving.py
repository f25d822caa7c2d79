"""What every long-running process of a run does alike: die with its parent, stop on a signal, listen on a port."""

import asyncio
import contextlib
import ctypes
import os
import signal
import ssl
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass

import uvloop
from aiohttp import web

from etude.errors import PortInUseError
from etude.run.endpoints import HOST

PR_SET_PDEATHSIG = 1
"""``prctl`` option: the kernel sends us a signal when our parent dies."""
SUPERVISOR_VARIABLE = "ETUDE_SUPERVISOR"
"""Environment variable that holds the process id of whoever started a process of the run."""
BIND_S = 5.0
"""How long a taken port is tried: after a crash the last owner's connections may still be closing."""
SHUTDOWN_S = 2.0
"""How long open requests may take once a process was told to stop."""


def die_with_parent() -> None:
    """Let the kernel end this process when the supervisor dies, however it dies (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is not None and os.getppid() != int(supervisor):
        raise SystemExit("etude: the supervisor died while this process was starting")


def run_until_signal(main: Coroutine[None, None, None]) -> None:
    """Run ``main`` to its end, or cancel it on SIGTERM or SIGINT, let it clean up and exit with 128 + the signal."""
    received: list[int] = []

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if not received:
                raise
        except BaseExceptionGroup as group:
            raise _first(group) from group

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(supervised())
    if received:
        raise SystemExit(128 + received[0])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made a task group fail: the others were only cancelled."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


@contextlib.asynccontextmanager
async def listening(
    app: web.Application | web.Server, port: int, *, host: str = HOST, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve ``app`` while the context is open; gives the port. Raises :class:`~etude.errors.PortInUseError`."""
    runner: web.BaseRunner
    if isinstance(app, web.Application):
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    else:
        runner = web.ServerRunner(app, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await _bind(runner, Address(host, port), tls)
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int


async def _bind(runner: web.BaseRunner, address: Address, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + BIND_S
    while True:
        try:
            site = web.TCPSite(runner, address.host, address.port, reuse_address=True, ssl_context=tls)
            return await site.start()
        except OSError as error:
            if loop.time() >= deadline_s:
                raise PortInUseError(
                    f"port {address.port} on {address.host} is in use: free it, or set port = 0 ({error.strerror})"
                ) from error
        await asyncio.sleep(0.2)
