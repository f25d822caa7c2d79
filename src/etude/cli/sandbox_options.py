"""Options of commands that start sandboxes."""

from typing import Annotated, TypeAlias

import typer

from etude.config.tasks import MachineKind, SandboxConfig
from etude.errors import ConfigError

Sandbox: TypeAlias = Annotated[MachineKind, typer.Option(help="Where commands run.")]
SandboxUrl: TypeAlias = Annotated[str, typer.Option(metavar="URL", help="A remote server of sandboxes.")]


def sandbox_config(kind: str, url: str) -> SandboxConfig:
    """The sandboxes that a command was told to use. Raises :class:`~etude.errors.ConfigError`."""
    if (kind == "remote") != bool(url):
        raise ConfigError("--sandbox remote and --sandbox-url go together")
    try:
        return SandboxConfig.model_validate({"kind": kind, **({"options": {"url": url}} if url else {})})
    except ValueError as error:
        raise ConfigError(f"--sandbox-url {url}: expected http://… or https://…") from error
