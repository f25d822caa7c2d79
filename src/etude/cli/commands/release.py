"""`etude release`: the versions that users get: status, approval, rollback, proposals; and the process of a run.

Owns the options; the modules that it imports do the rest.
"""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.options import RunPath, group
from etude.errors import ConfigError

By: TypeAlias = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Name of the person (default: your user name).")
]

app = group()


@app.callback(invoke_without_command=True)
def process(
    context: typer.Context,
    *,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose release process this is.")] = "",
) -> None:
    """Show, approve, propose and roll back the weight versions that users get."""
    if context.invoked_subcommand is None:
        if not run:
            raise ConfigError("etude release needs a command, such as `etude release status RUN`, or --run RUN")
        from etude.run.process_name import RELEASE
        from etude.run.processes import run_process
        from etude.run.working_folder import open_run_folder

        run_process(RELEASE, open_run_folder(run, process=RELEASE))


@app.command()
def status(
    run: RunPath, *, version: Annotated[int | None, typer.Option(help="Show only this version.")] = None
) -> None:
    """Show each release, and its changes of state with their reasons."""
    from etude.cli.actions.manage_releases import show_releases

    show_releases(run, version)


@app.command()
def approve(
    run: RunPath,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The candidate.")],
    *,
    by: By = "",
) -> None:
    """Approve a candidate, so that users may get it."""
    from etude.cli.actions.manage_releases import request_approval

    request_approval(run, version, by)


@app.command()
def rollback(run: RunPath, *, by: By = "") -> None:
    """Take back the candidate that is being released; without one, return to the previous release."""
    from etude.cli.actions.manage_releases import request_rollback

    request_rollback(run, by)


@app.command()
def propose(
    run: RunPath,
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in Hugging Face's format.")],
    *,
    by: By = "",
) -> None:
    """Propose weights from elsewhere as a candidate: the trainer continues from them, and the gate decides."""
    from etude.cli.actions.propose_checkpoint import propose_checkpoint

    propose_checkpoint(run, checkpoint, by)
