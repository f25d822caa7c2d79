"""The parts that commands share: options that several have, and the name of this program."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

RunPath: TypeAlias = Annotated[str, typer.Argument(metavar="RUN", help="The run folder, or the URL of a run.")]
RecipePath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A TOML file, or a folder with run.toml.")
]
Overrides: TypeAlias = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.KEY=VALUE", default_factory=list, help="Override the recipe."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="Name what is sound, too, a line each.")]
Split: TypeAlias = Annotated[Literal["train", "heldout"], typer.Option(help="The side of the hold-out.")]


def group() -> typer.Typer:
    """The commands of one module; a single one is the command of the module's name."""
    return typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def own_name() -> str:
    """The words to type to start this program again: it may lie in a virtual environment that is not active."""
    if shutil.which("etude"):
        return "etude"
    return sys.argv[0] if Path(sys.argv[0]).name == "etude" else f"{sys.executable} -m etude"
