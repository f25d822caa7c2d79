"""The thread that writes to the feedback store: all waiting works are in one transaction (group commit).

    callers ──submit──▶ queue ──up to MAX_WORKS──▶ one transaction, one sync of the disk ──▶ their futures

A disk sync takes milliseconds and a work tens of microseconds, so many concurrent calls share a few syncs, and a single
call has its own. Works run in the order of submission.

Owns the thread and its bounded queue: a full queue raises an error at once.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import TypeVar, cast, final

from etude.errors import InfrastructureError
from etude.feedback.store import FeedbackStore, Work
from etude.ledger.database import Database

MAX_WORKS = 256
"""Maximum works per transaction, which limits the time that others wait for its lock."""
MAX_WAITING = 16_384
"""Maximum waiting works: a few seconds of work for a slow disk."""
T = TypeVar("T")
_Item = tuple[Work, "Future[object]"]


class StoreBusy(InfrastructureError):
    """The queue of the feedback store is full; retry later."""


@final
class StoreWriter:
    """A store and the only thread that uses it; the thread calls ``open_store``."""

    def __init__(self, open_store: Callable[[], FeedbackStore]) -> None:
        self._open_store = open_store
        self._queue: queue.Queue[_Item | None] = queue.Queue(MAX_WAITING)
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="feedback store", daemon=True)
        self._store: FeedbackStore | None = None
        self.commits = 0
        """Number of transactions so far."""

    def start(self) -> None:
        """Start the thread, which opens the store. Raises any exception from the opening."""
        self._thread.start()
        self._opened.result()

    @property
    def store(self) -> FeedbackStore:
        """The store, only to create works; its connection belongs to the thread. Available after :meth:`start`."""
        assert self._store is not None, "the writer was not started"
        return self._store

    def submit(self, work: Callable[[Database], T]) -> "Future[T]":
        """Queue a work; the future has its result or exception once it is on disk. Raises :class:`StoreBusy`."""
        future: Future[object] = Future()
        try:
            self._queue.put_nowait((work, future))
        except queue.Full as error:
            raise StoreBusy(f"{MAX_WAITING} works wait for the feedback store: its disk or server is slow") from error
        return cast("Future[T]", future)

    def stop(self, timeout_s: float) -> None:
        """Write all waiting works and close the store; gives up after ``timeout_s``."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            store = self._store = self._open_store()
        except Exception as error:  # noqa: BLE001 - whoever started it gets it
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        with closing(store):
            while batch := self._next():
                works = [(work, future) for work, future in batch if future.set_running_or_notify_cancel()]
                results = store.all_or_each([work for work, _ in works])
                self.commits += 1
                for (_, future), result in zip(works, results, strict=True):
                    if isinstance(result, BaseException):
                        future.set_exception(result)
                    else:
                        future.set_result(result)

    def _next(self) -> list[_Item]:
        """Waiting works, up to a limit; empty once the thread must stop."""
        item = self._queue.get()
        batch: list[_Item] = []
        while item is not None:
            batch.append(item)
            if len(batch) == MAX_WORKS:
                return batch
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)  # read again after this batch is written
        return batch
