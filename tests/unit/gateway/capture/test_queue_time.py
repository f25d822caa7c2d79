"""Whose fault it is that a session's calls took long."""

import asyncio

import pytest

from etude.gateway.capture.sessions import QueueTime
from etude.gateway.request_log import RequestRecord
from etude.types import Json
from gateways import CHAT, Caller, Setting, fake_engine, gateway
from waiting import WAIT_S


def record(
    code: str = "", *, dispatched: float | None = None, status: int = 200, own_deadline: bool = False
) -> RequestRecord:
    return RequestRecord(
        began=1.0, ended=4.0, code=code, dispatched=dispatched, status=status, own_deadline=own_deadline
    )


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
