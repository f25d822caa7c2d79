"""How the ranks of a trainer publish one version together, through nothing but the log.

Each rank stores the packs of its share and announces them; rank 0 waits for all and commits; the others wait for that
record. Announcements double as an invitation: readers fetch announced packs before the commit. They carry the name of
the launch, so that what a dead start of the trainer left behind is never taken for a living rank's work, and the
version that their packs are a change of, so that no version is ever made of changes of different ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from etude.errors import FencedError, InfrastructureError
from etude.types import TensorSpec, WeightPack, WeightVersion
from etude.weights.chunks import Layout
from etude.weights.digest import Digest, layout_digest
from etude.weights.elements import ELEMENTS
from etude.weights.log import WeightLog
from etude.weights.records import Announcement
from etude.weights.state import spec_bytes

START = "-start"
"""What the ranks tell each other before their first version: which version each can build upon."""
POLL_S = 0.05
"""How often a rank looks for what the others announced or committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Which part of the trainer a publisher speaks for."""

    index: int = 0
    world: int = 1
    launch: str = ""
    """Shared by all ranks of one start of the trainer and by no other start; required when there are several."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.world or (self.world > 1 and not self.launch):
            raise ValueError(f"{self}: the index must be below the world size, and several ranks need a launch name")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePacks:
    """What one rank contributes to a version."""

    layout: Layout
    content: Digest
    """What its chunks add to the state digest."""
    packs: tuple[WeightPack, ...]
    base: int | None
    """The version that the packs are a change of; ``None`` when they hold everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What all ranks contribute, in the order of ranks."""

    layouts: tuple[str, ...]
    digest: str
    """The state digest."""
    packs: tuple[WeightPack, ...]


@final
class Ranks:
    """A rank's way to the others; ``writer`` tells this start of the trainer from any other."""

    def __init__(self, log: WeightLog, rank: Rank, writer: str, deadline_s: float) -> None:
        self._log = log
        self._rank = rank
        self._writer = writer
        self._deadline_s = deadline_s
        self._covered: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether there is one rank only."""
        return self._rank.world == 1

    def announce_pack(self, version: int, sequence: int, pack: WeightPack) -> None:
        """Tell readers that a pack of a coming version can be fetched; what an earlier try said stays."""
        try:
            self._log.announce(self._announcement(version, self._writer, sequence, (pack,)))
        except FencedError:
            return

    def agree(self, version: int, readable: int | None) -> int | None:
        """Tell the others, before the first ``version``, what this rank can build upon; returns what all of them can.

        ``None`` when they differ or one can build on nothing: then everything is published whole. Raises
        :class:`~etude.errors.InfrastructureError` when a rank stays silent past the deadline.
        """
        if self.alone:
            return readable
        writer = self._writer + START
        mine = self._announcement(version, writer, 0, ())
        self._log.announce(replace(mine, done=True, base=readable))
        told = self._await_announcements(version, writer, range(self._rank.world), lambda _: True)
        return readable if all(one.base == readable for one in told) else None

    def gather(self, version: int, share: SharePacks, purpose: str = "") -> Whole | None:
        """Contribute ``share`` to ``version``; on rank 0 wait for all others and return the whole, else ``None``.

        ``purpose`` tells what is gathered beside the version itself. Raises
        ``ValueError`` unless each number of each tensor is one rank's, and
        :class:`~etude.errors.InfrastructureError` when a rank stays silent past the deadline, or built upon another
        version than rank 0 because it missed one: the next version will find them together again.
        """
        if self.alone:
            return self._combine([share.layout], [share.content], share.packs)
        writer = self._writer + purpose
        if self._rank.index > 0:
            self._contribute(version, writer, share)
            return None
        others = self._await_announcements(
            version, writer, range(1, self._rank.world), lambda other: other.base == share.base
        )
        layouts = [Layout.from_bytes(self._layout(other)) for other in others]
        contents = [Digest.parse(other.content or "") for other in others]
        packs = tuple(pack for other in others for pack in other.packs)
        return self._combine([share.layout, *layouts], [share.content, *contents], (*share.packs, *packs))

    def await_commit(self, version: int) -> WeightVersion:
        """The record that rank 0 commits. Raises :class:`~etude.errors.FencedError` when another writer did."""
        deadline_s = time.monotonic() + self._deadline_s
        while (record := self._log.read(version)) is None:
            if time.monotonic() > deadline_s:
                raise InfrastructureError(f"rank 0 did not commit weight version {version} in {self._deadline_s} s")
            time.sleep(POLL_S)
        if record.writer != self._writer:
            raise FencedError(f"weight version {version} was committed by {record.writer}, not by {self._writer}")
        return record

    def _await_announcements(
        self, version: int, writer: str, ranks: Sequence[int], fits: Callable[[Announcement], bool]
    ) -> list[Announcement]:
        """The final announcement that fits, of each of ``ranks``, in that order."""
        deadline_s = time.monotonic() + self._deadline_s
        while True:
            done = {a.rank: a for a in self._log.announced(version) if a.done and a.writer == writer and fits(a)}
            missing = [rank for rank in ranks if rank not in done]
            if not missing:
                return [done[rank] for rank in ranks]
            if time.monotonic() > deadline_s:
                raise InfrastructureError(
                    f"ranks {missing} did not announce weight version {version}, or built it upon another version "
                    f"than rank {self._rank.index}, in {self._deadline_s} s"
                )
            time.sleep(POLL_S)

    def _combine(self, layouts: Sequence[Layout], contents: Sequence[Digest], packs: tuple[WeightPack, ...]) -> Whole:
        names = tuple(layout.digest for layout in layouts)
        if names != self._covered:
            _require_cover(layouts)
            self._covered = names
        specs: dict[str, TensorSpec] = {spec.name: spec for layout in layouts for spec in layout.specs}
        digest = sum(contents, layout_digest(list(specs.values())))
        return Whole(layouts=names, digest=digest.hex(), packs=packs)

    def _contribute(self, version: int, writer: str, share: SharePacks) -> None:
        """Announce a share. One that is equal but was encoded otherwise, in an earlier try, is as good."""
        told = [a for a in self._log.announced(version) if (a.writer, a.rank) == (writer, self._rank.index)]
        sequence = 1 + max((a.sequence for a in told), default=0)
        mine = replace(
            self._announcement(version, writer, sequence, share.packs),
            done=True,
            layout=share.layout.digest,
            content=share.content.hex(),
            base=share.base,
        )
        done = [a for a in told if a.done]
        if any((a.layout, a.content) != (mine.layout, mine.content) for a in done):
            raise FencedError(
                f"rank {mine.rank} contributed other weights to version {version} before, in the same launch "
                f"{self._writer!r}: give each start of the trainer its own name"
            )
        if all(a.base != mine.base for a in done):
            self._log.announce(mine)

    def _announcement(self, version: int, writer: str, sequence: int, packs: tuple[WeightPack, ...]) -> Announcement:
        return Announcement(version=version, writer=writer, rank=self._rank.index, sequence=sequence, packs=packs)

    def _layout(self, announcement: Announcement) -> bytes:
        data = self._log.layout(announcement.layout or "")
        if data is None:
            raise InfrastructureError(f"rank {announcement.rank} announced a layout that is not in the store")
        return data


def _require_cover(layouts: Sequence[Layout]) -> None:
    """Raise ``ValueError`` unless the ranks together hold as many numbers of each tensor as it has."""
    held: dict[TensorSpec, int] = {}
    for part in (part for layout in layouts for part in layout.parts):
        held[part.spec] = held.get(part.spec, 0) + part.region.count
    for spec, numbers in held.items():
        if numbers * ELEMENTS[spec.dtype].size_bytes != spec_bytes(spec):
            raise ValueError(
                f"the ranks hold {numbers} numbers of {spec}, which is not what it has: give each to one rank"
            )
