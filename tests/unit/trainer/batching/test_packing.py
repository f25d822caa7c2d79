"""Division of a batch: nothing lost or duplicated, no pass too large, and similar work for all ranks."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trainer.batching.packing import Cost, MicroBatch, pack

LINEAR, ATTENTIVE = Cost(per_token=1.0, per_pair=0.0), Cost(per_token=1.0, per_pair=0.1)
LENGTHS = st.lists(st.integers(1, 50), max_size=40)
COSTS = st.sampled_from([LINEAR, ATTENTIVE, Cost(per_token=0.01, per_pair=1.0)])


def lengths_of(lengths: list[int], max_tokens: int, ranks: int = 1, cost: Cost = LINEAR) -> list[list[list[int]]]:
    packed = pack(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)
    return [[[lengths[index] for index in chunk] for chunk in share] for share in packed]


def total(share: list[MicroBatch], lengths: list[int], cost: Cost) -> float:
    return sum(cost.of(lengths[index]) for chunk in share for index in chunk)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(1, 5), COSTS)
def test_every_sequence_is_in_one_chunk_and_no_chunk_is_too_large(
    lengths: list[int], max_tokens: int, ranks: int, cost: Cost
) -> None:
    packed = pack(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)
    assert sorted(i for share in packed for chunk in share for i in chunk) == list(range(len(lengths)))
    assert len(packed) == ranks
    assert len({len(share) for share in packed}) == 1
    for share in packed:
        for chunk in share:
            assert sum(lengths[index] for index in chunk) <= max_tokens or len(chunk) == 1
            assert [lengths[index] for index in chunk] == sorted((lengths[index] for index in chunk), reverse=True)
        dear = [sum(cost.of(lengths[index]) for index in chunk) for chunk in share]
        assert dear == sorted(dear, reverse=True)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(1, 5), COSTS)
def test_there_are_no_more_passes_than_needed(lengths: list[int], max_tokens: int, ranks: int, cost: Cost) -> None:
    packed = pack(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)
    assert all(any(passes) for passes in zip(*packed, strict=True))
    most = 2 * sum(lengths) / max_tokens + 1  # any two pieces of first fit are more than a full one
    assert len(packed[0]) <= math.ceil(most / ranks)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(1, 5), COSTS)
def test_passes_are_of_like_cost_and_so_are_ranks(lengths: list[int], max_tokens: int, ranks: int, cost: Cost) -> None:
    packed = pack(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)
    passes = [[total([chunk], lengths, cost) for chunk in chunks] for chunks in zip(*packed, strict=True)]
    for dear, cheap in pairwise(passes):
        assert min(dear) >= max(cheap)
    totals = [total(share, lengths, cost) for share in packed]
    dearest = max((max(prices) for prices in passes), default=0.0)
    assert max(totals) - min(totals) <= dearest * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3), COSTS)
def test_in_one_pass_the_dearest_rank_is_within_the_bound(lengths: list[int], ranks: int, cost: Cost) -> None:
    packed = pack(lengths, max_tokens=sum(lengths), ranks=ranks, cost=cost)
    assert len(packed[0]) == 1
    dearest = max(total(share, lengths, cost) for share in packed)
    prices = [cost.of(length) for length in lengths]
    best = min(
        max(sum(price for price, other in zip(prices, division, strict=True) if other == rank) for rank in range(ranks))
        for division in product(range(ranks), repeat=len(lengths))
    )
    assert dearest <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-9)


def test_the_worst_case_of_the_bound_is_reached() -> None:
    costs = [sum(map(sum, share)) for share in lengths_of([5, 5, 4, 4, 3, 3, 3], 100, ranks=3)]
    assert sorted(costs) == [8, 8, 11], "Graham's example, in which 9 is possible"


def test_attention_makes_a_long_sequence_dearer_than_as_many_tokens_in_short_ones() -> None:
    lengths = [40, *[10] * 8]
    assert [sum(map(sum, share)) for share in lengths_of(lengths, 200, ranks=2, cost=LINEAR)] == [60, 60]
    assert [sum(map(sum, share)) for share in lengths_of(lengths, 200, ranks=2, cost=ATTENTIVE)] == [80, 40]


def test_passes_that_have_to_be_made_are_made_even() -> None:
    assert lengths_of([6, 5, 4, 3, 2], 12) == [[[6, 3, 2], [5, 4]]]
    assert lengths_of([9, 1, 1], 10) == [[[9], [1, 1]]], "full would be 10 and 1"


def test_where_even_does_not_fit_as_few_as_possible_are_filled() -> None:
    assert lengths_of([6, 4, 4, 3, 3], 10) == [[[6, 4], [4, 3, 3]]]


def test_a_rank_without_work_makes_its_passes_empty() -> None:
    assert lengths_of([30, 20], 10, ranks=3) == [[[30]], [[20]], [[]]]
    assert pack([7], max_tokens=10, ranks=2, cost=LINEAR) == [[(0,)], [()]]


def test_a_sequence_beyond_the_limit_has_a_chunk_of_its_own() -> None:
    assert lengths_of([5, 30, 5], 20) == [[[30], [5, 5]]]


def test_nothing_becomes_nothing() -> None:
    assert pack([], max_tokens=100, ranks=2, cost=LINEAR) == [[], []]


@pytest.mark.parametrize(("lengths", "max_tokens", "ranks"), [([3, 0], 10, 1), ([3], 0, 1), ([3], 10, 0)])
def test_what_is_below_one_is_refused(lengths: list[int], max_tokens: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        pack(lengths, max_tokens=max_tokens, ranks=ranks, cost=LINEAR)


def test_a_price_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="per_token"):
        Cost(per_token=0.0, per_pair=1.0)
