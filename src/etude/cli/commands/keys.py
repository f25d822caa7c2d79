"""`etude keys`: the keys of a gateway, stored in a file as digests, and the keys that a run derives from its secret.

Owns the output. A secret is shown once, by the command that makes it. A gateway that was started with the file reads a
change within a second.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from etude.cli.console import console
from etude.cli.options import group
from etude.clock import SystemClock, date_utc
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.errors import UserError
from etude.gateway.http.auth import Key, KeyLimits, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.keyfile import KeyFile
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole

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
    limits = (requests_per_minute, tokens_per_minute)
    users = (product, consent == "train")
    key_id, secret = add_key(file, scope, label, limits, expires_s, users)
    print(f"key {key_id}, scope {scope}; this is shown once:", file=sys.stderr)
    print(secret)


@app.command("ls")
def list_keys(file: KeyPath) -> None:
    """List the keys."""
    now = SystemClock().now()
    table = light_table("key", "scope", "created", "expires", "a minute", "label", broken=["a minute"])
    for key in KeyFile(file, now).load():
        bounds = {"requests": key.limits.requests_per_minute, "tokens": key.limits.tokens_per_minute}
        budget = ", ".join(f"{formatting.brief(bound)} {what}" for what, bound in bounds.items() if bound is not None)
        table.add_row(
            key.key_id, key.scope.value, key.created[:10], _expiry(key, now), budget or formatting.MISSING, key.label
        )
    console().print(table)


def _expiry(key: Key, now: float) -> str:
    if key.expires_at is None:
        return "never"
    left_s = key.expires_at - now
    return f"in {left_s:,.0f} s" if left_s > 0 else "expired"


@app.command()
def revoke(file: KeyPath, key: Annotated[str, typer.Argument(help="The key's id, or the beginning of it.")]) -> None:
    """Revoke a key, by its id or a beginning that no other id has."""
    try:
        KeyFile(file, SystemClock().now()).revoke(key)
    except ValueError as error:
        raise UserError(str(error)) from error


@app.command()
def derive(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    role: Annotated[
        Literal["engine", "product", "admin", "release"],
        typer.Argument(help="For calls to engines; calls of the product; administration; rollbacks in the page."),
    ],
) -> None:
    """Print a key of a run, for its engines, its product, its administration or its releases."""
    print(RunFolder.open(run, writes=False).key(KeyRole(role)))


def add_key(
    file: Path,
    scope: str,
    label: str,
    per_minute: tuple[int | None, int | None],
    expires_s: float | None,
    users: tuple[str, bool] = ("", False),
) -> tuple[str, str]:
    """Make a key with limits of requests and tokens per minute.

    ``users``: the id of the production key whose users a feedback key reports on, and whether users of a production
    key consent to training if a call states nothing.

    Returns its id and its secret, which is stored nowhere. Raises :class:`~etude.errors.UserError`.
    """
    product, consent = users
    if expires_s is not None and expires_s <= 0:
        raise UserError(f"--expires-s {expires_s:g}: the key would have expired already; give a number above 0")
    if bool(product) != (scope == Scope.FEEDBACK):
        raise UserError("--product KEY goes with --scope feedback: the production key whose sessions it may name")
    if consent and scope != Scope.PRODUCTION:
        raise UserError("--consent train goes with --scope production: no other key has users")
    try:
        limits = KeyLimits(requests_per_minute=per_minute[0], tokens_per_minute=per_minute[1])
    except ValueError as error:
        raise UserError(str(error)) from error
    now = SystemClock().now()
    secret = new_secret(Scope(scope))
    key = Key(
        key_id=new_key_id(),
        digest=digest_of(secret),
        scope=Scope(scope),
        limits=limits,
        expires_at=None if expires_s is None else now + expires_s,
        created=date_utc(),
        label=label,
        opener=product or None,
        consent=consent,
    )
    try:
        KeyFile(file, now).add(key)
    except ValueError as error:
        raise UserError(str(error)) from error
    return key.key_id, secret
