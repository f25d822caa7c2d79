"""`etude ui`: shows runs in a browser, while they run and afterwards. Owns the options."""

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import group
from etude.errors import ConfigError
from etude.run.endpoints import HOST

RUNS = Path("runs")
"""Folder of runs that `etude run` makes by default."""

app = group()


@app.command()
def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run folders, folders of run folders, or URLs of runs (default: runs)."),
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 0,
    descriptor: Annotated[int | None, typer.Option("--fd", hidden=True)] = None,
) -> None:
    """Look at runs in a browser: curves, rollouts, weights, users, live."""
    if not runs and not RUNS.is_dir():
        raise ConfigError("there is no folder 'runs' here: name a run, or a folder with runs")
    from etude.run.run_url import is_run_url
    from etude.run.serving import run_until_signal
    from etude.run.working_folder import open_run_folder
    from etude.ui.page import be_child, listen, new_token, page_url, serve_page
    from etude.ui.runs import RunList, check_places

    if descriptor is not None:
        be_child()
    places = [open_run_folder(run, writes=False).path if is_run_url(run) else Path(run) for run in runs or [str(RUNS)]]
    check_places(places)
    token = new_token()
    listener = listen(host, port) if descriptor is None else socket.socket(fileno=descriptor)
    if descriptor is None:
        sys.stdout.write(f"{page_url(listener, token)}\n")
        sys.stdout.flush()
    run_until_signal(serve_page(RunList(places), listener, token), cleanup_s=None)
