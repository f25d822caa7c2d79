"""The sampler: requests in, tokens with their log-probabilities and sets out."""

import math

import numpy as np
import pytest
import torch

from etude.engines.native.sampling import Sampler
from etude.errors import DivergedError
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.protocols import SamplingParams
from etude.types import SamplingMask

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, top_p=0.5)
PLAIN = SamplingParams(max_tokens=1)
CUT = SamplingParams(max_tokens=1, temperature=0.5, top_k=2)


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    drawn = Sampler(FastArithmetic()).sample(logits, [GREEDY, PLAIN, CUT], [1, 2, 3], [0, 0, 0])
    assert drawn.token_ids[0] == 2
    assert drawn.logprobs[0] == 0.0
    plain = math.log(math.exp(drawn.token_ids[1]) / sum(math.exp(x) for x in (0, 1, 2)))
    assert math.isclose(drawn.logprobs[1], plain, rel_tol=1e-5)
    cut = math.log(math.exp(2 * drawn.token_ids[2]) / sum(math.exp(2 * x) for x in (1, 2)))
    assert math.isclose(drawn.logprobs[2], cut, rel_tol=1e-5)
    assert [drawn.kept_row(row).tolist() for row in range(3)] == [[], [], [1, 2]]
    assert drawn.token_ids.dtype == np.int32
    assert drawn.logprobs.dtype == np.float32


def test_no_sets_where_nothing_was_cut() -> None:
    drawn = Sampler(FastArithmetic()).sample(torch.randn(2, 50), [GREEDY, PLAIN], [1, 2], [0, 0])
    assert drawn.sampling_mask is None
    assert drawn.kept_row(1).tolist() == []


def test_a_draw_depends_on_seed_and_position_only() -> None:
    sampler = Sampler(FastArithmetic())
    logits = torch.zeros(4, 1_000)
    drawn = sampler.sample(logits, [PLAIN] * 4, [5, 5, 6, -1], [0, 1, 0, 0])
    again = sampler.sample(logits, [PLAIN] * 4, [2**64 - 1, 6, 5, 5], [0, 0, 1, 0])
    assert drawn.token_ids.tolist() == again.token_ids.tolist()[::-1]
    assert len(set(drawn.token_ids.tolist())) == 4


def test_a_row_does_not_know_its_batch_to_the_last_bit() -> None:
    torch.set_num_threads(1)
    sampler = Sampler(InvariantArithmetic())
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 300, generator=generator) * 3
    params = [GREEDY, PLAIN, CUT] * 3
    batched = sampler.sample(logits, params, range(9), range(9))
    for row in range(9):
        alone = sampler.sample(logits[row : row + 1], params[row : row + 1], [row], [row])
        assert alone.token_ids[0] == batched.token_ids[row]
        assert alone.logprobs[0] == batched.logprobs[row]
        assert alone.kept_row(0).tolist() == batched.kept_row(row).tolist()


def test_narrow_logits_are_drawn_from_as_they_are() -> None:
    logits = (torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    sampler = Sampler(FastArithmetic())
    narrow = sampler.sample(logits, [CUT] * 6, range(6), [0] * 6)
    wide = sampler.sample(logits.float(), [CUT] * 6, range(6), [0] * 6)
    assert narrow.token_ids.tolist() == wide.token_ids.tolist()
    assert narrow.logprobs.tolist() == wide.logprobs.tolist()


def test_broken_weights_are_named() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    with pytest.raises(DivergedError, match="row 1 of 3"):
        Sampler(FastArithmetic()).sample(logits, [PLAIN] * 3, [0] * 3, [0] * 3)


def test_sets_of_a_completion_are_joined() -> None:
    rows = [np.array([3, 5], np.int32), np.zeros(0, np.int32), np.array([1], np.int32)]
    mask = SamplingMask.of_rows(rows)
    assert mask.offsets.tolist() == [0, 2, 2, 3]
    assert mask.token_ids.tolist() == [3, 5, 1]
    assert mask.token_ids.dtype == np.int32
    assert len(SamplingMask.of_rows([])) == 0


def test_which_requests_report_sets() -> None:
    assert [one.truncates for one in (GREEDY, PLAIN, CUT)] == [False, False, True]
    assert SamplingParams(max_tokens=1, top_p=0.99).truncates
