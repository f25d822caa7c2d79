"""Which sessions are open, and for how long."""

from functools import cache

import pytest

from etude.engines.http.client import ANSWER_TIMEOUT_S
from etude.errors import SessionLost
from etude.gateway.capture.sessions import SessionLimits, Sessions
from etude.gateway.routing.admission import TrafficClass
from etude.tokens.chat import ChatTemplate

ROLLOUT, PRODUCTION = TrafficClass.ROLLOUT, TrafficClass.PRODUCTION


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(["def total(values):\n    return sum(values)\n"] * 4, vocab_size=300)


def new_sessions(limits: SessionLimits | None = None) -> Sessions:
    return Sessions(template(), limits or SessionLimits())


def test_a_session_is_open_until_it_is_closed() -> None:
    sessions = new_sessions()
    first, second = sessions.open("a", "k1", ROLLOUT, now=0.0), sessions.open("b", "k2", ROLLOUT, now=0.0)
    assert first is not None
    assert first.session_id == "a"
    assert sessions.find("a", now=1.0) is first
    assert sessions.find("b", now=1.0) is second
    assert sessions.find("c", now=1.0) is None
    assert (sessions.owner("a"), sessions.owner("b"), sessions.owner("c")) == ("k1", "k2", None)
    assert sessions.close("a", now=2.0) is first
    assert first.closed
    assert sessions.find("a", now=2.0) is None
    assert len(sessions) == 1
    with pytest.raises(SessionLost, match="'a'"):
        sessions.close("a", now=2.0)


def test_an_id_is_open_once() -> None:
    sessions = new_sessions()
    sessions.open("a", "k", ROLLOUT, now=0.0)
    with pytest.raises(ValueError, match="'a' is open already"):
        sessions.open("a", "k", ROLLOUT, now=0.0)


def test_sessions_are_bounded_in_number_and_idle_ones_make_room() -> None:
    sessions = new_sessions(SessionLimits(max_rollouts=2, idle_s=10.0))
    idle = sessions.open("a", "k", ROLLOUT, now=0.0)
    sessions.open("b", "k", ROLLOUT, now=1.0)
    assert sessions.open("c", "k", ROLLOUT, now=2.0) is None
    assert sessions.find("a", now=9.0) is idle
    assert sessions.find("b", now=11.0) is None  # idle since 1.0
    assert sessions.find("a", now=11.0) is not None
    assert sessions.open("c", "k", ROLLOUT, now=11.0) is not None
    assert sessions.expire(now=21.0) == ("b", "a", "c")
    assert sessions.expire(now=22.0) == ()
    assert len(sessions) == 0
    assert idle is not None
    assert idle.closed


def test_products_and_rollouts_leave_each_other_their_sessions() -> None:
    sessions = new_sessions(SessionLimits(max_rollouts=1, max_production=2))
    for number in range(20):
        assert sessions.find_or_open(f"chat-{number}", "k", now=number) is not None
    assert len(sessions) == 2
    assert sessions.open("a", "run", ROLLOUT, now=20.0) is not None
    assert sessions.open("b", "run", ROLLOUT, now=20.0) is None
    assert sessions.find_or_open("chat-20", "k", now=21.0) is not None
    assert sessions.find("a", now=21.0) is not None


def test_of_products_sessions_the_longest_idle_of_whoever_has_most_gives_way() -> None:
    sessions = new_sessions(SessionLimits(max_production=3))
    for number, (name, owner) in enumerate([("few", "k1"), ("old", "k2"), ("new", "k2")]):
        sessions.find_or_open(name, owner, now=number)
    old = sessions.find("k2.old", now=3.0)
    with sessions.queue_time("k2.old").call():
        sessions.find("k2.new", now=4.0)
        assert sessions.open("more", "k3", PRODUCTION, now=5.0) is not None  # "old" is longer idle, but is answered now
    assert sessions.expire(now=5.0) == ("k2.new",)
    assert sessions.find("k2.old", now=6.0) is old
    assert sessions.find("k1.few", now=6.0) is not None


def test_a_session_is_not_ended_in_the_middle_of_a_call() -> None:
    sessions = new_sessions(SessionLimits(max_production=1))
    sessions.find_or_open("chat", "k", now=0.0)
    with sessions.queue_time("k.chat").call():
        assert sessions.find_or_open("another", "k", now=1.0) is None
    assert sessions.find_or_open("another", "k", now=2.0) is not None
    with sessions.queue_time("nothing").call():
        assert sessions.find("k.chat", now=3.0) is None


def test_what_a_killed_rollouts_process_left_goes_but_no_rollout_is_that_slow() -> None:
    sessions = new_sessions()
    sessions.open("a", "k", ROLLOUT, now=0.0)
    assert sessions.expire(now=ANSWER_TIMEOUT_S + 60.0) == ()
    assert sessions.expire(now=15 * 60.0) == ("a",)


def test_a_name_means_one_session_for_each_owner() -> None:
    sessions = new_sessions()
    mine = sessions.find_or_open("chat", "k1", now=0.0)
    assert mine is not None
    assert sessions.find_or_open("chat", "k1", now=1.0) is mine
    assert sessions.find_or_open("chat", "k2", now=1.0) is not mine
    assert sessions.owner(mine.session_id) == "k1"
    assert sessions.find("chat", now=1.0) is None


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ä", "x" * 129, "a\n"])
def test_a_name_that_cannot_stand_in_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 128"):
        new_sessions().find_or_open(name, "k", now=0.0)


def test_a_call_without_a_session_leaves_none() -> None:
    sessions = new_sessions()
    assert sessions.detached("x").session_id == "x"
    assert len(sessions) == 0
    assert sessions.find("x", now=0.0) is None
