"""Mixture of corpora: sources by token shares, which are exact and may change during a phase.

Owns the choice of sources, the cursor and the batches. The sources own the contents of documents. Pure: the next batch
is a function of the sources, the shares and the cursor, so a phase that resumes from a saved cursor reads the same
documents.

    shares, tokens read so far ──next_source──▶ source ──its next document──▶ batch, until it has its tokens
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from etude.types import Document, Split

FEISTEL_ROUNDS = 4
"""Rounds of the permutation: enough for a pseudo-random order (M. Luby and C. Rackoff, 1988)."""


class Source(Protocol):
    """A numbered source of documents: the same number is always the same document."""

    @property
    def identity(self) -> str:
        """Identity of its documents, as text or a digest: a cursor is valid for one identity only."""
        ...

    @property
    def size(self) -> int | None:
        """Number of different documents; ``None`` if unlimited."""
        ...

    def document(self, index: int) -> Document:
        """Document number ``index``, from 0 without limit; a source with a ``size`` repeats all in another order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Selection of a source's documents: side of the held-out split, and seed."""

    split: Split = Split.TRAIN
    seed: int
    one_in: int
    """Holdout ratio: one file or conversation in this many is held out."""

    def has(self, content: bytes) -> bool:
        """True if the hash of ``content`` is on this side; independent of the seed."""
        is_heldout = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % self.one_in == 0
        return is_heldout == (self.split is Split.HELDOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Read position in one source."""

    documents: int = 0
    """Number of documents read, and index of the next one."""
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Read position of a phase in its data: its whole saved state."""

    taken: Mapping[str, Taken] = field(default_factory=dict)
    """Position by source; a missing source has not been read."""

    @property
    def tokens(self) -> int:
        """Tokens read from all sources."""
        return sum(taken.tokens for taken in self.taken.values())

    def of(self, name: str) -> Taken:
        """The position in a source."""
        return self.taken.get(name, Taken())

    def after(self, name: str, document: Document) -> "Cursor":
        """The cursor after reading a document of a source."""
        before = self.of(name)
        taken = Taken(documents=before.documents + 1, tokens=before.tokens + len(document.token_ids))
        return Cursor(taken={**self.taken, name: taken})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The shares of sources in the tokens of a phase, each linear in the tokens read so far.

    The next document comes from the source that is furthest behind its share. So no source is ever ahead of its share
    by more than its own last document, nor behind by more than the others' last documents: the differences add up to 0.
    With random draws the error of a share would grow as the square root of the tokens read.
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
        """Tokens of a source among the first ``read``: the integral of its share, which is constant after the end."""
        first, last = self.shares[name]
        inside = min(read, self.tokens)
        ramp = (last - first) * inside * inside / (2 * self.tokens) if self.tokens else 0.0
        return first * inside + ramp + last * (read - inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStream:
    """Batches of documents of a mixture, or one reader's part of each.

    Each of n readers has every n-th document of a source, and the same number of tokens. No reader reads the documents
    of another.
    """

    mixture: Mixture
    sources: Mapping[str, Source]
    """Source by name, at least those of the mixture."""
    reader: int = 0
    readers: int = 1

    @property
    def identity(self) -> str:
        """The identity of the batches of all readers, without their token budgets."""
        sources = {name: self.sources[name].identity for name in sorted(self.mixture.shares)}
        readers = f" for {self.readers} readers" if self.readers > 1 else ""
        return f"{self.mixture.tokens} tokens of {dict(self.mixture.shares)}{readers}: {sources}"

    def batch(self, cursor: Cursor, until: int) -> tuple[list[Document], Cursor]:
        """The documents that follow ``cursor``, and the cursor after them.

        The batch ends with the document that completes this reader's part of ``until`` tokens, counted over all
        batches. So no batch is off by more than a document, and errors do not add up. It is empty if the last document
        of an earlier batch already covered this one.
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
    """The first ``count`` different documents of a held-out source, or all if it has fewer."""
    available = count if source.size is None else min(count, source.size)
    return [source.document(index) for index in range(available)]


def shuffled(stem: str, index: int, size: int) -> int:
    """Element ``index`` of an endless sequence whose epochs of ``size`` each hold 0 … ``size`` − 1 in another order.

    A Feistel network over the next power of four, repeated until its value is below ``size`` (J. Black and P. Rogaway,
    "Ciphers with arbitrary finite domains", 2002): every index costs the same, and no state is stored.
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
