"""A decline of the reward is seen where there is one, and seldom where there is none."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.telemetry.decline import WINDOW, Decline, decline_of

RESULTS = Path(__file__).parents[3] / "bench/science/results"
REWARDS = st.lists(st.floats(-2, 2, width=16), max_size=60)


def plain_rule(rewards: list[float]) -> bool:
    """The rule for the newest window, in one loop over the windows before it."""
    if len(rewards) < 2 * WINDOW:
        return False
    windows = [np.array(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    now, best = windows[-1], max(windows[:-WINDOW], key=lambda window: float(window.mean()))
    error = np.sqrt(now.var(ddof=1) / WINDOW + best.var(ddof=1) / WINDOW)
    return bool(best.mean() - now.mean() > max(4 * error, 0.15 * abs(best.mean())))


@given(REWARDS)
def test_it_is_the_plain_rule_for_the_newest_steps(rewards: list[float]) -> None:
    decline = decline_of(rewards)
    assert (decline is not None) == plain_rule(rewards)
    if decline is not None:
        assert decline.best > decline.now
        assert decline.best_end + WINDOW <= decline.now_end <= len(rewards)
        assert all(plain_rule(rewards[:end]) for end in range(decline.now_end, len(rewards) + 1))
        assert not plain_rule(rewards[: decline.now_end - 1])


def test_the_windows_are_those_of_the_first_step_that_was_worse() -> None:
    rewards = [0.2] * 5 + [0.8] * 12 + [0.4] * 15
    decline = decline_of(rewards)
    assert decline == decline_of(rewards[:-3])
    assert decline is not None
    assert decline.best == pytest.approx(0.8)
    assert decline.best_end == 15
    assert decline.share == pytest.approx((0.8 - decline.now) / 0.8)


def test_a_share_of_no_reward_is_whole() -> None:
    assert Decline(best=0.0, best_end=10, now=-1.0, now_end=20).share == 1.0


def test_runs_that_never_broke_hardly_ever_have_one() -> None:
    runs = declines = 0
    for file in sorted(RESULTS.glob("*.json")):
        for row in json.loads(file.read_bytes())["results"]:
            rewards = row["rewards"]
            assert row["broken_at"] is None
            runs += 1
            declines += any(decline_of(rewards[:end]) for end in range(2 * WINDOW, len(rewards) + 1))
    assert (runs, declines) == (403, 1), "docs/troubleshooting.md and telemetry/decline.py have both numbers"
