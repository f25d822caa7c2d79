"""`etude feedback`: what users said about live sessions; and the process of a run that learns of it."""

from typing import Annotated

import typer

from etude.cli.options import group
from etude.errors import ConfigError
from etude.run.process_name import FEEDBACK
from etude.run.processes import run_process
from etude.run.working_folder import open_run_folder

app = group()


@app.callback(invoke_without_command=True)
def process(
    context: typer.Context,
    *,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose feedback process this is.")] = "",
) -> None:
    """Look after what users said about live sessions."""
    if context.invoked_subcommand is None:
        if not run:
            raise ConfigError("etude feedback needs a command, such as `etude feedback status RUN`, or --run RUN")
        run_process(FEEDBACK, open_run_folder(run))
