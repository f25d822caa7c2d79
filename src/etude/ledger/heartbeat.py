"""Ledger connections that hold a lease: they take it, renew it in a thread, and release it.

    take ──▶ beat, beat, beat … (a thread with its own connection) ──▶ release

Owns the wait for a lease and its heartbeats; :mod:`etude.ledger.leases` decides who may hold it.

- consumes: nothing
- produces: heartbeats
- waits for: a quarter of a term between heartbeats; at the start for the lease, at most ``WAIT_TERMS`` terms
- woken by: time; the end of the context
- on shutdown: the thread ends and the lease is released, so that a successor need not wait
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from etude.config.recipe import LedgerConfig
from etude.errors import FencedError, RunFolderError
from etude.ledger.database import LedgerUnavailable
from etude.ledger.leases import BEATS_PER_TERM, Lease
from etude.ledger.ledger import Ledger
from etude.ledger.payloads import Payloads

WAIT_TERMS = 2.0
"""Maximum wait for another holder's lease, in terms; after this time the holder is alive."""


@contextmanager
def leased(
    place: Path | str, config: LedgerConfig, *, name: str, holder: str, payloads: Payloads | None = None
) -> Iterator[Ledger]:
    """A ledger connection that holds the lease ``name`` while the context is open; ``payloads`` is as in
    :meth:`Ledger.open`.

    ``holder`` is also the name under which a dead predecessor may still hold the lease. Raises
    :class:`~etude.errors.RunFolderError` if another holder is alive.
    """
    with Ledger.open(place, config, payloads=payloads) as ledger:
        lease = _wait(ledger, config, name, holder)
        stop = threading.Event()
        beating = threading.Thread(target=_beat, args=(place, config, lease, stop), name=f"lease-{name}", daemon=True)
        beating.start()
        try:
            yield ledger
        finally:
            stop.set()
            beating.join(config.lease_s)
            with suppress(FencedError, LedgerUnavailable):  # lost already, or others will see it silent
                ledger.leases.release()


def _wait(ledger: Ledger, config: LedgerConfig, name: str, holder: str) -> Lease:
    pause_s = config.lease_s / BEATS_PER_TERM / 2
    for _ in range(round(WAIT_TERMS * config.lease_s / pause_s)):
        lease = ledger.leases.take(name, holder)
        if lease is not None:
            return lease
        time.sleep(pause_s)
    holder = ledger.leases.look(name).holder
    raise RunFolderError(f"the ledger {ledger.name} is in use: {holder} is its {name!r}; stop that process first")


def _beat(place: Path | str, config: LedgerConfig, lease: Lease, stop: threading.Event) -> None:
    """Send heartbeats until ``stop`` is set or the lease is lost; the holder's next write then raises the error."""
    with suppress(FencedError):
        while not stop.is_set():
            with suppress(LedgerUnavailable), Ledger.open(place, config) as ledger:
                while not stop.wait(config.lease_s / BEATS_PER_TERM):
                    ledger.leases.beat(lease)
