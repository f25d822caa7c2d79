"""Logits in chunks: the same numbers and gradients as of all at once, in memory that does not grow with the tokens."""

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.models.arithmetic import MaskTensors
from etude.models.decoder import Decoder
from etude.models.spec import TINY_DENSE
from etude.trainer.readout import in_chunks
from etude.trainer.sampling_mask import entropies
from largest_tensor import Largest

TOKENS = 200


@pytest.fixture
def model() -> Decoder:
    fresh = Decoder(TINY_DENSE)
    fresh.initialise(0, std=0.3)
    return fresh.double()


def read(
    model: Decoder, hidden_nH: Tensor, ids_n: Tensor, heat_n: Tensor, mask: MaskTensors | None
) -> tuple[Tensor, Tensor]:
    logits_nV = model.logits(hidden_nH)
    logprobs_n = (logits_nV / heat_n.unsqueeze(1)).log_softmax(-1).gather(1, ids_n.unsqueeze(1)).squeeze(1)
    return logprobs_n, entropies(logits_nV, heat_n, mask)


def columns(masked: bool) -> tuple[Tensor, Tensor, Tensor, MaskTensors | None]:
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    hidden_NH = torch.randn(TOKENS, TINY_DENSE.hidden_size, generator=generator, dtype=torch.float64)
    ids_N = torch.randint(TINY_DENSE.vocab_size, (TOKENS,), generator=generator)
    heat_N = 0.5 + torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    sets = [np.sort(rng.choice(TINY_DENSE.vocab_size, size, replace=False)) for size in rng.integers(0, 9, TOKENS)]
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum([len(one) for one in sets])]))
    mask = MaskTensors(offsets_N1=offsets, token_ids=torch.from_numpy(np.concatenate(sets)).long())
    return hidden_NH, ids_N, heat_N, mask if masked else None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 7, TOKENS - 1, TOKENS, 2 * TOKENS])
def test_a_chunk_at_a_time_is_the_same(model: Decoder, rows: int, *, masked: bool) -> None:
    outcomes = []
    for most in (1 << 40, rows * TINY_DENSE.vocab_size):
        hidden_NH, *rest = columns(masked)
        logprobs_N, entropies_N = in_chunks(read, model, hidden_NH.requires_grad_(), *rest, most=most)
        assert model.head is not None
        loss = (logprobs_N * torch.arange(TOKENS)).sum() + entropies_N.square().sum()
        outcomes.append([logprobs_N, entropies_N, *torch.autograd.grad(loss, (hidden_NH, model.head))])
    for whole, cut in zip(*outcomes, strict=True):
        torch.testing.assert_close(cut, whole, atol=1e-12, rtol=1e-10)


def test_no_more_logits_exist_than_were_allowed(model: Decoder) -> None:
    hidden_NH, *rest = columns(masked=False)
    most = 5 * TINY_DENSE.vocab_size
    with Largest() as seen:  # type: ignore[no-untyped-call]
        logprobs_N, entropies_N = in_chunks(read, model, hidden_NH.requires_grad_(), *rest, most=most)
        (logprobs_N.sum() + entropies_N.sum()).backward()
    others = max(model.embedding.numel(), hidden_NH.numel())
    assert seen.numbers <= max(most, others) < TOKENS * TINY_DENSE.vocab_size
