"""Sampling masks and temperatures in the trainer, compared with a computation token by token."""

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models.arithmetic import MaskTensors
from etude.trainer.sampling_mask import entropies, gather_masks
from etude.types import UNSAMPLED, SamplingMask, Trajectory

CPU = torch.device("cpu")
Sets = list[list[int]]


def as_sampling_mask(sets: Sets) -> SamplingMask:
    offsets = np.cumsum([0, *map(len, sets)])
    return SamplingMask(offsets=offsets, token_ids=np.array([token for one in sets for token in one], np.int32))


def make_trajectory(mask: list[bool], sets: Sets | None) -> Trajectory:
    length = len(mask)
    sampled = np.array(mask)
    return Trajectory(
        rollout_id="r",
        token_ids=np.zeros(length, np.int32),
        loss_mask=sampled,
        logprobs=np.zeros(length, np.float32),
        versions=np.where(sampled, 0, UNSAMPLED).astype(np.int32),
        temperatures=np.ones(length, np.float32),
        turn_starts=(),
        advantages=np.zeros(length, np.float32),
        sampling_mask=None if sets is None else as_sampling_mask(sets),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[Trajectory, Sets]:
    """One trajectory, and the sets of its tokens."""
    length = draw(st.integers(1, 12))
    mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    a_set = st.lists(st.integers(0, 50), max_size=4, unique=True).map(sorted)
    sets = [draw(a_set) if sampled else [] for sampled in mask]
    if draw(st.booleans()):
        return make_trajectory(mask, None), [[] for _ in mask]
    return make_trajectory(mask, sets), sets


@settings(deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=4), st.data())
def test_sets_are_gathered_in_the_order_of_the_masks(rows: list[tuple[Trajectory, Sets]], data: st.DataObject) -> None:
    masks = [row.loss_mask & np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
             for row, _ in rows for n in [len(row.token_ids)]]  # fmt: skip
    expected = [
        sets[t] for (_, sets), mask in zip(rows, masks, strict=True) for t in range(1, len(mask)) if bool(mask[t])
    ]
    remaining = gather_masks([row for row, _ in rows], masks, CPU)
    if remaining is None:
        assert not any(expected)
        return
    ends = remaining.offsets_N1.tolist()
    ids = remaining.token_ids.tolist()
    assert [ids[start:end] for start, end in pairwise(ends)] == expected
    assert remaining.token_ids.dtype == torch.int64


def plain_entropy(logits: list[float], temperature: float, mask_of: list[int]) -> float:
    if temperature == 0:
        return 0.0
    weights = [math.exp(logits[token] / temperature) for token in mask_of or range(len(logits))]
    return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)


def test_entropy_is_that_of_what_was_sampled_from() -> None:
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    temperatures = torch.tensor([1.0, 0.5, 0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    sets: Sets = [[], [], [1, 2], [0, 3, 6], [4], [2, 5]]
    expected = [plain_entropy(*case) for case in zip(logits.tolist(), temperatures.tolist(), sets, strict=True)]
    remaining = as_sampling_mask(sets)
    tensors = MaskTensors(
        offsets_N1=torch.from_numpy(remaining.offsets), token_ids=torch.from_numpy(remaining.token_ids).long()
    )
    torch.testing.assert_close(entropies(logits, temperatures, tensors), torch.tensor(expected, dtype=torch.float64))
    whole = [plain_entropy(row, t, []) for row, t in zip(logits.tolist(), temperatures.tolist(), strict=True)]
    torch.testing.assert_close(entropies(logits, temperatures, None), torch.tensor(whole, dtype=torch.float64))


def test_entropy_of_impossible_tokens_is_nothing() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert math.isclose(float(entropies(logits, torch.ones(1), None)), math.log(2), rel_tol=1e-6)
    logits = torch.tensor([[0.5, -torch.inf, -500.0, 0.0]], requires_grad=True)
    entropies(logits, torch.ones(1), None).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] < 0 < logits.grad[0, 3]
