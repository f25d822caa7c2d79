"""Mixture of corpora: sources by shares, which may change along the way and are held exactly.

Owns the draw, the cursor and the cutting into batches. What a document says is its source's business. Pure: the next
batch is a function of the sources, the shares and the cursor, so a phase that goes on from a saved cursor reads what it
would have read.

    shares, tokens read so far ──next_source──▶ source ──its next document──▶ batch, until it has its tokens
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from etude.types import Document, Split

FEISTEL_ROUNDS = 4
"""Enough for an order that looks like chance (M. Luby and C. Rackoff, 1988)."""


class Source(Protocol):
    """A numbered source of documents: the same number is always the same document."""

    @property
    def identity(self) -> str:
        """Identity of its documents, in words or as a digest: a cursor means nothing for another identity."""
        ...

    @property
    def size(self) -> int | None:
        """The number of different documents it has; ``None`` if it makes new ones without end."""
        ...

    def document(self, index: int) -> Document:
        """Document 0, 1, … without end; one with a ``size`` has them all again, in another order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Selection of a source's documents: side of the held-out split, and seed."""

    split: Split = Split.TRAIN
    seed: int
    one_in: int
    """Holdout ratio: one file or conversation in this many is held out."""

    def has(self, content: bytes) -> bool:
        """Return true if something is on this side by its hash: the same in every run, whatever its seed."""
        is_heldout = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % self.one_in == 0
        return is_heldout == (self.split is Split.HELDOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Read position in one source."""

    documents: int = 0
    """Also the number of the next one."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Read position of a phase in its data: the whole state to save."""

    taken: Mapping[str, Taken] = field(default_factory=dict)
    """By source; one that is not there has not been read."""

    @property
    def tokens(self) -> int:
        """Tokens of all sources."""
        return sum(taken.tokens for taken in self.taken.values())

    def of(self, name: str) -> Taken:
        """The position in a source."""
        return self.taken.get(name, Taken())

    def after(self, name: str, document: Document) -> "Cursor":
        """The cursor once a document of a source has been read."""
        before = self.of(name)
        taken = Taken(documents=before.documents + 1, tokens=before.tokens + len(document.token_ids))
        return Cursor(taken={**self.taken, name: taken})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The shares of sources in the tokens of a phase, each linear in the tokens read so far.

    The next document comes from the source that lags most behind its share of the next token. So no source is ever
    more than its own last document ahead of its share, and none is more than the others' last documents behind: the
    lags add up to 0. Drawn at random, shares would be off by the square root of what was read.
    """

    shares: Mapping[str, tuple[float, float]]
    """Source → its first and its last share; both columns add up to 1."""
    tokens: int
    """Tokens of the whole phase."""

    def next_source(self, cursor: Cursor) -> str:
        """The source of the next document."""
        read = cursor.tokens + 1
        return max(self.shares, key=lambda name: self.due(name, read) - cursor.of(name).tokens)

    def due(self, name: str, read: int) -> float:
        """The number of of the first ``read`` tokens are a source's: the integral of its share. Beyond the end it
        stays.
        """
        first, last = self.shares[name]
        inside = min(read, self.tokens)
        ramp = (last - first) * inside * inside / (2 * self.tokens) if self.tokens else 0.0
        return first * inside + ramp + last * (read - inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStream:
    """Batches of documents of a mixture, or one reader's part of each.

    Of several readers each has every so-manieth document of a source, and as many of the tokens as any other. No reader
    looks at the documents of another.
    """

    mixture: Mixture
    sources: Mapping[str, Source]
    """At least those of the mixture."""
    reader: int = 0
    readers: int = 1

    @property
    def identity(self) -> str:
        """The identity of the batches of all readers, apart from their budgets."""
        sources = {name: self.sources[name].identity for name in sorted(self.mixture.shares)}
        readers = f" for {self.readers} readers" if self.readers > 1 else ""
        return f"{self.mixture.tokens} tokens of {dict(self.mixture.shares)}{readers}: {sources}"

    def batch(self, cursor: Cursor, until: int) -> tuple[list[Document], Cursor]:
        """The documents that follow ``cursor``, and the cursor after them.

        The last one is that with which this reader's part of ``until`` tokens has been read in all, so no batch is off
        by more than a document and the errors of many do not add up. There is none if that was long enough for this
        batch, too.
        """
        own = replace(self.mixture, tokens=-(-self.mixture.tokens // self.readers))
        batch: list[Document] = []
        while cursor.tokens * self.readers < until:
            name = own.next_source(cursor)
            place = cursor.of(name).documents * self.readers + self.reader
            batch.append(self.sources[name].document(place))
            cursor = cursor.after(name, batch[-1])
        return batch, cursor


def heldout_documents(source: Source, count: int) -> Sequence[Document]:
    """The first ``count`` different documents of the held-out side of a source, or as many as it has."""
    available = count if source.size is None else min(count, source.size)
    return [source.document(index) for index in range(available)]


def shuffled(stem: str, index: int, size: int) -> int:
    """Place ``index`` of an endless sequence in which every run of ``size`` holds 0 … ``size`` − 1 in another order.

    A Feistel network over the next power of four, walked until it lands inside (J. Black and P. Rogaway, "Ciphers with
    arbitrary finite domains", 2002): any place costs the same, and nothing is kept.
    """
    epoch, place = divmod(index, size)
    half = ((size - 1).bit_length() + 1) // 2
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for turn in range(FEISTEL_ROUNDS):
            word = hashlib.blake2b(f"{stem}|{epoch}|{turn}|{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(word, "big") & ((1 << half) - 1)
        place = left << half | right
        if place < size:
            return place
