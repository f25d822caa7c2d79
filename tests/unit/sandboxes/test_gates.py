"""Many or one, and nobody once it is shut."""

import asyncio

import pytest

from etude.errors import SandboxError
from etude.sandboxes.gates import Gate


async def visit(gate: Gate, log: list[str], name: str, leave: asyncio.Event) -> None:
    async with gate.alone() if name.isupper() else gate.together():
        log.append(f"+{name}")
        await leave.wait()
        log.append(f"-{name}")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_waits_for_many_and_newcomers_for_the_one() -> None:
    async def act() -> list[str]:
        gate, log = Gate(), list[str]()
        doors = {name: asyncio.Event() for name in "abCd"}
        visits = []
        for name, leave in doors.items():
            visits.append(asyncio.create_task(visit(gate, log, name, leave)))
            await settle()
        for name in "abCd":
            log.append(f"?{name}")
            doors[name].set()
            await settle()
        await asyncio.gather(*visits)
        return log

    assert asyncio.run(act()) == ["+a", "+b", "?a", "-a", "?b", "-b", "+C", "?C", "-C", "+d", "?d", "-d"]


def test_who_waits_when_it_is_shut_is_told_so() -> None:
    async def act() -> list[str]:
        gate, log, leave = Gate(), list[str](), asyncio.Event()
        inside = asyncio.create_task(visit(gate, log, "a", leave))
        await settle()
        waiting = [asyncio.create_task(visit(gate, log, name, leave)) for name in "Bc"]
        await settle()
        await gate.shut()
        for visitor in (*waiting, asyncio.create_task(visit(gate, log, "d", leave))):
            with pytest.raises(SandboxError, match="closed"):
                await visitor
        leave.set()
        await inside
        return log

    assert asyncio.run(act()) == ["+a", "-a"]


def test_one_who_gives_up_waiting_keeps_nobody_out() -> None:
    async def act() -> list[str]:
        gate, log, leave = Gate(), list[str](), asyncio.Event()
        first = asyncio.create_task(visit(gate, log, "a", leave))
        await settle()
        waiting = asyncio.create_task(visit(gate, log, "B", leave))
        await settle()
        waiting.cancel()
        await settle()
        second = asyncio.create_task(visit(gate, log, "c", leave))
        await settle()
        leave.set()
        await asyncio.gather(first, second)
        return log

    assert asyncio.run(act()) == ["+a", "+c", "-a", "-c"]
