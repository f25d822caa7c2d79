"""The scripted engine of other tests: it behaves as an engine does, at once and the same every time."""

import asyncio

import pytest

from etude.clock import VirtualClock
from etude.engines.fake import FakeEngine
from etude.errors import EngineUnavailable
from etude.protocols import Completion, SamplingParams
from etude.types import Finish

STOP = 1


def engine(token_s: float = 0.0, clock: VirtualClock | None = None, seed: int = 0) -> FakeEngine:
    return FakeEngine(clock or VirtualClock(), vocab_size=32, max_length=64, seed=seed, token_s=token_s)


def generate(fake: FakeEngine, max_tokens: int = 8, seed: int | None = None) -> Completion:
    params = SamplingParams(max_tokens=max_tokens, stop_ids=(STOP,), seed=seed)
    return asyncio.run(fake.generate([2, 3], params, session="s"))


def test_scripts_are_played_in_order_and_end_like_any_completion() -> None:
    fake = engine()
    fake.script([4, 5, STOP, 6], [7, 8, 9, 10])
    first, second = generate(fake), generate(fake, max_tokens=3)
    assert (first.token_ids.tolist(), first.finish) == ([4, 5, STOP], Finish.STOP)
    assert (second.token_ids.tolist(), second.finish) == ([7, 8, 9], Finish.LENGTH)


def test_a_script_that_does_not_end_is_a_mistake_in_the_test() -> None:
    fake = engine()
    fake.script([4, 5])
    with pytest.raises(AssertionError, match="2 tokens"):
        generate(fake)


def test_the_whole_stream_of_calls_repeats_with_the_seed_of_the_engine() -> None:
    streams = [[generate(fake).token_ids.tolist() for _ in range(4)] for fake in (engine(), engine(), engine(seed=1))]
    assert streams[0] == streams[1] != streams[2]


def test_a_token_takes_time_and_a_swap_may_fall_inside_a_completion() -> None:
    async def run() -> None:
        clock = VirtualClock()
        fake = engine(token_s=0.5, clock=clock)
        fake.script([4] * 8)
        call = asyncio.create_task(fake.generate([2], SamplingParams(max_tokens=8), session="s"))
        while clock.now() < 1.5:
            await asyncio.sleep(0)
        assert (await fake.health()).running == 1
        fake.version = 1
        completion = await call
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        assert clock.now() == 4.0
        assert (await fake.health()).running == 0

    asyncio.run(run())


def test_another_version_has_another_digest() -> None:
    fake = engine()
    old = asyncio.run(fake.health())
    fake.version = 1
    new = asyncio.run(fake.health())
    assert (old.version, new.version) == (0, 1)
    assert old.digest != new.digest


def test_it_fails_as_often_as_told() -> None:
    fake = engine()
    fake.fail_next(2)
    with pytest.raises(EngineUnavailable):
        generate(fake)
    with pytest.raises(EngineUnavailable):
        asyncio.run(fake.health())
    assert len(generate(fake).token_ids) > 0
