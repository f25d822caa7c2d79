"""The number of groups that may start: the least of three limits (see also ``test_staleness_machine.py``)."""

import pytest

from etude.config.live import LiveConfig
from etude.config.rollouts import RolloutConfig
from etude.ledger.changes import LIVE, TRAIN
from etude.rollouts.admission import Admission, BatchPlan

SMALL = RolloutConfig(groups_per_step=4, group_size=2, max_staleness=1, concurrency=16)


def test_the_window_opens_by_a_step_with_each_version_up_to_the_last() -> None:
    admission = Admission(SMALL, steps=10)
    assert [admission.window(version) for version in (0, 1, 7, 8, 9, 10)] == [8, 12, 36, 40, 40, 40]


@pytest.mark.parametrize(
    ("version", "admitted", "in_flight", "groups", "why"),
    [
        (0, 0, 0, 8, "the window of two steps is empty"),
        (0, 5, 0, 3, "the window has three places left"),
        (0, 8, 0, 0, "the window is full"),
        (1, 8, 0, 4, "a new version opens one step's worth"),
        (0, 0, 11, 2, "five idle rollouts are two whole groups"),
        (0, 0, 15, 0, "one idle rollout is not a group"),
        (0, 0, 20, 0, "more in flight than allowed, as after a change of configuration"),
        (9, 38, 0, 2, "the run needs forty groups"),
        (9, 40, 0, 0, "the run has all it needs"),
    ],
)
def test_admission_takes_the_tightest_of_three_limits(
    version: int, admitted: int, in_flight: int, groups: int, why: str
) -> None:
    admission = Admission(SMALL, steps=10)
    assert admission.groups_to_admit(version=version, admitted=admitted, in_flight=in_flight) == groups, why


def test_without_staleness_the_next_batch_waits_for_the_weights_of_this_one() -> None:
    admission = Admission(RolloutConfig(groups_per_step=4, group_size=2, max_staleness=0, concurrency=8), steps=10)
    assert admission.groups_to_admit(version=0, admitted=0, in_flight=0) == 4
    assert admission.groups_to_admit(version=0, admitted=4, in_flight=0) == 0
    assert admission.groups_to_admit(version=1, admitted=4, in_flight=0) == 4


def test_steps_that_load_weights_need_no_groups() -> None:
    admission = Admission(SMALL, steps=10)
    assert (admission.groups_needed(), admission.groups_needed(loads=3)) == (40, 28)
    assert [admission.window(version, loads=3) for version in (3, 5, 9)] == [8, 16, 28]
    assert admission.groups_to_admit(version=5, admitted=9, in_flight=0, loads=3) == 7


def test_the_window_of_live_groups_opens_after_the_steps_without_them() -> None:
    live = LiveConfig(groups_per_step=3, simulated_groups_per_step=2, after_steps=2)
    admission = Admission(SMALL, steps=5, live=live)
    assert [admission.window(version, purpose=LIVE) for version in range(6)] == [0, 3, 6, 9, 9, 9]
    assert [admission.window(version) for version in range(6)] == [8, 10, 12, 14, 14, 14]
    assert admission.groups_needed(purpose=LIVE) == 9


@pytest.mark.parametrize("after", [1, 2])
def test_live_sessions_join_the_batches_after_the_first_steps(after: int) -> None:
    plan = BatchPlan.of(SMALL, LiveConfig(groups_per_step=3, simulated_groups_per_step=2, after_steps=after))
    for purpose, groups in ((TRAIN, [4] * after + [2] * (4 - after)), (LIVE, [0] * after + [3] * (4 - after))):
        assert [plan.groups(purpose, batch) for batch in range(4)] == groups
        assert [plan.before(purpose, batch) for batch in range(5)] == [sum(groups[:batch]) for batch in range(5)]
