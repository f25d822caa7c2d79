"""`etude tinker`: a model that programs train step by step, over the Tinker API.

Owns the options and the key. The server is started by :mod:`etude.cli.actions.serve_tinker`.
"""

import os
import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from etude.cli.imports import without_collections
from etude.cli.options import group
from etude.errors import ConfigError
from etude.run.endpoints import HOST

KEY_VARIABLE = "TINKER_API_KEY"
"""Environment variable with the key, for server and clients alike."""
KEY_PREFIX = "tml-"
"""Begins every key that the SDK takes."""

app = group()


@app.command()
def tinker(
    *,
    model: Annotated[Path, typer.Option(metavar="DIR", help="A Hugging Face checkpoint, with its tokenizer.")],
    name: Annotated[str | None, typer.Option(help="The clients' name for it, base_model (default: DIR).")] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where saved weights go.")] = Path("tinker"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8478,
    device: Annotated[Literal["cpu", "cuda", "auto"], typer.Option(help="Device to compute on.")] = "auto",
    max_length: Annotated[int, typer.Option(min=64, help="Most tokens of a prompt with its completion.")] = 2048,
    clients: Annotated[int, typer.Option(min=1, help="Most training clients at a time.")] = 4,
) -> None:
    """Let programs train a model step by step, over the Tinker API."""
    key = os.environ.get(KEY_VARIABLE) or KEY_PREFIX + secrets.token_urlsafe(24)
    if not key.startswith(KEY_PREFIX):
        raise ConfigError(f"{KEY_VARIABLE} must begin with {KEY_PREFIX!r}: the SDK refuses any other key")
    with without_collections():
        from etude.cli.actions.serve_tinker import serve
        from etude.run.serving import run_until_signal
        from etude.tinker.service import TinkerOptions, TinkerService

    options = TinkerOptions(
        model=model,
        name=name or str(model),
        folder=folder,
        device=device,
        max_length=max_length,
        max_clients=clients,
    )
    run_until_signal(serve(TinkerService(options), key, host, port), cleanup_s=None)
