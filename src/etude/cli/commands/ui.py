"""`etude ui`: runs in a browser, while they go on and after."""

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import group
from etude.run.endpoints import HOST
from etude.run.serving import run_until_signal
from etude.ui.page import TOKEN_VARIABLE, page_url, serve_page
from etude.ui.runs import RunList, check_places

app = group()


@app.command()
def ui(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders, or folders of such (default: runs).")
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 0,
    descriptor: Annotated[int | None, typer.Option("--fd", hidden=True)] = None,
) -> None:
    """Look at runs in a browser: curves, rollouts, weights, users, as they go on."""
    places = runs or [Path("runs")]
    check_places(places)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    if descriptor is None:
        listener = socket.create_server((host, port))
        print(page_url(listener, token), flush=True)
    else:
        listener = socket.socket(fileno=descriptor)
    run_until_signal(serve_page(RunList(places), listener, token), cleanup_s=None)
