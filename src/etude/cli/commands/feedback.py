"""`etude feedback`: shows, exports and deletes the stored data of a product's users.

Owns the options. A user is named as the product names them, or by the pseudonym, which alone is stored and shown.
"""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.options import group
from etude.errors import ConfigError, UserError

Run: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]
User: TypeAlias = Annotated[
    str, typer.Option(metavar="NAME", help="A user, by the product's name for them or by the pseudonym.")
]

app = group()


@app.callback(invoke_without_command=True)
def process(
    context: typer.Context,
    *,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose feedback process this is.")] = "",
) -> None:
    """Show, export and delete the stored data of a product's users."""
    if context.invoked_subcommand is None:
        if not run:
            raise ConfigError("etude feedback needs a command, such as `etude feedback status RUN`, or --run RUN")
        from etude.run.process_name import FEEDBACK
        from etude.run.processes import run_process
        from etude.run.working_folder import open_run_folder

        run_process(FEEDBACK, open_run_folder(run))


@app.command()
def status(run: Run) -> None:
    """Count sessions and signals by their state, and list requests for deletion."""
    from etude.cli.actions.stored_feedback import show_counts

    show_counts(run)


@app.command()
def delete(
    run: Run,
    *,
    user: User = "",
    session: Annotated[str, typer.Option(metavar="ID", help="One session, by its id.")] = "",
) -> None:
    """Delete all data of a user or a session, and name the weight versions that were trained on any of it."""
    if bool(user) == bool(session):
        raise UserError("etude feedback delete: give either --user NAME or --session ID")
    from etude.cli.actions.stored_feedback import delete_data

    delete_data(run, user=user, session=session)


@app.command()
def export(run: Run, user: User) -> None:
    """Print all data of a user as JSON, one session per line, for a user who asks to see it."""
    from etude.cli.actions.stored_feedback import export_data

    export_data(run, user)


@app.command()
def audit(run: Run) -> None:
    """Print the audit log: who did what with users' data."""
    from etude.cli.actions.stored_feedback import show_audit

    show_audit(run)
