"""Division of a split sequence's tokens among ranks, and the attention of its last tokens."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.models.arithmetic import AttentionRule, packed_rows
from etude.models.fast import FastArithmetic
from etude.trainer.parallel_context import attend_tail, zigzag

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(lengths, st.integers(1, 5))
def test_every_token_is_one_ranks_and_sees_its_own_sequence(lengths: list[int], ranks: int) -> None:
    shares = zigzag(lengths, ranks)
    starts = list(itertools.accumulate(lengths, initial=0))
    owned = [token for share in shares for chunk in share for token in range(chunk.start, chunk.end)]
    assert sorted(owned) == list(range(sum(lengths)))
    for share in shares:
        assert [chunk.start for chunk in share] == sorted(chunk.start for chunk in share)
        for chunk in share:
            assert chunk.sequence == max(start for start in starts if start <= chunk.start)
            assert chunk.end <= starts[starts.index(chunk.sequence) + 1]


@given(lengths, st.integers(1, 5))
def test_ranks_have_nearly_equal_work(lengths: list[int], ranks: int) -> None:
    tokens = [sum(map(len, share)) for share in zigzag(lengths, ranks)]
    assert max(tokens) - min(tokens) <= 2 * len(lengths)
    pairs = [
        sum(token - chunk.sequence + 1 for chunk in share for token in range(chunk.start, chunk.end))
        for share in zigzag(lengths, ranks)
    ]
    # Pairs of chunks have equal numbers of pairs but for a token's worth in each of the sequences.
    assert max(pairs) - min(pairs) <= 2 * sum(lengths) + len(lengths)


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 16), (4, 1, 24)])
@pytest.mark.parametrize("rule", [AttentionRule(scale=0.2), AttentionRule(scale=0.2, window=4, sinks_Q=torch.ones(4))])
def test_the_tail_of_a_sequence_attends_as_it_does_in_the_whole(
    heads: int, key_heads: int, width: int, rule: AttentionRule
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(13, h, 24, generator=generator) for h in (heads, key_heads))
    v = k[..., :width]
    whole = FastArithmetic().attend_packed(q, k, v, packed_rows([13], q.device), rule)
    for count in (1, 5, 13):
        assert torch.allclose(attend_tail(q[-count:], k, v, rule), whole[-count:], atol=1e-6)
