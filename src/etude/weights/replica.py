"""A receiver's copy of one version, or of the part it wants: how it follows a link, and proof that it did.

This file owns the copy and what changed in it; where links and packs come from is ``pull.py``'s and ``fetch.py``'s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import final

import numpy as np

from etude.errors import DamagedError
from etude.types import WeightPack, WeightVersion
from etude.weights.chunks import Chunk, Indices, Layout, Positions, assemble
from etude.weights.digest import layout_digest
from etude.weights.frames import parse
from etude.weights.packs import read_pack
from etude.weights.shards import Share, Touched
from etude.weights.state import Numbers, StoredTensor
from etude.weights.subscription import Want


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledWeights:
    """One weight version, whole and verified."""

    version: int
    digest: str
    """The state digest, as the log has it and as the bytes gave it."""
    state: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangedNumbers:
    """Numbers of one tensor that may have changed, and what they are now."""

    indices: Indices
    """[k] canonical, ascending."""
    bits: Numbers
    """[k]"""


@final
class Changes:
    """Which places of which chunks may have changed on the way from one version to another."""

    def __init__(self) -> None:
        self.whole = False
        """Everything may have changed: it was read from nothing, or laid out anew."""
        self._touched: dict[tuple[int, int], list[Positions] | None] = {}

    def note(self, rank: int, chunk: int, touched: Touched) -> None:
        """Add the places that one link touched; ``None`` for all of the chunk."""
        before = self._touched.get((rank, chunk), [])
        self._touched[rank, chunk] = None if touched is None or before is None else [*before, touched]

    def places(self) -> Iterator[tuple[int, int, Touched]]:
        """(rank, chunk, places), ascending; chunks that are not named are as before."""
        for (rank, chunk), parts in sorted(self._touched.items()):
            if parts is None:
                yield rank, chunk, None
            else:
                yield rank, chunk, parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replica:
    """What is held of one version."""

    record: WeightVersion
    shares: tuple[Share | None, ...]
    """Per rank; ``None`` for a rank of which nothing is wanted."""
    want: Want

    @classmethod
    def empty(cls, record: WeightVersion, layouts: Sequence[Layout], want: Want) -> "Replica":
        """Zeros in the layouts of a version, to be filled by a full link to it."""
        shares = tuple(want.empty_share(rank, layout) for rank, layout in enumerate(layouts))
        return cls(record=record, shares=shares, want=want)

    def laid_out(self, layouts: Sequence[Layout]) -> "Replica":
        """The same weights in memory of their own, cut as another set of ranks holds them."""
        if not self.want.everything:
            raise DamagedError("a part of the weights cannot be laid out anew: read it from nothing")
        state = self.weights().state
        shares = tuple(Share.copy_of(layout, layout.cut(state)) for layout in layouts)
        return Replica(record=self.record, shares=shares, want=self.want)

    def follow(
        self,
        record: WeightVersion,
        packs: Iterable[tuple[WeightPack, bytes]],
        appliers: Executor,
        changes: Changes,
    ) -> "Replica":
        """Apply the packs of a link that leads to ``record``, in place, and prove that it did.

        Raises :class:`~etude.errors.DamagedError` when a frame does not fit or the result is another; the replica
        is then of no version and must be given up.
        """
        places = [
            (pack.rank, share.layout.chunks[index], frame)
            for pack, data in packs
            if pack.rank < len(self.shares) and (share := self.shares[pack.rank]) is not None
            for index, frame in read_pack(data)
            if index in share.wanted
        ]
        if len({(rank, chunk.index) for rank, chunk, _ in places}) < len(places):
            raise DamagedError(f"a link to weight version {record.version} changes a chunk twice")
        jobs = [appliers.submit(self._apply, rank, chunk, frame) for rank, chunk, frame in places]
        wait(jobs)
        for (rank, chunk, _), job in zip(places, jobs, strict=True):
            changes.note(rank, chunk.index, job.result())
        followed = Replica(record=record, shares=self.shares, want=self.want)
        followed._prove()
        return followed

    def weights(self) -> PulledWeights:
        """Whole tensors; those that one rank holds whole share memory with the replica."""
        state = assemble([share.tensors for _, share in self.present()])
        return PulledWeights(version=self.record.version, digest=self.record.digest, state=state)

    def present(self) -> Iterator[tuple[int, Share]]:
        """The shares of which anything is held, with their ranks."""
        return ((rank, share) for rank, share in enumerate(self.shares) if share is not None)

    def changed(self, changes: Changes) -> dict[str, list[ChangedNumbers]]:
        """The numbers at the places that ``changes`` names, by tensor; a tensor may come in several runs.

        All that is held when everything may have changed.
        """
        found: dict[str, list[ChangedNumbers]] = {}
        for rank, index, touched in self._all_places() if changes.whole else changes.places():
            share = self.shares[rank]
            assert share is not None, "only chunks that are held can be touched"
            chunk = share.layout.chunks[index]
            places = np.arange(chunk.count, dtype=np.uint32) if touched is None else touched
            for numbers, (piece, local) in zip(share.numbers(chunk), chunk.local(places), strict=True):
                if len(local):
                    run = ChangedNumbers(indices=piece.part.indices(local + piece.start), bits=numbers[local])
                    found.setdefault(piece.part.spec.name, []).append(run)
        return found

    def changed_share(self, changes: Changes) -> float:
        """The share of all numbers held at the places that ``changes`` names."""
        if changes.whole:
            return 1.0
        held = sum(chunk.count for _, share in self.present() for chunk in share.layout.chunks)
        changed = 0
        for rank, index, touched in changes.places():
            share = self.shares[rank]
            assert share is not None, "only chunks that are held can be touched"
            changed += share.layout.chunks[index].count if touched is None else len(touched)
        return changed / max(1, held)

    def scrub(self) -> list[tuple[int, Chunk]]:
        """Read everything again and name the (rank, chunk) that are not what they should be."""
        return [(rank, share.layout.chunks[index]) for rank, share in self.present() for index in share.scrub()]

    def _all_places(self) -> Iterator[tuple[int, int, Touched]]:
        return ((rank, index, None) for rank, share in self.present() for index in sorted(share.wanted))

    def _apply(self, rank: int, chunk: Chunk, frame: memoryview) -> Touched:
        share = self.shares[rank]
        assert share is not None, "frames of absent shares are not applied"
        return share.apply(chunk, parse(frame))

    def _prove(self) -> None:
        """Compare with the state digest; a part of a state has only its chunks' digests, proven one by one before."""
        if not self.want.everything:
            return
        present = [share for _, share in self.present()]
        specs = {spec.name: spec for share in present for spec in share.layout.specs}
        digest = sum((share.content() for share in present), layout_digest(specs.values())).hex()
        if digest != self.record.digest:
            raise DamagedError(
                f"weight version {self.record.version} gives the state {digest[:12]}, its commit record says "
                f"{self.record.digest[:12]}; run `etude weights verify`"
            )
