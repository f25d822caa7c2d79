"""Plans are the fastest there are, and the ladder keeps them short."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import WeightPack
from etude.weights.plan import (
    Edge,
    LinkSpeed,
    Place,
    edge_of,
    ladder,
    needs_anchor,
    plan,
    reachable,
)
from etude.weights.records import Link

SPEED = LinkSpeed(bytes_per_s=100, apply_bytes_per_s=250, seconds_per_edge=0.3)


def edge(source: Place, target: int, *sizes: int) -> Edge:
    packs = [
        WeightPack(digest=f"{source}-{target}-{number}", size_bytes=size, first=0, last=0)
        for number, size in enumerate(sizes)
    ]
    return edge_of(
        Link(source=source, source_digest=None, target=target, digest="d" * 32, layout="b" * 64, packs=tuple(packs))
    )


def ends(edges: tuple[Edge, ...]) -> list[tuple[Place, int]]:
    return [(one.source, one.target) for one in edges]


CHAIN = [edge(None, 0, 1000), *(edge(n, n + 1, 20) for n in range(8)), edge(0, 4, 50), edge(4, 8, 60), edge(4, 3, 20)]


@pytest.mark.parametrize(
    ("have", "target", "expected"),
    [
        (None, 0, [(None, 0)]),
        (None, 4, [(None, 0), (0, 4)]),
        (0, 8, [(0, 4), (4, 8)]),
        (3, 8, [(3, 4), (4, 8)]),
        (1, 3, [(1, 2), (2, 3)]),
        (4, 3, [(4, 3)]),
        (5, 5, []),
        (99, 1, [(None, 0), (0, 1)]),
        (8, 0, [(None, 0)]),
    ],
)
def test_the_fastest_way_is_taken(have: int | None, target: int, expected: list[tuple[Place, int]]) -> None:
    assert ends(plan(CHAIN, target, have, SPEED).edges) == expected


def test_what_a_plan_costs() -> None:
    best = plan(CHAIN, 8, 0, SPEED)
    assert best.size_bytes == 110
    assert best.seconds == pytest.approx(2 * 0.3 + 110 / 100)
    slow_to_apply = plan(CHAIN, 8, 0, LinkSpeed(bytes_per_s=100, apply_bytes_per_s=50))
    assert slow_to_apply.seconds == pytest.approx(2 * 0.3 + 110 / 50)


@pytest.mark.parametrize(
    ("edges", "have", "message"),
    [
        ([], None, "version 3 cannot be reached from nothing: no record leads to it"),
        ([edge(2, 3, 1)], 1, "from nothing or from version 1: it rests on version 2, to which no record leads"),
        ([edge(2, 3, 1), edge(3, 2, 1)], 1, "it rests on version 2, 3"),
        ([edge(n, 3, 1) for n in range(10, 20)], None, "it rests on version 10, 11, 12, 13, 14 and 5 more"),
    ],
)
def test_what_is_missing_is_named(edges: list[Edge], have: int | None, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        plan(edges, 3, have, SPEED)


places = st.integers(0, 5)
edge_lists = st.lists(
    st.tuples(st.none() | places, places, st.integers(0, 200)).filter(lambda one: one[0] != one[1]),
    max_size=14,
    unique_by=lambda one: one[:2],
).map(lambda triples: [edge(*triple) for triple in triples])


def all_ways(edges: list[Edge], target: int, have: int | None) -> Iterator[tuple[Edge, ...]]:
    """Every way without a detour through a place that was visited before."""

    def extend(way: tuple[Edge, ...], place: Place, seen: frozenset[Place]) -> Iterator[tuple[Edge, ...]]:
        if place == target:
            yield way
            return
        for one in edges:
            if one.source == place and one.target not in seen:
                yield from extend((*way, one), one.target, seen | {one.target})

    starts = frozenset({None, have})
    for start in starts:
        yield from extend((), start, starts)


def cost(way: tuple[Edge, ...]) -> tuple[int, int, int]:
    seconds = [0.3 + max(one.size_bytes / 100, one.size_bytes / 250) for one in way]
    return sum(round(1e6 * each) for each in seconds), sum(one.size_bytes for one in way), len(way)


@given(edge_lists, places, st.none() | places)
@settings(max_examples=300)
def test_no_other_way_is_better(edges: list[Edge], target: int, have: int | None) -> None:
    ways = list(all_ways(edges, target, have))
    if not ways:
        assert target not in reachable(edges, {None, have})
        with pytest.raises(DamagedError, match=f"weight version {target} cannot be reached"):
            plan(edges, target, have, SPEED)
        return
    assert target in reachable(edges, {None, have})
    best = plan(edges, target, have, SPEED)
    assert best.edges in ways
    assert cost(best.edges) == min(map(cost, ways))
    assert (best.size_bytes, best.seconds) == (cost(best.edges)[1], cost(best.edges)[0] / 1e6)


@given(edge_lists, edge_lists, places, st.none() | places)
def test_more_ways_never_make_a_plan_slower(edges: list[Edge], more: list[Edge], target: int, have: int | None) -> None:
    if target in reachable(edges, {None, have}):
        assert plan([*edges, *more], target, have, SPEED).seconds <= plan(edges, target, have, SPEED).seconds


@given(st.permutations(CHAIN), places, st.none() | places)
def test_a_plan_does_not_depend_on_the_order_of_edges(edges: list[Edge], target: int, have: int | None) -> None:
    assert plan(edges, target, have, SPEED) == plan(CHAIN, target, have, SPEED)


def test_a_ladder_has_a_link_of_each_length_that_ends_here() -> None:
    assert [ladder(version) for version in (0, 1, 3, 5)] == [[], [], [], []]
    assert ladder(4) == [(0, 4)]
    assert ladder(16) == [(12, 16), (0, 16)]
    assert ladder(64) == [(60, 64), (48, 64), (0, 64)]
    assert ladder(80) == [(76, 80), (64, 80)]
    assert ladder(9, base=3, levels=(2, 1)) == [(6, 9), (0, 9)]


@pytest.mark.parametrize(("base", "levels"), [(1, (1,)), (4, (0, 1))])
def test_a_ladder_without_steps_is_refused(base: int, levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="merges nothing"):
        ladder(4, base, levels)


@given(st.integers(0, 30), st.integers(1, 1000))
@settings(max_examples=40, deadline=None)
def test_a_reader_far_behind_takes_few_links(have: int, behind: int) -> None:
    target, levels = have + behind, (1, 2, 3, 4, 5)
    links = itertools.chain.from_iterable(ladder(version, 4, levels) for version in range(have, target + 1))
    edges = [edge(version, version + 1, 10) for version in range(have, target)]
    edges += [edge(source, end, 12) for source, end in links if source >= have]
    way = plan(edges, target, have, SPEED).edges
    lengths = [one.target - (one.source or 0) for one in way]
    assert all(lengths.count(4**level) <= 2 * 3 for level in (0, *levels))


def test_anchors_come_at_intervals() -> None:
    assert [version for version in range(20) if needs_anchor(version, 8)] == [8, 16]
    with pytest.raises(ValueError, match="every 0 versions"):
        needs_anchor(8, 0)


def test_a_speed_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rates are positive"):
        LinkSpeed(bytes_per_s=0)
