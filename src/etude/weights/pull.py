"""From the log to weights in memory, each step proven.

This file owns reading whole versions. Nothing that it returns is unverified: every payload is compared with its digest
before it is decoded, every state with its own after each step of the chain.
"""

import hashlib
from dataclasses import dataclass
from functools import partial

from etude.errors import DamagedError, UserError
from etude.types import WeightVersion
from etude.weights.codec import apply_delta, decode_full
from etude.weights.log import latest, plan_chain, read_commit
from etude.weights.state import State, state_digest
from etude.weights.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledWeights:
    """One weight version, whole and verified."""

    version: int
    digest: str
    """The state digest, as the log has it and as the bytes gave it."""
    state: State


def pull(store: ObjectStore, target: int | None = None, have: PulledWeights | None = None) -> PulledWeights:
    """The weights of version ``target`` (default: the newest), fetching only what ``have`` does not save.

    Idempotent: a version that is at hand is returned as it is. ``have`` from another log is not built upon. Raises
    :class:`~etude.errors.UserError` when there is no such version, :class:`~etude.errors.DamagedError` naming what is
    broken when there is no proven way to it.
    """
    version = latest(store) if target is None else target
    if version is None:
        raise UserError(f"no weight version is published in {store.url} yet")
    if read_commit(store, version) is None:
        raise UserError(f"weight version {version} is not published in {store.url}: the newest is {latest(store)}")
    held = have if have is not None and _is_in_log(store, have) else None
    for record in plan_chain(partial(read_commit, store), version, held.version if held else None):
        held = _advance(store, record, held)
    assert held is not None, "a plan without a start is never empty"
    return held


def _is_in_log(store: ObjectStore, have: PulledWeights) -> bool:
    record = read_commit(store, have.version)
    return record is not None and record.digest == have.digest


def _advance(store: ObjectStore, record: WeightVersion, held: PulledWeights | None) -> PulledWeights:
    """Apply one record to what is held; a full one needs nothing."""
    payload = _fetch(store, record)
    try:
        if record.base is None:
            state = decode_full(payload)
        else:
            assert held is not None and held.version == record.base, "plan_chain starts every delta at its base"
            state = apply_delta(held.state, payload)
    except DamagedError as error:
        raise DamagedError(f"{_name(record)} cannot be decoded: {error}; run `etude weights verify`") from error
    digest = state_digest(state)
    if digest != record.digest:
        raise DamagedError(
            f"{_name(record)} gives the state {digest[:12]}, its commit record says {record.digest[:12]}; "
            f"run `etude weights verify`"
        )
    return PulledWeights(version=record.version, digest=digest, state=state)


def _fetch(store: ObjectStore, record: WeightVersion) -> bytes:
    payload = store.get(record.object_key)
    if payload is None:
        raise DamagedError(f"{_name(record)} is missing from {store.url}; run `etude weights verify`")
    digest = hashlib.sha256(payload).hexdigest()
    if digest != record.object_digest:
        raise DamagedError(
            f"{_name(record)} is damaged: its {len(payload)} bytes have the digest {digest[:12]}; "
            f"run `etude weights verify`"
        )
    return payload


def _name(record: WeightVersion) -> str:
    return f"object {record.object_key} of weight version {record.version}"
