"""What part of the weights a receiver wants: everything, the shares of some ranks, or what an engine's slice needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from etude.types import WeightPack
from etude.weights.chunks import Chunk, Layout, Piece
from etude.weights.shards import Share
from etude.weights.state import Region

Wanted: TypeAlias = Callable[[Piece], bool]
"""Whether any of a piece is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A choice of chunks; chunks are fetched, held and proven whole."""

    ranks: frozenset[int] | None = None
    """Whose shares; ``None`` for all."""
    pieces: Wanted | None = None
    """Which pieces; ``None`` for all."""

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self.ranks is None and self.pieces is None

    def rank(self, rank: int) -> bool:
        """Whether anything of a rank's share may be wanted."""
        return self.ranks is None or rank in self.ranks

    def chunk(self, chunk: Chunk) -> bool:
        """Whether a chunk of a wanted rank is wanted."""
        return self.pieces is None or any(self.pieces(piece) for piece in chunk.pieces)

    def pack(self, pack: WeightPack, layout: Layout) -> bool:
        """Whether a pack may hold a wanted chunk; ``layout`` is that of its rank."""
        return self.rank(pack.rank) and any(map(self.chunk, layout.chunks[pack.first : pack.last + 1]))

    def empty_share(self, rank: int, layout: Layout) -> Share | None:
        """Zeros for the wanted chunks of a rank, ``None`` when there are none."""
        if not self.rank(rank):
            return None
        if self.pieces is None:
            return Share.empty(layout)
        wanted = [chunk.index for chunk in layout.chunks if self.chunk(chunk)]
        return Share.empty(layout, wanted) if wanted else None


EVERYTHING = Want()
"""All chunks of all ranks."""


def wanted_regions(regions: Mapping[str, Sequence[Region]]) -> Wanted:
    """Wants what may lie in given regions of given tensors; judged by first and last index, so never too little."""

    def wants(piece: Piece) -> bool:
        low, high = (int(index) for index in piece.part.indices(np.array([piece.start, piece.stop - 1])))
        return any(region.offset <= high and low < region.end for region in regions.get(piece.part.spec.name, ()))

    return wants
