"""What is due in a group, and when it is ready or hopeless."""

from etude.ledger.slots import Ending, Slots
from etude.ledger.states import GroupState
from etude.types import RolloutStatus

FAILED, GRADED = RolloutStatus.FAILED_INFRA, RolloutStatus.GRADED


def test_a_failure_makes_the_next_attempt_due_and_an_end_none() -> None:
    slots = Slots(size=4)
    assert slots.due == {0: 0, 1: 0, 2: 0, 3: 0}
    slots = slots.after(Ending(0, 0, FAILED, "a")).after(Ending(1, 0, GRADED, "b")).without(3)
    assert slots.due == {0: 1, 2: 0}
    assert slots.has("a")
    assert not slots.has("c")
    assert slots.state is GroupState.OPEN


def test_a_group_follows_from_its_slots() -> None:
    half = Slots(size=4).without(0).without(1)
    assert half.state is GroupState.OPEN
    assert half.without(2).state is GroupState.DROPPED
    filled = half.after(Ending(2, 0, GRADED, "a")).after(Ending(3, 0, GRADED, "b"))
    assert (filled.state, filled.due) == (GroupState.READY, {})
