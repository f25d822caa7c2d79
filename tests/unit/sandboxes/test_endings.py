"""Several that are made or closed at once: none is left that nobody holds, whatever becomes of the others."""

import asyncio
from collections.abc import Iterator

import pytest

from etude.errors import SandboxError
from etude.sandboxes.endings import all_or_none, close_all


class House:
    """Makes what has to be closed, and knows what is open."""

    def __init__(self) -> None:
        self.open: set[Thing] = set()
        self.full = asyncio.Event()

    async def make(self, number: int, fails: int = -1) -> "Thing":
        """The first two at once; then either one that fails, or nothing for ever."""
        if number == fails:
            await self.full.wait()
            raise SandboxError(f"no room for {number}")
        if number >= 2:
            await asyncio.Event().wait()
        thing = Thing(self, breaks=number == 0)
        self.open.add(thing)
        if len(self.open) == 2:
            self.full.set()
        return thing

    def make_all(self, fails: int = -1) -> "Iterator[asyncio.Task[Thing]]":
        return (asyncio.ensure_future(self.make(number, fails)) for number in range(4))


class Thing:
    """Complains about its end if it ``breaks``."""

    def __init__(self, house: House, *, breaks: bool) -> None:
        self.house = house
        self.breaks = breaks

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.house.open.discard(self)
        if self.breaks:
            raise SandboxError("did not end within 5 s")


def test_where_one_cannot_be_made_none_is_left() -> None:
    async def act() -> set[Thing]:
        house = House()
        with pytest.raises(SandboxError, match="no room for 3"):
            await all_or_none(house.make_all(fails=3))
        return house.open

    assert asyncio.run(act()) == set()


def test_where_nobody_waits_for_all_none_is_left() -> None:
    async def act() -> tuple[bool, set[Thing]]:
        house = House()
        making = asyncio.ensure_future(all_or_none(house.make_all()))
        await house.full.wait()
        making.cancel()
        await asyncio.wait([making])
        return making.cancelled(), house.open

    assert asyncio.run(act()) == (True, set())


def test_all_are_closed_and_what_went_wrong_is_told() -> None:
    async def act() -> tuple[list[str], set[Thing]]:
        house = House()
        made = await all_or_none([house.make(0), house.make(1), house.make(0)])
        return [str(error) for error in await close_all(made)], house.open

    assert asyncio.run(act()) == (["did not end within 5 s"] * 2, set())
