"""`etude keys`: the keys of a gateway, stored in a file as digests, and the keys that a run derives from its secret.

Owns the options. A secret is shown once, by the command that makes it. A gateway that was started with the file reads a
change within a second.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from etude.cli.options import group

KeyPath: TypeAlias = Annotated[Path, typer.Argument(metavar="FILE", help="The file of keys.")]
PerMinute: TypeAlias = Annotated[int | None, typer.Option(metavar="N", help="Budget (default: none).")]

app = group()


@app.command()
def add(
    file: KeyPath,
    *,
    scope: Annotated[
        Literal["production", "feedback", "admin"], typer.Option(help="Which calls the key allows.")
    ] = "production",
    product: Annotated[
        str, typer.Option(metavar="KEY", help="Id of the production key whose sessions a feedback key may name.")
    ] = "",
    consent: Annotated[
        Literal["train", "none"], typer.Option(help="Consent of the key's users to training, unless a call states it.")
    ] = "none",
    label: Annotated[str, typer.Option(help="A note about the key.")] = "",
    requests_per_minute: PerMinute = None,
    tokens_per_minute: PerMinute = None,
    expires_s: Annotated[float | None, typer.Option(help="Seconds until the key expires (default: never).")] = None,
) -> None:
    """Make a key; its secret is printed once."""
    from etude.cli.actions.manage_keys import add_key

    limits = (requests_per_minute, tokens_per_minute)
    users = (product, consent == "train")
    key_id, secret = add_key(file, scope, label, limits, expires_s, users)
    print(f"key {key_id}, scope {scope}; this is shown once:", file=sys.stderr)
    print(secret)


@app.command("ls")
def list_keys(file: KeyPath) -> None:
    """List the keys."""
    from etude.cli.actions.manage_keys import show_keys

    show_keys(file)


@app.command()
def revoke(file: KeyPath, key: Annotated[str, typer.Argument(help="The key's id, or the beginning of it.")]) -> None:
    """Revoke a key, by its id or a beginning that no other id has."""
    from etude.cli.actions.manage_keys import revoke_key

    revoke_key(file, key)


@app.command()
def derive(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    role: Annotated[
        Literal["engine", "product", "admin", "release"],
        typer.Argument(help="For calls to engines; calls of the product; administration; rollbacks in the page."),
    ],
) -> None:
    """Print a key of a run, for its engines, its product, its administration or its releases."""
    from etude.run.folder import RunFolder
    from etude.run.keys import KeyRole

    print(RunFolder.open(run, writes=False).key(KeyRole(role)))
