"""`etude weights relay`: copies a store to another one that is closer to its readers, until stopped."""

import random
import time

from etude.backoff import Backoff
from etude.cli.actions.weight_store import log_of
from etude.cli.console import console
from etude.errors import InfrastructureError
from etude.run.heartbeat import Heartbeat
from etude.run.weight_log import open_store
from etude.weights.relay import Relay
from etude.weights.relay_lease import RelayLease

POLL_S = 0.1
"""Seconds between two polls."""
RELAY_PAUSES = Backoff(first_s=0.5, longest_s=1.0, jitter=0.5)
"""Pauses of a relay that cannot reach a store; short, so that it continues as soon as the link is back."""


def relay_store(store: str, region: str, *, once: bool, log_id: str | None, at_least: int) -> None:
    """Copy a store to that of a region: what is there now, or every version as it is published."""
    origin, nearer = log_of(store, log_id=log_id, at_least=at_least, far=True), open_store(region)
    if once:
        with Relay(origin, nearer) as copying:
            console().print(f"version {copying.advance()} is in {nearer.store.url}")
        return
    with RelayLease(nearer.store) as lease, Relay(origin, nearer, lease=lease) as copying:
        _keep_up(copying, lease, nearer.store.url)


def _keep_up(copying: Relay, lease: RelayLease, region: str) -> None:
    """Copy each version while the lease is held, and say so."""
    newest: int | None = None
    was_active, failures, heartbeat = True, 0, Heartbeat()
    while True:
        heartbeat.beat()
        is_active = lease.wait(RELAY_PAUSES.first_s)
        if is_active != was_active:
            was_active = is_active
            console().print("this relay is active" if is_active else "this relay is on standby")
        if not is_active:
            continue
        try:
            current = copying.follow()
        except InfrastructureError as error:
            failures += 1
            console().print(f"trying again: {error}")
            lease.release()  # another relay may be better off
            time.sleep(RELAY_PAUSES.delay_s(failures, random.random()))
            lease.seek()
            continue
        failures = 0
        if current != newest:
            newest = current
            console().print(f"version {current} is in {region}")
        time.sleep(POLL_S)
