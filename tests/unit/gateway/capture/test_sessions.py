"""Open sessions: which, for how long, and the time their calls waited for engines."""

import asyncio
from functools import cache
from typing import Any

import pytest

from etude.engines.api_client import ANSWER_TIMEOUT_S
from etude.errors import SessionLost
from etude.gateway.capture.sessions import QueueTime, SessionLimits, SessionStore
from etude.gateway.request_log import RequestRecord
from etude.gateway.routing.admission import TrafficClass
from etude.tokens.chat import ChatTemplate
from etude.types import Json
from gateways import CHAT, Caller, Setting, fake_engine, gateway
from waiting import WAIT_S

ROLLOUT, PRODUCTION = TrafficClass.ROLLOUT, TrafficClass.PRODUCTION


@cache
def template() -> ChatTemplate:
    return ChatTemplate.train(["def total(values):\n    return sum(values)\n"] * 4, vocab_size=300)


def new_sessions(limits: SessionLimits | None = None) -> SessionStore:
    return SessionStore(template(), limits or SessionLimits())


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


def test_of_products_sessions_the_longest_idle_of_the_largest_product_gives_way() -> None:
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


def test_a_name_is_one_session_for_each_owner() -> None:
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


def record(code: str = "", *, arrived: float | None = 1.0, **fields: Any) -> RequestRecord:
    return RequestRecord(began=1.0, ended=4.0, code=code, arrived=arrived, **fields)


@pytest.mark.parametrize(
    ("one", "waited_s", "unserved"),
    [
        (record(dispatched=1.5), 0.5, False),
        (record("engine_unavailable", dispatched=1.5, status=503), 3.0, True),
        (record("rate_limit_exceeded", status=429), 3.0, True),
        (record("deadline_exceeded", dispatched=1.5, status=504), 3.0, True),
        (record("invalid_request", dispatched=1.25, status=400), 0.25, False),
        (record(dispatched=1.5, status=499), 0.5, False),
        (record(status=499), 3.0, True),
        (record(status=499, arrived=2.5), 1.5, True),
        (record(status=499, arrived=3.5), 0.5, False),
        (record(status=499, arrived=None), 0.0, False),
        (record("body_timeout", status=408, arrived=None), 0.0, False),
        (record("draining", status=503, arrived=None), 0.0, True),
        (record(arrived=2.0, dispatched=2.5), 0.5, False),
        (record("deadline_exceeded", status=504, own_deadline=True), 0.0, False),
    ],
)
def test_what_a_call_says_of_engines(one: RequestRecord, waited_s: float, unserved: bool) -> None:
    times = QueueTime()
    times.add(one)
    assert (times.waited_s, times.unserved) == (waited_s, unserved)


def test_an_answer_makes_good_what_was_unserved_but_not_the_time() -> None:
    times = QueueTime()
    times.add(record("engine_unavailable", status=503))
    times.add(record(dispatched=1.0))
    assert times.facts() == {"calls": 0, "waited_s": 3.0, "unserved": False}


def test_a_session_is_told_how_its_calls_fared() -> None:
    async def scene() -> None:
        engine = fake_engine()
        async with gateway(Setting(engine)) as caller:
            _, key = await caller.open_session()

            async def queue_time() -> Json:
                answer = await caller.send("GET", "/v1/queue_time", key)
                assert answer.status == 200
                return answer.body

            assert await queue_time() == {"calls": 0, "waited_s": 0.0, "unserved": False}
            engine.fail_next(10**6)
            refused = [await caller.chat(key), await caller.chat(key, stream=True)]
            assert [answer.status for answer in refused] == [503, 503]
            during = await queue_time()
            assert isinstance(during, dict)
            assert during["unserved"] is True
            assert isinstance(during["waited_s"], float)
            assert during["waited_s"] >= 0.2  # twice engine_timeout_s
            engine.fail_next(0)
            await _answered(caller, key)
            assert (await caller.send("POST", CHAT, key, {}, X_Etude_Deadline_S="1")).status == 400
            after = await queue_time()
            assert isinstance(after, dict)
            assert (after["calls"], after["unserved"]) == (0, False)
            assert isinstance(after["waited_s"], float)
            assert after["waited_s"] >= during["waited_s"]

    asyncio.run(scene())


async def _answered(caller: Caller, key: str) -> None:
    """Once the engine was heard of again."""
    async with asyncio.timeout(WAIT_S):
        while (await caller.chat(key)).status != 200:
            await asyncio.sleep(0.05)
