"""No background task outlives its owner."""

import asyncio

import pytest

from etude.aio import MAX_FAILURES, background_task, gather_or_cancel, supervised
from etude.errors import DamagedError, InfrastructureError


def test_results_are_in_the_order_of_the_works() -> None:
    async def work(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert asyncio.run(gather_or_cancel(map(work, (0.01, 0.0)))) == [0.01, 0.0]


def test_when_one_fails_the_others_have_ended_before_its_error_is_told() -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(0 if name == "fails" else 60)
            raise ValueError(name)
        finally:
            await asyncio.sleep(0.01)
            ended.append(name)

    async def run() -> None:
        with pytest.raises(ValueError, match="fails"):
            await gather_or_cancel(map(work, ("first", "fails", "last")))
        assert sorted(ended) == ["fails", "first", "last"]

    asyncio.run(run())


def test_what_goes_on_beside_has_ended_when_the_context_is_left() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("work")

    async def run() -> None:
        with pytest.raises(ValueError, match="inside"):
            async with background_task(work()):
                await asyncio.sleep(0)
                raise ValueError("inside")
        assert ended == ["work"]

    asyncio.run(run())


def test_awaiting_a_background_task_gives_its_result_or_its_error() -> None:
    async def work(fault: str) -> str:
        await asyncio.sleep(0)
        if fault:
            raise ValueError(fault)
        return "done"

    async def run(fault: str) -> str:
        async with background_task(work(fault)) as task:
            return await task

    assert asyncio.run(run("")) == "done"
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(run("bad"))


def test_a_background_task_that_fails_is_named_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    started, words = list[int](), "a secret"

    async def work() -> None:
        started.append(len(started))
        if len(started) < 3:
            raise KeyError(words)

    asyncio.run(supervised("engine polls", work, pause_s=0.0))
    assert len(started) == 3
    assert caplog.text.count("background task 'engine polls' failed: KeyError") == 2
    assert "a secret" not in caplog.text


def test_a_background_task_that_cannot_be_helped_ends_the_process_by_name() -> None:
    started = list[int]()

    async def work() -> None:
        started.append(len(started))
        raise KeyError("x")

    with pytest.raises(InfrastructureError, match="'engine polls' failed 6 times in 120 s, last with KeyError"):
        asyncio.run(supervised("engine polls", work, pause_s=0.0))
    assert len(started) == MAX_FAILURES + 1


def test_what_a_background_task_raises_on_purpose_is_raised_at_once() -> None:
    async def work() -> None:
        raise DamagedError("bytes")

    with pytest.raises(DamagedError, match="bytes"):
        asyncio.run(supervised("announcements", work))
