"""Delays double up to their bound, and jitter only shortens them."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.backoff import Backoff


def test_delays_double_up_to_the_bound() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3.0)
    assert list(islice(backoff.delays(), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.delay_s(10**9) == 3.0


@given(failures=st.integers(1, 100), chance=st.floats(0, 1), jitter=st.floats(0, 1))
def test_jitter_takes_at_most_its_share_away(failures: int, chance: float, jitter: float) -> None:
    plain, random = Backoff(first_s=0.1, longest_s=8.0), Backoff(first_s=0.1, longest_s=8.0, jitter=jitter)
    delay_s = random.delay_s(failures, chance)
    assert (1 - jitter) * plain.delay_s(failures) - 1e-9 <= delay_s <= plain.delay_s(failures)


def test_each_delay_draws_its_own_chance() -> None:
    chances = iter([0.0, 1.0])
    assert list(islice(Backoff(first_s=1.0, longest_s=4.0, jitter=0.5).delays(lambda: next(chances)), 2)) == [1.0, 1.0]


@pytest.mark.parametrize(("first_s", "longest_s", "jitter"), [(0.0, 1.0, 0.0), (2.0, 1.0, 0.0), (1.0, 2.0, 1.5)])
def test_what_is_no_backoff_is_refused(first_s: float, longest_s: float, jitter: float) -> None:
    with pytest.raises(ValueError, match="jitter is a share"):
        Backoff(first_s=first_s, longest_s=longest_s, jitter=jitter)
