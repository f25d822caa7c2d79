"""`etude doctor --parity`: engine and trainer compared layer by layer, and how a chat template's calls are read.

The comparison is :mod:`etude.run.parity`'s.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from etude.config.loading import default_recipe, load_recipe
from etude.dashboard.terminal import GOOD, WARN
from etude.errors import ExitCode
from etude.run.parity import Parity, parity_of_model, parity_of_run, show_parity
from etude.run.preflight import about_template
from etude.run.working_folder import open_run_folder
from etude.tokens.jinja import call_support


def compare_run(run: str, overrides: Sequence[str]) -> int:
    """Compare both sides with the newest weights of a run; returns the exit status."""
    folder = open_run_folder(run, writes=False)
    return _shown(parity_of_run(folder, load_recipe(folder.config_file, overrides)), Console())


def compare_model(checkpoint: Path | None, overrides: Sequence[str]) -> int:
    """Compare both sides with the weights of a checkpoint, or else with random ones; returns the exit status."""
    console = Console()
    status = _shown(parity_of_model(checkpoint, default_recipe(overrides)), console)
    if checkpoint is None:
        return status
    reads_calls = show_calls(checkpoint, console)
    for line in about_template(checkpoint):
        console.print(line)
    return status if reads_calls else ExitCode.USER_ERROR


def _shown(parity: Parity, console: Console) -> int:
    """Print the comparison; returns the exit status."""
    show_parity(parity, console)
    return 0 if parity.passed else ExitCode.USER_ERROR


def show_calls(checkpoint: Path, console: Console) -> bool:
    """Print how the tool calls of a checkpoint's chat template are read; ``False`` if the template writes calls that
    étude cannot read.
    """
    calls = call_support(checkpoint)
    words = (
        calls.problem
        or f"tool calls are read as the chat template writes them ({calls.grammar and calls.grammar.name})"
    )
    console.print(Text(words, WARN if calls.problem else GOOD))
    return not calls.is_lost
