"""Several sandboxes that are made or closed at once, and many calls or one in a sandbox until it is closed."""

import asyncio
from collections.abc import Iterator

import pytest

from etude.errors import SandboxError
from etude.sandboxes.lifecycle import SharedLock, all_or_none, close_all


class Maker:
    """Makes parts that have to be closed, and records which are open."""

    def __init__(self) -> None:
        self.open: set[Part] = set()
        self.full = asyncio.Event()

    async def make(self, number: int, fails: int = -1) -> "Part":
        """Make the first two at once; a later number fails if it equals ``fails``, and otherwise waits for ever."""
        if number == fails:
            await self.full.wait()
            raise SandboxError(f"no room for {number}")
        if number >= 2:
            await asyncio.Event().wait()
        part = Part(self, breaks=number == 0)
        self.open.add(part)
        if len(self.open) == 2:
            self.full.set()
        return part

    def make_all(self, fails: int = -1) -> "Iterator[asyncio.Task[Part]]":
        return (asyncio.ensure_future(self.make(number, fails)) for number in range(4))


class Part:
    """Complains about its end if it ``breaks``."""

    def __init__(self, maker: Maker, *, breaks: bool) -> None:
        self.maker = maker
        self.breaks = breaks

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.maker.open.discard(self)
        if self.breaks:
            raise SandboxError("did not end within 5 s")


def test_where_one_cannot_be_made_none_is_left() -> None:
    async def act() -> set[Part]:
        maker = Maker()
        with pytest.raises(SandboxError, match="no room for 3"):
            await all_or_none(maker.make_all(fails=3))
        return maker.open

    assert asyncio.run(act()) == set()


def test_a_cancelled_caller_leaves_none() -> None:
    async def act() -> tuple[bool, set[Part]]:
        maker = Maker()
        making = asyncio.ensure_future(all_or_none(maker.make_all()))
        await maker.full.wait()
        making.cancel()
        await asyncio.wait([making])
        return making.cancelled(), maker.open

    assert asyncio.run(act()) == (True, set())


def test_all_are_closed_and_errors_are_returned() -> None:
    async def act() -> tuple[list[str], set[Part]]:
        maker = Maker()
        made = await all_or_none([maker.make(0), maker.make(1), maker.make(0)])
        return [str(error) for error in await close_all(made)], maker.open

    assert asyncio.run(act()) == (["did not end within 5 s"] * 2, set())


async def use(lock: SharedLock, log: list[str], name: str, leave: asyncio.Event) -> None:
    async with lock.exclusive() if name.isupper() else lock.shared():
        log.append(f"+{name}")
        await leave.wait()
        log.append(f"-{name}")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_waits_for_many_and_newcomers_for_the_one() -> None:
    async def act() -> list[str]:
        lock, log = SharedLock(), list[str]()
        leaves = {name: asyncio.Event() for name in "abCd"}
        callers = []
        for name, leave in leaves.items():
            callers.append(asyncio.create_task(use(lock, log, name, leave)))
            await settle()
        for name in "abCd":
            log.append(f"?{name}")
            leaves[name].set()
            await settle()
        await asyncio.gather(*callers)
        return log

    assert asyncio.run(act()) == ["+a", "+b", "?a", "-a", "?b", "-b", "+C", "?C", "-C", "+d", "?d", "-d"]


def test_a_caller_that_waits_when_it_is_closed_gets_an_error() -> None:
    async def act() -> list[str]:
        lock, log, leave = SharedLock(), list[str](), asyncio.Event()
        inside = asyncio.create_task(use(lock, log, "a", leave))
        await settle()
        waiting = [asyncio.create_task(use(lock, log, name, leave)) for name in "Bc"]
        await settle()
        await lock.close()
        for caller in (*waiting, asyncio.create_task(use(lock, log, "d", leave))):
            with pytest.raises(SandboxError, match="closed"):
                await caller
        leave.set()
        await inside
        return log

    assert asyncio.run(act()) == ["+a", "-a"]


def test_a_caller_that_gives_up_waiting_keeps_no_other_out() -> None:
    async def act() -> list[str]:
        lock, log, leave = SharedLock(), list[str](), asyncio.Event()
        first = asyncio.create_task(use(lock, log, "a", leave))
        await settle()
        waiting = asyncio.create_task(use(lock, log, "B", leave))
        await settle()
        waiting.cancel()
        await settle()
        second = asyncio.create_task(use(lock, log, "c", leave))
        await settle()
        leave.set()
        await asyncio.gather(first, second)
        return log

    assert asyncio.run(act()) == ["+a", "+c", "-a", "-c"]
