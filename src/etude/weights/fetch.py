"""Packs of links, fetched in parallel, early where they were announced, and the speed of the link that this shows."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import final

from etude.types import WeightPack
from etude.weights.log import WeightLog
from etude.weights.packcache import PackCache
from etude.weights.plan import LinkSpeed

SMALLEST_SAMPLE = 1 << 20
"""Transfers below a megabyte measure the round trip, not the link."""


@final
class Fetcher:
    """Fetches verified packs over ``connections`` at once; for one thread at a time."""

    def __init__(self, log: WeightLog, link: LinkSpeed, *, connections: int, cache_bytes: int) -> None:
        self.fetched_bytes = 0
        """Of packs that have arrived since the start."""
        self.link = link
        """What the way to the store is like, as far as transfers have shown."""
        self._cache = PackCache(log, cache_bytes)
        self._threads = ThreadPoolExecutor(connections, "fetch")

    def close(self) -> None:
        """Stop all threads."""
        self._threads.shutdown(cancel_futures=True)

    def fetch(self, packs: Iterable[WeightPack]) -> list[tuple[WeightPack, bytes]]:
        """All of some packs, verified.

        Raises :class:`~etude.errors.DamagedError` for a pack that is missing or is not what its name says,
        :class:`~etude.errors.InfrastructureError` when the store does not do its part.
        """
        wanted = list(packs)
        started_s = time.perf_counter()
        futures = [self._threads.submit(self._fetch_one, pack) for pack in wanted]
        try:
            data = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        self._observe(sum(map(len, data)), time.perf_counter() - started_s)
        return list(zip(wanted, data, strict=True))

    def _fetch_one(self, pack: WeightPack) -> bytes:
        data = self._cache.fetch(pack)
        self.fetched_bytes += len(data)
        return data

    def fetch_early(self, packs: Iterable[WeightPack]) -> int:
        """Fetch announced packs into the cache; returns the bytes that came."""
        return sum(self._threads.map(self._cache.fetch_early, packs))

    def _observe(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= SMALLEST_SAMPLE and seconds > 0:
            self.link = replace(self.link, bytes_per_s=(self.link.bytes_per_s + size_bytes / seconds) / 2)
