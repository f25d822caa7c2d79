"""The live page as a process: a server on a socket, and the child process of `etude run` that serves it during a run.

    etude run ──listening socket──▶ etude ui RUN --fd N, at the lowest priority

It is not one of the run's processes: none of them waits for it or restarts it. The parent opens its socket, so that the
URL is known, and works, before the child has started.
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from aiohttp import web

from etude.errors import PortInUseError
from etude.run.connections import Connections, LimitedSite
from etude.run.endpoints import HOST
from etude.run.folder import RunFolder
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent
from etude.ui.runs import RunList
from etude.ui.server import STREAMS, ui_app

TOKEN_VARIABLE = "ETUDE_UI_TOKEN"
"""Environment variable with the token; without it the token is random."""
SHUTDOWN_S = 0.5
"""Longest wait for open streams when the page is stopped."""
STOP_S = 5.0
"""Longest wait for the page's process to stop with its run."""
LOWEST_PRIORITY = 19
"""Niceness of a run's page: it computes only if no other process does."""


def new_token() -> str:
    """The token of a page: the environment's, or a new one."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises :class:`~etude.errors.PortInUseError` naming the options to change."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}; leave --port out for one that is free"
        ) from error


def page_url(listener: socket.socket, token: str) -> str:
    """The URL to open, with the token after ``#``, since browsers do not send that part."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/#token={token}"


async def serve_page(runs: RunList, listener: socket.socket, token: str) -> None:
    """Serve the page until it is cancelled."""
    app = ui_app(runs, token)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        connections = Connections()
        assert runner.server is not None, "it was set up"
        connections.watch(runner.server)
        await LimitedSite(runner, listener, connections).start()
        await asyncio.Event().wait()
    finally:
        try:
            await app[STREAMS].close()
        finally:
            await runner.cleanup()


@contextmanager
def page_beside(folder: RunFolder, out: TextIO) -> Iterator[str]:
    """Serve the page of a run while the context is open; yields its URL, or "" if ``log.page`` switches it off.

    A page that cannot be started is a warning on ``out``, never an error.
    """
    setting = folder.config().log.page
    if setting is False or (setting == "terminal" and not out.isatty()):
        yield ""
        return
    try:
        with listen(HOST, 0) as listener:
            token = new_token()
            child, url = _start(folder, listener, token), page_url(listener, token)
    except (OSError, PortInUseError) as error:
        print(f"this run has no page: {error}", file=out)
        yield ""
        return
    try:
        yield url
    finally:
        _stop(child)


def be_child() -> None:
    """Run at the lowest priority, end with the parent, and ignore Ctrl-C, which the parent handles."""
    os.nice(LOWEST_PRIORITY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()


def _start(folder: RunFolder, listener: socket.socket, token: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "etude", "ui", str(folder.path), "--fd", str(listener.fileno())]
    environment = {**os.environ, TOKEN_VARIABLE: token, SUPERVISOR_VARIABLE: str(os.getpid())}
    with (folder.logs / "page.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
        )


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
