"""The log of weight versions: which exist, who may add one, and how to get from one to another.

    objects/<sha256>            payloads, named by their content
    commits/<version>.json      one :class:`~etude.types.WeightVersion` each, created if absent

A version exists from the moment its commit record does; payloads without a record are rubbish that harms nobody. The
record is also the fence: a second writer of the same version loses. This file owns the records; payloads are
``codec.py``'s, writing and reading whole versions ``publish.py``'s and ``pull.py``'s.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import get_type_hints

import orjson

from etude.errors import DamagedError, FencedError
from etude.types import WeightVersion
from etude.weights.store import ObjectStore

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT_KEY = re.compile(r"commits/(\d{8,})\.json")


def object_key(object_digest: str) -> str:
    """Where the payload with this SHA-256 lies."""
    return f"objects/{object_digest}"


def commit(store: ObjectStore, record: WeightVersion) -> WeightVersion:
    """Make a version visible to everyone and return the record that the log now holds.

    Committing the same weights again (a writer that restarted) returns the first record. Raises
    :class:`~etude.errors.FencedError` when the version exists with other weights: another writer is at work, or this
    one went back in time without going back in the log.
    """
    if store.put_if_absent(_commit_key(record.version), orjson.dumps(dataclasses.asdict(record))):
        return record
    existing = read_commit(store, record.version)
    if existing is None:
        raise DamagedError(f"{_commit_key(record.version)} vanished from {store.url}: something deletes from the log")
    if existing.digest != record.digest:
        raise FencedError(
            f"weight version {record.version} is already committed in {store.url} with other weights "
            f"(state {existing.digest[:12]}, ours {record.digest[:12]}): another writer holds this log; stop this one"
        )
    return existing


def read_commit(store: ObjectStore, version: int) -> WeightVersion | None:
    """The record of a version, ``None`` if it was never committed.

    Raises :class:`~etude.errors.DamagedError` when the record is there but is not one.
    """
    data = store.get(_commit_key(version))
    return None if data is None else _parse_record(data, version)


def versions(store: ObjectStore) -> list[int]:
    """All committed versions, ascending."""
    matches = (_COMMIT_KEY.fullmatch(key) for key in store.list("commits"))
    return sorted(int(match[1]) for match in matches if match)


def latest(store: ObjectStore) -> int | None:
    """The newest committed version, ``None`` if there is none."""
    return max(versions(store), default=None)


def plan_chain(record_of: Callable[[int], WeightVersion | None], target: int, have: int | None) -> list[WeightVersion]:
    """The records to apply, in order, to get from ``have`` (or from nothing) to ``target``: the fewest bytes possible.

    Each version has one payload, so there is one way back from ``target``, and the shortest plan is to stop at the
    first version that is at hand or needs no base. Pure but for ``record_of``, which looks a version up.
    Raises :class:`~etude.errors.DamagedError` when a link is missing.

    Example: 0 full, 1–3 deltas → ``target=3, have=1`` gives 2, 3; ``have=None`` gives 0, 1, 2, 3.
    """
    plan: list[WeightVersion] = []
    version: int | None = target
    while version is not None and version != have:
        record = record_of(version)
        if record is None:
            needed_by = f"weight version {plan[-1].version} is a delta against it" if plan else "it was asked for"
            raise DamagedError(
                f"weight version {version} is not in the log but {needed_by}; run `etude weights verify`"
            )
        plan.append(record)
        version = record.base
    return plan[::-1]


def _commit_key(version: int) -> str:
    return f"commits/{version:08d}.json"


def _parse_record(data: bytes, version: int) -> WeightVersion:
    try:
        record = WeightVersion(**orjson.loads(data))
        fault = _record_fault(record, version)
    except (ValueError, TypeError) as error:
        fault = str(error)
    if fault:
        raise DamagedError(f"commit record {_commit_key(version)} is damaged: {fault}; run `etude weights verify`")
    return record


def _record_fault(record: WeightVersion, version: int) -> str | None:
    """What is wrong with a record read from storage, where no type is checked yet."""
    for name, expected in get_type_hints(WeightVersion).items():
        if not isinstance(getattr(record, name), expected):
            return f"{name} is {getattr(record, name)!r}"
    if record.version != version:
        return f"it is the record of version {record.version}"
    if record.base is not None and not 0 <= record.base < version:
        return f"its base {record.base} does not come before it"
    if not _SHA256.fullmatch(record.digest) or not _SHA256.fullmatch(record.object_digest):
        return f"{record.digest!r} and {record.object_digest!r} are not both SHA-256 digests"
    if record.object_key != object_key(record.object_digest):
        return f"object_key {record.object_key!r} does not name the object {record.object_digest!r}"
    return None
