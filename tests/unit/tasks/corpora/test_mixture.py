"""A mixture has exactly its shares, and a stream can resume at any place."""

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tasks.corpora.mixture import BatchStream, Cursor, Mixture, Side, Taken, heldout_documents, shuffled
from etude.types import Document, Split


@dataclass(frozen=True)
class Numbered:
    """Documents whose tokens name their source and number."""

    mark: int
    longest: int = 9
    size: int | None = None

    @property
    def identity(self) -> str:
        return f"numbered {self.mark}"

    def document(self, index: int) -> Document:
        length = Random(f"{self.mark}|{index}").randint(1, self.longest)
        return Document(
            token_ids=np.full(length, self.mark * 1_000 + index, np.int32), weights=np.ones(length, np.float32)
        )


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    names = "abcd"[: draw(st.integers(1, 4))]
    columns = []
    for _ in range(2):
        parts = [draw(st.integers(1, 20)) for _ in names]
        columns.append([part / sum(parts) for part in parts])
    shares = dict(zip(names, zip(*columns, strict=True), strict=True))
    return Mixture(shares=shares, tokens=draw(st.integers(1, 2_000)))


def stream_of(mixture: Mixture) -> BatchStream:
    return BatchStream(mixture=mixture, sources={name: Numbered(mark) for mark, name in enumerate(mixture.shares)})


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures())
def test_every_source_stays_within_a_document_of_its_share(mixture: Mixture) -> None:
    stream, cursor, longest = stream_of(mixture), Cursor(), 9
    while cursor.tokens < mixture.tokens:
        _, cursor = stream.batch(cursor, cursor.tokens + 1)
        for name in mixture.shares:
            lag = mixture.due(name, cursor.tokens) - cursor.of(name).tokens
            assert lag >= -longest
            assert lag <= longest * (len(mixture.shares) - 1) + 1e-6


@settings(max_examples=60, deadline=None)
@given(mixture=mixtures(), cuts=st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_how_batches_are_cut_changes_nothing_of_what_is_read(mixture: Mixture, cuts: list[int]) -> None:
    stream = stream_of(mixture)
    whole, end = stream.batch(Cursor(), sum(cuts))
    parts: list[Document] = []
    cursor = Cursor()
    for number in range(len(cuts)):
        until = sum(cuts[: number + 1])
        saved = {name: (taken.documents, taken.tokens) for name, taken in cursor.taken.items()}
        restored = Cursor(taken={name: Taken(documents=d, tokens=t) for name, (d, t) in saved.items()})
        documents, cursor = stream_of(mixture).batch(restored, until)
        parts += documents
    assert [document.token_ids.tolist() for document in parts] == [document.token_ids.tolist() for document in whole]
    assert cursor == end


def test_shares_change_linearly_along_the_way() -> None:
    mixture = Mixture(shares={"early": (1.0, 0.0), "late": (0.0, 1.0)}, tokens=10_000)
    assert mixture.due("early", 10_000) == pytest.approx(5_000)
    assert mixture.due("early", 5_000) == pytest.approx(3_750)
    _, half = stream_of(mixture).batch(Cursor(), 5_000)
    assert half.of("early").tokens == pytest.approx(3_750, abs=10)
    _, end = stream_of(mixture).batch(half, 10_000)
    assert end.of("early").tokens == pytest.approx(5_000, abs=10)


def test_a_batch_ends_with_the_document_that_reaches_its_end() -> None:
    stream = stream_of(Mixture(shares={"only": (1.0, 1.0)}, tokens=100))
    documents, cursor = stream.batch(Cursor(), 50)
    assert 50 <= cursor.tokens < 50 + len(documents[-1].token_ids)
    assert stream.batch(cursor, 10) == ([], cursor), "what was too long for one batch is taken off the next"


def test_a_finite_source_is_measured_on_once() -> None:
    assert len(heldout_documents(Numbered(1, size=3), 64)) == 3
    assert len(heldout_documents(Numbered(1), 64)) == 64


@given(size=st.integers(1, 300), epoch=st.integers(0, 5))
def test_every_epoch_has_everything_once(size: int, epoch: int) -> None:
    order = [shuffled("stem", epoch * size + place, size) for place in range(size)]
    assert sorted(order) == list(range(size))


def test_epochs_differ_and_are_out_of_order() -> None:
    one, other = ([shuffled("stem", epoch * 1_000 + place, 1_000) for place in range(1_000)] for epoch in range(2))
    assert one != other
    assert 400 < sum(a < b for a, b in pairwise(one)) < 600


def test_the_sides_share_nothing_and_are_the_same_in_every_run() -> None:
    contents = [str(number).encode() for number in range(4_000)]
    train = {content for content in contents if Side(seed=1, one_in=20).has(content)}
    heldout = {content for content in contents if Side(split=Split.HELDOUT, seed=2, one_in=20).has(content)}
    assert train | heldout == set(contents)
    assert not train & heldout
    assert 140 < len(heldout) < 260


def test_several_readers_read_each_document_once_and_as_many_tokens_each() -> None:
    mixture = Mixture(shares={"a": (0.25, 0.25), "b": (0.75, 0.75)}, tokens=3_000)
    readers = [replace(stream_of(mixture), reader=reader, readers=3) for reader in range(3)]
    parts = [reader.batch(Cursor(), 3_000) for reader in readers]
    read = [int(document.token_ids[0]) for documents, _ in parts for document in documents]
    assert len(read) == len(set(read))
    for _, cursor in parts:
        assert cursor.tokens == pytest.approx(1_000, abs=9)
        assert cursor.of("a").tokens == pytest.approx(250, abs=18)
    assert {reader.identity for reader in readers} != {stream_of(mixture).identity}
