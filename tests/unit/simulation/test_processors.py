"""Shared processors: a single part has its own, and several parts are slowed down equally."""

import asyncio

import pytest

from etude.rollouts.fake import run_virtually
from etude.simulation.processors import Processors


def test_parts_that_find_a_processor_each_do_not_notice_each_other() -> None:
    async def main() -> float:
        processors = Processors(2)
        await asyncio.gather(processors.compute(3.0), processors.compute(2.0))
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(3.0)


def test_parts_beyond_the_processors_slow_all_down() -> None:
    async def main() -> list[float]:
        processors, ends = Processors(1), list[float]()

        async def part(seconds: float) -> None:
            await processors.compute(seconds)
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(part(1.0), part(2.0), part(2.0))
        return ends

    assert run_virtually(main()) == pytest.approx([3.0, 5.0, 5.0])


def test_hundreds_of_commands_do_not_crowd_out_a_process() -> None:
    async def main() -> tuple[float, float]:
        processors, loop = Processors(2), asyncio.get_running_loop()
        commands = [asyncio.create_task(processors.run(0.1)) for _ in range(100)]
        await processors.compute(3.0)
        process_s = loop.time()
        await asyncio.gather(*commands)
        return process_s, loop.time()

    process_s, all_s = run_virtually(main())
    assert process_s == pytest.approx(3.0 * 3 / 2)  # a process and two commands at a time, on two processors
    assert all_s == pytest.approx((3.0 + 100 * 0.1) / 2)


def test_a_part_that_gives_up_leaves_its_share_to_the_others() -> None:
    async def main() -> tuple[float, float]:
        processors = Processors(1)
        gone = asyncio.create_task(processors.compute(10.0))
        stays = asyncio.create_task(processors.compute(3.0))
        await asyncio.sleep(2.0)
        gone.cancel()
        await stays
        return asyncio.get_running_loop().time(), processors.done_s()

    ended_s, done_s = run_virtually(main())
    assert ended_s == pytest.approx(2.0 + 2.0)
    assert done_s == pytest.approx(1.0 + 2.0)


def test_as_many_as_are_wanted_work_passes_like_time() -> None:
    async def main() -> tuple[float, float]:
        processors = Processors()
        await asyncio.gather(*(processors.compute(1.5) for _ in range(50)))
        return asyncio.get_running_loop().time(), processors.done_s()

    assert run_virtually(main()) == pytest.approx((1.5, 1.5))
