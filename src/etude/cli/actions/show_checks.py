"""The output of `etude check`, with which `etude run` begins, too: one line for each check, as it ends."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.config.loading import load_fleet, load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.terminal import DIM, GOOD, WARN
from etude.run.gpu_machine import GpuMachine
from etude.run.local import default_out
from etude.run.preflight import MachineFinding, check_ready
from etude.run.pretend import check_pretended


def show_machine(recipe: Path, overrides: Sequence[str]) -> None:
    """Check a recipe on this machine. Raises as :func:`show_ready`."""
    config = load_recipe(recipe, overrides)
    show_ready(config, default_out(config), Console())


def show_pretended(recipe: Path, overrides: Sequence[str], machine: str, fleet: Path | None) -> None:
    """Check a recipe for a named machine, or for a ``fleet`` of such machines.

    Raises :class:`~etude.errors.ConfigError`.
    """
    machines = load_fleet(fleet) if fleet else None
    show(check_pretended(load_recipe(recipe, overrides), GpuMachine.parse(machine), machines), Console())


def show_ready(config: RunConfig, out: Path, console: Console) -> None:
    """Print what a new run at ``out`` needs, one line per check as it ends.

    Raises :class:`~etude.errors.UserError` for what is missing.
    """
    show(check_ready(config, out), console)


def show(findings: Iterable[MachineFinding], console: Console) -> None:
    """Print findings as they come."""
    for finding in findings:
        mark = Text("✓ ", GOOD) if finding.works else Text("! ", WARN)
        console.print(mark.append(f"{finding.name:<9} ", DIM).append(finding.words, "default"), soft_wrap=True)
