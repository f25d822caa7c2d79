"""One rank's resident weights, kept equal to the log chunk by chunk.

Publisher and receiver hold the same thing: bytes in a layout, and for every chunk the digest of its contents. The
publisher moves a chunk on by comparing it with the trainer's weights, the receiver by applying what came of that.
A chunk's digest is what makes this safe: a frame is applied only to the contents it was made from, applying it again is
a no-op, one that was torn in between is recognised. This file owns that rule and knows nothing of versions or stores.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from etude.errors import DamagedError
from etude.weights.chunks import Chunk, Layout, Positions
from etude.weights.digest import Digest
from etude.weights.frames import (
    Changes,
    Codec,
    Frame,
    apply,
    apply_changes,
    encode,
    encode_changes,
    encode_full,
    invert,
    parse,
    scan,
)
from etude.weights.state import Numbers, State, snapshot

DENSE_SHARE = 0.3
"""From this share of changed numbers on, positions cost more than they save: every step is stored."""

Touched: TypeAlias = Positions | None
"""Which places of a chunk may have changed; ``None`` for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Move:
    """A chunk's way from what a share held to what it holds now, and back."""

    chunk: Chunk
    frame: bytes
    changed: int
    """Numbers that differ."""
    changes: Changes | None
    """What the frame says, for taking it back; ``None`` when the frame itself can be inverted."""


@final
class Share:
    """The weights of one rank; one thread at a time may work on one chunk.

    ``wanted`` restricts a receiver to some chunks; the others are neither held nor counted.
    """

    def __init__(self, layout: Layout, tensors: State, wanted: Iterable[int] | None = None) -> None:
        self.layout = layout
        self.tensors = tensors
        self.wanted = frozenset(range(len(layout.chunks)) if wanted is None else wanted)
        self._digests: dict[int, Digest] = {}

    @classmethod
    def copy_of(cls, layout: Layout, state: State) -> "Share":
        """A share with its own bytes, equal to ``state``."""
        return cls(layout, snapshot(state))

    @classmethod
    def empty(cls, layout: Layout, wanted: Iterable[int] | None = None) -> "Share":
        """A share of zeros, to be filled from full frames."""
        if wanted is None:
            return cls(layout, layout.empty_share())
        chosen = frozenset(wanted)
        return cls(layout, layout.empty_share([layout.chunks[index] for index in chosen]), chosen)

    def numbers(self, chunk: Chunk) -> list[Numbers]:
        """Views of a chunk's numbers, piece by piece."""
        return chunk.numbers(self.tensors)

    def digest(self, chunk: Chunk) -> Digest:
        """The digest of a chunk's contents, computed when it is not known."""
        known = self._digests.get(chunk.index)
        if known is None:
            known = self._digests[chunk.index] = chunk.digest(self.numbers(chunk))
        return known

    def content(self) -> Digest:
        """What all its chunks add to the state digest."""
        return sum((self.digest(self.layout.chunks[index]) for index in self.wanted), Digest.ZERO)

    def scrub(self) -> list[int]:
        """Read everything again and name the chunks that are not what they should be (bit rot, a stray writer)."""
        known = dict(self._digests)
        return [
            index
            for index in sorted(known)
            if self.layout.chunks[index].digest(self.numbers(self.layout.chunks[index])) != known[index]
        ]

    def full(self, chunk: Chunk) -> bytes:
        """A frame that holds all of a chunk, whatever the reader has."""
        return encode_full(self.numbers(chunk), chunk.element, after=self.digest(chunk))

    def advance(self, chunk: Chunk, target: State, codec: Codec) -> Move | None:
        """Make a chunk equal to ``target``'s and return how; ``None`` when it is already.

        ``codec`` is what sparse changes are written in; a chunk that changed in most places is written densely.
        """
        held, new = self.numbers(chunk), chunk.numbers(target)
        changes = scan(held, new, chunk.element)
        if not len(changes):
            return None
        before = self.digest(chunk)
        if len(changes) > DENSE_SHARE * chunk.count:
            after = chunk.digest(new)
            frame = encode(Codec.DENSE, held, new, chunk.element, before=before, after=after, changes=changes)
            for mine, theirs in zip(held, new, strict=True):
                np.copyto(mine, theirs)
            move = Move(chunk=chunk, frame=frame, changed=len(changes), changes=None)
        elif codec is Codec.CLASSES and chunk.element.exponent_bits:
            after = before + chunk.move(changes, held, take=False)
            frame = encode(codec, held, new, chunk.element, before=before, after=after, changes=changes)
            apply_changes(changes, held, chunk.element)
            move = Move(chunk=chunk, frame=frame, changed=len(changes), changes=changes)
        else:
            after = before + chunk.move(changes, held, take=True)
            frame = encode_changes(changes, chunk.element, chunk.count, before=before, after=after)
            move = Move(chunk=chunk, frame=frame, changed=len(changes), changes=changes)
        self._digests[chunk.index] = after
        return move

    def undo(self, move: Move) -> None:
        """Take back the last :meth:`advance` of a chunk."""
        held = self.numbers(move.chunk)
        if move.changes is None:
            apply(parse(invert(parse(move.frame))), held)
        else:
            back = Changes(positions=move.changes.positions, steps=-move.changes.steps)
            apply_changes(back, held, move.chunk.element)
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
        held = self.numbers(chunk)
        if frame.codec is not Codec.FULL and not self._starts_from(chunk, frame):
            return None
        self._digests.pop(chunk.index, None)  # unknown until proven again
        touched = apply(frame, held)
        found = chunk.digest(held)
        if found != frame.after:
            raise DamagedError(f"chunk {chunk.index} became {found.hex()} where its frame promised {frame.after.hex()}")
        self._digests[chunk.index] = found
        return touched

    def _starts_from(self, chunk: Chunk, frame: Frame) -> bool:
        """Whether the frame applies here; false when it has been applied already."""
        found = self.digest(chunk)
        if found not in (frame.before, frame.after):
            self._digests.pop(chunk.index)  # perhaps what is known is wrong: look again
            found = self.digest(chunk)
        if found == frame.before:
            return True
        if found == frame.after:
            return False
        raise DamagedError(
            f"chunk {chunk.index} holds {found.hex()}; its frame leads from {frame.before.hex()} to {frame.after.hex()}"
        )
