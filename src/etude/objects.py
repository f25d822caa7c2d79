"""Object stores: named immutable objects in a folder, in memory or in a cloud bucket.

This file owns the way to the storage and nothing of what is stored. Objects are created whole or not at all, and never
changed: :meth:`ObjectStore.put_if_absent` is all the coordination that writers need. :class:`Objects` is the seam:
whatever implements it (a cache, a counter, a store that fails on purpose) can stand where an :class:`ObjectStore` does.

What makes it atomic: S3, GCS and Azure take the condition with the request (``If-None-Match: *`` and kin). In a local
folder obstore writes ``<key>#<n>`` (opened with ``O_EXCL``), hard-links it to the key, which fails with ``EEXIST`` when
the key is there, and removes the staging name. So a reader never sees part of an object, a writer that dies leaves at
most a ``#<n>`` file, which listings skip and :meth:`ObjectStore.remove_partial` removes, and the folder must lie on a
file system that has hard links. Objects outlive the process that wrote them; only a store that ``syncs`` waits for the
disk, so of any other a power cut may take the newest, and digests tell which.

A process that cannot go on without its store puts a :class:`RetryingStore` before it: what the storage fails to do is
tried again. What it answers, also that an object is missing or was there before, is passed on, and so is a full disk,
which stays full until room is made. How long is waited, and what is reported meanwhile, is the caller's
(:class:`Outages`).

Ages are told by the storage alone: when an object was written and what time it is (:meth:`ObjectStore.now`) come from
the same clock, so a local clock that jumps deletes nothing.
"""

import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, S3Store, from_url

from etude.clock import SystemClock
from etude.errors import DamagedError, InfrastructureError, UserError
from etude.fsync import sync
from etude.storage import FULL, storage_errno

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_Answer = TypeVar("_Answer")

CLOUD_SCHEMES = frozenset({"s3", "gs", "az"})
"""Stores that honour put-if-absent; credentials and region come from their usual environment variables."""
S3_OPTIONS = ("endpoint", "region", "access_key_id", "secret_access_key", "session_token")
"""Fields of :class:`StoreOptions` that only S3 has, by the names that obstore has for them, too."""
BUCKETS_VARIABLE = "ETUDE_BUCKETS"
"""Environment variable with the places of S3 buckets that are elsewhere than ``AWS_ENDPOINT`` and ``AWS_REGION`` say:
``runs-us=us-east-1 runs-eu=eu-west-1 lab=http://10.0.0.5:9000``, a region of AWS or the endpoint of a service each. A
process that copies from region to region talks to two.
"""
CLOCK_FOLDER = "clock"
"""Folder in which :meth:`ObjectStore.now` writes its probes; whatever lies there may be deleted."""

_PARTIAL = re.compile(r".+#\d+")
"""Names of what a writer has begun to write into a folder."""
_PLAIN = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]*(/[0-9A-Za-z_-][0-9A-Za-z._-]*)*")
"""Keys that are the names of files as they are; obstore writes some characters otherwise."""
_FIRST_PAUSE_S = 0.1
_BACKOFF_SHARE = 0.1
"""The longest pause before a retry by default, as a share of the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectEntry:
    """One entry of an object listing."""

    key: str
    size_bytes: int
    modified_s: float
    """When it was written, by the storage's own clock: seconds since 1970. Some clouds tell whole seconds only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of a cloud store; what is ``None`` comes from the environment (``AWS_ENDPOINT``, ``AWS_REGION``, …).

    The times hold for every request on its own: a listing makes one per 1,000 keys, other calls one or two.
    Raises :class:`~etude.errors.UserError` for times that leave no room for a second try.
    """

    request_s: float = 30.0
    """Timeout of one try of one request, its data included."""
    deadline_s: float = 90.0
    """Timeout of all tries of one request, pauses included; at least twice ``request_s``."""
    silence_s: float | None = None
    """Longest silence of the storage within a try, before another one is made: after a cut connections stay silent for
    as long again. For stores that are only read, since while data is sent the storage is silent, too. A connection has
    as long to be made.
    """
    longest_pause_s: float | None = None
    """Longest pause before a retry; by default a tenth of ``deadline_s``."""
    retries: int = 6
    """Retries of a request that failed; creating an object only if it certainly was not done."""
    endpoint: str | None = None
    """Address of an S3-compatible service, e.g. ``https://minio.example.org:9000``."""
    allow_http: bool | None = None
    """True if the endpoint may be without TLS; ``None`` asks ``AWS_ALLOW_HTTP``."""
    unsigned_payload: bool = True
    """True to sign requests only and not what they carry (S3): five times less work per byte sent. TLS and the
    digests that étude keeps of what it stores protect the content anyway.
    """
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 < 2 * self.request_s <= self.deadline_s or self.retries < 0 or self.silence_s == 0:
            raise UserError(
                f"object store: request_s={self.request_s} must be positive, deadline_s={self.deadline_s} at least "
                f"twice that, retries={self.retries} at least 0, silence_s={self.silence_s} positive"
            )


class Objects(Protocol):
    """Named immutable objects; safe to share between threads. :class:`ObjectStore` says what each method promises."""

    @property
    def url(self) -> str:
        """Place of the objects, for people."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; false, and nothing is changed, when ``key`` is already there."""
        ...

    def renew(self, key: str, data: bytes) -> None:
        """Write the bytes that an object already has, so that its age starts anew."""
        ...

    def get(self, key: str) -> bytes | None:
        """The whole object, or ``None`` if there is none."""
        ...

    def stream(self, key: str, first: int, part_bytes: int) -> Iterator[bytes] | None:
        """The object from byte ``first`` on, in parts as they arrive, or ``None`` if there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Return true if the object is there."""
        ...

    def entries(self, prefix: str) -> list[ObjectEntry]:
        """The objects below a folder, by ascending key, with sizes and times."""
        ...

    def list(self, prefix: str) -> list[str]:
        """The keys below a folder, ascending."""
        ...

    def delete(self, *keys: str) -> None:
        """Remove objects; those that are not there count as removed."""
        ...

    def remove_partial(self, older_than_s: float) -> int:
        """Remove what writers that died began to write so long ago; returns how much that was."""
        ...

    def now(self) -> float:
        """The time by the storage's own clock, comparable with :attr:`ObjectEntry.modified_s`."""
        ...


@final
class ObjectStore:
    """Named immutable objects at one place; safe to share between threads, never across a fork.

    ``url`` is a plain path or ``file:///path`` (created when missing if this ``creates``, else refused), ``memory://``
    (a fresh, private store each time), or ``s3://bucket/prefix``, ``gs://…``, ``az://…``; any other raises
    :class:`~etude.errors.UserError`. Of a folder, one that ``syncs`` has what it creates on the disk before it goes on;
    clouds do that by themselves. Keys are ``/``-separated. Every method raises
    :class:`~etude.errors.InfrastructureError` when the storage does not do its part, for clouds not later than
    ``options.deadline_s`` says, and ``ValueError`` for an illegal key.
    """

    def __init__(
        self, url: str, options: StoreOptions | None = None, *, creates: bool = True, syncs: bool = False
    ) -> None:
        self.url = url
        self._syncs = syncs
        self._store = _open(url, options, creates)
        self._folder = self._store.prefix if isinstance(self._store, LocalStore) else None
        self._is_mount = self._folder is not None and os.path.ismount(self._folder)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; false, and nothing is changed, when ``key`` is already there.

        Of any number of concurrent callers exactly one gets true. On a cloud store a retry after a lost answer may get
        false for an object that this very call created: callers that must know compare the object's content.
        """
        with self._blaming_storage("create", key):
            try:
                # Only single-request uploads can be conditional; clouds take up to 5 GB in one request.
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
                is_new = True
            except AlreadyExistsError:
                is_new = False
        if self._syncs and self._folder is not None:
            self._sync(self._folder / key)
        return is_new

    def renew(self, key: str, data: bytes) -> None:
        """Write the bytes that an object already has, so that its age starts anew; readers notice nothing.

        The one exception to never writing twice: for objects that are named by their content, where it cannot matter.
        """
        with self._blaming_storage("renew", key):
            obstore.put(self._store, key, data, mode="overwrite", use_multipart=False)

    def get(self, key: str) -> bytes | None:
        """The whole object, or ``None`` if there is none."""
        self._require_file(key)
        with self._blaming_storage("read", key):
            if self._folder is not None and _PLAIN.fullmatch(key):
                with suppress(OSError):  # which obstore tells apart; a small file takes it five times as long
                    return (self._folder / key).read_bytes()
            try:
                return obstore.get(self._store, key).bytes().to_bytes()
            except FileNotFoundError:
                return None

    def stream(self, key: str, first: int, part_bytes: int) -> Iterator[bytes] | None:
        """The object from byte ``first`` on, which it has, in parts of at least ``part_bytes`` as they arrive, but for
        the last one; ``None`` if there is none.
        """
        self._require_file(key)
        with self._blaming_storage("read", key):
            try:
                answer = obstore.get(self._store, key, options={"range": {"offset": first}})
            except FileNotFoundError:
                return None
        return self._parts(key, map(bytes, iter(answer.stream(min_chunk_size=part_bytes))))

    def exists(self, key: str) -> bool:
        """Return true if the object is there."""
        return self._size_bytes(key) is not None

    def entries(self, prefix: str) -> list[ObjectEntry]:
        """The objects below the folder ``prefix``, by ascending key (``commits`` finds ``commits/1``, no
        ``commits-2``).

        Everything that was there all the time is listed; what comes or goes meanwhile may or may not be.
        """
        with self._blaming_storage("list", prefix):
            entries = [
                ObjectEntry(key=meta["path"], size_bytes=meta["size"], modified_s=meta["last_modified"].timestamp())
                for page in obstore.list(self._store, prefix, chunk_size=1000)
                for meta in page
            ]
        return sorted(entries, key=lambda entry: entry.key)

    def list(self, prefix: str) -> list[str]:
        """The keys below the folder ``prefix``, ascending; otherwise as :meth:`entries`."""
        return [entry.key for entry in self.entries(prefix)]

    def delete(self, *keys: str) -> None:
        """Remove objects; those that are not there count as removed. When it raises, some may be gone."""
        if not keys:
            return
        with self._blaming_storage("delete", keys[0]):
            try:
                obstore.delete(self._store, list(keys))
            except FileNotFoundError:
                # Some storages stop at the first that is missing: go through them one by one.
                for key in keys:
                    self._delete_one(key)

    def remove_partial(self, older_than_s: float) -> int:
        """Remove what writers that died began to write so many seconds ago; returns how much that was. Clouds have
        nothing of the kind.
        """
        if self._folder is None:
            return 0
        before_s, removed = self.now() - older_than_s, 0
        try:
            for file in self._folder.rglob("*#*"):
                with suppress(FileNotFoundError):  # its writer lives
                    if _PARTIAL.fullmatch(file.name) and file.stat().st_mtime < before_s:
                        file.unlink()
                        removed += 1
        except OSError as error:
            raise InfrastructureError(f"object store {self.url}: cannot remove what is partial: {error}") from error
        return removed

    def now(self) -> float:
        """The time by the storage's own clock, in seconds since 1970, from the age of an object written just now."""
        key = f"{CLOCK_FOLDER}/{uuid.uuid4().hex}"
        with self._blaming_storage("read the clock with", key):
            obstore.put(self._store, key, b"", mode="create", use_multipart=False)
            modified_s = obstore.head(self._store, key)["last_modified"].timestamp()
            self._delete_one(key)
        return modified_s

    def _sync(self, file: Path) -> None:
        try:
            sync(file)
            sync(file.parent)
        except OSError as error:
            raise InfrastructureError(f"object store {self.url}: cannot sync {file}: {error}") from error

    def _parts(self, key: str, parts: Iterator[bytes]) -> Iterator[bytes]:
        with self._blaming_storage("read", key):
            yield from parts

    def _require_folder(self) -> None:
        """Raise :class:`~etude.errors.InfrastructureError` where the folder is gone: its objects are not missing, and
        what is created must not begin another one in its place.
        """
        if self._folder is None:
            return
        try:
            is_there = stat.S_ISDIR(self._folder.stat().st_mode)
        except OSError as error:
            raise InfrastructureError(f"object store {self.url}: cannot reach its folder: {error}") from error
        if not is_there:
            raise InfrastructureError(f"object store {self.url}: {self._folder} is no longer a folder")
        if self._is_mount and not os.path.ismount(self._folder):
            raise InfrastructureError(f"object store {self.url}: {self._folder} is not mounted any more")

    def _require_file(self, key: str) -> None:
        """Raise :class:`~etude.errors.DamagedError` for what lies in a folder and would hold its reader up."""
        if self._folder is None:
            return
        try:
            mode = (self._folder / key).stat().st_mode
        except (OSError, ValueError):
            return  # the storage itself says what that is
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise DamagedError(f"object {key!r} in {self.url} is not a file but a pipe, socket or device: remove it")

    def _size_bytes(self, key: str) -> int | None:
        self._require_file(key)
        with self._blaming_storage("look up", key):
            try:
                return obstore.head(self._store, key)["size"]
            except FileNotFoundError:
                return None

    def _delete_one(self, key: str) -> None:
        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            return

    @contextmanager
    def _blaming_storage(self, action: str, key: str) -> Iterator[None]:
        self._require_folder()
        started_s = SystemClock().now()
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            # Where a missing object is an answer it has been taken for one: what is missing here is the bucket.
            took_s = SystemClock().now() - started_s
            message = f"object store {self.url}: cannot {action} {key!r} (gave up after {took_s:.1f} s): "
            raise InfrastructureError(message + _first_line(error)) from error


def check_put_if_absent(store: Objects) -> None:
    """Write an object twice, which a storage has to refuse: some servers that speak S3 overlook ``If-None-Match``.

    Raises :class:`~etude.errors.UserError` where it does not, and ``InfrastructureError``.
    """
    key = f"{CLOCK_FOLDER}/{uuid.uuid4().hex}"
    store.put_if_absent(key, b"first")
    overwritten = store.put_if_absent(key, b"second")
    store.delete(key)
    if overwritten:
        raise UserError(
            f"object store {store.url} overwrites objects that must not be there (it ignores If-None-Match: *), so two "
            f"writers could destroy each other's versions: use one that honours it, as S3, GCS and Azure do"
        )


class Outages(Protocol):
    """Protocol of the reaction to storage that fails; shared between threads."""

    def failed(self, error: InfrastructureError, *, again: bool) -> None:
        """Wait for as long as makes sense before the next try of a call that has failed, or has ``again``.

        Raises when there shall be none.
        """
        ...

    def succeeded(self) -> None:
        """Take note that a call which had failed was answered."""
        ...


@final
class RetryingStore:
    """The store that ``opens`` gives, which is called until it succeeds; each call is tried until it is answered.

    As with every store that retries, :meth:`put_if_absent` may give false for an object that this very call created.
    """

    def __init__(self, url: str, opens: Callable[[], Objects], outages: Outages) -> None:
        self._url = url
        self._opens = opens
        self._outages = outages
        self._opened: Objects | None = None
        self._lock = Lock()

    @property
    def url(self) -> str:
        """Place of the objects."""
        return self._url

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.put_if_absent(key, data))

    def renew(self, key: str, data: bytes) -> None:
        """See :class:`ObjectStore`."""
        self._retry(lambda store: store.renew(key, data))

    def get(self, key: str) -> bytes | None:
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.get(key))

    def stream(self, key: str, first: int, part_bytes: int) -> Iterator[bytes] | None:
        """See :class:`ObjectStore`; all of it comes at once, as what breaks off would be read again."""
        data = self.get(key)
        return None if data is None else iter((data[first:],))

    def exists(self, key: str) -> bool:
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.exists(key))

    def entries(self, prefix: str) -> "list[ObjectEntry]":
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.entries(prefix))

    def list(self, prefix: str) -> "list[str]":
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.list(prefix))

    def delete(self, *keys: str) -> None:
        """See :class:`ObjectStore`."""
        self._retry(lambda store: store.delete(*keys))

    def remove_partial(self, older_than_s: float) -> int:
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.remove_partial(older_than_s))

    def now(self) -> float:
        """See :class:`ObjectStore`."""
        return self._retry(lambda store: store.now())

    def _retry(self, call: Callable[[Objects], _Answer]) -> _Answer:
        has_failed = False
        while True:
            try:
                answer = call(self._store())
            except InfrastructureError as error:
                if storage_errno(error) in FULL:
                    raise
                self._outages.failed(error, again=has_failed)
                has_failed = True
            else:
                if has_failed:
                    self._outages.succeeded()
                return answer

    def _store(self) -> Objects:
        with self._lock:
            if self._opened is None:
                self._opened = self._opens()
            return self._opened


def _open(url: str, options: StoreOptions | None, creates: bool) -> obstore.store.ObjectStore:
    parts = urlsplit(url)
    if parts.scheme in CLOUD_SCHEMES and "://" in url:
        return _open_cloud(url, parts.scheme, options or StoreOptions())
    if options is not None:
        raise UserError(f"object store {url}: options are for s3://, gs:// and az:// and have no effect here")
    if "://" not in url:
        return _open_folder(url, Path(url), creates)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return _open_folder(url, Path(unquote(parts.path)), creates)
    if url == "memory://":
        return MemoryStore()
    raise UserError(f"object store {url!r}: expected a path, file:///path, memory://, or s3://, gs:// or az://")


def _open_folder(url: str, folder: Path, creates: bool) -> LocalStore:
    if not creates and not folder.is_dir():
        raise UserError(f"object store {url}: there is no folder {folder}")
    try:
        return LocalStore(folder.absolute(), mkdir=creates)
    except (BaseError, OSError) as error:
        raise UserError(
            f"object store {url}: cannot open or create the folder {folder}: {_first_line(error)}"
        ) from error


def _open_cloud(url: str, scheme: str, options: StoreOptions) -> obstore.store.ObjectStore:
    named = {name: value for name in S3_OPTIONS if (value := getattr(options, name)) is not None}
    if scheme == "s3":
        named = {**_place_of_bucket(urlsplit(url).netloc), **named}
    s3 = cast("S3Config", {"unsigned_payload": options.unsigned_payload, **named})
    if scheme != "s3" and named:
        raise UserError(f"object store {url}: {', '.join(sorted(named))} are for s3:// only and have no effect here")
    client, retry = _limits(options)
    try:
        if scheme == "s3":
            return S3Store.from_url(url, config=s3, client_options=client, retry_config=retry)
        return from_url(url, client_options=client, retry_config=retry)
    except BaseError as error:
        raise UserError(f"object store {url}: {_first_line(error)}") from error


def _place_of_bucket(bucket: str) -> dict[str, str]:
    """Endpoint or region of a bucket by :data:`BUCKETS_VARIABLE`. Raises :class:`~etude.errors.UserError`."""
    for entry in os.environ.get(BUCKETS_VARIABLE, "").split():
        name, _, place = entry.partition("=")
        if not name or not place:
            raise UserError(f"{BUCKETS_VARIABLE}: {entry!r} is not a place of a bucket: expected BUCKET=REGION or "
                            f"BUCKET=http://HOST:PORT")  # fmt: skip
        if name == bucket:
            return {"endpoint" if "://" in place else "region": place}
    return {}


def _limits(options: StoreOptions) -> tuple["ClientConfig", "RetryConfig"]:
    """The options' times as obstore wants them: no try starts so late that it could end after the deadline."""
    pause_s = options.deadline_s * _BACKOFF_SHARE if options.longest_pause_s is None else options.longest_pause_s
    client: ClientConfig = {"timeout": timedelta(seconds=options.request_s)}
    if options.silence_s is not None:
        client["read_timeout"] = client["connect_timeout"] = timedelta(seconds=options.silence_s)
    # obstore itself does not look at the variable once it is given any client option.
    is_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true", "yes", "on"}
    client["allow_http"] = is_allowed if options.allow_http is None else options.allow_http
    retry: RetryConfig = {
        "max_retries": options.retries,
        "retry_timeout": timedelta(seconds=options.deadline_s - options.request_s - pause_s),
        "backoff": {
            "init_backoff": timedelta(seconds=min(_FIRST_PAUSE_S, pause_s)),
            "max_backoff": timedelta(seconds=pause_s),
            "base": 2,
        },
    }
    return client, retry


def _first_line(error: Exception) -> str:
    """The message of obstore, without the dump of its internals that follows."""
    return str(error).partition("\n")[0]
