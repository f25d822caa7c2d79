"""A copy of the weights in memory, kept equal to the log chunk by chunk, with proof that it is.

Publisher and receiver hold the same thing: bytes in a layout, and for every chunk the digest of its contents. The
publisher moves a chunk on by comparing it with the trainer's weights, the receiver by applying what came of that. A
chunk's digest is what makes this safe: a frame is applied only to the contents it was made from, applying it again is a
no-op, one that was torn in between is recognised. This file owns that rule; it knows nothing of stores.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from etude.errors import DamagedError
from etude.types import WeightVersion
from etude.weights.chunks import Chunk, Indices, Layout
from etude.weights.codecs.codec import Changes, Codec, Frame
from etude.weights.codecs.dense import DENSE
from etude.weights.codecs.full import FULL
from etude.weights.codecs.gaps import GAPS, apply_changes
from etude.weights.digest import Digest, layout_digest
from etude.weights.frames import apply, encode_full, invert, pack, parse, scan
from etude.weights.kernels import Positions
from etude.weights.packs import read_pack
from etude.weights.state import Numbers, State, StoredTensor, snapshot

DENSE_SHARE = 0.3
"""From this share of changed numbers on, positions cost more than they save: every step is stored."""

Touched: TypeAlias = Positions | None
"""Positions of a chunk that may have changed; ``None`` for all of them."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """The change of a chunk between two versions, forwards and back."""

    chunk: Chunk
    frame: bytes
    changed: int
    """Numbers that differ."""
    changes: Changes | None
    """Content of the frame, for taking it back; ``None`` when the frame itself can be inverted."""


@final
class ChangedPlaces:
    """The places of chunks that may have changed on the way from one version to another."""

    def __init__(self) -> None:
        self.whole = False
        """True if everything may have changed: it was read from nothing, or cut anew."""
        self._touched: dict[int, list[Positions] | None] = {}

    def note(self, chunk: int, touched: Touched) -> None:
        """Add the positions that one link touched; ``None`` for all of the chunk."""
        before = self._touched.get(chunk, [])
        self._touched[chunk] = None if touched is None or before is None else [*before, touched]

    def places(self) -> Iterator[tuple[int, Touched]]:
        """(chunk, positions), ascending; chunks that are not named are as before."""
        for chunk, parts in sorted(self._touched.items()):
            if parts is None:
                yield chunk, None
            else:
                yield chunk, parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


@final
class Replica:
    """A model's tensors in memory; one thread at a time may work on one chunk."""

    def __init__(self, layout: Layout, tensors: State) -> None:
        self.layout = layout
        self.tensors = tensors
        self._digests: dict[int, Digest] = {}

    @classmethod
    def copy_of(cls, layout: Layout, state: State) -> "Replica":
        """A replica with its own bytes, equal to ``state``."""
        return cls(layout, snapshot(state))

    @classmethod
    def empty(cls, layout: Layout) -> "Replica":
        """A replica of zeros, to be filled from full frames."""
        return cls(layout, layout.empty_state())

    def laid_out(self, layout: Layout) -> "Replica":
        """The same bytes, cut otherwise. Raises ``ValueError`` for a layout of other tensors."""
        if layout.specs != self.layout.specs:
            raise ValueError(_difference(self.layout, layout))
        return self if layout == self.layout else Replica(layout, self.tensors)

    # --- One chunk ---

    def numbers(self, chunk: Chunk) -> list[Numbers]:
        """Views of a chunk's numbers, segment by segment."""
        return chunk.numbers(self.tensors)

    def digest(self, chunk: Chunk) -> Digest:
        """The digest of a chunk's contents, computed when it is not known."""
        digest = self._digests.get(chunk.index)
        if digest is None:
            digest = self._digests[chunk.index] = chunk.digest(self.numbers(chunk))
        return digest

    def full(self, chunk: Chunk) -> bytes:
        """A frame that holds all of a chunk, whatever the reader has."""
        return encode_full(self.numbers(chunk), chunk.element, after=self.digest(chunk))

    def advance(self, chunk: Chunk, target: State, codec: Codec) -> Move | None:
        """Make a chunk equal to ``target``'s and return how; ``None`` when it is already.

        ``codec`` is for sparse changes, where it can encode the type; a chunk that changed in most places is written
        densely.
        """
        own, new = self.numbers(chunk), chunk.numbers(target)
        changes = scan(own, new, chunk.element)
        if not len(changes):
            return None
        is_dense = len(changes) > DENSE_SHARE * chunk.count
        chosen = DENSE if is_dense else codec if codec.supports(chunk.element) else GAPS
        before = self.digest(chunk)
        changed, streams = chosen.encode(own, new, chunk.element, changes)
        encoded = list(streams)  # before the chunk moves: a codec may look at the old contents
        if is_dense:
            after = chunk.digest(new)
            for mine, theirs in zip(own, new, strict=True):
                np.copyto(mine, theirs)
        else:
            after = before + chunk.move(changes, own, take=True)
        frame = pack(chosen, chunk.element, (chunk.count, changed), (before, after), encoded)
        self._digests[chunk.index] = after
        return Move(chunk=chunk, frame=frame, changed=len(changes), changes=None if is_dense else changes)

    def undo(self, move: Move) -> None:
        """Take back the last :meth:`advance` of a chunk."""
        own = self.numbers(move.chunk)
        if move.changes is None:
            apply(parse(invert(parse(move.frame))), own)
        else:
            back = Changes(positions=move.changes.positions, steps=-move.changes.steps)
            apply_changes(back, own, move.chunk.element)
        self._digests[move.chunk.index] = parse(move.frame).before

    def apply(self, chunk: Chunk, frame: Frame) -> Touched:
        """Bring a chunk to where ``frame`` leads and return the places that may have changed.

        Idempotent: a chunk that is there already stays, and all its places are named. Raises
        :class:`~etude.errors.DamagedError` when the chunk holds neither what the frame starts from nor what it leads
        to, or when the result is not what was promised.
        """
        if (frame.elements, frame.element.size_bytes) != (chunk.count, chunk.element.size_bytes):
            raise DamagedError(
                f"a frame of {frame.elements} numbers of {frame.element.size_bytes} bytes does not fit chunk "
                f"{chunk.index}, which has {chunk.count} of {chunk.element.size_bytes}"
            )
        own = self.numbers(chunk)
        if frame.codec is not FULL and not self._starts_from(chunk, frame):
            return None
        self._digests.pop(chunk.index, None)  # unknown until proven again
        touched = apply(frame, own)
        digest = chunk.digest(own)
        if digest != frame.after:
            raise DamagedError(
                f"chunk {chunk.index} became {digest.hex()} where its frame promised {frame.after.hex()}"
            )
        self._digests[chunk.index] = digest
        return touched

    def _starts_from(self, chunk: Chunk, frame: Frame) -> bool:
        """True if the frame applies here; false when it has been applied already."""
        digest = self.digest(chunk)
        if digest not in (frame.before, frame.after):
            self._digests.pop(chunk.index)  # perhaps what is remembered is wrong: look again
            digest = self.digest(chunk)
        if digest == frame.before:
            return True
        if digest == frame.after:
            return False
        raise DamagedError(
            f"chunk {chunk.index} holds {digest.hex()}; its frame leads from {frame.before.hex()} to "
            f"{frame.after.hex()}"
        )

    # --- All chunks ---

    def state_digest(self) -> str:
        """The digest of the whole state, in hex, from the digests of its chunks."""
        return sum(map(self.digest, self.layout.chunks), layout_digest(self.layout.specs)).hex()

    def follow(self, record: WeightVersion, packs: Iterable[bytes], appliers: Executor, changes: ChangedPlaces) -> None:
        """Apply the packs of a link that leads to ``record``, in place, and prove that the state is the record's.

        Raises :class:`~etude.errors.DamagedError` when a frame does not fit or the result is another; the replica is
        then of no version and must be given up.
        """
        chunks = self.layout.chunks
        places = [(chunks[index], frame) for data in packs for index, frame in read_pack(data) if index < len(chunks)]
        if len({chunk.index for chunk, _ in places}) < len(places):
            raise DamagedError(f"a link to weight version {record.version} changes a chunk twice")
        jobs = [appliers.submit(self._parse_and_apply, chunk, frame) for chunk, frame in places]
        wait(jobs)
        for (chunk, _), job in zip(places, jobs, strict=True):
            changes.note(chunk.index, job.result())
        if (digest := self.state_digest()) != record.digest:
            raise DamagedError(
                f"weight version {record.version} gives the state {digest[:12]}, its commit record says "
                f"{record.digest[:12]}; run `etude weights verify`"
            )

    def _parse_and_apply(self, chunk: Chunk, frame: memoryview) -> Touched:
        return self.apply(chunk, parse(frame))

    def scrub(self) -> list[Chunk]:
        """Read everything again and name the chunks that are not what they should be (bit rot, a stray writer)."""
        digests = dict(self._digests)
        chunks = (self.layout.chunks[index] for index in sorted(digests))
        return [chunk for chunk in chunks if chunk.digest(self.numbers(chunk)) != digests[chunk.index]]

    def changed(self, changes: ChangedPlaces) -> dict[str, list[ChangedNumbers]]:
        """The numbers at the places that ``changes`` names, by tensor; a tensor may come in several runs.

        Everything when everything may have changed.
        """
        numbers_by_tensor: dict[str, list[ChangedNumbers]] = {}
        places = ((chunk.index, None) for chunk in self.layout.chunks) if changes.whole else changes.places()
        for index, touched in places:
            chunk = self.layout.chunks[index]
            positions = np.arange(chunk.count, dtype=np.uint32) if touched is None else touched
            for numbers, (segment, local) in zip(self.numbers(chunk), chunk.local(positions), strict=True):
                if len(local):
                    run = ChangedNumbers(indices=(local + segment.start).astype(np.uint64), bits=numbers[local])
                    numbers_by_tensor.setdefault(segment.spec.name, []).append(run)
        return numbers_by_tensor

    def changed_share(self, changes: ChangedPlaces) -> float:
        """The share of all numbers at the places that ``changes`` names."""
        if changes.whole:
            return 1.0
        chunks = self.layout.chunks
        changed = sum(chunks[index].count if at is None else len(at) for index, at in changes.places())
        return changed / max(1, sum(chunk.count for chunk in chunks))


def _difference(before: Layout, after: Layout) -> str:
    old, new = ({spec.name: spec for spec in layout.specs} for layout in (before, after))
    name = min(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return (
        f"{name!r} differs from the version before in more than bytes: {old.get(name)} became {new.get(name)}; "
        f"publish another model to another store"
    )
