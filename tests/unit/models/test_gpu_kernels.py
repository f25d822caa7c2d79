"""The Triton kernels equal torch's operations, on a CUDA device or else in Triton's interpreter.

Types other than float32 are compared in ``tests/gpu``.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.engines.native.sampling import RowParams, draw_tensors
from etude.models.arithmetic import AttentionRule, PagedRows
from etude.models.fast import FastArithmetic
from etude.models.kernels.draws import FASTEST_FALL, UNIT_BITS
from etude.trainer.sampling_mask import entropies
from triton_interpreter import interpreted, kernels

if find_spec("triton") is None:
    pytest.skip("Triton is for Linux", allow_module_level=True)
fused, paged_attention, vocabulary = kernels("fused", "paged_attention", "vocabulary")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numpy, inside the interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = FastArithmetic()
"""Torch's operations, on the CPU."""
RULE = AttentionRule(scale=0.3)
SINKS = torch.linspace(-3.0, 9.0, 8)
PAGES = 40
NOTHING = -52.0


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(ends: list[int], counts: list[int]) -> PagedRows:
    """Sequences of ``ends`` positions, of which the last ``counts`` are in this step, on pages of their own."""
    pages = torch.from_numpy(np.random.default_rng(0).permutation(PAGES * len(ends)).astype(np.int32))
    return PagedRows(
        tables_BP=pages.view(len(ends), PAGES),
        sequences_N=torch.arange(len(ends), dtype=torch.int32).repeat_interleave(torch.tensor(counts)),
        positions_N=torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]),
        counts=tuple(counts),
    )


def placed(rows: PagedRows) -> PagedRows:
    return PagedRows(
        tables_BP=rows.tables_BP.to(DEVICE),
        sequences_N=rows.sequences_N.to(DEVICE),
        positions_N=rows.positions_N.to(DEVICE),
        counts=rows.counts,
    )


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width"),
    [(8, 2, 32, 32), (3, 3, 64, 64), (16, 1, 48, 32)],
    ids=["grouped", "single", "latent"],
)
@pytest.mark.parametrize(
    ("ends", "counts"),
    [([600, 1, 16, 17], [1, 1, 1, 1]), ([33, 640, 90], [1, 1, 60]), ([5, 300], [5, 19])],
    ids=["decode", "mixed", "prompts"],
)
def test_each_token_attends_to_its_own_past(
    heads: int, key_heads: int, width: int, value_width: int, ends: list[int], counts: list[int]
) -> None:
    compare_attention((heads, key_heads, width, value_width), ends, counts, RULE)
    compare_attention((heads, key_heads, width, value_width), ends, counts, RULE, tiled=True)


@pytest.mark.parametrize(
    "rule",
    [replace(RULE, window=37), replace(RULE, window=300, sinks_Q=SINKS), replace(RULE, window=1, sinks_Q=SINKS)],
    ids=["window", "wide window and sinks", "own position and sinks"],
)
def test_windows_end_and_sinks_take_their_share(rule: AttentionRule) -> None:
    for tiled in (False, True):
        compare_attention((8, 2, 32, 32), [33, 640, 90], [1, 1, 60], rule, tiled=tiled)


def compare_attention(
    shape: tuple[int, int, int, int], ends: list[int], counts: list[int], rule: AttentionRule, *, tiled: bool = False
) -> None:
    heads, key_heads, width, value_width = shape
    pages = PAGES * len(ends)
    cache = random(pages, key_heads, width, 16), random(pages, key_heads, 16, value_width, seed=1)
    q_NQD, rows = random(sum(counts), heads, width, seed=2), rows_of(ends, counts)
    expected = PLAIN.attend_pages(q_NQD, cache, rows, rule)
    keys, values = (part.to(DEVICE) for part in cache)
    there = rule if rule.sinks_Q is None else replace(rule, sinks_Q=rule.sinks_Q.to(DEVICE))
    moved = placed(rows)
    if tiled:
        size = paged_attention.tile_tokens(heads, key_heads, width + value_width, q_NQD.element_size())
        moved = replace(moved, counts=(), tiles_2T=tiles_of(counts, size).to(DEVICE))
    result = paged_attention.attend(q_NQD.to(DEVICE), (keys, values), moved, there)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=1e-5)


def tiles_of(counts: list[int], size: int) -> Tensor:
    """First rows and numbers of rows of tiles of at most ``size``, the last one twice."""
    starts = np.cumsum([0, *counts])
    tiles = [
        (first, min(size, start + count - first))
        for start, count in zip(starts.tolist(), counts, strict=False)
        for first in range(start, start + count, size)
    ]
    return torch.tensor([*tiles, tiles[-1]], dtype=torch.int32).t().contiguous()


def test_what_lies_beyond_a_sequence_is_never_seen() -> None:
    """Contents of reused pages, and pages of other sequences, have no effect on attention."""
    ends, counts = [5, 21], [1, 3]
    rows = rows_of(ends, counts)
    keys, values = random(2 * PAGES, 1, 32, 16), random(2 * PAGES, 1, 16, 32, seed=1)
    expected = PLAIN.attend_pages(q := random(4, 2, 32, seed=2), (keys, values), rows, RULE)
    seen = torch.zeros(2 * PAGES, 16, dtype=torch.bool)
    for table, end in zip(rows.tables_BP.long(), ends, strict=True):
        positions = torch.arange(end)
        seen[table[positions // 16], positions % 16] = True
    keys = torch.where(seen[:, None, None, :], keys, torch.nan)
    values = torch.where(seen[:, None, :, None], values, torch.nan)
    result = paged_attention.attend(q.to(DEVICE), (keys.to(DEVICE), values.to(DEVICE)), placed(rows), RULE)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-6, rtol=1e-5)


def test_widths_that_the_kernel_does_not_take_are_known() -> None:
    taken = [widths for widths in ((128, 128), (576, 512), (192, 128), (80, 80), (24, 16), (96, 96))
             if paged_attention.attends(*widths)]  # fmt: skip
    assert taken == [(128, 128), (576, 512), (192, 128)]


def test_positions_turn_and_turn_back() -> None:
    tables = [random(5, 12, seed=seed).repeat(1, 2) for seed in (1, 2)]
    outcomes = []
    for device, rotate in ((torch.device("cpu"), PLAIN.rotate), (DEVICE, fused.rotate)):
        x = random(5, 9, 24).to(device).requires_grad_()
        turned = rotate(x[:, 1:8], *(table.to(device) for table in tables))
        outcomes.append([turned, *torch.autograd.grad((turned * random(5, 7, 24, seed=3).to(device)).sum(), x)])
    for expected, result in zip(*outcomes, strict=True):
        assert torch.equal(result.cpu(), expected)


def test_gates_and_their_gradient() -> None:
    outcomes = []
    for device, gated in ((torch.device("cpu"), PLAIN.gated), (DEVICE, fused.gated)):
        x = random(5, 3000).to(device).requires_grad_()
        out = gated(x)
        outcomes.append([out, *torch.autograd.grad((out * random(5, 1500, seed=1).to(device)).sum(), x)])
    for expected, result in zip(*outcomes, strict=True):
        torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(7, 3, 1500), (1, 1, 8), (40, 8, 64)], ids=str)
def test_rows_of_experts_are_spread_and_combined(shape: tuple[int, int, int]) -> None:
    tokens, slots, width = shape
    chosen_Nk = random(tokens, 9, seed=4).topk(slots).indices
    outcomes = []
    for device, arithmetic in ((torch.device("cpu"), PLAIN), (DEVICE, fused)):
        dispatch = PLAIN.dispatch(chosen_Nk.to(device), 9)
        x_NH, gates_Nk = (part.to(device).requires_grad_() for part in (random(tokens, width), random(tokens, slots)))
        rows_RH = arithmetic.spread(x_NH, dispatch)
        out_NH = arithmetic.combine(rows_RH.tanh(), dispatch.order_R, gates_Nk)
        total = (out_NH * random(tokens, width, seed=3).to(device)).sum()
        outcomes.append([rows_RH, out_NH, *torch.autograd.grad(total, (x_NH, gates_Nk))])
    for expected, result in zip(*outcomes, strict=True):
        torch.testing.assert_close(result.cpu(), expected, atol=2e-5, rtol=1e-5)


def test_keys_and_values_are_put_in_their_places() -> None:
    rows = rows_of([33, 5], [4, 2])
    written = []
    for device, write in ((torch.device("cpu"), PLAIN.write_pages), (DEVICE, fused.write_pages)):
        cache = torch.zeros(2 * PAGES, 2, 24, 16, device=device), torch.zeros(2 * PAGES, 2, 16, 20, device=device)
        k_NKD, v_NKW = random(6, 5, 24).to(device)[:, 1:3], random(6, 2, 20, seed=1).to(device)
        write(k_NKD, v_NKW, cache, placed(rows) if device == DEVICE else rows)
        written.append(cache)
    for expected, result in zip(*written, strict=True):
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("hidden", [0, 4000], ids=["all", "most are impossible"])
def test_log_probabilities_entropies_and_their_gradient(hidden: int) -> None:
    logits_RV, ids_R = 4 * random(6, 5003), torch.randint(hidden, 5003, (6,))
    logits_RV[:, :hidden] = -torch.inf
    heat_R, weights = torch.tensor([0.5, 0.7, 1.0, 1.3, 2.0, 9.0]), random(2, 6, seed=1)
    exact = logits_RV.double().requires_grad_()
    logs_RV = (exact / heat_R.double().unsqueeze(1)).log_softmax(-1)
    expected = [logs_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1), entropies(exact, heat_R.double(), None)]
    mine = logits_RV.to(DEVICE).requires_grad_()
    result = list(vocabulary.logprobs_and_entropies(mine, ids_R.to(DEVICE), heat_R.to(DEVICE)))
    expected += torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, expected, strict=True)), exact)
    sides = zip(weights.to(DEVICE), result, strict=True)
    result += torch.autograd.grad(sum((w * x).sum() for w, x in sides), mine)
    for one, other in zip(expected, result, strict=True):
        torch.testing.assert_close(other.cpu(), one.float(), atol=5e-6, rtol=1e-5)


def test_the_same_tokens_are_drawn() -> None:
    """Greedy rows, cold ones and hot ones; where nothing can be drawn, nothing is."""
    logits_RV = 3 * random(12, 5003)
    logits_RV[0, 77] = logits_RV[0, 99] = 50.0  # equals: the first is taken
    logits_RV[9, 7], logits_RV[10, 9], logits_RV[11] = torch.nan, torch.inf, -torch.inf
    heat_R = torch.tensor([0.0, 1.0, 1.0, 0.7, 1e-4, 5.0, 0.0, 1.0, -1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    chance_R = torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chance_R[1:3] = torch.tensor([0.0, 1 - 2**-53])
    chances = RowParams(
        temperatures=heat_R.unsqueeze(1),
        top_ks=torch.zeros(12, 1),
        top_ps=torch.ones(12, 1),
        uniforms=chance_R.unsqueeze(1),
        truncates=False,
    )
    expected, _ = draw_tensors(logits_RV, chances)
    result = vocabulary.draw(
        logits_RV.to(DEVICE),
        heat_R.to(DEVICE),
        chance_R.to(DEVICE),
        unit_bits=UNIT_BITS,
        fastest_fall=FASTEST_FALL,
        nothing=NOTHING,
    )
    assert result.tolist() == expected.tolist()
    assert expected[0] == 77
    assert expected[8:].tolist() == [-1, -1, -1, -1]
