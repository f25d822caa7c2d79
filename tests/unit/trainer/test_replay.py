"""The routes that a forward pass gets are those of the right tokens only."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trainer.replay import producers, replay, replayed_rows
from etude.types import NO_ROUTE, Mask, Routes, Trajectory

CPU = torch.device("cpu")


def make_trajectory(mask: list[bool], routes: Routes | None) -> Trajectory:
    length = len(mask)
    return Trajectory(
        rollout_id="r",
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array(mask),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        temperatures=np.ones(length, np.float32),
        turn_starts=(),
        advantages=np.zeros(length, np.float32),
        routes=routes,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=9))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    routes = random.integers(0, NO_ROUTE, (len(mask), 2, 3)).astype(np.uint16)
    return make_trajectory(mask, routes if draw(st.booleans()) else None)


def test_a_completion_is_produced_by_the_tokens_before_it() -> None:
    sampled = np.array([False, True, True, False, True])
    assert producers(sampled).tolist() == [True, True, False, True, False]
    trajectory = make_trajectory(sampled.tolist(), None)
    assert replayed_rows(trajectory, "completion").tolist() == [True, True, False, True, False]
    assert replayed_rows(trajectory, "full").all()
    assert not replayed_rows(trajectory, "off").any()


@settings(deadline=None, max_examples=50)
@given(st.lists(trajectories(), min_size=1, max_size=4), st.integers(0, 99))
def test_every_chosen_token_has_its_own_routes_and_every_other_none(batch: list[Trajectory], seed: int) -> None:
    random = np.random.default_rng(seed)
    masks: list[Mask] = [random.random(len(one.token_ids)) < 0.5 for one in batch]
    result = replay(list(zip(batch, masks, strict=True)), CPU)
    if all(one.routes is None for one in batch):
        assert result is None
        return
    assert result is not None
    assert result.dtype == torch.int64
    parts = result.split([len(mask) for mask in masks])
    for one, mask, part in zip(batch, masks, parts, strict=True):
        rows, chosen = part.numpy(), mask & (one.routes is not None)
        if one.routes is not None:
            assert (rows[chosen] == one.routes[mask]).all()
        assert (rows[~chosen] == NO_ROUTE).all()


def test_routes_of_two_models_are_refused() -> None:
    batch = [make_trajectory([True], np.zeros((1, layers, 2), np.uint16)) for layers in (1, 2)]
    with pytest.raises(ValueError, match="different shapes"):
        replay([(one, one.loss_mask) for one in batch], CPU)
