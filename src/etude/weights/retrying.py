"""A store that is waited for: in front of any other, for processes that cannot go on without it.

Owns which failures are tried again: those of the storage. What it answers, also that an object is missing or was there
before, is passed on, and so is a full disk, which stays full until somebody makes room. How long is waited, and who is
told meanwhile, is the caller's (:class:`Outages`).
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol, TypeVar, final

from etude.errors import InfrastructureError
from etude.storage import FULL, storage_errno
from etude.weights.store import ObjectEntry, Objects

_Answer = TypeVar("_Answer")


class Outages(Protocol):
    """What is done about storage that fails; shared between threads."""

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
        """Where the objects lie."""
        return self._url

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As :class:`~etude.weights.store.ObjectStore`."""
        return self._retry(lambda store: store.put_if_absent(key, data))

    def renew(self, key: str, data: bytes) -> None:
        """As :class:`~etude.weights.store.ObjectStore`."""
        self._retry(lambda store: store.renew(key, data))

    def get(self, key: str) -> bytes | None:
        """As :class:`~etude.weights.store.ObjectStore`."""
        return self._retry(lambda store: store.get(key))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> "list[bytes] | None":
        """As :class:`~etude.weights.store.ObjectStore`."""
        return self._retry(lambda store: store.get_ranges(key, ranges))

    def exists(self, key: str) -> bool:
        """As :class:`~etude.weights.store.ObjectStore`."""
        return self._retry(lambda store: store.exists(key))

    def entries(self, prefix: str) -> "list[ObjectEntry]":
        """As :class:`~etude.weights.store.ObjectStore`."""
        return self._retry(lambda store: store.entries(prefix))

    def list(self, prefix: str) -> "list[str]":
        """As :class:`~etude.weights.store.ObjectStore`."""
        return self._retry(lambda store: store.list(prefix))

    def delete(self, *keys: str) -> None:
        """As :class:`~etude.weights.store.ObjectStore`."""
        self._retry(lambda store: store.delete(*keys))

    def now(self) -> float:
        """As :class:`~etude.weights.store.ObjectStore`."""
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
