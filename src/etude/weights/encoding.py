"""One share, encoded on several threads, in order, and taken back when it came to nothing.

This file owns the work between two versions of a share: which chunks are looked at, by whom, and how to return to the
version before. What is done to one chunk is ``share.py``'s.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from typing import final

from etude.weights.chunks import Chunk
from etude.weights.frames import Codec
from etude.weights.shards import Move, Share
from etude.weights.state import State

WINDOW = 64
"""Chunks of a full version that are encoded ahead of their upload: enough for every thread, little enough to hold."""


@final
class DeltaEncoding:
    """Moves a share to ``target`` and gives out what changed; the share is at the target when the frames are out."""

    def __init__(self, share: Share, target: State, codec: Codec, encoders: Executor) -> None:
        self._share = share
        self._futures: list[Future[Move | None]] = [
            encoders.submit(share.advance, chunk, target, codec) for chunk in share.layout.chunks
        ]

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """The changed chunks, ascending."""
        for future in self._futures:
            move = future.result()
            if move is not None:
                yield move.chunk.index, move.frame

    def changed(self) -> int:
        """How many numbers differ, once all frames are out."""
        return sum(move.changed for move in self._moves())

    def take_back(self) -> None:
        """Bring the share back to where it was, from wherever it is now."""
        wait([future for future in self._futures if not future.cancel()])
        for move in self._moves():
            self._share.undo(move)

    def _moves(self) -> Iterator[Move]:
        for future in self._futures:
            if not future.cancelled() and future.exception() is None:
                move = future.result()
                if move is not None:
                    yield move


def full_frames(share: Share, encoders: Executor) -> Iterator[tuple[int, bytes]]:
    """All chunks of a share, whole, ascending; never more than a window of them is held."""
    chunks = iter(share.layout.chunks)
    ahead: list[tuple[Chunk, Future[bytes]]] = []
    for chunk in chunks:
        ahead.append((chunk, encoders.submit(share.full, chunk)))
        if len(ahead) >= WINDOW:
            first, future = ahead.pop(0)
            yield first.index, future.result()
    for chunk, future in ahead:
        yield chunk.index, future.result()
