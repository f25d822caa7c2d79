"""The page as a process: a server on a socket, and the child of `etude run` that serves it beside a run."""

import asyncio
import socket

from aiohttp import web

from etude.ui.runs import RunList
from etude.ui.server import ui_app

TOKEN_VARIABLE = "ETUDE_UI_TOKEN"
"""Environment variable with the token, where it is not to be drawn."""
SHUTDOWN_S = 0.5
"""Longest wait for browsers that read a stream when the page is stopped."""


def page_url(listener: socket.socket, token: str) -> str:
    """The URL to open: the token stands behind ``#``, which browsers send to nobody."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/#token={token}"


async def serve_page(runs: RunList, listener: socket.socket, token: str) -> None:
    """Serve the page until this is cancelled."""
    runner = web.AppRunner(ui_app(runs, token), handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
