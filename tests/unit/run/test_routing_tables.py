"""Routing tables in a store: one of two writers wins, and an object that no process of the run wrote is rejected."""

import asyncio

import pytest

from etude.aio import background_task
from etude.gateway.routing.shadow import ShadowCall
from etude.objects import ObjectStore
from etude.routing_table import LIVE, Arm, RoutingTable
from etude.run.routing_tables import LIST_LOOKS, ROUTING, RoutingTables
from faulty_store import Failure, FaultyStore
from waiting import until


def table(generation: int, digest: str = "d") -> RoutingTable:
    arm = Arm(name=LIVE, version=generation, digest=digest, share=1.0)
    return RoutingTable(generation=generation, salt="", arms=(arm,))


def test_the_newest_table_is_followed_and_of_two_writers_one_wins() -> None:
    store = ObjectStore("memory://")
    mine, theirs = RoutingTables(store, "key"), RoutingTables(store, "key")
    assert mine.newest() is None
    assert mine.write(table(1))
    assert mine.write(table(1)), "the same once more is no other table"
    assert not theirs.write(table(1, "other"))
    assert theirs.after(None) == table(1)
    for generation in range(2, 30):
        assert mine.write(table(generation))
    assert theirs.newest() == table(29)
    looks = [theirs.after(table(1)) for _ in range(LIST_LOOKS)]
    assert table(29) in looks, "a reader who slept finds the newest although the next number is gone"


def test_a_table_without_the_key_of_the_run_routes_no_user() -> None:
    store = ObjectStore("memory://")
    tables, forger = RoutingTables(store, "key"), RoutingTables(store, "guess")
    tables.write(table(1))
    forger.write(table(2, "evil"))
    first = store.get(f"{ROUTING}/000000000001")
    assert first is not None
    store.put_if_absent(f"{ROUTING}/000000000003", first)  # an old one under a new number
    store.put_if_absent(f"{ROUTING}/zzz", b"")
    assert tables.newest() == table(1)
    assert tables.after(table(1)) is None


def test_a_follower_tells_once_that_tables_cannot_be_read_and_once_that_they_can(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FaultyStore(ObjectStore("memory://"))
    RoutingTables(store, "key").write(table(1))
    received: list[RoutingTable] = []

    async def follow() -> None:
        async with background_task(RoutingTables(store, "key").follow(received.append)):
            await until(lambda: received == [table(1)])

    store.fail(dict.fromkeys(range(3), Failure.REFUSED))
    asyncio.run(follow())
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "routing tables cannot be read now",
        "routing tables can be read again",
    ]


def test_shadow_calls_are_read_once() -> None:
    tables = RoutingTables(ObjectStore("memory://"), "key")
    call = ShadowCall(digest="d", failed=False, seconds=1.0, tokens=3, live_seconds=1.0, live_tokens=4)
    tables.add_shadow(call)
    seen: dict[str, ShadowCall] = {}
    tables.shadow_calls("d", seen)
    tables.shadow_calls("d", seen)
    tables.shadow_calls("other", seen)
    assert list(seen.values()) == [call]
