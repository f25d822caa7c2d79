"""Shorter ways through the log: merged links for readers that fell behind, inverse ones for going back.

Steps form a group, so frames can be added up and turned around without the weights they apply to, in time proportional
to what changed. Any process that reaches the store can do it; nothing depends on it being done. This file owns making
such links; which are worth making is ``plan.py``'s to say.
"""

from collections.abc import Iterator
from typing import final

from etude.errors import DamagedError
from etude.types import WeightPack
from etude.weights.codecs.codec import Frame
from etude.weights.frames import invert, merge, parse
from etude.weights.log import WeightLog
from etude.weights.packs import PACK_BYTES, fill_packs, read_pack
from etude.weights.plan import Edge, LinkSpeed, ladder, plan
from etude.weights.records import Link


@final
class Compactor:
    """Writes links into a log; safe to run anywhere, any number of times."""

    def __init__(self, log: WeightLog, pack_bytes: int = PACK_BYTES) -> None:
        self._log = log
        self._pack_bytes = pack_bytes

    def after(self, version: int) -> None:
        """Write the merged links that end at ``version``, as far as the log allows."""
        for source, target in ladder(version):
            self.link(source, target)

    def link(self, source: int, target: int) -> Link | None:
        """Write a link from ``source`` to ``target``, merged from those there are; the older may be the target.

        Returns ``None``, and writes nothing, when there is such a link already or none can be made: a version on the
        way is missing or whole, its layout is another, or its frames (classes) cannot be added without weights.
        Raises :class:`~etude.errors.DamagedError` when what is on the way is damaged.
        """
        first, last = min(source, target), max(source, target)
        edges = self._way(first, last)
        if not edges or self._exists(source, target):
            return None
        merged = self._merge(edges)
        if merged is None:
            return None
        if source > target:
            merged = {chunk: invert(parse(frame)) for chunk, frame in merged.items()}
        start, record = self._log.read(source), self._log.read(target)
        if start is None or record is None:
            return None
        link = Link(
            source=source,
            source_digest=start.digest,
            target=target,
            digest=record.digest,
            layout=record.layout,
            packs=tuple(self._store(merged)),
        )
        self._log.add_link(link)
        return link

    def _way(self, first: int, last: int) -> tuple[Edge, ...]:
        """The links to merge, in order; none when there are no two of them in one layout."""
        edges = [edge for edge in self._log.edges(first, last) if edge.source is not None and edge.source < edge.target]
        try:
            way = plan(edges, last, first, LinkSpeed()).edges
        except DamagedError:
            return ()
        start = self._log.read(first)
        alike = start is not None and all(edge.layout == start.layout for edge in way)
        return way if alike else ()

    def _exists(self, source: int, target: int) -> bool:
        return any((edge.source, edge.target) == (source, target) for edge in self._log.edges(source, target))

    def _merge(self, edges: tuple[Edge, ...]) -> dict[int, bytes] | None:
        """Chunk → one frame for all edges; ``None`` when some frame cannot be added."""
        merged: dict[int, bytes] = {}
        for edge in edges:
            for chunk, data in self._frames(edge):
                frame = parse(data)
                if not frame.codec.is_additive:
                    return None
                added = _add(merged.get(chunk), frame, data)
                if added is None:
                    merged.pop(chunk, None)
                else:
                    merged[chunk] = added
        return merged

    def _frames(self, edge: Edge) -> Iterator[tuple[int, memoryview]]:
        for pack in edge.packs:
            yield from read_pack(self._log.pack(pack))

    def _store(self, frames: dict[int, bytes]) -> Iterator[WeightPack]:
        for filled in fill_packs(sorted(frames.items()), self._pack_bytes):
            yield self._log.put_filled(filled)


def _add(before: bytes | None, frame: Frame, data: memoryview) -> bytes | None:
    """``frame`` on top of what is merged so far; ``None`` when together they change nothing."""
    return bytes(data) if before is None else merge(parse(before), frame)
