"""From weights in memory to the log: the trainer's end of the chain.

This file owns when a version is published whole and when as a change. The order of writes is what makes it safe to
die anywhere: payload first, commit record second, and only then does the publisher believe that it published.
"""

import hashlib
from typing import final

from etude import clock
from etude.errors import DamagedError
from etude.types import WeightVersion
from etude.weights.codec import encode_delta, encode_full
from etude.weights.log import commit, object_key, versions
from etude.weights.pull import PulledWeights, pull
from etude.weights.state import State, snapshot, state_digest
from etude.weights.store import ObjectStore


@final
class Publisher:
    """Publishes one run's weights, version after version; one per log, used by one thread at a time.

    The first version is full, and so is the first one of every ``full_every`` version numbers (0, 16, 32, …), so that a
    reader from nothing applies at most ``full_every − 1`` deltas. The rule depends on numbers alone, hence a
    restarted publisher goes on where the dead one stopped. It holds a copy of what it published last.
    """

    def __init__(self, store: ObjectStore, *, full_every: int = 16) -> None:
        if full_every < 1:
            raise ValueError(f"full_every={full_every} must be at least 1 (every version full)")
        self._store = store
        self._full_every = full_every
        self._last: PulledWeights | None = None

    def publish(self, state: State, *, version: int, step: int) -> WeightVersion:
        """Publish ``state`` as ``version`` and return its commit record; nobody may write to it during the call.

        Publishing what is already there (after a crash) returns the first record. Raises
        :class:`~etude.errors.FencedError` when the version is committed with other weights,
        :class:`~etude.errors.DamagedError` when the version to build upon cannot be read, ``ValueError`` when tensors
        changed their names, types or shapes since then.
        """
        if version < 0:
            raise ValueError(f"weight version {version} is negative; versions count from 0")
        held = snapshot(state)
        base = self._base_of(version)
        payload = encode_full(held) if base is None else encode_delta(base.state, held)
        object_digest = hashlib.sha256(payload).hexdigest()
        self._upload(payload, object_digest)
        record = commit(
            self._store,
            WeightVersion(
                version=version,
                base=None if base is None else base.version,
                digest=state_digest(held),
                object_key=object_key(object_digest),
                object_digest=object_digest,
                size_bytes=len(payload),
                step=step,
                created=clock.date_utc(),
            ),
        )
        self._last = PulledWeights(version=version, digest=record.digest, state=held)
        return record

    def _base_of(self, version: int) -> PulledWeights | None:
        """What to publish ``version`` against; ``None`` when it shall be full."""
        oldest = version - version % self._full_every
        if self._last is not None and oldest <= self._last.version == version - 1:
            return self._last
        committed = [number for number in versions(self._store) if oldest <= number < version]
        return pull(self._store, max(committed), have=self._last) if committed else None

    def _upload(self, payload: bytes, object_digest: str) -> None:
        key = object_key(object_digest)
        if self._store.put_if_absent(key, payload) or self._store.get(key) == payload:
            return
        raise DamagedError(f"object {key} in {self._store.url} is not what its name says: delete it and publish again")
