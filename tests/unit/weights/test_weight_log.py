"""The log admits one writer per version and knows the shortest way to each."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest

from etude.errors import DamagedError, FencedError
from etude.types import WeightVersion
from etude.weights.log import commit, latest, plan_chain, read_commit, versions
from etude.weights.store import ObjectStore


def record(version: int, base: int | None = None, digest: str = "d" * 64, step: int = 0) -> WeightVersion:
    return WeightVersion(
        version=version,
        base=base,
        digest=digest,
        object_key="objects/" + "a" * 64,
        object_digest="a" * 64,
        size_bytes=10,
        step=step,
        created="2026-01-01T00:00:00+00:00",
    )


def test_a_commit_can_be_read_back() -> None:
    store = ObjectStore("memory://")
    assert (versions(store), latest(store), read_commit(store, 0)) == ([], None, None)
    for version, base in ((10, 9), (0, None), (9, 0), (123_456_789, 10)):
        assert commit(store, record(version, base)) == record(version, base)
        assert read_commit(store, version) == record(version, base)
    assert (versions(store), latest(store)) == ([0, 9, 10, 123_456_789], 123_456_789)


def test_foreign_files_are_not_versions() -> None:
    store = ObjectStore("memory://")
    commit(store, record(3))
    for key in ("commits/3.json", "commits/00000004.json.bak", "commits/old/00000005.json", "commits-2/00000006.json"):
        store.put_if_absent(key, b"{}")
    assert versions(store) == [3]


def test_committing_the_same_weights_again_returns_the_first_record() -> None:
    store = ObjectStore("memory://")
    first = commit(store, record(1, 0, step=1))
    assert commit(store, record(1, None, step=2)) == first
    assert read_commit(store, 1) == first


def test_a_second_writer_with_other_weights_is_fenced() -> None:
    store = ObjectStore("memory://")
    first = commit(store, record(1))
    with pytest.raises(FencedError, match="weight version 1 is already committed"):
        commit(store, record(1, digest="e" * 64))
    assert read_commit(store, 1) == first


def test_of_many_writers_one_wins() -> None:
    store = ObjectStore("memory://")

    def attempt(writer: int) -> bool:
        try:
            commit(store, record(1, digest=f"{writer:064x}"))
        except FencedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(32))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "record of version 2"),
        ({"version": "1"}, "version is '1'"),
        ({"base": 1}, "base 1 does not come before"),
        ({"base": -1}, "base -1 does not come before"),
        ({"digest": "d"}, "not both SHA-256"),
        ({"object_key": "objects/../secret"}, "does not name the object"),
        ({"size_bytes": None}, "size_bytes is None"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_record_is_damage(change: dict[str, object], message: str) -> None:
    store = ObjectStore("memory://")
    store.put_if_absent("commits/00000001.json", orjson.dumps(dataclasses.asdict(record(1, 0)) | change))
    with pytest.raises(DamagedError, match=message):
        read_commit(store, 1)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"null", b'{"version": 1}'])
def test_an_unreadable_record_is_damage(data: bytes) -> None:
    store = ObjectStore("memory://")
    store.put_if_absent("commits/00000001.json", data)
    with pytest.raises(DamagedError, match=r"commits/00000001\.json is damaged"):
        read_commit(store, 1)


CHAIN = {n: record(n, base) for n, base in {0: None, 1: 0, 2: 1, 3: 2, 4: None, 5: 4, 9: 5}.items()}


@pytest.mark.parametrize(
    ("target", "have", "plan"),
    [
        (3, None, [0, 1, 2, 3]),
        (3, 1, [2, 3]),
        (3, 3, []),
        (3, 5, [0, 1, 2, 3]),
        (5, 3, [4, 5]),
        (4, 3, [4]),
        (9, 4, [5, 9]),
        (9, 8, [4, 5, 9]),
    ],
)
def test_plan_is_the_shortest_way(target: int, have: int | None, plan: list[int]) -> None:
    assert [step.version for step in plan_chain(CHAIN.get, target, have)] == plan


def test_a_plan_across_a_gap_is_refused() -> None:
    broken = {n: r for n, r in CHAIN.items() if n != 1}
    with pytest.raises(DamagedError, match="version 1 is not in the log but weight version 2 is a delta against it"):
        plan_chain(broken.get, 3, None)
    with pytest.raises(DamagedError, match="version 1 is not in the log but it was asked for"):
        plan_chain(broken.get, 1, None)
    assert [step.version for step in plan_chain(broken.get, 3, 1)] == [2, 3]
