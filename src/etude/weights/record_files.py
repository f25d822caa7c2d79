"""Writing and reading of records, whatever answers get lost on the way.

This file owns three habits that everything in the log relies on: an object that is there with our bytes is ours, a
record that has been read is not read again, and a record of another log is damage. What records say is
``records.py``'s, what they are for ``log.py``'s.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from threading import Lock
from typing import cast, final

from etude import clock
from etude.errors import DamagedError, FencedError, InfrastructureError, UserError
from etude.types import WeightVersion
from etude.weights.records import (
    LOG_KEY,
    LogStart,
    Record,
    RecordT,
    parse_commit_key,
    parse_record,
    record_bytes,
    record_key,
    require_log_id,
)
from etude.weights.store import Objects

_CREATE_TRIES = 3
"""How often an object is sent when answers get lost; the store has its own retries below that."""
_CACHE_BYTES = 64 << 20
"""How many bytes of records, as stored, are kept parsed."""
_READERS = 16
"""Records that are fetched at a time."""


def create(store: Objects, key: str, data: bytes) -> bool:
    """Create an object; false, and nothing is changed, when ``key`` is there with other bytes.

    An object with the same bytes counts as ours: it is what an earlier call made whose answer got lost.
    """
    return _place(store, key, data) is not _Placed.OTHER


def put_content(store: Objects, key: str, data: bytes) -> None:
    """Store an object that is named by its content; one that is there already counts as written now.

    What lies there and is not what its name says is damage, and is replaced: nobody could have used it.
    """
    if _place(store, key, data) is not _Placed.NEW:
        store.renew(key, data)


@final
class RecordShelf:
    """The records of one store: signed, checked, and parsed once. Safe to share between threads.

    Records never change, so what has been read is not read again, also if somebody has deleted it since: ask a listing
    what exists.

    All are of one log: of ``log_id`` where that is given, else, with a ``key``, of the log that is there at the first
    look. Without either the storage is trusted, since whoever writes to it could write any id.
    """

    def __init__(self, store: Objects, key: bytes | None, log_id: str | None = None) -> None:
        if log_id is not None:
            try:
                require_log_id(log_id)
            except ValueError as error:
                raise UserError(str(error)) from error
        self._store = store
        self._key = key
        self._expected = log_id
        self._written: str | None = None
        self._lock = Lock()
        self._cache: OrderedDict[str, tuple[Record, int]] = OrderedDict()
        self._cached_bytes = 0
        self._faults: dict[str, str] = {}

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the records that were passed over, by ascending name."""
        with self._lock:
            return tuple(message for _, message in sorted(self._faults.items()))

    def add(self, record: RecordT) -> RecordT:
        """Write a record unless there is one at its place, and return the one that is there now."""
        name = record_key(record)
        if create(self._store, name, record_bytes(record, self._started(), self._key)):
            return record
        existing = self.read(type(record), name)
        if existing is None:
            raise DamagedError(f"{name} vanished from {self._store.url}: something deletes from the log")
        return existing

    def read(self, kind: type[RecordT], name: str) -> RecordT | None:
        """The record at an object key, ``None`` if there is none. Raises :class:`~etude.errors.DamagedError`."""
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return cast(RecordT, self._cache[name][0])
        return self.read_again(kind, name)

    def read_again(self, kind: type[RecordT], name: str) -> RecordT | None:
        """As :meth:`read`, but from the store, whatever has been read before."""
        data = self._store.get(name)
        if data is None:
            return None
        record = self.parse(data, kind, name)
        self._remember(name, record, len(data))
        return record

    def parse(self, data: bytes, kind: type[RecordT], name: str) -> RecordT:
        """The record in the bytes of an object. Raises :class:`~etude.errors.DamagedError`, also for another log's."""
        record, log_id = parse_record(data, kind, name, self._key)
        if self._expected is None and self._key is not None:
            self._expected = self.log_id() or log_id
        if self._expected not in (None, log_id):
            raise DamagedError(f"record {name} is of log {log_id}, this is log {self._expected}")
        return record

    def log_id(self) -> str | None:
        """The id that the log in this store bears, of its first record or else of its newest; ``None`` for no log."""
        if (log_id := self._id_in(LOG_KEY, LogStart)) is not None:
            return log_id
        commits = [name for name in self._store.list("commits") if parse_commit_key(name) is not None]
        ids = (self._id_in(name, WeightVersion) for name in reversed(commits))
        return next(filter(None, ids), None)

    def _id_in(self, name: str, kind: type[Record]) -> str | None:
        data = self._store.get(name)
        try:
            return None if data is None else parse_record(data, kind, name, self._key)[1]
        except DamagedError:
            return None

    def _started(self) -> str:
        """The id of the log, which begins now if there is none.

        Raises :class:`~etude.errors.FencedError` where another log is than the one that is expected.
        """
        if self._written is None:
            log_id = self.log_id()
            if log_id is None:
                log_id = self._expected or secrets.token_hex(16)
                if not create(self._store, LOG_KEY, self._first_record(log_id)):
                    log_id = self.log_id() or self.begin_again(log_id)
            if self._expected not in (None, log_id):
                raise FencedError(
                    f"{self._store.url} holds the log {log_id}, what should be written is of log {self._expected}: "
                    f"give each run a store of its own"
                )
            self._written = log_id
        return self._written

    def begin_again(self, log_id: str) -> str:
        """Write the first record over one that nobody can read; returns the id."""
        self._store.renew(LOG_KEY, self._first_record(log_id))
        return log_id

    def _first_record(self, log_id: str) -> bytes:
        return record_bytes(LogStart(created=clock.date_utc()), log_id, self._key)

    def read_sound(self, kind: type[RecordT], names: Iterable[str]) -> list[RecordT]:
        """The records at many keys, fetched together; absent ones are left out, damaged ones noted in ``faults``."""

        def read(name: str) -> RecordT | None:
            try:
                return self.read(kind, name)
            except DamagedError as error:
                self.note_fault(name, str(error))
                return None

        wanted = list(names)
        with self._lock:
            unread = [name for name in wanted if name not in self._cache]
        if len(unread) <= 1:
            found = list(map(read, wanted))
        else:
            with ThreadPoolExecutor(min(_READERS, len(unread))) as pool:
                found = list(pool.map(read, wanted))
        return [record for record in found if record is not None]

    def note_fault(self, name: str, message: str) -> None:
        """Remember why the record ``name`` was passed over."""
        with self._lock:
            self._faults[name] = message

    def _remember(self, name: str, record: Record, size_bytes: int) -> None:
        with self._lock:
            self._faults.pop(name, None)
            if name not in self._cache:
                self._cache[name] = record, size_bytes
                self._cached_bytes += size_bytes
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                _, (_, freed_bytes) = self._cache.popitem(last=False)
                self._cached_bytes -= freed_bytes


class _Placed(Enum):
    """What became of an object to be created."""

    NEW = "new"
    SAME = "it was there"
    OTHER = "something else was there"


def _place(store: Objects, key: str, data: bytes) -> _Placed:
    """Create an object whatever answers get lost, and say what is there now."""
    for last_try in (*[False] * (_CREATE_TRIES - 1), True):
        try:
            if store.put_if_absent(key, data):
                return _Placed.NEW
            existing = store.get(key)
        except InfrastructureError:
            if last_try:
                raise
            continue
        if existing is not None:
            return _Placed.SAME if existing == data else _Placed.OTHER
    raise DamagedError(f"{key} comes and goes in {store.url}: something deletes from the log")
