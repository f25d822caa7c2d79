"""Shared code of a run's long-running processes: stop on a signal, listen on a port."""

import asyncio
import contextlib
import os
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from types import FrameType

import uvloop
from aiohttp import web

from etude.aio import background_task
from etude.errors import ConfigError, PortInUseError
from etude.run.connections import Connections, LimitedSite, raise_file_limit
from etude.run.endpoints import HOST
from etude.run.heartbeat import Heartbeat

BIND_S = 5.0
"""Time to retry a port in use: after a crash the previous owner's connections may still be closing."""
SHUTDOWN_S = 2.0
"""Longest time for open requests after a stop signal; once cancelled, they have the same time again to end."""
STOP_S = 10.0
"""Longest time that a process of a run may take to clean up before it is killed."""


def run_until_signal(main: Coroutine[None, None, None], *, cleanup_s: float | None = STOP_S) -> None:
    """Run ``main`` to its end, or cancel it on SIGTERM or SIGINT, let it clean up and exit with 128 + the signal.

    The process exits after ``cleanup_s`` even if the cleanup is not done: the supervisor would kill it, but a process
    that lost its supervisor would keep its successor waiting. ``None``: no limit, for a standalone server.
    """
    raise_file_limit()
    received: list[int] = []
    cancellations: list[Callable[[], object]] = []
    """The call that cancels ``main``, while it runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        if cleanup_s is not None and not received:
            _exit_after(cleanup_s, 128 + number)
        received.append(number)
        for cancel in cancellations:
            cancel()

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        cancellations.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        if received:
            task.cancel()
        try:
            async with background_task(Heartbeat().keep()):
                await task
        except asyncio.CancelledError:
            if not received:
                raise
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            cancellations.clear()

    # Not the loop's own handlers, which run in the loop: code that blocks the loop must have the same bound. And before
    # there is a loop: a signal that raises an error inside of it leaves it unable to close.
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(supervised())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise SystemExit(128 + received[0])


def _exit_after(seconds: float, status: int) -> None:
    """End this process after ``seconds``, whatever it is doing."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that made a task group fail: the others were only cancelled."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


@contextlib.asynccontextmanager
async def listening(
    app: web.Application | web.Server,
    port: int,
    *,
    host: str = HOST,
    tls: ssl.SSLContext | None = None,
    shutdown_s: float = SHUTDOWN_S,
    connections: Connections | None = None,
) -> AsyncIterator[int]:
    """Serve ``app`` while the context is open; yields the port. Raises :class:`~etude.errors.PortInUseError`.

    ``connections`` is shared by all servers of the process, if it has several.
    """
    runner: web.BaseRunner
    if isinstance(app, web.Application):
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_s)
    else:
        runner = web.ServerRunner(app, shutdown_timeout=shutdown_s)
    await runner.setup()
    try:
        shared = connections or Connections()
        assert runner.server is not None, "it was set up"
        shared.watch(runner.server)
        await _bind(lambda: LimitedSite(runner, (host, port), shared, tls), host, port)
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def tls_context(section: str, cert: str, key: str) -> ssl.SSLContext | None:
    """The TLS context of a server; ``None`` for plain HTTP, without a ``cert``.

    Raises ``ConfigError``, naming the recipe's ``section``, for a certificate that cannot be used.
    """
    if not cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{section}.tls_cert, {section}.tls_key: {error}") from error
    return context


async def _bind(site: Callable[[], web.BaseSite], host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + BIND_S
    while True:
        try:
            return await site().start()
        except OSError as error:
            if loop.time() >= deadline_s:
                raise PortInUseError(
                    f"port {port} on {host} is in use: free it, or choose another, 0 for any that is free "
                    f"({error.strerror})"
                ) from error
        await asyncio.sleep(0.2)
