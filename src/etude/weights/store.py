"""Where weight versions lie: named immutable objects in a folder, in memory or in a cloud bucket.

This file owns the way to the storage and nothing of what is stored. Objects are only ever created, whole or not at
all; nothing is overwritten. That one primitive (:meth:`ObjectStore.put_if_absent`) is all the coordination that
writers need.

What makes it atomic: S3, GCS and Azure take the condition with the request (``If-None-Match: *`` and kin). In a local
folder obstore writes ``<key>#<n>`` (opened with ``O_EXCL``), hard-links it to the key, which fails with ``EEXIST`` when
the key is there, and removes the staging name. So a reader never sees part of an object, a writer that dies leaves at
most a ``#<n>`` file, which listings skip, and the folder must lie on a file system that has hard links. Nothing is
fsynced: objects outlive the process that wrote them, and after a power cut digests tell what was lost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, from_url

from etude.errors import InfrastructureError, UserError

CLOUD_SCHEMES = frozenset({"s3", "gs", "az"})
"""Stores that honour put-if-absent; credentials and region come from their usual environment variables."""


@final
class ObjectStore:
    """Named immutable objects at one place; safe to share between threads, never across a fork.

    ``url`` is a plain path or ``file:///path`` (created when missing), ``memory://`` (a fresh, private store each
    time), or ``s3://bucket/prefix``, ``gs://…``, ``az://…``; any other raises :class:`~etude.errors.UserError`. Keys
    are ``/``-separated. Every method raises :class:`~etude.errors.InfrastructureError` when the storage does not do
    its part and ``ValueError`` for an illegal key.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = _open(url)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; false, and nothing is changed, when ``key`` is already there.

        Of any number of concurrent callers exactly one gets true. On a cloud store a retry after a lost answer may get
        false for an object that this very call created: callers that must know compare the object's content.
        """
        with self._blaming_storage("create", key):
            try:
                # Only single-request uploads can be conditional; clouds take up to 5 GB in one request.
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def get(self, key: str) -> bytes | None:
        """The whole object, or ``None`` if there is none."""
        with self._blaming_storage("read", key):
            try:
                return obstore.get(self._store, key).bytes().to_bytes()
            except FileNotFoundError:
                return None

    def exists(self, key: str) -> bool:
        """Whether the object is there."""
        with self._blaming_storage("look up", key):
            try:
                obstore.head(self._store, key)
            except FileNotFoundError:
                return False
        return True

    def list(self, prefix: str) -> list[str]:
        """The keys below the folder ``prefix``, ascending (``commits`` finds ``commits/1``, not ``commits-old``)."""
        with self._blaming_storage("list", prefix):
            return sorted(meta["path"] for page in obstore.list(self._store, prefix) for meta in page)

    @contextmanager
    def _blaming_storage(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except BaseError as error:
            message = f"object store {self.url}: cannot {action} {key!r}: {_first_line(error)}"
            raise InfrastructureError(message) from error


def _open(url: str) -> obstore.store.ObjectStore:
    parts = urlsplit(url)
    if "://" not in url:
        return _open_folder(url, Path(url))
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return _open_folder(url, Path(unquote(parts.path)))
    if url == "memory://":
        return MemoryStore()
    if parts.scheme in CLOUD_SCHEMES:
        try:
            return from_url(url)
        except BaseError as error:
            raise UserError(f"object store {url}: {_first_line(error)}") from error
    raise UserError(f"object store {url!r}: expected a path, file:///path, memory://, or s3://, gs:// or az://")


def _open_folder(url: str, folder: Path) -> LocalStore:
    try:
        return LocalStore(folder.absolute(), mkdir=True)
    except (BaseError, OSError) as error:
        raise UserError(
            f"object store {url}: cannot open or create the folder {folder}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    """What obstore says, without the dump of its internals that follows."""
    return str(error).partition("\n")[0]
