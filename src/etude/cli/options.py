"""Parts that commands share: common options, and the name of this program."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from etude.errors import ConfigError
from etude.run.process_name import ProcessName

RunPath: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="The run folder, or the URL of a run.")]
RecipePath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A TOML file, a folder with run.toml, or a shipped name.")
]
Overrides: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", default_factory=list, show_default=False, help="Override the recipe."
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="List what is sound as well, one per line.")]
Split: TypeAlias = Annotated[Literal["train", "heldout"], typer.Option(help="Training tasks or held-out tasks.")]


def group() -> typer.Typer:
    """The commands of one module. If it has a single command, that one has the module's name."""
    return typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def own_name() -> str:
    """The command line that starts this program: it may be in a virtual environment that is not active."""
    if shutil.which("etude"):
        return "etude"
    return sys.argv[0] if Path(sys.argv[0]).name == "etude" else f"{sys.executable} -m etude"


def key_in(variable: str, default: str) -> str:
    """The API key in an environment ``variable``; without one, in the variable ``default``, which may be unset.

    Raises :class:`~etude.errors.ConfigError`.
    """
    if variable and not os.environ.get(variable):
        raise ConfigError(f"--key-env {variable}: the variable is not set; export it, or name another one")
    return os.environ.get(variable or default, "")


def process_name(command: str, replica: int, region: str) -> ProcessName:
    """The name of a process from its command line. Raises :class:`~etude.errors.ConfigError`."""
    try:
        return ProcessName(command=command, replica=replica, region=region)
    except ValueError as error:
        raise ConfigError(f"--replica {replica}, --region {region!r}: {error}") from error
