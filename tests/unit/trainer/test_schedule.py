"""Rates warm up, hold and decay."""

import pytest

from etude.trainer.schedule import FINAL_RATE_SHARE, rate_share


def shares_of(steps: int, decay_share: float) -> list[float]:
    return [rate_share(step, steps, warmup_steps=5, decay_share=decay_share) for step in range(steps)]


def test_the_schedule_warms_up_holds_and_decays() -> None:
    shares = shares_of(100, 0.4)
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(shares[5:61]) == {1.0}
    assert shares[61:] == sorted(shares[61:], reverse=True)
    assert shares[80] == pytest.approx(0.5)
    assert min(shares[60:]) >= FINAL_RATE_SHARE


def test_without_decay_the_rate_holds_to_the_end() -> None:
    assert set(shares_of(50, 0.0)[5:]) == {1.0}
