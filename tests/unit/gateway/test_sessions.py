"""Which sessions are open, and for how long."""

from functools import cache

import pytest

from etude.engines.http import ANSWER_TIMEOUT_S
from etude.errors import SessionLost
from etude.gateway.sessions import SessionLimits, Sessions
from etude.tokens.chat import ChatTemplate


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(["def total(values):\n    return sum(values)\n"] * 4, vocab_size=300)


def new_sessions(limits: SessionLimits | None = None) -> Sessions:
    return Sessions(template(), limits or SessionLimits())


def test_a_session_is_open_until_it_is_closed() -> None:
    sessions = new_sessions()
    first, second = sessions.open("a", "k1", now=0.0), sessions.open("b", "k2", now=0.0)
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
    sessions.open("a", "k", now=0.0)
    with pytest.raises(ValueError, match="'a' is open already"):
        sessions.open("a", "k", now=0.0)


def test_sessions_are_bounded_in_number_and_idle_ones_make_room() -> None:
    sessions = new_sessions(SessionLimits(max_sessions=2, idle_s=10.0))
    idle = sessions.open("a", "k", now=0.0)
    sessions.open("b", "k", now=1.0)
    assert sessions.open("c", "k", now=2.0) is None
    assert sessions.find_or_open("c", "k", now=2.0) is None
    assert sessions.find("a", now=9.0) is idle
    assert sessions.find("b", now=11.0) is None  # idle since 1.0
    assert sessions.find("a", now=11.0) is not None
    assert sessions.open("c", "k", now=11.0) is not None
    assert sessions.expire(now=21.0) == ("b", "a", "c")
    assert sessions.expire(now=22.0) == ()
    assert len(sessions) == 0
    assert idle is not None
    assert idle.closed


def test_what_a_killed_rollouts_process_left_goes_but_no_rollout_is_that_slow() -> None:
    sessions = new_sessions()
    sessions.open("a", "k", now=0.0)
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
