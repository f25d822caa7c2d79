"""Packed sequences: where they lie, and attention inside each of them, in both arithmetics."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.models.arithmetic import Arithmetic, AttentionRule, packed_rows
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic

CPU = torch.device("cpu")
SCALE = 0.3


SHAPES = (4, 8), (2, 8), (2, 5)
"""Heads and widths of queries, keys and values."""


def plain_attention(q_NQD: Tensor, k_NKD: Tensor, v_NKW: Tensor, lengths: list[int]) -> Tensor:
    """Token by token, written down."""
    share, out = q_NQD.shape[1] // k_NKD.shape[1], []
    for token, first in enumerate(start for start, length in starts(lengths) for _ in range(length)):
        for head in range(q_NQD.shape[1]):
            keys_XD, values_XW = (x[first : token + 1, head // share] for x in (k_NKD, v_NKW))
            out.append((SCALE * keys_XD @ q_NQD[token, head]).softmax(0) @ values_XW)
    return torch.stack(out).view(*q_NQD.shape[:2], -1)


def starts(lengths: list[int]) -> list[tuple[int, int]]:
    """(first row, length) of each sequence."""
    return [(sum(lengths[:index]), length) for index, length in enumerate(lengths)]


def make(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LENGTHS = st.lists(st.sampled_from([1, 2, 5, 15, 16, 17]), min_size=1, max_size=5)


@settings(deadline=None, max_examples=12)
@given(LENGTHS, st.sampled_from([FastArithmetic(), InvariantArithmetic()]))
def test_attention_stays_inside_its_sequence_backwards_too(lengths: list[int], arithmetic: Arithmetic) -> None:
    tokens, rows = sum(lengths), packed_rows(lengths, CPU)
    q, k, v = (make(tokens, *shape, seed=seed).requires_grad_() for seed, shape in enumerate(SHAPES))
    outputs = arithmetic.attend_packed(q, k, v, rows, AttentionRule(scale=SCALE)), plain_attention(q, k, v, lengths)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    weights = make(*outputs[0].shape, seed=9)
    ours, plain = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in outputs)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_positions_begin_anew_with_every_sequence(lengths: list[int]) -> None:
    rows = packed_rows(lengths, CPU)
    assert rows.positions_N.tolist() == [position for length in lengths for position in range(length)]
    assert [end - start for start, end in pairwise(rows.starts_B1.tolist())] == lengths
    assert (rows.starts_B1.dtype, rows.positions_N.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_what_has_no_token_has_no_place(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        packed_rows(lengths, CPU)
