"""Packs that were fetched before they are needed, within a bound.

What is announced may never be committed, and what is committed may be announced twice; a pack is named by its content,
so neither does harm: it is fetched once, and the oldest leave when room is short.
"""

from collections import OrderedDict
from threading import Lock
from typing import final

from etude.errors import DamagedError
from etude.types import WeightPack
from etude.weights.log import WeightLog


@final
class PackCache:
    """Verified packs in memory, the oldest given up first; safe to share between threads."""

    def __init__(self, log: WeightLog, most_bytes: int) -> None:
        self._log = log
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._packs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def fetch(self, pack: WeightPack) -> bytes:
        """A pack's bytes, verified; it leaves the cache, since who needs it applies it now.

        Raises :class:`~etude.errors.DamagedError` when it is missing or is not what its name says.
        """
        with self._lock:
            data = self._packs.pop(pack.digest, None)
            if data is not None:
                self._size_bytes -= len(data)
                return data
        return self._log.pack(pack)

    def fetch_early(self, pack: WeightPack) -> int:
        """Fetch a pack into the cache if it is there and there is room; returns the bytes fetched."""
        with self._lock:
            if pack.digest in self._packs or pack.size_bytes > self._most_bytes:
                return 0
        try:
            data = self._log.pack(pack)
        except DamagedError:
            return 0  # announced and not sound: whoever commits it will answer for it
        with self._lock:
            if pack.digest in self._packs:  # another thread was faster
                return len(data)
            self._packs[pack.digest] = data
            self._size_bytes += len(data)
            while self._size_bytes > self._most_bytes:
                _, oldest = self._packs.popitem(last=False)
                self._size_bytes -= len(oldest)
        return len(data)
