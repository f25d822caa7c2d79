"""Weights and masks one by one; with which loss they go is tests/numerics/test_policy_loss.py's."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.training import GeometricMaskOptions, LossConfig
from etude.trainer.corrections import (
    correct,
    masked,
    on_policy_or_good,
    proximal_logprobs,
    trajectory_means,
    trajectory_sums,
    truncated,
    within,
)

LOGS = torch.tensor([0.0, math.log(3.0), -math.log(4.0), 0.1], dtype=torch.float64)
"""Ratios 1, 3, 1/4 and a bit more than 1."""
TRAJECTORIES = torch.tensor([0, 0, 1, 3])
"""Number 2 has no token."""


def test_truncation_bounds_a_weight_and_loses_no_token() -> None:
    result = truncated(LOGS, 2.0)
    torch.testing.assert_close(result.weights_N, torch.tensor([1.0, 2.0, 0.25, math.exp(0.1)], dtype=torch.float64))
    assert result.truncated_N.tolist() == [False, True, False, False]
    assert not result.masked_N.any()


def test_masks_believe_a_ratio_or_leave_the_token_out() -> None:
    one_sided, two_sided = masked(LOGS, 0.0, 2.0), masked(LOGS, 0.5, 2.0)
    torch.testing.assert_close(one_sided.weights_N, torch.tensor([1, 0, 0.25, math.exp(0.1)], dtype=torch.float64))
    torch.testing.assert_close(two_sided.weights_N, torch.tensor([1, 0, 0, math.exp(0.1)], dtype=torch.float64))
    assert two_sided.masked_N.tolist() == [False, True, True, False]
    assert within(LOGS, 0.5, 2.0).tolist() == [True, False, False, True]


def test_a_ratio_at_a_bound_is_within_it() -> None:
    one = torch.zeros(1, dtype=torch.float64)
    for correction in (truncated(one, 1.0), masked(one, 1.0, 1.0)):
        assert correction.weights_N.tolist() == [1.0]
        assert not correction.truncated_N.any()
        assert not correction.masked_N.any()
    assert on_policy_or_good(-torch.ones(1), -torch.ones(1), torch.tensor([0]), 1.0).all()


def test_sums_and_means_stay_in_their_trajectory() -> None:
    half = math.log(3.0) / 2
    assert trajectory_sums(LOGS, TRAJECTORIES).tolist() == [2 * half, 2 * half, *LOGS.tolist()[2:]]
    assert trajectory_means(LOGS, TRAJECTORIES).tolist() == [half, half, *LOGS.tolist()[2:]]


def test_only_a_bad_trajectory_that_was_left_behind_is_masked() -> None:
    """δ = 1 nat: number 1 has been left by ln 4 = 1.4 nats."""
    for advantage, remaining in ((-1.0, [True, True, False, True]), (0.0, [True] * 4), (1.0, [True] * 4)):
        advantages = torch.full_like(LOGS, advantage)
        assert on_policy_or_good(LOGS, advantages, TRAJECTORIES, 1.0).tolist() == remaining
    assert on_policy_or_good(LOGS, -torch.ones_like(LOGS), TRAJECTORIES, 1.4).all()


def test_a_sequence_mask_comes_on_top_of_weights() -> None:
    config = LossConfig(sequence_mask="geometric", mask_options=GeometricMaskOptions(floor=0.5, cap=1.9))
    result = correct(LOGS, LOGS, torch.ones_like(LOGS), TRAJECTORIES, config)
    torch.testing.assert_close(result.weights_N, torch.tensor([1.0, 2.0, 0.0, math.exp(0.1)], dtype=torch.float64))
    assert result.masked_N.tolist() == [False, False, True, False]


def test_the_geometric_mean_does_not_punish_length() -> None:
    for length in (1, 1_000):
        logs, one = torch.full((length,), 0.009), torch.zeros(length, dtype=torch.int64)
        assert within(trajectory_means(logs, one), 0.99, 1.01).all()
    assert not within(trajectory_sums(logs, one), 0.5, 2.0).any()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 8)), min_size=1, max_size=20),
)
def test_the_proximal_policy_lies_one_version_behind(rows: list[tuple[float, float, int]]) -> None:
    ours, engine = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    result = proximal_logprobs(ours.requires_grad_(), engine, torch.tensor([row[2] for row in rows]))
    assert not result.requires_grad
    for (own, mu, staleness), proximal in zip(rows, result.tolist(), strict=True):
        steps = max(staleness, 1)
        assert math.isclose(proximal, mu + (steps - 1) / steps * (own - mu), rel_tol=1e-12, abs_tol=1e-12)
        assert math.isclose(own - proximal, (own - mu) / steps, rel_tol=1e-9, abs_tol=1e-12)
