"""The state of a group follows from its slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.ledger.states import (
    GROUP_MOVES,
    STEP_MOVES,
    EndedAttempt,
    GroupSlots,
    GroupState,
    StepState,
    move,
    quorum,
    settled,
)
from etude.types import RolloutStatus


def test_a_quorum_is_half_and_two_where_there_are_two() -> None:
    assert [quorum(size) for size in (1, 2, 3, 4, 5, 8, 128)] == [1, 2, 2, 2, 3, 4, 64]


@given(st.integers(1, 128), st.data())
def test_every_way_through_a_group_ends_once_and_as_its_survivors_say(size: int, data: st.DataObject) -> None:
    graded = lost = 0
    for slot in range(size):
        assert settled(size, graded=graded, lost=lost) is GroupState.OPEN
        if data.draw(st.booleans()):
            graded += 1
        else:
            lost += 1
        if settled(size, graded=graded, lost=lost) is GroupState.DROPPED:
            assert graded + (size - slot - 1) < quorum(size)
            return
    assert settled(size, graded=graded, lost=lost) is GroupState.READY
    assert graded >= quorum(size)


@pytest.mark.parametrize(
    ("state", "to", "why"),
    [
        (GroupState.CONSUMED, GroupState.CLAIMED, "nothing: that is an end"),
        (GroupState.OPEN, GroupState.CLAIMED, "dropped, ready"),
        (GroupState.READY, GroupState.CONSUMED, "claimed"),
        (GroupState.CLAIMED, GroupState.DROPPED, "consumed"),
    ],
)
def test_a_move_that_is_not_in_the_table_is_refused(state: GroupState, to: GroupState, why: str) -> None:
    with pytest.raises(ValueError, match=f"no move from {state} to {to}; from {state} it may become {why}"):
        move(GROUP_MOVES, state, to)


def test_a_step_is_done_once() -> None:
    assert move(STEP_MOVES, StepState.CLAIMED, StepState.DONE) is StepState.DONE
    with pytest.raises(ValueError, match="no move from done to done"):
        move(STEP_MOVES, StepState.DONE, StepState.DONE)


FAILED, GRADED = RolloutStatus.FAILED_INFRA, RolloutStatus.GRADED


def test_a_failure_makes_the_next_attempt_due_and_an_end_none() -> None:
    slots = GroupSlots(size=4)
    assert slots.due == {0: 0, 1: 0, 2: 0, 3: 0}
    slots = slots.after(EndedAttempt(0, 0, FAILED, "a")).after(EndedAttempt(1, 0, GRADED, "b")).without(3)
    assert slots.due == {0: 1, 2: 0}
    assert slots.has("a")
    assert not slots.has("c")
    assert slots.state is GroupState.OPEN


def test_a_group_follows_from_its_slots() -> None:
    half = GroupSlots(size=4).without(0).without(1)
    assert half.state is GroupState.OPEN
    assert half.without(2).state is GroupState.DROPPED
    filled = half.after(EndedAttempt(2, 0, GRADED, "a")).after(EndedAttempt(3, 0, GRADED, "b"))
    assert (filled.state, filled.due) == (GroupState.READY, {})
