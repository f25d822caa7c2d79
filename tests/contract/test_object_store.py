"""What every object store promises, wherever it keeps its objects."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from etude.errors import InfrastructureError, UserError
from etude.weights.store import ObjectStore

URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory://",
    "path": lambda folder: str(folder / "a store"),
    "file": lambda folder: (folder / "a store").as_uri(),
}


@pytest.fixture(params=sorted(URLS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(URLS[request.param](tmp_path))


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40_000], ids=["empty", "one", "10MB"])
def test_an_object_comes_back_as_it_was(store: ObjectStore, data: bytes) -> None:
    assert not store.exists("a/b")
    assert store.get("a/b") is None
    assert store.put_if_absent("a/b", data)
    assert store.exists("a/b")
    assert store.get("a/b") == data


def test_an_object_is_never_overwritten(store: ObjectStore) -> None:
    assert store.put_if_absent("k", b"first")
    assert not store.put_if_absent("k", b"second")
    assert store.get("k") == b"first"


def test_list_is_sorted_deep_and_by_folder(store: ObjectStore) -> None:
    assert store.list("a") == []
    for key in ("a/c", "a/b/d", "a/b/c", "ab/c", "b"):
        store.put_if_absent(key, b"")
    assert store.list("a") == ["a/b/c", "a/b/d", "a/c"]


def test_a_folder_is_not_an_object(store: ObjectStore) -> None:
    store.put_if_absent("a/b", b"1")
    assert store.get("a") is None
    assert not store.exists("a")


@pytest.mark.parametrize("key", ["../escape", "a//b", "a/../../b"])
def test_illegal_keys_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(ValueError, match="path"):
        store.put_if_absent(key, b"")


def test_of_many_threads_one_creates_a_key(store: ObjectStore) -> None:
    writers, keys = 8, 20
    barrier = Barrier(writers)

    def write(writer: int) -> list[int]:
        barrier.wait(timeout=30)
        return [key for key in range(keys) if store.put_if_absent(f"k/{key}", b"%d" % writer * 1000)]

    with ThreadPoolExecutor(writers) as pool:
        won = list(pool.map(write, range(writers)))
    assert Counter(key for keys_won in won for key in keys_won) == Counter(range(keys))
    for writer, keys_won in enumerate(won):
        assert all(store.get(f"k/{key}") == b"%d" % writer * 1000 for key in keys_won)


def test_a_reader_never_sees_part_of_an_object(store: ObjectStore) -> None:
    data = bytes(2_000_000)

    def write() -> None:
        for number in range(20):
            store.put_if_absent(f"k/{number}", data)

    def read() -> set[int]:
        sizes = set()
        deadline_s = time.monotonic() + 30
        for number in range(20):
            while (seen := store.get(f"k/{number}")) is None:
                assert time.monotonic() < deadline_s, f"k/{number} never appeared"
                assert not any("#" in key for key in store.list("k")), "staging files are listed"
            sizes.add(len(seen))
        return sizes

    with ThreadPoolExecutor(2) as pool:
        reading, writing = pool.submit(read), pool.submit(write)
        writing.result(timeout=30)
        assert reading.result(timeout=30) == {len(data)}


WRITER = """
import sys
from etude.weights.store import ObjectStore
store = ObjectStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(*[key for key in range(100) if store.put_if_absent(f"k/{key}", sys.argv[2].encode())])
"""


def test_of_two_processes_one_creates_a_key(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    won = [writer.communicate(timeout=30)[0].split() for writer in writers]
    assert Counter(won[0] + won[1]) == Counter(str(key) for key in range(100))
    store = ObjectStore(str(tmp_path))
    assert all(store.get(f"k/{key}") == b"a" for key in won[0])
    assert all(store.get(f"k/{key}") == b"b" for key in won[1])


def test_what_a_dead_writer_leaves_is_invisible_and_harmless(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "1#1").write_bytes(b"par")
    assert store.list("k") == []
    assert store.get("k/1") is None
    assert store.put_if_absent("k/1", b"whole")
    assert store.list("k") == ["k/1"]


def test_a_folder_outlives_its_store(tmp_path: Path) -> None:
    ObjectStore(str(tmp_path)).put_if_absent("k", b"1")
    assert ObjectStore(tmp_path.as_uri()).get("k") == b"1"


@pytest.mark.parametrize("url", ["http://host/x", "file://host/x", "file://", "memory://x", "s3x://bucket"])
def test_unknown_places_are_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"expected a path, file:///path"):
        ObjectStore(url)


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot open or create the folder"):
        ObjectStore(str(tmp_path / "file"))


def test_broken_storage_is_an_infrastructure_error(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    (tmp_path / "k").write_text("a file where a folder is needed")
    with pytest.raises(InfrastructureError, match="cannot create 'k/1'"):
        store.put_if_absent("k/1", b"")
