"""`etude keys`: who may call a gateway, kept in a file of digests.

Owns what is printed. A secret is shown once, by the command that makes it; a gateway that was started with the file
learns of a change within a second.
"""

from pathlib import Path

from rich.console import Console

from etude.clock import SystemClock, date_utc
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.errors import UserError
from etude.gateway.http.auth import Key, Limits, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.keyfile import KeyFile


def add_key(
    file: Path, scope: str, label: str, per_minute: tuple[int | None, int | None], expires_s: float | None
) -> tuple[str, str]:
    """Make a key that may make ``per_minute`` requests and take so many tokens.

    Returns its id and its secret, which nobody can find out later. Raises :class:`~etude.errors.UserError`.
    """
    if expires_s is not None and expires_s <= 0:
        raise UserError(f"--expires-s {expires_s:g}: the key would be dead already")
    try:
        limits = Limits(requests_per_minute=per_minute[0], tokens_per_minute=per_minute[1])
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
    )
    KeyFile(file, now).add(key)
    return key.key_id, secret


def show_keys(file: Path, console: Console) -> None:
    """All keys of the file. Raises :class:`~etude.errors.ConfigError` if there is none."""
    now = SystemClock().now()
    table = light_table("key", "scope", "created", "expires", "a minute", "label", broken=["a minute"])
    for key in KeyFile(file, now).load():
        left_s = None if key.expires_at is None else key.expires_at - now
        expires = "never" if left_s is None else f"in {left_s:,.0f} s" if left_s > 0 else "expired"
        bounds = {"requests": key.limits.requests_per_minute, "tokens": key.limits.tokens_per_minute}
        budget = ", ".join(f"{formatting.brief(bound)} {what}" for what, bound in bounds.items() if bound is not None)
        table.add_row(key.key_id, key.scope.value, key.created[:10], expires, budget or formatting.MISSING, key.label)
    console.print(table)


def revoke_key(file: Path, key_id: str) -> None:
    """Take a key out of the file, by its id or a beginning that no other has.

    Raises :class:`~etude.errors.UserError` if it is not in there.
    """
    try:
        KeyFile(file, SystemClock().now()).revoke(key_id)
    except ValueError as error:
        raise UserError(str(error)) from error
