"""Rates warm up, hold and decay; batches grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.optimisation import FINAL_RATE_SHARE, BatchSchedule, RateSchedule, RateShape


def shares_of(steps: int, decay_share: float = 0.0, shape: RateShape = "wsd") -> list[float]:
    schedule = RateSchedule(steps=steps, warmup_steps=5, decay_share=decay_share, shape=shape)
    return [schedule.share(step) for step in range(1, steps + 1)]


def test_the_schedule_warms_up_holds_and_decays() -> None:
    shares = shares_of(100, 0.4)
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(shares[5:60]) == {1.0}
    assert shares[60:] == sorted(shares[60:], reverse=True)
    assert shares[79] == pytest.approx((1 + FINAL_RATE_SHARE) / 2)


@pytest.mark.parametrize("steps", [8, 100])
def test_a_decay_ends_at_its_last_share_however_short_it_is(steps: int) -> None:
    assert shares_of(steps, 0.4)[-1] == pytest.approx(FINAL_RATE_SHARE)
    assert set(shares_of(steps, 0.0)[5:]) == {1.0}


def test_without_decay_the_rate_holds_to_the_end() -> None:
    assert set(shares_of(50)[5:]) == {1.0}
    assert shares_of(50, shape="constant") == shares_of(50)


def test_a_cosine_falls_from_the_warm_up_to_the_last_step() -> None:
    shares = shares_of(105, shape="cosine")
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert shares[54] == pytest.approx((1 + FINAL_RATE_SHARE) / 2)
    assert shares[-1] == pytest.approx(FINAL_RATE_SHARE)


@given(
    tokens=st.integers(0, 10_000),
    first=st.integers(1, 500),
    growth=st.integers(0, 500),
    ramp_share=st.floats(0, 1),
)
def test_batches_grow_and_add_up_to_the_phase(tokens: int, first: int, growth: int, ramp_share: float) -> None:
    schedule = BatchSchedule(tokens=tokens, first=first, last=first + growth, ramp_share=ramp_share)
    budgets = schedule.budgets()
    assert sum(budgets) == tokens
    assert list(budgets[:-1]) == sorted(budgets[:-1])
    assert all(first <= budget <= first + growth for budget in budgets[:-1])
    assert bool(budgets) == bool(tokens)


def test_without_a_ramp_all_batches_are_alike() -> None:
    assert BatchSchedule(tokens=2_200, first=500, last=500).budgets() == (500, 500, 500, 700)


def test_a_ramp_is_linear_in_the_tokens_read() -> None:
    budgets = BatchSchedule(tokens=1_000_000, first=100, last=1_100, ramp_share=0.5).budgets()
    read = 0
    for budget in budgets[:-1]:
        assert budget == pytest.approx(100 + 1_000 * min(1.0, read / 500_000), abs=1)
        read += budget
