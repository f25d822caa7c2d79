"""When a group's slots decide what it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.ledger.states import GROUP_MOVES, STEP_MOVES, GroupState, StepState, move, quorum, settled


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
        (GroupState.READY, GroupState.CONSUMED, "it may become claimed"),
        (GroupState.READY, GroupState.DROPPED, "it may become claimed"),
    ],
)
def test_a_move_that_is_not_in_the_table_is_refused(state: GroupState, to: GroupState, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        move(GROUP_MOVES, state, to)


def test_a_step_is_done_once() -> None:
    assert move(STEP_MOVES, StepState.CLAIMED, StepState.DONE) is StepState.DONE
    with pytest.raises(ValueError, match="no move from done to done"):
        move(STEP_MOVES, StepState.DONE, StepState.DONE)
