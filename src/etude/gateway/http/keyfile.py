"""Stored keys: a JSON file with digests instead of secrets.

    {"version": 1, "keys": [{"key_id", "digest", "scope", "label", "created", "expires",
                             "requests_per_minute", "tokens_per_minute"}]}

A feedback key also has ``"opener"``, the id of its production key; a production key has ``"consent": true`` if its
users consent unless a call says otherwise.

Owns the file format, its atomic replacement, and the detection of changes. Keys of rollouts live in memory as long as
their sessions, and are never written. The rights of a key are in :mod:`etude.gateway.http.auth`.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from etude.clock import unix_s
from etude.errors import ConfigError, DamagedError
from etude.gateway.http.auth import MAX_KEYS, Key, KeyLimits, Keyring, Scope
from etude.types import Json

FORM = 1
"""Version of the file format; any other number comes from another version of étude."""
OWNER_ONLY = 0o600
"""File mode. Digests grant no access, but the list of keys is private."""
UNREADABLE = (-1,)
"""The identity of a missing file."""


class _FiledKey(BaseModel):
    """One stored key: all fields are required, and no others are allowed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    key_id: str
    digest: str
    scope: Scope
    label: str
    created: str
    expires: AwareDatetime | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    opener: str | None = None
    consent: bool = False


class _Filed(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    keys: tuple[_FiledKey, ...] = Field(max_length=MAX_KEYS)


class KeyFile:
    """One file of keys. Methods block while they read or write it.

    ``now`` is the current time on the ring's clock: files hold dates, rings hold seconds of a clock.
    """

    def __init__(self, path: Path, now: float) -> None:
        self.path = path
        self._unix_ahead_s = unix_s() - now
        self._seen: tuple[int, ...] | None = None  # by refresh alone: a change that no ring got must not pass for known

    def load(self) -> tuple[Key, ...]:
        """The keys of the file. Raises ``ConfigError`` if it is unreadable, ``DamagedError`` for an invalid format."""
        return self._decode(self._read()[1])

    def refresh(self, ring: Keyring, now: float) -> bool:
        """Load the file's keys into ``ring`` if the file changed since the last call; return whether it did.

        Raises like :meth:`load`, once per change; the ring then stays as it is.
        """
        try:
            identity = _identity(self.path.stat())
        except OSError:
            identity = UNREADABLE
        if identity == self._seen:
            return False
        self._seen = UNREADABLE
        self._seen, data = self._read()
        try:
            ring.replace(self._decode(data), now)
        except ValueError as error:
            raise DamagedError(f"{self.path}: {error}") from error
        return True

    def add(self, key: Key) -> None:
        """Add a key to the file, which is created if necessary.

        Raises ``ValueError`` if its id or secret is taken or there are too many keys, ``ConfigError`` while another
        process changes the file.
        """

        def added(keys: Sequence[Key]) -> list[Key]:
            if key.session_id is not None:
                raise ValueError(f"key {key.key_id!r} is a rollout's: it lives in memory and dies with its session")
            if any(other.key_id == key.key_id or other.digest == key.digest for other in keys):
                raise ValueError(f"{self.path} has a key {key.key_id!r} already")
            if key.opener is not None and not any(other.key_id == key.opener for other in keys):
                raise ValueError(f"{self.path} has no key {key.opener!r}: a feedback key is made for a production key")
            if len(keys) >= MAX_KEYS:
                raise ValueError(f"{self.path} has {len(keys)} keys already: revoke some first")
            return [*keys, key]

        self._change(added)

    def revoke(self, key_id: str) -> None:
        """Remove a key from the file, by its id or a unique prefix of it.

        Raises ``ValueError`` if there is no such key, ``ConfigError`` like :meth:`add`.
        """

        def without(keys: Sequence[Key]) -> list[Key]:
            begun = [key for key in keys if key_id and key.key_id.startswith(key_id)]
            meant = [key for key in begun if key.key_id == key_id] or begun
            if len(meant) > 1:
                raise ValueError(f"{key_id!r} begins several ids in {self.path}: say more of it")
            rest = [key for key in keys if key not in meant]
            if not meant:
                raise ValueError(f"{self.path} has no key {key_id!r}: see `etude keys ls {self.path}`")
            return rest

        self._change(without)

    def _change(self, change: Callable[[Sequence[Key]], Sequence[Key]]) -> None:
        """Read, change and replace the file under its lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.with_name(f".{self.path.name}.lock")):
            self._write(change(self.load() if self.path.exists() else ()))

    def _write(self, keys: Iterable[Key]) -> None:
        data = orjson.dumps(
            {"version": FORM, "keys": [self._record(key) for key in keys]},
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )
        partial = self.path.with_name(f".{self.path.name}.{uuid4().hex}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a revoked key must not return after a power failure
            partial.replace(self.path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def _record(self, key: Key) -> dict[str, Json]:
        expires = None
        if key.expires_at is not None:
            expires = datetime.fromtimestamp(round(key.expires_at + self._unix_ahead_s), UTC).isoformat()
        record: dict[str, Json] = {
            "key_id": key.key_id,
            "digest": key.digest,
            "scope": key.scope.value,
            "label": key.label,
            "created": key.created,
            "expires": expires,
            "requests_per_minute": key.limits.requests_per_minute,
            "tokens_per_minute": key.limits.tokens_per_minute,
        }
        return record | ({"opener": key.opener} if key.opener else {}) | ({"consent": True} if key.consent else {})

    def _read(self) -> tuple[tuple[int, ...], bytes]:
        """The identity and the content of the file. Raises ``ConfigError``."""
        try:
            with self.path.open("rb") as file:
                return _identity(os.fstat(file.fileno())), file.read()
        except OSError as error:
            raise ConfigError(
                f"keys cannot be read from {self.path}: {error.strerror}; `etude keys add {self.path}` makes the file"
            ) from error

    def _decode(self, data: bytes) -> tuple[Key, ...]:
        """The keys in the content of the file. Raises ``DamagedError``."""
        try:
            keys = tuple(self._key(record) for record in _Filed.model_validate_json(data).keys)
            ids, digests = {key.key_id for key in keys}, {key.digest for key in keys}
            if len(ids) < len(keys) or len(digests) < len(keys):
                raise ValueError("two keys have the same id or digest")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DamagedError(f"{self.path} is not a file of keys: {error}; restore it from a copy") from error
        return keys

    def _key(self, filed: _FiledKey) -> Key:
        return Key(
            key_id=filed.key_id,
            digest=filed.digest,
            scope=filed.scope,
            label=filed.label,
            created=filed.created,
            expires_at=None if filed.expires is None else filed.expires.timestamp() - self._unix_ahead_s,
            limits=KeyLimits(requests_per_minute=filed.requests_per_minute, tokens_per_minute=filed.tokens_per_minute),
            opener=filed.opener,
            consent=filed.consent,
        )


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    """The identity of a file; it differs for any two files at one path, as far as the file system can tell."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that is released when its process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process holds {path}, it is changing the keys: try again") from error
        yield
    finally:
        os.close(descriptor)
