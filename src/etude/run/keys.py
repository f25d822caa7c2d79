"""The secrets of a run: one run key, from which each role's key is derived.

    run.key, or ETUDE_RUN_KEY ──HMAC-SHA256(role)──▶ engine    authorises calls to engines
                                                 ├─▶ product   serves users, and reports their feedback
                                                 ├─▶ admin     opens gateway sessions, manages a gateway
                                                 ├─▶ directory signs endpoints of processes
                                                 ├─▶ routing   signs the versions for users
                                                 ├─▶ fleet     signs the desired state
                                                 ├─▶ release   takes versions back from users, in the page
                                                 └─▶ users     makes pseudonyms of a product's users

The run key derives all others; a role's key derives nothing. Keys travel in files and environment variables, never on a
command line.
"""

import hashlib
import hmac
import os
import secrets
from enum import StrEnum
from pathlib import Path

from etude.errors import RunFolderError

RUN_KEY_FILE = "run.key"
RUN_KEY_VARIABLE = "ETUDE_RUN_KEY"
"""Environment variable with the run key; it overrides the file."""
ENGINE_KEY_VARIABLE = "ETUDE_ENGINE_KEY"
"""Environment variable with only the engine key, for a standalone gateway."""
OLD_FILE = "admin.key"
"""The secret of runs of an older étude."""
PSEUDONYM_DIGITS = 32
"""128 bits, so that no two users collide."""
SHORTEST = 32
"""Minimum characters of a run key, so that it cannot be guessed."""


class KeyRole(StrEnum):
    """Use of a derived key."""

    ENGINE = "engine"
    """Calls to the run's engines."""
    PRODUCT = "product"
    """Calls and signals of the product whose users are served."""
    ADMIN = "admin"
    """Sessions and the administration of the run's gateways."""
    DIRECTORY = "directory"
    """Signatures of directory entries with the endpoints of processes."""
    ROUTING = "routing"
    """Signatures of routing tables."""
    FLEET = "fleet"
    """Signatures of a fleet's desired state."""
    RELEASE = "release"
    """Rollbacks requested on the page."""
    USERS = "users"
    """Pseudonyms of a product's users."""


def derive_key(run_key: str, role: KeyRole) -> str:
    """The key of one role: 64 hexadecimal digits."""
    return hmac.new(run_key.encode(), role.value.encode(), hashlib.sha256).hexdigest()


def pseudonym(users_key: str, user: str) -> str:
    """The pseudonym of a user: 32 hexadecimal digits, the same for one user everywhere in a run."""
    return hmac.new(users_key.encode(), user.encode(), hashlib.sha256).hexdigest()[:PSEUDONYM_DIGITS]


def write_run_key(folder: Path) -> None:
    """Generate a run key and write it to a file that only its owner can read."""
    descriptor = os.open(folder / RUN_KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(secrets.token_urlsafe(32) + "\n")


def has_run_key(folder: Path) -> bool:
    """True if there is a run key, in the environment or in a file. The file of an older étude counts:
    :func:`read_run_key` says how to rename it.
    """
    return any((folder / name).is_file() for name in (RUN_KEY_FILE, OLD_FILE)) or bool(os.environ.get(RUN_KEY_VARIABLE))


def read_run_key(folder: Path) -> str:
    """The run key. Raises :class:`~etude.errors.RunFolderError` if there is none, or if it is too short."""
    file, key = folder / RUN_KEY_FILE, os.environ.get(RUN_KEY_VARIABLE, "").strip()
    source = RUN_KEY_VARIABLE if key else str(file)
    if not key:
        if not file.is_file():
            old = folder / OLD_FILE
            fix = f"mv {old} {file}" if old.is_file() else f"set {RUN_KEY_VARIABLE} to the key of this run"
            raise RunFolderError(f"{file} is missing, from which the keys of engines and gateways come: {fix}")
        key = file.read_text(encoding="utf-8").strip()
    if len(key) < SHORTEST:
        raise RunFolderError(
            f"{source} has {len(key)} characters: a run key has at least {SHORTEST}, e.g. of `openssl rand -hex 32`"
        )
    return key
