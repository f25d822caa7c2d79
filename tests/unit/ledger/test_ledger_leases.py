"""Leases: who may take one, and when its holder counts as dead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import FencedError
from etude.ledger.leases import BEATS_PER_TERM, Lease, LeaseWatch, beat, prove, release, relieve, take

FREE = Lease(name="trainer")
TAKEN = Lease(name="trainer", holder="a", token=3, beats=7)
TERM_S = 20.0
LOOK_S = TERM_S / BEATS_PER_TERM


@pytest.mark.parametrize(
    ("lease", "holder", "silent", "token"),
    [
        (FREE, "a", False, 1),
        (TAKEN, "a", False, 4),
        (TAKEN, "b", False, None),
        (TAKEN, "b", True, 4),
        (release(TAKEN), "b", False, 4),
        (relieve(TAKEN), "b", False, 5),
    ],
)
def test_a_lease_is_taken_when_free_from_the_silent_and_from_oneself(
    lease: Lease, holder: str, silent: bool, token: int | None
) -> None:
    taken = take(lease, holder, silent=silent)
    assert taken == (None if token is None else Lease(name="trainer", holder=holder, token=token, beats=0))


def test_only_the_newest_holder_may_beat_or_prove() -> None:
    assert beat(TAKEN, TAKEN).beats == 8
    prove(beat(TAKEN, TAKEN), TAKEN)
    for lost in (release(TAKEN), relieve(TAKEN), take(TAKEN, "a", silent=False), take(TAKEN, "b", silent=True)):
        assert lost is not None
        with pytest.raises(FencedError, match=r"lease 'trainer' of a \(token 3\) is lost.*must stop"):
            prove(lost, TAKEN)


moves = st.sampled_from(["take a", "take b", "seize a", "seize b", "release", "relieve"])


@given(st.lists(moves, max_size=30))
def test_whatever_happens_at_most_one_holder_can_prove_itself(history: list[str]) -> None:
    lease, given_out = FREE, list[Lease]()
    for move in history:
        what, _, who = move.partition(" ")
        if who:
            taken = take(lease, who, silent=what == "seize")
            if taken is not None:
                given_out.append(taken)
            lease = taken or lease
        elif not lease.is_free:
            lease = release(lease) if what == "release" else relieve(lease)
        assert [mine for mine in given_out if (mine.token, mine.holder) == (lease.token, lease.holder)] == (
            [] if lease.is_free else given_out[-1:]
        )


def test_a_holder_is_silent_after_a_term_of_looking() -> None:
    watch = LeaseWatch(TERM_S)
    looks = [watch.silent([TAKEN], number * LOOK_S) for number in range(BEATS_PER_TERM + 1)]
    assert looks == [frozenset()] * BEATS_PER_TERM + [frozenset({"trainer"})]


@given(st.lists(st.floats(0, LOOK_S), min_size=1, max_size=60))
def test_a_holder_that_beats_is_never_silent(pauses_s: list[float]) -> None:
    """A holder that beats once a quarter of a term, seen by a watcher that looks at any times."""
    watch, now_s, lease = LeaseWatch(TERM_S), 0.0, TAKEN
    for pause_s in pauses_s:
        beats = int(now_s / LOOK_S)
        now_s += pause_s
        if int(now_s / LOOK_S) > beats:
            lease = beat(lease, TAKEN)
        assert not watch.silent([lease], now_s)


@given(st.floats(0, 1e9))
def test_a_watcher_that_slept_or_whose_clock_went_wrong_does_not_take_that_for_silence(gap_s: float) -> None:
    watch = LeaseWatch(TERM_S)
    for now_s in (0.0, gap_s, gap_s / 2, gap_s):
        assert not watch.silent([TAKEN], now_s)


def test_a_watch_remembers_only_what_it_is_asked_about() -> None:
    watch = LeaseWatch(TERM_S)
    for number in range(BEATS_PER_TERM):
        watch.silent([TAKEN], number * LOOK_S)
    watch.silent([], BEATS_PER_TERM * LOOK_S)
    assert not watch.silent([TAKEN], (BEATS_PER_TERM + 1) * LOOK_S)
