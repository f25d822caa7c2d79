"""The plan of a fault campaign: a function of its seed, with every kind in it, in order, within the run."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.faults.schedule import (
    EMBEDDED,
    FLEET,
    LAST_SHARE,
    LONGEST_DELAY_S,
    OFFLINE,
    SERVED,
    SPECS,
    Extent,
    Kind,
    Place,
    RunSize,
    apportion,
    plan,
)

SIZE, FLEET_SIZE = RunSize(faults=25, rollouts=104), RunSize(faults=10, rollouts=160)
THOUSAND = Extent(faults=1000, size=SIZE, fleet_size=FLEET_SIZE)
POSSIBLE = {Place.FOLDER: set(Kind) - SERVED - FLEET, Place.URL: set(Kind) - EMBEDDED - FLEET, Place.FLEET: FLEET}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    faults=st.integers(1, 120),
    per_run=st.integers(5, 30),
    server=st.booleans(),
    fleet=st.booleans(),
    only=st.sampled_from([frozenset(Kind), FLEET | {Kind.KILL_ENGINE}, frozenset({Kind.LOSE_DISK, Kind.CUT_REGION})]),
)
def test_a_plan_has_all_its_faults_in_order_within_its_runs(
    seed: int, faults: int, per_run: int, server: bool, fleet: bool, only: frozenset[Kind]
) -> None:
    size = RunSize(faults=per_run, rollouts=4 * per_run)
    extent = Extent(faults=faults, size=size, fleet_size=FLEET_SIZE if fleet else None, server=server, only=only)
    if not extent.kinds:
        with pytest.raises(ValueError, match="no campaign"):
            plan(seed, extent)
        return
    schedules = plan(seed, extent)
    assert plan(seed, extent) == schedules
    assert sorted(fault.number for schedule in schedules for fault in schedule.faults) == list(range(faults))
    for schedule in schedules:
        due = [fault.at for fault in schedule.faults]
        assert due
        assert len(due) <= extent.size_of(schedule.place).faults or only != frozenset(Kind)
        assert due == sorted(due)
        assert server or schedule.place is not Place.URL
        for fault in schedule.faults:
            assert fault.kind in POSSIBLE[schedule.place] & only
            shortest_s, longest_s = SPECS[fault.kind].hold_s
            assert 0 <= fault.at <= LAST_SHARE * extent.size_of(schedule.place).rollouts
            assert shortest_s <= fault.hold_s <= longest_s
            assert 0 <= fault.delay_s <= LONGEST_DELAY_S
            assert 0 <= fault.pick < 1


def test_every_kind_has_a_spec_and_comes_in_a_campaign_of_fifty() -> None:
    assert set(SPECS) == set(Kind)
    fifty = Extent(faults=50, size=SIZE, fleet_size=FLEET_SIZE, server=True)
    assert {fault.kind for schedule in plan(0, fifty) for fault in schedule.faults} == set(Kind)


@settings(max_examples=30)
@given(st.integers(1, 300), st.sets(st.sampled_from(Kind), min_size=1).map(frozenset))
def test_as_many_are_apportioned_as_were_asked_for(faults: int, kinds: frozenset[Kind]) -> None:
    apportioned = apportion(faults, kinds)
    assert len(apportioned) == faults
    assert len(set(apportioned)) == min(faults, len(kinds))
    assert set(apportioned) <= kinds


def test_few_faults_are_the_likeliest_ones() -> None:
    assert apportion(1) == [max(SPECS, key=lambda kind: SPECS[kind].share)]


def test_shares_are_kept() -> None:
    given_ = Counter(apportion(1000))
    whole = sum(spec.share for spec in SPECS.values())
    assert all(abs(given_[kind] - 1000 * spec.share / whole) <= 1 for kind, spec in SPECS.items())


def test_seeds_differ() -> None:
    assert plan(1, THOUSAND) != plan(2, THOUSAND)


def test_files_are_damaged_while_the_run_is_down_anyway() -> None:
    shared = 0
    for schedule in plan(0, THOUSAND):
        kills = [fault.at for fault in schedule.faults if fault.kind is Kind.KILL_SUPERVISOR]
        damages = [fault for fault in schedule.faults if fault.kind in OFFLINE]
        assert len({fault.at for fault in damages}) <= 1
        if kills and damages:
            shared += 1
            assert damages[0].at in kills
            first = schedule.faults.index(damages[0])
            assert schedule.faults[first - 1].kind is Kind.KILL_SUPERVISOR
            assert schedule.faults[first : first + len(damages)] == tuple(damages)
    assert shared > 0


@pytest.mark.parametrize("extent", [Extent(faults=0, size=SIZE), Extent(faults=9, size=RunSize(faults=9, rollouts=9))])
def test_a_plan_that_does_not_fit_is_refused(extent: Extent) -> None:
    with pytest.raises(ValueError, match="no campaign"):
        plan(0, extent)
