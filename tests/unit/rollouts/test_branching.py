"""Dependencies between slots, and the turns at which parents fork."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.credit import CreditConfig, SharedPrefixOptions
from etude.ledger.ledger import OpenSlot
from etude.rollouts.branching import Branching, Bundles, ForkPoint
from ledgers import task

RANDOM = CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=4, branch_within=3))


def slot(group: int, number: int, attempt: int = 0) -> OpenSlot:
    return OpenSlot(task=task(group), group_index=group, slot=number, attempt=attempt)


def places(slots: list[OpenSlot]) -> list[tuple[int, int]]:
    return [(one.group_index, one.slot) for one in slots]


def test_parents_start_and_the_rest_of_their_bundles_is_held() -> None:
    bundles = Bundles(4)
    started = bundles.admit([slot(0, number) for number in range(8)])
    assert places(started) == [(0, 0), (0, 4)]
    assert len(bundles) == 6
    assert slot(0, 5) in bundles
    assert slot(0, 4) not in bundles
    assert [bundles.waiting_for(one) for one in started] == [3, 3]
    assert places(bundles.release(slot(0, 4))) == [(0, 5), (0, 6), (0, 7)]
    assert bundles.release(slot(0, 4)) == []
    assert (len(bundles), bundles.waiting_for(slot(0, 4))) == (3, 0)


def test_slots_whose_parent_is_filled_or_has_forked_start_by_themselves() -> None:
    bundles = Bundles(2)
    assert places(bundles.admit([slot(0, 1), slot(0, 3), slot(0, 2)])) == [(0, 1), (0, 2)]
    bundles.release(slot(0, 2))
    assert places(bundles.admit([slot(0, 3, attempt=1)])) == [(0, 3)]


def test_a_dropped_group_waits_for_nothing() -> None:
    bundles = Bundles(2)
    bundles.admit([slot(group, number) for group in (0, 1) for number in (0, 1)])
    bundles.abandon(0)
    assert (len(bundles), slot(0, 1) in bundles, slot(1, 1) in bundles) == (1, False, True)


def test_without_branches_nothing_is_held() -> None:
    slots = [slot(0, number) for number in range(3)]
    bundles = Bundles(1)
    assert bundles.admit(slots) == slots
    assert (len(bundles), bundles.waiting_for(slots[0])) == (0, 0)


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 5), admitted=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), unique=True))
def test_every_slot_starts_or_waits_for_a_parent_that_starts(size: int, admitted: list[tuple[int, int]]) -> None:
    bundles = Bundles(size)
    started = bundles.admit([slot(*place) for place in admitted])
    assert len(started) + len(bundles) == len(admitted)
    released = [one for parent in started for one in bundles.release(parent)]
    assert len(bundles) == 0
    assert sorted(places(started) + places(released)) == sorted(admitted)


def test_a_parent_forks_where_the_seed_says_in_every_attempt() -> None:
    branching = Branching.of(RANDOM, seed=7)
    assert branching is not None
    points = [branching.fork_point(slot(group, 0)) for group in range(300)]
    assert points == [branching.fork_point(slot(group, 0, attempt=2)) for group in range(300)]
    counts = Counter(point.call for point in points)
    assert counts.keys() == {1, 2, 3}
    assert min(counts.values()) > 70
    assert Branching.of(RANDOM, seed=8) != branching


@pytest.mark.parametrize(("call", "failed", "due"), [(1, True, False), (2, False, True), (3, True, False)])
def test_a_drawn_point_looks_at_nothing_but_the_number(call: int, failed: bool, due: bool) -> None:
    assert ForkPoint(call=2).is_due(call, failed=failed) is due


def test_the_other_rule_waits_for_a_command_that_fails() -> None:
    branching = Branching.of(
        CreditConfig(kind="shared_prefix", options=SharedPrefixOptions(branches=2, branch_at="error")), seed=0
    )
    assert branching is not None
    point = branching.fork_point(slot(0, 0))
    assert [point.is_due(call, failed=call == 3) for call in (1, 2, 3)] == [False, False, True]


def test_recipes_without_branches_have_no_branching() -> None:
    assert Branching.of(CreditConfig(), seed=0) is None
