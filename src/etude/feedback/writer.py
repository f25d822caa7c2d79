"""The thread that writes to the feedback store: all waiting works are in one transaction (group commit).

    callers ──submit──▶ queue ──up to MAX_WORKS──▶ one transaction, one sync of the disk ──▶ their futures

A disk sync takes milliseconds and a work tens of microseconds, so many concurrent calls share a few syncs, and a single
call has its own. Works run in the order of submission.

Owns the thread and its bounded queue: a full queue raises an error at once. A work that must not be lost, such as a
deletion, is never refused, and is tried until the store takes it.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import NamedTuple, TypeVar, cast, final

from etude.errors import InfrastructureError
from etude.feedback.store import FeedbackStore, Work
from etude.ledger.database import Database

MAX_WORKS = 256
"""Maximum works per transaction, which limits the time that others wait for its lock."""
MAX_WAITING = 16_384
"""Maximum waiting works: a few seconds of work for a slow disk."""
RETRY_S = 1.0
"""Interval at which works that must not be lost are tried again, after a failure of the store."""
T = TypeVar("T")


class _Submitted(NamedTuple):
    """A submitted work."""

    work: Work
    future: "Future[object]"
    must_run: bool


class StoreBusy(InfrastructureError):
    """The queue of the feedback store is full; retry later."""


@final
class StoreWriter:
    """A store and the only thread that uses it; the thread calls ``open_store``."""

    def __init__(self, open_store: Callable[[], FeedbackStore]) -> None:
        self._open_store = open_store
        self._queue: queue.Queue[_Submitted | None] = queue.Queue(MAX_WAITING)
        self._owed: deque[_Submitted] = deque()  # works that must run, which the store or the queue did not take
        self._is_stopping = False
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

    def submit(self, work: Callable[[Database], T], *, must_run: bool = False) -> "Future[T]":
        """Queue a work; the future has its result or exception once it is on disk.

        One that ``must_run`` is tried until the store is available, and its future waits for that. Raises
        :class:`StoreBusy` for any other.
        """
        item = _Submitted(work, Future(), must_run)
        try:
            self._queue.put_nowait(item)
        except queue.Full as error:
            if not must_run:
                message = f"{MAX_WAITING} works wait for the feedback store: its disk or server is slow"
                raise StoreBusy(message) from error
            self._owed.append(item)
        return cast("Future[T]", item.future)

    def stop(self, timeout_s: float) -> None:
        """Write all waiting works and close the store; gives up after ``timeout_s``."""
        self._is_stopping = True
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
                items = [one for one in batch if one.future.running() or one.future.set_running_or_notify_cancel()]
                results = store.all_or_each([one.work for one in items])
                self.commits += 1
                for one, result in zip(items, results, strict=True):
                    if isinstance(result, InfrastructureError) and one.must_run and not self._is_stopping:
                        self._owed.append(one)
                    elif isinstance(result, BaseException):
                        one.future.set_exception(result)
                    else:
                        one.future.set_result(result)

    def _next(self) -> list[_Submitted]:
        """Waiting works, up to a limit; empty once the thread must stop."""
        owed = len(self._owed)
        try:
            item = self._queue.get(timeout=RETRY_S if owed else None)
        except queue.Empty:
            return [self._owed.popleft() for _ in range(owed)]
        batch = [self._owed.popleft() for _ in range(owed)]
        while item is not None:
            batch.append(item)
            if len(batch) >= MAX_WORKS:
                return batch
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)  # read again after this batch is written
        return batch
