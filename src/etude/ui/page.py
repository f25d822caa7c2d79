"""The page as a process: a server on a socket, and the child of `etude run` that serves it beside a run.

    etude run ──socket that listens──▶ etude ui RUN --fd N, of the lowest priority

It is no process of the run: nobody waits for it, restarts it or minds its end. Its socket is opened by the parent, so
that the URL is known, and can be opened, before the child has started.
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
"""Environment variable with the token, where it is not to be drawn."""
SHUTDOWN_S = 0.5
"""Longest wait for browsers that read a stream when the page is stopped."""
STOP_S = 5.0
"""Longest wait for a page that was told to stop with its run."""
LOWEST_PRIORITY = 19
"""Niceness of a page beside a run: it computes when nobody else does."""


def new_token() -> str:
    """The token of a page: the environment's, or a new one."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises :class:`~etude.errors.PortInUseError` naming the options to change."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}; leave --port out for one that is free"
        ) from error


def page_url(listener: socket.socket, token: str) -> str:
    """The URL to open: the token stands behind ``#``, which browsers send to nobody."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/#token={token}"


async def serve_page(runs: RunList, listener: socket.socket, token: str) -> None:
    """Serve the page until this is cancelled."""
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
    """Serve the page of a run while the context is open; yields its URL, or nothing where none is wanted.

    It is wanted as ``log.page`` says. One that cannot be started is a warning on ``out``, never an error.
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
    """Take the lowest priority, end with the parent, and leave Ctrl-C to it."""
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
