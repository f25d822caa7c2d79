"""`etude chat`: talk with the newest weights of a run, or with any gateway, from a terminal.

Owns the options. :mod:`etude.cli.actions.conversation` does the rest.
"""

from typing import Annotated

import typer

from etude.cli.options import group, key_in
from etude.errors import ConfigError

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key of a gateway, unless ``--key-env`` names another one."""

app = group()


@app.command()
def chat(
    run: Annotated[str | None, typer.Argument(help="The run folder, or the URL of a run.")] = None,
    *,
    url: Annotated[str | None, typer.Option(help="A gateway, instead of a run.")] = None,
    key_env: Annotated[
        str, typer.Option(metavar="VAR", help=f"Variable with a key for it (default: {KEY_VARIABLE}).")
    ] = "",
) -> None:
    """Chat with the newest weights, and see which version answered."""
    if run is not None and url is None:
        if key_env:
            raise ConfigError(f"--key-env {key_env} has no effect on a run, whose own key is used: leave it out")
        from etude.cli.actions.conversation import chat_with_run
        from etude.run.working_folder import open_run_folder

        chat_with_run(open_run_folder(run))
    elif run is None and url is not None:
        key = key_in(key_env, KEY_VARIABLE)
        if not key:
            raise ConfigError(f"--url {url} needs a key: export {KEY_VARIABLE}, or name its variable by --key-env")
        from etude.cli.actions.conversation import chat_with

        chat_with(url, key)
    else:
        raise ConfigError("give either a run folder, or --url URL")
