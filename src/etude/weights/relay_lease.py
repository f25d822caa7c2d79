"""The lease by which one of a region's relays is the active one, and another one takes over when it falls silent.

    relay-lease/000000000041    who held it        Each object is one renewal: its name counts, its content is the
    relay-lease/000000000042    who holds it       holder. Empty: the lease is free. Older ones are deleted.

Whoever creates the next object holds the lease until it is ``term_s`` old: creating is put-if-absent, so of two that
try only one succeeds, and the number is a fencing token, which only grows. The holder renews; another one may create
the next object once the last one is as old as that, by the storage's own clock. The holder believes in its lease for a
shorter time, by its own stopwatch, from before the renewal: so it stops before anybody else begins, however long it was
suspended, and clocks are never compared between machines.

What a relay writes is named by its content or put if absent: two active ones would do no harm but fetch twice. So the
lease saves bytes, and need not be proved with each write.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread
from typing import final
from uuid import uuid4

from etude.closing import Closing
from etude.errors import InfrastructureError
from etude.objects import Objects

LEASE_FOLDER = "relay-lease"
TERM_S = 4.0
"""Age at which a lease that was not renewed may be taken. Some clouds tell the time in whole seconds."""
RENEWALS = 4
"""Renewals in the time of one term."""
BELIEVED_SHARE = 0.75
"""Share of the term for which a holder trusts its own lease; the rest is for clocks that differ in rate or resolution.
"""
_FREE = b""
_NEWEST_OBJECTS = 2
"""Objects that stay, the newest included, so that no listing finds the lease between two."""


@final
class RelayLease(Closing):
    """One process's part in the lease of a regional store; a thread seeks and renews it until it is closed."""

    def __init__(
        self, store: Objects, *, term_s: float = TERM_S, stopwatch: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._term_s = term_s
        self._stopwatch = stopwatch
        self._holder = uuid4().hex.encode()
        self._held_until_s = 0.0
        self._is_sought = True
        self._is_closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._keep, name="relay-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the lease up, so that nobody has to wait for its end; storage that is away is not waited for."""
        self.release()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def is_held(self) -> bool:
        """True while this process is the active one for certain."""
        return self._stopwatch() < self._held_until_s

    def wait(self, timeout_s: float) -> bool:
        """Wait until the lease is held, at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_held, timeout_s)

    def seek(self) -> None:
        """Try to get the lease, and to keep it, from now on; so does a new one."""
        with self._changed:
            self._is_sought = True
            self._changed.notify_all()

    def release(self) -> None:
        """Let another one have the lease, and do not try to get it until :meth:`seek`."""
        with self._changed:
            was_held = self.is_held
            self._is_sought, self._held_until_s = False, 0.0
        if was_held:
            with suppress(InfrastructureError):
                self._take(_FREE)

    def _keep(self) -> None:
        while not self._is_closed:
            started_s = self._stopwatch()
            with suppress(InfrastructureError):  # it ends by itself
                if self._is_sought and self._take(self._holder):
                    self._believe(started_s + BELIEVED_SHARE * self._term_s)
            with self._changed:
                if not self._is_closed:
                    self._changed.wait(self._term_s / RENEWALS)

    def _believe(self, until_s: float) -> None:
        with self._changed:
            if self._is_sought:
                self._held_until_s = until_s
                self._changed.notify_all()
                return
        self._take(_FREE)  # it was given up while it was renewed

    def _take(self, content: bytes) -> bool:
        """Write the next object, unless another process holds the lease; whether it is ours."""
        entries = self._store.entries(LEASE_FOLDER)
        newest = entries[-1] if entries else None
        if newest is not None:
            holder = self._store.get(newest.key)
            if holder not in (self._holder, _FREE) and self._store.now() - newest.modified_s < self._term_s:
                return False
        number = 0 if newest is None else int(newest.key.rpartition("/")[2]) + 1
        key = f"{LEASE_FOLDER}/{number:012d}"
        # On a cloud a retry may find the object that it created itself.
        if not self._store.put_if_absent(key, content) and self._store.get(key) != content:
            return False
        # Others may have come past while this process was suspended, and have deleted what was in the way.
        entries = self._store.entries(LEASE_FOLDER)
        if not entries or entries[-1].key != key:
            self._store.delete(key)
            return False
        self._store.delete(*(entry.key for entry in entries[:-_NEWEST_OBJECTS]))
        return True
