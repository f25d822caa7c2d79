"""The nearest name does not depend on the other names on the ring, and names share the keys evenly."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.routing.hash_ring import HashRing

NAMES = [f"http://engine-{number}" for number in range(60)]


def ring_of(names: Sequence[str]) -> HashRing:
    ring = HashRing()
    for name in names:
        ring.add(name)
    return ring


@given(key=st.text(), names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), gone=st.sampled_from(NAMES))
def test_the_nearest_is_the_same_with_other_names_on_the_ring(key: str, names: list[str], gone: str) -> None:
    """Both methods find the same name: comparing distances (few names) and the first one on the ring (many names)."""
    nearest = ring_of(names).nearest(key, names)
    ring = ring_of(NAMES)
    assert ring.nearest(key, names) == nearest
    ring.remove(gone)
    left = [name for name in names if name != gone]
    if left:
        expected = ring_of(left).nearest(key, left)
        assert ring.nearest(key, left) == expected
        assert gone == nearest or expected == nearest, "who leaves moves its own keys only"


@pytest.mark.parametrize("names", list(combinations(NAMES[:6], 2)))
def test_two_names_have_the_same_keys_on_a_small_and_on_a_large_ring(names: list[str]) -> None:
    """On a large ring a few names are compared by distance, also beyond the end of the turn."""
    small, large = ring_of(names), ring_of(NAMES)
    for number in range(400):
        assert large.nearest(f"session-{number}", names) == small.nearest(f"session-{number}", names)


def test_names_may_be_added_at_any_time() -> None:
    whole, ring = ring_of(NAMES), ring_of(NAMES[:20])
    ring.remove(NAMES[3])
    for name in (NAMES[3], *NAMES[20:]):
        ring.add(name)
    assert len(ring) == len(whole) == 60
    for number in range(200):
        assert ring.nearest(f"session-{number}", NAMES) == whole.nearest(f"session-{number}", NAMES)


def test_gateways_of_two_releases_choose_alike() -> None:
    """During an update, gateways of both send a session to one engine."""
    ring = ring_of(NAMES)
    chosen = [NAMES.index(ring.nearest(f"session-{number}", NAMES)) for number in range(20)]
    assert chosen == [31, 52, 6, 17, 40, 2, 28, 14, 42, 55, 41, 52, 8, 17, 30, 15, 45, 44, 30, 8]


def test_keys_and_names_may_be_any_text() -> None:
    ring = ring_of(["é", "\ud800"])
    assert {ring.nearest(f"\ud800 {number}", ["é", "\ud800"]) for number in range(20)} == {"é", "\ud800"}


def test_keys_are_shared_evenly() -> None:
    ring = ring_of(NAMES)
    shares = Counter(ring.nearest(f"session-{number}", NAMES) for number in range(6000))
    assert set(shares) == set(NAMES)
    assert max(shares.values()) < 150 and min(shares.values()) > 60, "each has about a hundred"
