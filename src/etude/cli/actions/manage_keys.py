"""Keys in the file of a gateway, for `etude keys`: adds, lists and revokes them."""

from pathlib import Path

from etude.cli.console import console
from etude.clock import SystemClock, date_utc
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.errors import UserError
from etude.gateway.http.auth import Key, KeyLimits, Scope, digest_of, new_key_id, new_secret
from etude.gateway.http.keyfile import KeyFile


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


def show_keys(file: Path) -> None:
    """Print the keys of a file with their scopes, limits and ends."""
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


def revoke_key(file: Path, key: str) -> None:
    """Revoke a key by the beginning of its id. Raises :class:`~etude.errors.UserError` unless exactly one has it."""
    try:
        KeyFile(file, SystemClock().now()).revoke(key)
    except ValueError as error:
        raise UserError(str(error)) from error
