"""What mid-training reads: the standard library, clean domain code and imperfect transcripts.

Yields batches of documents of about ``batch_tokens`` padded tokens, grouped by length so that little is padding. Every
stream is endless and decided by the seed. Code and transcripts are a family's: its :class:`Practice`, which draws from
the training side only, so nothing held out can occur.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np

from etude.config import MidtrainConfig
from etude.environments.transcripts import Message
from etude.tokens.chat import ChatTemplate
from etude.types import Document

WINDOW_TOKENS = 256
"""Length of a standard-library document."""
CODE_TOKENS = 170
"""A document of domain code holds functions until it has this many tokens."""
STDLIB_FILES, STDLIB_CHARACTERS = 60, 30_000
"""How many modules of the standard library are read, and how much of each."""
POOL_BATCHES = 8
"""Batches worth of documents that are sorted by length together."""


class Practice(Protocol):
    """What a family has to learn from, of its training side."""

    def code(self, rng: Random) -> str:
        """A piece of right code, plain or as an agent reads it."""
        ...

    def session(self, rng: Random) -> Sequence[Message]:
        """A session of an imperfect agent on a training task."""
        ...


class Corpus:
    """The mid-training mixture of one recipe."""

    def __init__(self, practice: Practice, chat: ChatTemplate, midtrain: MidtrainConfig) -> None:
        self._practice = practice
        self._chat = chat
        self._midtrain = midtrain

    def batches(self, seed: int) -> Iterator[list[Document]]:
        """An endless stream of batches; each holds documents of one kind."""
        rng = Random(f"corpus|{seed}")
        shares = self._midtrain.stdlib_share, self._midtrain.code_share
        weights = (*shares, 1.0 - sum(shares))
        makers = (self._stdlib(), self._code(), self._session)
        streams = [self._by_length(maker, Random(rng.random())) for maker in makers]
        while True:
            yield next(rng.choices(streams, weights)[0])

    def _by_length(self, make: Callable[[Random], Document], rng: Random) -> Iterator[list[Document]]:
        budget = self._midtrain.batch_tokens
        while True:
            pool: list[Document] = []
            while sum(len(document.token_ids) for document in pool) < POOL_BATCHES * budget:
                pool.append(make(rng))
            batches = list(_cut(sorted(pool, key=lambda document: len(document.token_ids)), budget))
            rng.shuffle(batches)
            yield from batches

    def _stdlib(self) -> Callable[[Random], Document]:
        ids = np.array(
            [i for text in stdlib_texts() for i in (self._chat.document_id, *self._chat.encode(text))], np.int32
        )

        def make(rng: Random) -> Document:
            start = rng.randrange(len(ids) - WINDOW_TOKENS)
            return _whole(ids[start : start + WINDOW_TOKENS])

        return make

    def _code(self) -> Callable[[Random], Document]:
        def make(rng: Random) -> Document:
            ids = [self._chat.document_id]
            while len(ids) < CODE_TOKENS:
                ids += [*self._chat.encode(self._practice.code(rng)), self._chat.end_id]
            return _whole(ids)

        return make

    def _session(self, rng: Random) -> Document:
        ids: list[int] = []
        weights: list[float] = []
        for message in self._practice.session(rng):
            rendered = self._chat.render_message(message.role, message.content)
            own = message.role == "assistant"
            ids += rendered
            weights += [self._midtrain.context_weight] + [1.0 if own else self._midtrain.context_weight] * (
                len(rendered) - 1
            )
        return Document(token_ids=np.array(ids, np.int32), weights=np.array(weights, np.float32))


def tokenizer_texts(practice: Practice, seed: int) -> Iterator[str]:
    """Text to learn a tokenizer from: the same sources, never anything held out."""
    rng = Random(f"tokenizer|{seed}")
    for _ in range(1500):
        yield from (message.content for message in practice.session(rng))
    yield from (text[:8000] for text in stdlib_texts()[::4])


def stdlib_texts() -> list[str]:
    """The beginnings of standard-library modules, in order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))[:STDLIB_FILES]
    return [file.read_text(encoding="utf-8", errors="replace")[:STDLIB_CHARACTERS] for file in files]


def _whole(ids: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]) -> Document:
    return Document(token_ids=np.asarray(ids, np.int32), weights=np.ones(len(ids), np.float32))


def _cut(documents: list[Document], budget: int) -> Iterator[list[Document]]:
    """Runs of documents, ascending in length, whose padded size fits the budget."""
    batch: list[Document] = []
    for document in documents:
        if batch and (len(batch) + 1) * len(document.token_ids) > budget:
            yield batch
            batch = []
        batch.append(document)
    yield batch
