"""`etude check`: all that a recipe needs of this machine, tried before there is a run; `etude run` begins with it.

Owns how it is shown. What is looked at is :mod:`etude.run.preflight`'s.
"""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.cli.options import Overrides, RecipePath, group
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.dashboard.terminal import DIM, GOOD, WARN
from etude.run.local import default_out
from etude.run.preflight import check_ready

app = group()


@app.command()
def check(recipe: RecipePath, *, overrides: Overrides) -> None:
    """See if a recipe can run here: what `etude run` checks first.

    All of it is tried before there is a run folder.
    """
    config = load_recipe(recipe, overrides)
    show_ready(config, default_out(config), Console())


def show_ready(config: RunConfig, out: Path, console: Console) -> None:
    """Print what a new run at ``out`` needs, a line each as it was found.

    Raises :class:`~etude.errors.UserError` for what is missing.
    """
    for finding in check_ready(config, out):
        mark = Text("✓ ", GOOD) if finding.works else Text("! ", WARN)
        console.print(mark.append(f"{finding.name:<9} ", DIM).append(finding.words, "default"), soft_wrap=True)
