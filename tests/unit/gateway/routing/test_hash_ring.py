"""The nearest name does not depend on the other names on the ring, and names share the keys evenly."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.routing.hash_ring import HashRing

NAMES = [f"http://engine-{number}" for number in range(60)]


def ring_of(names: list[str]) -> HashRing:
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


def test_keys_are_shared_evenly() -> None:
    ring = ring_of(NAMES)
    shares = Counter(ring.nearest(f"session-{number}", NAMES) for number in range(6000))
    assert set(shares) == set(NAMES)
    assert max(shares.values()) < 150 and min(shares.values()) > 60, "each has about a hundred"
