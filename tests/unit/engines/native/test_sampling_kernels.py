"""Drawing in torch operations: the same tokens and sets as the kernel."""

import numpy as np
import pytest
import torch

from etude.engines.native.sampling import draw_on_device, draw_on_host, tabulated
from etude.models.kernels.draws import NO_TOKEN
from etude.protocols import SamplingParams

ROWS = 48


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
    ids, mask = draw_on_device(logits, table)
    assert ids.tolist() == host_ids.tolist()
    if host_kept is None:
        assert mask is None or len(mask.token_ids) == 0
    else:
        assert mask is not None
        assert mask.offsets_N1.tolist() == host_kept.offsets_N1.tolist()
        assert mask.token_ids.tolist() == host_kept.token_ids.tolist()


def test_uncut_rows_have_no_sets_to_ask_for() -> None:
    params = [SamplingParams(max_tokens=1, temperature=t, top_p=p) for t, p in ((1.0, 1.0), (0.0, 0.5))]
    assert draw_on_device(torch.randn(2, 9), tabulated(params, [0, 1], [0, 0]))[1] is None


def test_unfit_logits_draw_nothing() -> None:
    rows = torch.tensor([[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf], [0.0, 50.0]])
    for top_k in (0, 1):
        params = [SamplingParams(max_tokens=1, top_k=top_k)] * 4
        assert draw_on_device(rows, tabulated(params, [1] * 4, [0] * 4))[0].tolist() == [NO_TOKEN] * 3 + [1]


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (0, 0.8), (6, 1.0)])
def test_frequencies_are_the_probabilities(k: int, p: float) -> None:
    torch.set_num_threads(1)
    draws = 20_000
    logits = torch.linspace(-1.5, 1.5, 12)
    params = [SamplingParams(max_tokens=1, temperature=0.7, top_k=k, top_p=p)] * draws
    ids, mask = draw_on_device(logits.expand(draws, 12), tabulated(params, [11] * draws, range(draws)))
    allowed = torch.arange(12) if mask is None else mask.token_ids[: mask.offsets_N1[1]]
    expected = draws * (logits[allowed] / 0.7).softmax(0)
    counts = torch.bincount(ids, minlength=12)
    assert int(counts.sum()) == int(counts[allowed].sum())
    freedom = len(allowed) - 1
    assert float(((counts[allowed] - expected) ** 2 / expected).sum()) < freedom + 4 * (2 * freedom) ** 0.5
