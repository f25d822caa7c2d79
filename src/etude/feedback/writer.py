"""The thread that writes to the feedback store: everything that waits goes into one transaction (group commit).

    callers ──submit──▶ queue ──up to MAX_WORKS──▶ one transaction, one sync of the disk ──▶ their futures

A sync of the disk takes milliseconds and a work tens of microseconds, so a gateway with many calls at a time pays for
few syncs, and one with a single call for its own. Works are done in the order in which they were submitted.

Owns the thread and its queue, which is bounded: a caller that finds it full is told so at once.
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
"""Works of one transaction: so long may others have to wait for its lock."""
MAX_WAITING = 16_384
"""Works that may wait: seconds of a disk that is as slow as disks are."""
T = TypeVar("T")
_Item = tuple[Work, "Future[object]"]


class StoreBusy(InfrastructureError):
    """The feedback store has as much to write as may wait; try again later."""


@final
class StoreWriter:
    """A store and the thread that uses it alone; ``open_store`` is called there."""

    def __init__(self, open_store: Callable[[], FeedbackStore]) -> None:
        self._open_store = open_store
        self._queue: queue.Queue[_Item | None] = queue.Queue(MAX_WAITING)
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="feedback store", daemon=True)
        self._store: FeedbackStore | None = None
        self.commits = 0
        """Transactions so far."""

    def start(self) -> None:
        """Open the store and start. Raises what opening it does."""
        self._thread.start()
        self._opened.result()

    @property
    def store(self) -> FeedbackStore:
        """The store, for whoever makes works of it; its connection is the thread's. Once it is started."""
        assert self._store is not None, "the writer was not started"
        return self._store

    def submit(self, work: Callable[[Database], T]) -> "Future[T]":
        """Have a work done; its result, or what it raises, comes once it is on the disk. Raises :class:`StoreBusy`."""
        future: Future[object] = Future()
        try:
            self._queue.put_nowait((work, future))
        except queue.Full as error:
            raise StoreBusy(f"{MAX_WAITING} works wait for the feedback store: its disk or server is slow") from error
        return cast("Future[T]", future)

    def stop(self, timeout_s: float) -> None:
        """Write what waits, and let go of the store; gives up after ``timeout_s``."""
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
        """Waiting pieces of work, up to a limit; none once it has to stop."""
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
            self._queue.put(None)  # seen again once this batch is written
        return batch
