"""A relay: copies every version of a log into a store that is nearer to its readers.

    origin ══ long distance, once ══▶ relay ──▶ the region's store ──▶ receiver
                                                                  └──▶ receiver …

A relay holds no weights. It copies records as they are, signatures included, and packs after checking them, each
before the record that names it; so a region's store is a log in its own right, always some version of the origin's.
Merged links are made anew from what is already there rather than fetched. Any number of relays may serve one region:
they write the same objects, and take what another one has brought, of a pack under way its parts. With a lease one of
them is active and the others stand by, so that nothing is fetched twice.

What is announced of the next version is fetched while that is asked for: over a long distance each question costs, and
two that wait for each other cost twice.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from threading import Lock
from typing import final

from etude.closing import Closing
from etude.errors import DamagedError, FencedError, InfrastructureError
from etude.types import WeightPack, WeightVersion
from etude.weights.compact import Compactor
from etude.weights.log import WeightLog, create, newest
from etude.weights.pack_parts import PackParts
from etude.weights.plan import Edge, LinkSpeed, plan
from etude.weights.records import LOG_KEY, Link, LogStart, commit_key, link_key
from etude.weights.relay_lease import RelayLease

LOOK_S = 5.0
"""Seconds between looks at the whole origin; in between only the version that should come next is asked for."""
LONG_S = 1.0
"""Seconds after which a transfer is a long one, of which parts are kept."""


@final
class Relay(Closing):
    """Copies ``origin`` to ``region``; for one thread at a time."""

    def __init__(
        self, origin: WeightLog, region: WeightLog, *, connections: int = 16, lease: RelayLease | None = None
    ) -> None:
        """With a ``lease`` nothing is fetched while another relay may have it: then calls raise
        :class:`~etude.errors.InfrastructureError`.
        """
        self._origin = origin
        self._region = region
        self._lease = lease
        self._compactor = Compactor(region)
        self._parts = PackParts(region.store)
        self._copies: dict[str, Future[int]] = {}
        """Packs of versions that are not complete yet, by digest, which are copied or being copied."""
        self._lock = Lock()
        self._is_begun = False
        self._copied_version: int | None = None
        self._looked_s = -LOOK_S
        self._threads = ThreadPoolExecutor(connections, "relay")
        self._ahead = ThreadPoolExecutor(1, "relay-ahead")

    def close(self) -> None:
        """Stop all threads."""
        self._ahead.shutdown(cancel_futures=True)
        self._threads.shutdown(cancel_futures=True)

    def follow(self) -> int | None:
        """Go one round: :meth:`prefetch` beside :meth:`advance`, whose answer and errors are this one's."""
        ahead = self._ahead.submit(self.prefetch)
        try:
            current = self.advance()
        finally:
            ahead.exception()
        ahead.result()
        return current

    def prefetch(self) -> int:
        """Copy what has been announced of the next version, before it is committed; returns the bytes copied."""
        newest = self._region.latest()
        announced = self._origin.announced(0 if newest is None else newest + 1)
        return self._copy_packs(pack for announcement in announced for pack in announcement.packs)

    def advance(self) -> int | None:
        """Copy everything up to the origin's newest version and return it; ``None`` while there is none.

        Each version is visible in the region as soon as it is complete. Raises
        :class:`~etude.errors.DamagedError` when the origin has no sound way to its newest version,
        :class:`~etude.errors.FencedError` when the region holds another log.
        """
        if self._copied_version is not None and not self._is_due_for_a_look():
            with suppress(DamagedError):  # whatever is unusual is left to a look at everything
                while self._copy_next(self._copied_version):
                    self._copied_version += 1
                return self._copied_version
        self._copy_start()
        current = self._newest_sound()
        target = newest(self._origin, current, max(current or 0, self._origin.at_least))
        if target is None or target == current:
            self._copied_version = current
            return current
        broken: frozenset[tuple[int | None, int]] = frozenset()
        while current != target:
            edge = plan(self._origin.edges(current, target, broken), target, current, LinkSpeed()).edges[0]
            try:
                self._copy_edge(edge)
                current = edge.target
            except DamagedError:
                broken |= {(edge.source, edge.target)}  # the plan says so when there is no other way
        self._copies.clear()
        with suppress(DamagedError):  # links are a convenience
            self._compactor.after(target)
        self._copied_version = target
        return target

    def _is_due_for_a_look(self) -> bool:
        """Return true if everything is to be looked at again, rather than the next version alone."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def _copy_next(self, current: int) -> bool:
        """Copy the version after ``current``, if it is there: two requests, one after the other.

        Raises :class:`~etude.errors.DamagedError` when it is not simply a sound change of ``current``.
        """
        key = commit_key(current + 1)
        data = self._origin.store.get(key)
        if data is None:
            return False
        record = self._origin.records.parse(data, WeightVersion, key)
        if record.base != current or not self._continues(current, record.base_digest):
            raise DamagedError(f"weight version {record.version} does not follow version {current}")
        self._copy_content(record.packs, record.layout)
        self._copies.clear()
        if not create(self._region.store, key, data):
            raise DamagedError(f"{key} is already in {self._region.store.url}, with other bytes")
        with suppress(DamagedError):  # links are a convenience
            self._compactor.after(record.version)
        return True

    def _copy_start(self) -> None:
        """Make the region's store one of the origin's log, at the first call.

        Raises :class:`~etude.errors.FencedError` when it is another's already.
        """
        if self._is_begun:
            return
        origin, region = self._origin.records.log_id(), self._region.records.log_id()
        if region is None and (data := self._origin.store.get(LOG_KEY)) is not None:
            self._origin.records.parse(data, LogStart, LOG_KEY)
            create(self._region.store, LOG_KEY, data)
        elif None not in (origin, region) and origin != region:
            raise FencedError(
                f"{self._region.store.url} holds the log {region}, {self._origin.store.url} the log {origin}: "
                f"give each log a regional store of its own"
            )
        self._is_begun = None not in (origin, region)

    def _continues(self, current: int, digest: str | None) -> bool:
        """True if a change of the state ``digest`` is one of the region's version ``current``."""
        with suppress(DamagedError):
            record = self._region.read(current)
            return record is None or record.digest == digest
        return True  # a damaged record says nothing

    def _newest_sound(self) -> int | None:
        """The newest version in the region whose record can be read; those above it are copied again."""
        return next((version for version in reversed(self._region.versions()) if self._is_sound(version)), None)

    def _is_sound(self, version: int) -> bool:
        try:
            return self._region.read(version) is not None
        except DamagedError:
            return False

    def _copy_edge(self, edge: Edge) -> None:
        """Packs and layouts, then the record of the link if it is one, then that of the version."""
        if edge.source is not None and not self._continues(edge.source, edge.source_digest):
            raise DamagedError(
                f"what leads to version {edge.target} does not continue what {self._region.store.url} has"
            )
        self._copy_content(edge.packs, edge.layout)
        if edge.kind != "delta":
            self._copy_record(Link, link_key(edge.source, edge.target))
        if not self._copy_record(WeightVersion, commit_key(edge.target)):
            raise DamagedError(f"version {edge.target} vanished from {self._origin.store.url} while it was copied")

    def _copy_content(self, packs: Iterable[WeightPack], layout_digest: str) -> None:
        self._copy_packs(packs)
        layout = self._origin.layout(layout_digest)
        if layout is None:
            raise DamagedError(f"layout {layout_digest[:12]} is missing from {self._origin.store.url}")
        self._region.put_layout(layout)

    def _copy_record(self, kind: type[WeightVersion] | type[Link], key: str) -> bool:
        """Copy a record, byte for byte, once it has been checked; false when there is none."""
        data = self._origin.store.get(key)
        if data is None:
            return False
        self._origin.records.parse(data, kind, key)
        if not create(self._region.store, key, data):
            try:
                self._region.records.read_again(kind, key)
            except DamagedError:
                self._region.store.renew(key, data)  # what lies there cannot be read
        return True

    def _copy_packs(self, packs: Iterable[WeightPack]) -> int:
        """Copy packs, each once, also if they are copied already; returns the bytes of those that were not."""
        began_s, by_digest = time.monotonic(), {pack.digest: pack for pack in packs}
        with self._lock:
            fresh = by_digest.keys() - self._copies.keys()
            if fresh:
                self._parts.look()
            for digest in fresh:
                self._copies[digest] = self._threads.submit(self._copy_pack, by_digest[digest], began_s)
            copies = {digest: self._copies[digest] for digest in by_digest}
        wait(copies.values())
        try:
            sizes = {digest: copy.result() for digest, copy in copies.items()}
        except BaseException:
            with self._lock:
                for digest in copies:
                    self._copies.pop(digest, None)
            raise
        return sum(sizes[digest] for digest in fresh)

    def _pack_in_region(self, pack: WeightPack) -> bytes | None:
        """The pack that another relay has brought, if it is sound."""
        with suppress(DamagedError):
            return self._region.pack(pack)
        return None

    def _copy_pack(self, pack: WeightPack, began_s: float) -> int:
        self._region.put_pack(self._pack_in_region(pack) or self._fetched(pack, began_s))
        self._parts.drop(pack)
        return pack.size_bytes

    def _fetched(self, pack: WeightPack, began_s: float) -> bytes:
        """A pack from far away, in a transfer that began at monotonic seconds ``began_s``."""
        if self._lease is not None and not self._lease.is_held:
            raise InfrastructureError(f"another relay may be at work in {self._region.store.url}: this one stands by")
        return self._parts.fetch(self._origin, pack, lambda: time.monotonic() - began_s > LONG_S)
