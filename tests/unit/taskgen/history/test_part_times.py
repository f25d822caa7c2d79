"""The time that the tests of a part of a change are given."""

import pytest

from etude.taskgen.history.validator import LEAST_TIMEOUT_S, PART_SLACK, RUN_TIMEOUT_S, part_timeout_s


@pytest.mark.parametrize(
    ("whole_s", "expected_s"), [(0.1, LEAST_TIMEOUT_S), (10.0, 10.0 * PART_SLACK), (170.0, RUN_TIMEOUT_S)]
)
def test_a_part_has_some_times_what_the_whole_change_took_within_limits(whole_s: float, expected_s: float) -> None:
    assert part_timeout_s(whole_s) == expected_s
