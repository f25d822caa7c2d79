"""Writing and reading of records, whatever answers get lost on the way.

This file owns two habits that everything in the log relies on: an object that is there with our bytes is ours, and a
record that has been read is not read again. What records say is ``records.py``'s, what they are for ``log.py``'s.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from threading import Lock
from typing import cast, final

from etude.errors import DamagedError, InfrastructureError
from etude.weights.records import Record, RecordT, parse_record, record_bytes, record_key
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
    """

    def __init__(self, store: Objects, key: bytes | None) -> None:
        self._store = store
        self._key = key
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
        if create(self._store, name, record_bytes(record, self._key)):
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
        record = parse_record(data, kind, name, self._key)
        self._remember(name, record, len(data))
        return record

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
