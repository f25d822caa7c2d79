"""The table of regions: which region gets a session, what reports change, and no region blocks or starves another."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.fleet.regions import RegionLimits, RegionReport, Regions

START_S = 1_000.0
"""Times of tests are relative to it."""
LIMITS = RegionLimits(quorum=0.5, lead=0.25, max_wait_s=20.0, away_s=3.0)


def table(**versions: int) -> Regions:
    """Regions with 8 places each that serve these versions at time 0."""
    regions = Regions(versions, LIMITS)
    report(regions, 0.0, **versions)
    return regions


def report(regions: Regions, at_s: float, **versions: int) -> None:
    for name, version in versions.items():
        regions.report(name, RegionReport(version=version, capacity=8), START_S + at_s)


def give(regions: Regions, version: int, at_s: float, most: int = 1000) -> Counter[str]:
    """Sessions until none may have another one."""
    taken: Counter[str] = Counter()
    while taken.total() < most and (name := regions.choose(version, START_S + at_s)) is not None:
        taken[name] += 1
    return taken


def test_sessions_go_to_regions_by_their_capacity() -> None:
    regions = Regions(("big", "small"), LIMITS)
    regions.report("big", RegionReport(version=3, capacity=30), START_S)
    regions.report("small", RegionReport(version=3, capacity=10), START_S)
    assert give(regions, 3, 0.0, most=20) == {"big": 15, "small": 5}
    assert give(regions, 3, 0.0) == {"big": 15, "small": 5}, "until all places are taken"
    regions.ended("small")
    assert regions.choose(3, START_S) == "small"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_in_the_long_run_each_region_gets_its_share_of_sessions(capacities: list[int]) -> None:
    share = {f"region-{index}": capacity for index, capacity in enumerate(capacities)}
    regions = Regions(share, LIMITS)
    for name, capacity in share.items():
        regions.report(name, RegionReport(version=0, capacity=capacity), START_S)
    for _ in range(10 * sum(capacities)):
        chosen = regions.choose(0, START_S)
        assert chosen is not None
        regions.ended(chosen)
    assert all(abs(view.given - 10 * share[view.name]) <= 1 for view in regions.views(START_S))


def test_a_session_that_must_open_in_a_region_counts_there_even_before_its_first_report() -> None:
    regions = Regions(("near", "far"), LIMITS)
    regions.add("far")
    assert [(view.open, view.given) for view in regions.views(START_S)] == [(0, 0), (1, 1)]
    report(regions, 0.0, near=0, far=0)
    assert give(regions, 0, 0.0, most=8) == {"near": 8}, "its session counts as if it filled the region"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=5), st.sampled_from([0.25, 0.5, 1.0]))
def test_the_newest_version_that_enough_capacity_serves_is_admitted(
    reports: list[tuple[int, int]], quorum: float
) -> None:
    regions, admitted = Regions("abcde", RegionLimits(quorum=quorum)), -1
    for number, (name, (version, capacity)) in enumerate(zip("abcde", reports, strict=False), 1):
        regions.report(name, RegionReport(version=version, capacity=capacity), START_S)
        whole = sum(capacity for _, capacity in reports[:number])
        for newest in range(5):
            serving = sum(capacity for version, capacity in reports[:number] if version >= newest)
            if serving and serving >= quorum * whole:
                admitted = max(admitted, newest)
        assert regions.admitted_version == admitted


def test_no_session_goes_where_older_weights_are_served() -> None:
    regions = table(near=5, far=4)
    assert give(regions, 5, 0.0)["far"] == 0
    assert give(regions, 4, 0.0)["far"] > 0
    assert give(regions, 6, 0.0) == {}


def test_what_enough_capacity_serves_is_heard_and_never_taken_back() -> None:
    regions = Regions("abc", RegionLimits(quorum=0.6))
    assert regions.admitted_version == -1
    for name in "abc":
        regions.report(name, RegionReport(version=1, capacity=10), 0.0)
    regions.report("a", RegionReport(version=2, capacity=10), 0.1)
    assert regions.admitted_version == 1, "a third of the capacity is not enough"
    regions.report("b", RegionReport(version=2, capacity=10), 0.2)
    assert regions.admitted_version == 2, "and nobody waits for the last"
    for name in "abc":
        regions.report(name, RegionReport(version=1, capacity=10), 0.3)
    assert regions.admitted_version == 2


def test_a_late_region_keeps_its_claim_for_a_while() -> None:
    regions = table(near=4, far=3)
    report(regions, 1.0, near=4, far=3)
    assert give(regions, 4, 1.0) == {"near": 2}, "a quarter of its places ahead, then sessions wait"
    report(regions, 2.0, near=4, far=4)
    assert give(regions, 4, 2.0, most=2) == {"far": 2}
    assert give(regions, 4, 2.0, most=4) == {"near": 2, "far": 2}


def test_of_several_late_regions_the_one_with_the_fewest_sessions_is_waited_for() -> None:
    regions = table(near=4, far=3, farther=3)
    regions.lose("near")
    assert give(regions, 3, 0.0, most=1) == {"far": 1}
    report(regions, 0.0, near=4)
    assert give(regions, 4, 0.0) == {"near": 2}, "a quarter of its places ahead of farther"


def test_a_region_that_does_not_follow_holds_no_other_up() -> None:
    regions = table(near=4, far=3)
    for second in range(1, 21):
        report(regions, float(second), near=4, far=3)
    assert give(regions, 4, 20.0) == {"near": 8}, "patience is over"
    for _ in range(8):
        regions.ended("near")
    report(regions, 21.0, near=4, far=4)
    assert give(regions, 4, 21.0, most=4) == {"near": 2, "far": 2}, "what it missed is not made up for"


def test_a_region_that_is_away_is_left_out_and_comes_back() -> None:
    regions = table(near=4, far=4)
    regions.lose("far")
    assert give(regions, 4, 1.0, most=6) == {"near": 6}
    report(regions, 5.0, near=5)
    assert regions.admitted_version == 5, "its capacity does not count"
    report(regions, 6.0, far=4, near=5)
    assert give(regions, 5, 6.0) == {"near": 1}, "one that is back and behind is waited for, like any other"
    report(regions, 7.0, far=5)
    assert give(regions, 5, 7.0, most=2) == {"far": 2}
    assert [view.is_away for view in regions.views(START_S + 9.0)] == [False, False]
    assert [view.is_away for view in regions.views(START_S + 9.5)] == [True, False], "silence is being away, too"


def test_the_wait_for_a_region_begins_when_it_is_late_or_back() -> None:
    regions = table(near=4, far=4)
    report(regions, 30.0, near=5, far=4)
    assert give(regions, 5, 30.0) == {"near": 2}, "it was not late before"
    report(regions, 55.0, near=5)
    assert give(regions, 5, 55.0) == {"near": 6}, "far is away"
    for _ in range(8):
        regions.ended("near")
    report(regions, 60.0, near=5, far=4)
    assert give(regions, 5, 60.0) == {"near": 1}, "it is back"


def test_free_places_are_those_of_regions_that_are_there() -> None:
    regions = table(near=4, far=4)
    assert give(regions, 4, 0.0, most=6) == {"near": 3, "far": 3}
    assert regions.free_places(START_S) == 10
    regions.report("far", RegionReport(version=4, capacity=2), START_S)
    assert regions.free_places(START_S) == 5, "far has one session too many"
    regions.lose("near")
    assert regions.free_places(START_S) == 0


def test_a_late_region_that_is_away_or_full_is_not_waited_for() -> None:
    regions = table(near=4, far=3)
    report(regions, 5.0, near=4)
    assert give(regions, 4, 5.0) == {"near": 8}, "far is away"
    regions = table(near=4, far=3)
    assert give(regions, 3, 0.0, most=16) == {"near": 8, "far": 8}
    for _ in range(8):
        regions.ended("near")
    assert give(regions, 4, 0.0) == {"near": 8}, "far is full"


def test_a_full_region_is_not_waited_for() -> None:
    regions = table(near=4, far=4)
    assert give(regions, 4, 0.0) == {"near": 8, "far": 8}
    for _ in range(100):
        regions.ended("near")
        assert regions.choose(4, START_S) == "near"
    regions.ended("far")
    regions.ended("near")
    assert {regions.choose(4, START_S), regions.choose(4, START_S)} == {"near", "far"}


def test_limits_may_be_as_narrow_as_can_be() -> None:
    regions = Regions(("far", "near"), RegionLimits(quorum=1.0, lead=0.0, max_wait_s=0.0, away_s=1e-9))
    report(regions, 0.0, near=4, far=3)
    assert give(regions, 4, 0.0) == {"near": 8}, "far is late, and nobody waits"


@pytest.mark.parametrize(
    "wrong", [{"quorum": 0.0}, {"quorum": 1.1}, {"lead": -0.1}, {"max_wait_s": -1.0}, {"away_s": 0.0}]
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RegionLimits(**wrong)


def test_a_run_without_regions_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one region"):
        Regions(())


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.floats(0.0, 8.0)), max_size=120),
)
def test_whatever_happens_a_session_is_where_it_may_be(places: list[int], moves: list[tuple[int, int, float]]) -> None:
    names = [f"region-{index}" for index in range(len(places))]
    regions, serving, open_in = Regions(names, LIMITS), dict.fromkeys(names, -1), Counter[str]()
    heard, now = -1, 0.0
    for which, what, pause_s in moves:
        name = names[which % len(names)]
        if what == 0:
            serving[name] += 1
        if what <= 1:
            regions.report(name, RegionReport(version=serving[name], capacity=places[which % len(names)]), now)
        elif what == 2:
            regions.lose(name)
        elif what == 3 and open_in[name]:
            regions.ended(name)
            open_in[name] -= 1
        now += pause_s
        assert heard <= regions.admitted_version <= max(serving.values())
        heard = regions.admitted_version
        chosen = regions.choose(heard, now)
        if chosen is not None:
            open_in[chosen] += 1
            assert serving[chosen] >= heard
            assert not next(view for view in regions.views(now) if view.name == chosen).is_away
        assert all(open_in[view.name] == view.open for view in regions.views(now))
        assert all(view.open <= max(places) for view in regions.views(now))
