"""Options that several benches share on the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def names(listed: str | None) -> tuple[str, ...] | None:
    """The names in a list with commas; ``None`` for all there are."""
    return None if listed is None else tuple(listed.split(","))


def add_contestants(parser: argparse.ArgumentParser) -> None:
    """``--quick`` and ``--contestants``, of benches that compare programs."""
    parser.add_argument("--quick", action="store_true", help="see that it runs, in seconds")
    parser.add_argument("--contestants", metavar="A,B,…", help="only these (default: all)")


def add_trials(parser: argparse.ArgumentParser, name: str, recipe: str) -> None:
    """Options of a bench of whole runs, seed by seed, whose folders are kept."""
    parser.add_argument("--recipe", type=Path, default=Path("recipes") / recipe, help="what is learnt")
    parser.add_argument("--out", type=Path, default=Path(f"runs/bench-{name}"), help="keeps the runs; goes on")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override its recipe")


def trial_arguments(options: argparse.Namespace) -> tuple[Path, Path, Sequence[int], Sequence[str]]:
    """Recipe, folder of the runs, seeds and overrides, as :func:`add_trials` reads them."""
    return options.recipe, options.out, range(options.seeds), options.set
