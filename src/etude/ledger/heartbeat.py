"""Ledger connections that hold a lease: taken, kept up by a thread, given back.

    take ──▶ beat, beat, beat … (a thread with a connection of its own) ──▶ release

Owns the waiting for a lease and its heartbeats; who may have it is decided in :mod:`etude.ledger.leases`.

- consumes: nothing
- produces: heartbeats
- waits for: a quarter of a term, then again; for the lease at first, at most ``WAIT_TERMS`` terms
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
"""Terms after which another holder's lease is not waited for any more: that one lives."""


@contextmanager
def leased(
    place: Path | str, config: LedgerConfig, *, name: str, holder: str, payloads: Payloads | None = None
) -> Iterator[Ledger]:
    """A ledger connection that holds the lease ``name``, for as long as the context is open; its turns are in
    ``payloads`` as :meth:`Ledger.open` says.

    ``holder`` is the name under which a predecessor, known to be dead, may have held it. Raises
    :class:`~etude.errors.RunFolderError` when another holder lives.
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
            with suppress(FencedError, LedgerUnavailable):  # lost already, or it will be found silent
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
    """Say that the holder lives, until told to stop or the lease is lost: its next write will tell the holder."""
    with suppress(FencedError):
        while not stop.is_set():
            with suppress(LedgerUnavailable), Ledger.open(place, config) as ledger:
                while not stop.wait(config.lease_s / BEATS_PER_TERM):
                    ledger.leases.beat(lease)
