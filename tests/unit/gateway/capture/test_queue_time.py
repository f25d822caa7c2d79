"""Whose fault it is that a session's calls took long."""

import asyncio

import pytest

from etude.gateway.capture.queue_time import Waits
from etude.gateway.http.request_log import Visit
from etude.types import Json
from gateways import CHAT, Caller, Setting, fake_engine, gateway
from patience import PATIENCE_S


def visit(code: str = "", *, taken: float | None = None, status: int = 200, hurried: bool = False) -> Visit:
    return Visit(began=1.0, ended=4.0, code=code, taken=taken, status=status, hurried=hurried)


@pytest.mark.parametrize(
    ("one", "waited_s", "unserved"),
    [
        (visit(taken=1.5), 0.5, False),
        (visit("engine_unavailable", taken=1.5, status=503), 3.0, True),
        (visit("rate_limit_exceeded", status=429), 3.0, True),
        (visit("deadline_exceeded", taken=1.5, status=504), 3.0, True),
        (visit("invalid_request", taken=1.25, status=400), 0.25, False),
        (visit(taken=1.5, status=499), 0.5, False),
        (visit(status=499), 3.0, True),
        (visit("deadline_exceeded", status=504, hurried=True), 0.0, False),
    ],
)
def test_what_a_call_says_of_engines(one: Visit, waited_s: float, unserved: bool) -> None:
    waits = Waits()
    waits.add(one)
    assert (waits.waited_s, waits.unserved) == (waited_s, unserved)


def test_an_answer_makes_good_what_was_unserved_but_not_the_time() -> None:
    waits = Waits()
    waits.add(visit("engine_unavailable", status=503))
    waits.add(visit(taken=1.0))
    assert waits.facts() == {"calls": 0, "waited_s": 3.0, "unserved": False}


def test_a_session_is_told_how_its_calls_fared() -> None:
    async def scene() -> None:
        engine = fake_engine()
        async with gateway(Setting(engine)) as caller:
            _, key = await caller.open_session()

            async def waits() -> Json:
                answer = await caller.send("GET", "/v1/waits", key)
                assert answer.status == 200
                return answer.body

            assert await waits() == {"calls": 0, "waited_s": 0.0, "unserved": False}
            engine.fail_next(10**6)
            refused = [await caller.chat(key), await caller.chat(key, stream=True)]
            assert [answer.status for answer in refused] == [503, 503]
            told = await waits()
            assert isinstance(told, dict)
            assert told["unserved"] is True
            assert isinstance(told["waited_s"], float)
            assert told["waited_s"] >= 0.2  # twice engine_timeout_s
            engine.fail_next(0)
            await _answered(caller, key)
            assert (await caller.send("POST", CHAT, key, {}, X_Etude_Deadline_S="1")).status == 400
            after = await waits()
            assert isinstance(after, dict)
            assert (after["calls"], after["unserved"]) == (0, False)
            assert isinstance(after["waited_s"], float)
            assert after["waited_s"] >= told["waited_s"]

    asyncio.run(scene())


async def _answered(caller: Caller, key: str) -> None:
    """Once the engine was heard of again."""
    async with asyncio.timeout(PATIENCE_S):
        while (await caller.chat(key)).status != 200:
            await asyncio.sleep(0.05)
