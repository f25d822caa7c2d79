"""Drawing in torch operations: the same tokens and sets as the kernel."""

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.engines.native.sampling import Table, draw_on_device, draw_on_host, may_truncate, tabulated
from etude.models.kernels.draws import NO_TOKEN
from etude.protocols import SamplingParams

ROWS = 48


def drawn_in_torch(logits: Tensor, table: Table) -> tuple[list[int], Tensor | None]:
    ids, mask = draw_on_device(logits, torch.from_numpy(table), truncates=may_truncate(table))
    return ids.tolist(), mask


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 700])
@pytest.mark.parametrize("tied", [False, True])
def test_it_draws_what_the_kernel_draws(vocabulary: int, tied: bool) -> None:
    torch.set_num_threads(1)
    generator = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(generator.normal(size=(ROWS, vocabulary)).astype(np.float32) * 4)
    if tied:
        logits = logits.round()
        logits[::5, ::3] = -torch.inf
        logits[:, 0] = -0.0
    params = [
        SamplingParams(
            max_tokens=1,
            temperature=float(generator.choice([0.0, 0.6, 1.0, 2.0])),
            top_k=int(generator.choice([0, 0, 1, 5, vocabulary, 1_000])),
            top_p=float(generator.choice([1.0, 0.9, 0.5, 1e-9])),
        )
        for _ in range(ROWS)
    ]
    table = tabulated(params, range(ROWS), range(ROWS))
    host_ids, host_kept = draw_on_host(logits, table)
    ids, mask = drawn_in_torch(logits, table)
    assert ids == host_ids.tolist()
    if host_kept is None:
        assert mask is None or not mask.any()
    else:
        assert mask is not None
        assert mask.sum(-1).cumsum(0).tolist() == host_kept.offsets_N1[1:].tolist()
        assert mask.nonzero()[:, 1].tolist() == host_kept.token_ids.tolist()


def test_uncut_rows_have_no_sets_to_ask_for() -> None:
    params = [SamplingParams(max_tokens=1, temperature=t, top_p=p) for t, p in ((1.0, 1.0), (0.0, 0.5))]
    assert drawn_in_torch(torch.randn(2, 9), tabulated(params, [0, 1], [0, 0]))[1] is None


def test_unfit_logits_draw_nothing() -> None:
    rows = torch.tensor([[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf], [0.0, 50.0]])
    for top_k in (0, 1):
        params = [SamplingParams(max_tokens=1, top_k=top_k)] * 4
        assert drawn_in_torch(rows, tabulated(params, [1] * 4, [0] * 4))[0] == [NO_TOKEN] * 3 + [1]


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (0, 0.8), (6, 1.0)])
def test_frequencies_are_the_probabilities(k: int, p: float) -> None:
    torch.set_num_threads(1)
    draws = 20_000
    logits = torch.linspace(-1.5, 1.5, 12)
    params = [SamplingParams(max_tokens=1, temperature=0.7, top_k=k, top_p=p)] * draws
    ids, mask = drawn_in_torch(logits.expand(draws, 12), tabulated(params, [11] * draws, range(draws)))
    allowed = torch.arange(12) if mask is None else mask[0].nonzero().squeeze(1)
    expected = draws * (logits[allowed] / 0.7).softmax(0)
    counts = torch.bincount(torch.tensor(ids), minlength=12)
    assert int(counts.sum()) == int(counts[allowed].sum())
    freedom = len(allowed) - 1
    assert float(((counts[allowed] - expected) ** 2 / expected).sum()) < freedom + 4 * (2 * freedom) ** 0.5
