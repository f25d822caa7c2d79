"""Health of engines after reports about them, and the routing of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.routing.router import (
    ANNOUNCEMENTS,
    FRESH_CALLS,
    FRESH_FACTOR,
    LOSS_BACKOFF,
    MOVES,
    STICKY_CALLS,
    Announcements,
    EngineEntry,
    EngineRecord,
    EngineState,
    HealthLimits,
    Reason,
    Router,
)
from etude.protocols import EngineHealth

MAX_LAG = 8
LIMITS = HealthLimits(max_lag=MAX_LAG)
HEALTHY, SUSPECT, STALE, DEAD = EngineState.HEALTHY, EngineState.SUSPECT, EngineState.STALE, EngineState.DEAD


def health(version: int = 0, digest: str = "", *, running: int = 0, waiting: int = 0) -> EngineHealth:
    return EngineHealth(version=version, digest=digest or f"digest {version}", running=running, waiting=waiting)


def router_of(*names: str, region: str = "", limits: HealthLimits = LIMITS) -> Router:
    """A router whose engines have all reported good health."""
    router = Router(limits)
    for name in names:
        join(router, name, region)
    return router


def join(router: Router, name: str, region: str = "") -> None:
    router.add(EngineEntry(name=name, url=f"http://{name}", region=region), 0.0)
    router.report(name, health(), 0.0)


def state(router: Router, name: str) -> EngineState:
    return next(view.state for view in router.engines() if view.entry.name == name)


def reason(router: Router, name: str) -> str:
    return next(view.reason for view in router.engines() if view.entry.name == name)


# States


def test_an_engine_is_suspect_until_it_was_seen_and_serves_as_a_last_resort() -> None:
    router = Router()
    router.add(EngineEntry(name="a", url="u"), 0.0)
    assert state(router, "a") is SUSPECT
    assert router.choose("s").reason is Reason.LAST_RESORT
    router.report("a", health(), 0.0)
    assert state(router, "a") is HEALTHY


def test_a_failure_makes_suspect_and_silence_dead() -> None:
    router = router_of("a")
    assert router.failed("a", "broken pipe", 100.0, in_call=True) is SUSPECT  # not dead at once, however long ago
    assert reason(router, "a") == "broken pipe"
    assert router.failed("a", "timeout", 100.0, in_call=False) is DEAD
    assert reason(router, "a") == "no contact for 100 s, at last: timeout"
    assert router.choose("s").reason is Reason.UNAVAILABLE
    router.report("a", health(), 101.0)
    assert state(router, "a") is SUSPECT
    router.report("a", health(), 101.5)
    assert state(router, "a") is HEALTHY


def test_failures_without_silence_do_not_kill() -> None:
    router = router_of("a")
    for now in range(1, 60):
        router.failed("a", "poll", float(now), in_call=False)
        router.answered("a", float(now))  # it is only too busy for its polls
    assert state(router, "a") is SUSPECT


def test_a_stale_engine_whose_polls_fail_is_no_last_resort() -> None:
    router = router_of("a")
    router.announce(0, "another", 0.0)
    assert state(router, "a") is STALE
    router.failed("a", "poll", 1.0, in_call=False)
    assert state(router, "a") is STALE
    assert router.failed("a", "poll", 1.0 + LIMITS.dead_s, in_call=False) is DEAD
    router.report("a", health(), 20.0)
    assert state(router, "a") is STALE


def test_an_engine_that_reports_well_and_loses_every_call_is_left_alone_for_longer_and_longer() -> None:
    router, now, pauses = router_of("a"), 0.0, list[float]()
    for _ in range(8):
        router.failed("a", "call", now, in_call=True)
        since = now
        while state(router, "a") is not HEALTHY:
            router.report("a", health(), now)
            now += 0.25
        pauses.append(now - since - 0.25)
    assert pauses == [0.0, 1.0, 3.0, 7.0, 15.0, *[(LOSS_BACKOFF.longest_s - LOSS_BACKOFF.first_s)] * 3]
    router.answered("a", now, version=0)
    router.failed("a", "call", now, in_call=True)
    router.report("a", health(), now)
    assert state(router, "a") is HEALTHY


def test_a_crash_that_takes_many_calls_counts_once() -> None:
    router = router_of("a")
    for _ in range(64):
        router.failed("a", "call", 1.0, in_call=True)
    router.report("a", health(), 1.0)
    assert state(router, "a") is HEALTHY


def test_only_moves_of_the_table_exist() -> None:
    assert set(MOVES) == set(EngineState)
    record = EngineRecord(entry=EngineEntry(name="a", url="u"), last_contact_at=0.0, poll_at=0.0)
    record.move(HEALTHY, "")
    with pytest.raises(AssertionError, match="from healthy to dead"):
        record.move(DEAD, "")


# Weights


def test_an_engine_with_a_wrong_digest_is_stale_until_it_holds_the_right_one() -> None:
    router = router_of("a", "b")
    router.announce(1, "right", 0.0)
    router.report("a", health(1, "right"), 1.0)
    router.report("b", health(1, "wrong"), 1.0)
    assert (state(router, "a"), state(router, "b")) == (HEALTHY, STALE)
    assert "right" in reason(router, "b") and "wrong" in reason(router, "b")
    router.report("b", health(1, "right"), 2.0)
    assert state(router, "b") is HEALTHY


def test_an_announcement_that_contradicts_a_report_counts_at_once() -> None:
    router = router_of("a")
    router.announce(0, "another", 0.0)
    assert router.choose("s").name is None
    assert router.due(0.0) == ["a"]


def test_an_engine_too_far_behind_is_stale() -> None:
    router = router_of("a")
    for version in range(MAX_LAG + 1):
        router.announce(version, f"digest {version}", 0.0)
        assert state(router, "a") is HEALTHY
    router.announce(MAX_LAG + 1, "digest", 0.0)
    assert state(router, "a") is STALE


def test_a_version_ahead_of_the_log_is_accepted_for_a_while() -> None:
    router = router_of("a", "b")
    router.announce(0, "digest 0", 0.0)
    router.report("a", health(1), 5.0)
    assert state(router, "a") is HEALTHY
    router.report("a", health(1), 5.0 + LIMITS.grace_s)
    assert state(router, "a") is HEALTHY
    router.report("b", health(1), 6.0 + LIMITS.grace_s)  # the grace is the version's, not the engine's
    assert state(router, "b") is STALE
    router.announce(1, "digest 1", 50.0)
    assert router.due(50.0) == ["a", "b"]
    router.report("b", health(1), 50.0)
    assert state(router, "b") is HEALTHY


def test_without_announcements_the_later_of_two_digests_is_stale() -> None:
    router = Router()
    for now, name in enumerate("ab"):
        router.add(EngineEntry(name=name, url=name), 0.0)
        router.report(name, health(1, name), float(now))
    assert (state(router, "a"), state(router, "b")) == (HEALTHY, STALE)
    router.report("a", health(1, "a"), 2.0)
    assert state(router, "a") is HEALTHY


def test_without_announcements_most_engines_are_right() -> None:
    router = Router()
    for now, name in enumerate("abcd"):
        router.add(EngineEntry(name=name, url=name), 0.0)
        router.report(name, health(1, "odd" if name == "a" else "same"), float(now))
    for name in "abcd":
        router.report(name, health(1, "odd" if name == "a" else "same"), 5.0)
    assert [view.state for view in router.engines()] == [STALE, HEALTHY, HEALTHY, HEALTHY]


def test_a_dead_engine_has_no_vote() -> None:
    router = Router()
    for now, name in enumerate("ab"):
        router.add(EngineEntry(name=name, url=name), 0.0)
        router.report(name, health(1, name), float(now))
    router.failed("a", "gone", 100.0, in_call=False)
    assert router.failed("a", "gone", 100.0, in_call=False) is DEAD
    router.report("b", health(1, "b"), 100.0)
    assert state(router, "b") is HEALTHY


def test_a_log_that_contradicts_itself_is_refused() -> None:
    router = Router()
    router.announce(3, "one", 0.0)
    router.announce(3, "one", 0.0)
    with pytest.raises(ValueError, match="version 3 was announced as one and now as two"):
        router.announce(3, "two", 0.0)


def test_announcements_are_bounded() -> None:
    announced = Announcements(LIMITS)
    for version in range(ANNOUNCEMENTS + 10):
        announced.announce(version, str(version))
    assert not announced.knows(9) and announced.knows(10)
    with pytest.raises(ValueError, match="max_lag"):
        HealthLimits(max_lag=ANNOUNCEMENTS)


# Polls


def test_polls_are_asked_for_once_and_again_when_their_time_has_come() -> None:
    router = router_of("a")
    assert router.due(LIMITS.healthy_poll_s) == ["a"]
    assert router.due(9.0) == []
    router.failed("a", "poll", 10.0, in_call=False)
    assert router.due(10.0) == []
    assert router.due(10.0 + LIMITS.suspect_poll_s) == ["a"]


def test_a_failed_call_and_newer_weights_bring_the_poll_forward() -> None:
    router = router_of("a", "b")
    router.failed("a", "call", 0.1, in_call=True)
    router.answered("b", 0.1, version=0)
    assert router.due(0.1) == ["a"]
    router.answered("b", 0.2, version=1)
    assert router.due(0.2) == ["b"]


def test_facts_about_an_engine_that_was_removed_are_passed_over() -> None:
    router = router_of("a")
    router.began("a")
    router.remove("a")
    router.report("a", health(), 1.0)
    assert router.failed("a", "call", 1.0, in_call=True) is None
    router.answered("a", 1.0, version=0)
    router.ended("a")
    assert router.engines() == ()
    with pytest.raises(ValueError, match="no engine 'a'"):
        router.remove("a")
    join(router, "b")
    with pytest.raises(ValueError, match="'b' is registered already"):
        join(router, "b")


# Choices


def test_a_session_stays_with_its_engine_while_others_join() -> None:
    router = router_of("a", "b")
    first = router.choose("s").name
    for name in "cdefgh":
        join(router, name)
        again = router.choose("s")
        assert (again.name, again.reason) == (first, Reason.AFFINITY)


@given(names=st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=2, max_size=8), data=st.data())
def test_an_engine_that_leaves_moves_only_its_own_sessions(names: set[str], data: st.DataObject) -> None:
    router = router_of(*sorted(names))
    before = {f"s{index}": router.choose(f"s{index}").name for index in range(40)}
    gone = data.draw(st.sampled_from(sorted(names)))
    router.remove(gone)
    fresh = router_of(*sorted(names - {gone}))  # a gateway that knows of no session hashes them to the same places
    for session, name in before.items():
        if name != gone:
            assert router.choose(session).name == fresh.choose(session).name == name
        else:
            assert router.choose(session).name in names - {gone}


def test_a_session_leaves_an_engine_that_is_much_busier() -> None:
    router = router_of("a", "b")
    busy = router.choose("s").name
    assert busy is not None
    for _ in range(STICKY_CALLS):
        router.began(busy)
    assert router.choose("s").name == busy
    router.began(busy)
    moved = router.choose("s")
    assert moved.name != busy and moved.reason is Reason.FRESH
    for _ in range(STICKY_CALLS + 1):
        router.ended(busy)
    assert router.choose("s").name == moved.name, "its prefix is there now"


def test_calls_of_others_count_as_load() -> None:
    router = router_of("a", "b")
    router.report("a", health(running=20, waiting=5), 1.0)
    assert {router.choose(f"s{index}").name for index in range(20)} == {"b"}
    for _ in range(25):
        router.began("a")
    router.report("a", health(running=20, waiting=5), 2.0)  # now they are ours: not counted twice
    for _ in range(25):
        router.began("b")
    assert {router.choose(f"t{index}").name for index in range(20)} == {"a", "b"}


def test_the_wanted_region_comes_first_and_others_are_better_than_nothing() -> None:
    router = Router()
    join(router, "near", "eu")
    join(router, "far", "us")
    assert router.choose("s", region="eu").name == "near"
    assert router.choose("s", region="eu", avoid={"near"}).name == "far"
    router.failed("near", "call", 0.0, in_call=True)
    assert router.choose("s", region="eu").name == "far", "healthy is better than near"
    router.remove("far")
    assert router.choose("s", region="eu").name == "near"
    assert router.choose("s", region="asia").name == "near"


def test_a_version_that_no_engine_has_is_told_from_no_engine() -> None:
    router = router_of("a", "b")
    router.report("b", health(3), 0.0)
    assert router.choose("s", min_version=3).name == "b"
    choice = router.choose("s", min_version=4)
    assert (choice.name, choice.reason, choice.newest) == (None, Reason.VERSION, 3)
    assert router.choose("s", min_version=3, avoid={"b"}).reason is Reason.UNAVAILABLE
    unseen = Router()
    unseen.add(EngineEntry(name="c", url="c"), 0.0)
    assert unseen.choose("s", min_version=0).reason is Reason.UNAVAILABLE


def test_sessions_that_are_remembered_are_bounded() -> None:
    router = Router(LIMITS, max_sessions=2)
    for name in "ab":
        join(router, name)
    assert router.choose("one").reason is Reason.FRESH
    assert router.choose("").reason is Reason.FRESH
    assert router.choose("two").reason is Reason.FRESH
    assert router.choose("one").reason is Reason.AFFINITY
    assert router.choose("three").reason is Reason.FRESH
    assert router.choose("one").reason is Reason.AFFINITY
    assert router.choose("two").reason is Reason.FRESH, "it was the longest unused"
    assert router.choose("").reason is Reason.FRESH


def test_a_session_that_has_ended_is_forgotten() -> None:
    router = router_of("a", "b")
    assert router.choose("one").reason is Reason.FRESH
    router.forget("one")
    router.forget("never seen")
    assert router.choose("one").reason is Reason.FRESH
    assert router.choose("one").reason is Reason.AFFINITY


def test_new_sessions_spread_over_equal_engines() -> None:
    router = router_of("a", "b", "c", "d")
    for index in range(400):
        name = router.choose(f"s{index}").name
        assert name is not None
        router.began(name)
    inflight = [view.inflight for view in router.engines()]
    assert sum(inflight) == 400
    assert max(inflight) <= FRESH_FACTOR * min(inflight) + FRESH_CALLS + 1
