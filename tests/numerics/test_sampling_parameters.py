"""Temperature, top-p and top-k are part of the policy: the loss recomputes the logprobs that the sampler reports.

Shape legend: N tokens, V vocabulary.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.config.training import CapOptions, LossConfig
from etude.engines.native.sampling import Drawn, Sampler
from etude.models.arithmetic import Arithmetic, MaskTensors
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.protocols import SamplingParams
from etude.trainer.losses import LossTokens, Totals, policy_loss
from etude.types import MAX_TEMPERATURE, MIN_TEMPERATURE

TOKENS, VOCABULARY = 64, 500
PARAMS = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9)
ARITHMETICS: tuple[Arithmetic, ...] = (FastArithmetic(), InvariantArithmetic())


def sample(arithmetic: Arithmetic, params: SamplingParams = PARAMS) -> tuple[Tensor, Drawn]:
    torch.set_num_threads(1)
    logits_NV = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    return logits_NV, Sampler(arithmetic).sample(logits_NV, [params] * TOKENS, [1] * TOKENS, range(TOKENS))


def replayed(drawn: Drawn) -> MaskTensors:
    assert drawn.sampling_mask is not None
    ids = torch.from_numpy(drawn.sampling_mask.token_ids).long()
    return MaskTensors(offsets_N1=torch.from_numpy(drawn.sampling_mask.offsets), token_ids=ids)


def mismatch(
    arithmetic: Arithmetic, logits_NV: Tensor, drawn: Drawn, temperature: float, mask: MaskTensors | None
) -> Tensor:
    """[N] the trainer's log-probability minus the one that the engine reported."""
    logits_NV = logits_NV.clone().requires_grad_()
    ids_N = torch.from_numpy(drawn.token_ids).long()
    own_N = arithmetic.logprobs(logits_NV, ids_N, torch.full((TOKENS,), temperature), mask)
    assert own_N.requires_grad
    return own_N.detach() - torch.from_numpy(drawn.logprobs)


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: type(a).__name__)
def test_temperature_and_sampling_masks_leave_no_mismatch(arithmetic: Arithmetic) -> None:
    logits_NV, drawn = sample(arithmetic)
    difference_N = mismatch(arithmetic, logits_NV, drawn, 0.8, replayed(drawn))
    assert float(difference_N.abs().max()) == 0.0
    tokens = LossTokens(
        logprobs_N=torch.from_numpy(drawn.logprobs) + difference_N,
        engine_logprobs_N=torch.from_numpy(drawn.logprobs),
        advantages_N=torch.ones(TOKENS),
        trajectories_N=torch.zeros(TOKENS, dtype=torch.int64),
    )
    assert (
        policy_loss(
            tokens, LossConfig(correction_options=CapOptions(cap=1.0)), Totals(tokens=TOKENS, trajectories=1)
        ).truncated
        == 0
    )


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: type(a).__name__)
def test_ignoring_the_sampling_mask_or_the_temperature_is_another_policy(arithmetic: Arithmetic) -> None:
    logits_NV, drawn = sample(arithmetic)
    no_set_N = mismatch(arithmetic, logits_NV, drawn, 0.8, None)
    assert float(no_set_N.max()) < 0  # part of the mass goes to tokens that could not be drawn
    assert float(no_set_N.mean()) < math.log(0.95)
    no_temperature_N = mismatch(arithmetic, logits_NV, drawn, 1.0, replayed(drawn))
    assert float(no_temperature_N.abs().mean()) > 0.1


def test_reported_probabilities_are_the_frequencies() -> None:
    """For many samples of one distribution, the mean of −log p is the distribution's entropy."""
    draws = 20_000
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    sampler = Sampler(FastArithmetic())
    drawn = sampler.sample(logits_V.expand(draws, 40), [PARAMS] * draws, [9] * draws, range(draws))
    assert drawn.sampling_mask is not None
    tokens, counts = np.unique(drawn.token_ids, return_counts=True)
    assert tokens.tolist() == drawn.kept_row(0).tolist()
    for token, count in zip(tokens, counts, strict=True):
        p = math.exp(drawn.logprobs[np.argmax(drawn.token_ids == token)])
        assert abs(count - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: type(a).__name__)
def test_the_gradient_is_that_of_the_cut_distribution(arithmetic: Arithmetic) -> None:
    logits_NV, drawn = sample(arithmetic)
    logits_NV = logits_NV.requires_grad_()
    masked, ids_N = replayed(drawn), torch.from_numpy(drawn.token_ids).long()
    arithmetic.logprobs(logits_NV, ids_N, torch.full((TOKENS,), 0.8), masked).sum().backward()
    assert logits_NV.grad is not None
    step = 1e-5
    for row in range(0, TOKENS, 9):
        allowed = torch.from_numpy(drawn.kept_row(row)).long()
        place = int((allowed == ids_N[row]).nonzero())
        precise = logits_NV.detach()[row].double()

        def logprob(at: Tensor, allowed: Tensor = allowed, place: int = place) -> float:
            return float((at[allowed] / 0.8).log_softmax(0)[place])

        for column in (*allowed[:4].tolist(), int(ids_N[row]), VOCABULARY - 1):
            nudge = torch.zeros(VOCABULARY, dtype=torch.float64)
            nudge[column] = step
            slope = (logprob(precise + nudge) - logprob(precise - nudge)) / (2 * step)
            assert math.isclose(float(logits_NV.grad[row, column]), slope, rel_tol=1e-4, abs_tol=1e-6)
        outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, allowed, False)
        assert float(logits_NV.grad[row, outside].abs().max()) == 0.0


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_every_temperature_that_is_taken_gives_logprobs_that_are_numbers(
    arithmetic: Arithmetic, temperature: float
) -> None:
    logits_RV = 50 * torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(max_tokens=1, temperature=temperature)
    drawn = Sampler(arithmetic).sample(logits_RV, [params] * 8, [9] * 8, range(8))
    assert np.isfinite(drawn.logprobs).all()


def test_greedy_tokens_have_no_gradient() -> None:
    for arithmetic in ARITHMETICS:
        logits_NV, drawn = sample(arithmetic, SamplingParams(max_tokens=1, temperature=0.0))
        logits_NV = logits_NV.requires_grad_()
        ids_N = torch.from_numpy(drawn.token_ids).long()
        logprobs_N = arithmetic.logprobs(logits_NV, ids_N, torch.zeros(TOKENS), None)
        logprobs_N.sum().backward()
        assert drawn.logprobs.tolist() == logprobs_N.tolist() == [0.0] * TOKENS
        assert logits_NV.grad is not None
        assert float(logits_NV.grad.abs().max()) == 0.0
