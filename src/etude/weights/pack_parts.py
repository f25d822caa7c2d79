"""Parts of packs that are on their way into a region, kept as they arrive: who goes on fetches the rest alone.

    origin ══ from byte n on ══▶ parts/<digest of the pack>/<first byte> … ──▶ packs/<digest>, and its parts go

So a relay that is killed in a long transfer loses a small share of each pack under way, and not all of it. Parts are
kept where a transfer takes its time; nothing of them is trusted: what they come to has the pack's digest, or is fetched
again.
"""

import hashlib
from collections.abc import Callable
from typing import final

from etude.objects import Objects
from etude.types import WeightPack
from etude.weights.log import WeightLog

FOLDER = "parts"
SHARE, LEAST_BYTES = 16, 16 << 10
"""A part is a sixteenth of its pack, or as much as one request is worth."""
SMALL_BYTES = 4 * LEAST_BYTES
"""Packs below are fetched whole."""


@final
class PackParts:
    """The parts in one region's store; safe to share between threads that fetch different packs."""

    def __init__(self, region: Objects) -> None:
        self._region = region
        self._firsts: dict[str, list[int]] = {}
        """Digest of a pack → first bytes of the parts that are here."""

    def look(self) -> None:
        """See what others have left here."""
        firsts: dict[str, list[int]] = {}
        for key in self._region.list(FOLDER):
            digest, _, first = key.removeprefix(f"{FOLDER}/").partition("/")
            if first.isdecimal():
                firsts.setdefault(digest, []).append(int(first))
        self._firsts = firsts

    def fetch(self, origin: WeightLog, pack: WeightPack, is_long: Callable[[], bool]) -> bytes:
        """A pack, verified: what is kept of it, and the rest from ``origin``; parts are kept once ``is_long``.

        Raises as :meth:`WeightLog.pack`.
        """
        if pack.size_bytes < SMALL_BYTES:
            return origin.pack(pack)
        data = self._read(pack)
        kept_bytes = len(data)
        for part in origin.pack_from(pack, kept_bytes, max(LEAST_BYTES, pack.size_bytes // SHARE)):
            data += part
            if len(data) < pack.size_bytes and is_long():
                self._keep(pack, kept_bytes, bytes(data[kept_bytes:]))
                kept_bytes = len(data)
        if hashlib.sha256(data).hexdigest() == pack.digest:
            return bytes(data)
        self.drop(pack)
        return origin.pack(pack)

    def drop(self, pack: WeightPack) -> None:
        """Remove the parts of a pack."""
        self._region.delete(*(_key(pack, first) for first in self._firsts.pop(pack.digest, ())))

    def _read(self, pack: WeightPack) -> bytearray:
        """The beginning of a pack, as far as it is there without a gap."""
        data = bytearray()
        for first in sorted(self._firsts.get(pack.digest, ())):
            if first == len(data) < pack.size_bytes:
                data += self._region.get(_key(pack, first)) or b""
        return data[: pack.size_bytes]

    def _keep(self, pack: WeightPack, first: int, data: bytes) -> None:
        self._region.put_if_absent(_key(pack, first), data)
        self._firsts.setdefault(pack.digest, []).append(first)


def _key(pack: WeightPack, first: int) -> str:
    return f"{FOLDER}/{pack.digest}/{first:012d}"
