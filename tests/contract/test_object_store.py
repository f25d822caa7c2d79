"""Contract of every object store."""

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from etude.errors import DamagedError, InfrastructureError, UserError
from etude.objects import CLOCK_FOLDER, Objects, ObjectStore, StoreOptions, check_put_if_absent
from etude.weights.log import WeightLog
from etude.weights.records import Link
from faulty_store import FaultyStore
from s3_server import S3Server

ANCHOR = Link(source=None, source_digest=None, target=0, digest="0" * 32, layout="0" * 64, packs=())
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def cloud(endpoint: str, request_s: float = 30.0, deadline_s: float = 90.0) -> StoreOptions:
    return StoreOptions(
        endpoint=endpoint,
        allow_http=True,
        region="us-east-1",
        access_key_id="id",
        secret_access_key="secret",
        request_s=request_s,
        deadline_s=deadline_s,
    )


@pytest.fixture(params=["memory", "path", "file", "wrapped", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    kind: str = request.param
    if kind == "s3":
        endpoint: str = request.getfixturevalue("endpoint")
        return ObjectStore(f"s3://bucket/{tmp_path.name}", cloud(endpoint))
    if kind == "wrapped":
        return FaultyStore(ObjectStore("memory://"))
    folder = tmp_path / "a store"
    return ObjectStore({"memory": "memory://", "path": str(folder), "file": folder.as_uri()}[kind])


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40_000], ids=["empty", "one", "10MB"])
def test_an_object_comes_back_as_it_was(store: Objects, data: bytes) -> None:
    assert not store.exists("a/b")
    assert store.get("a/b") is None
    assert store.put_if_absent("a/b", data)
    assert store.exists("a/b")
    assert store.get("a/b") == data


def test_an_object_is_never_overwritten(store: Objects) -> None:
    assert store.put_if_absent("k", b"first")
    assert not store.put_if_absent("k", b"second")
    assert store.get("k") == b"first"


def test_list_is_sorted_deep_and_by_folder(store: Objects) -> None:
    assert store.list("a") == []
    for key in ("a/c", "a/b/d", "a/b/c", "ab/c", "b"):
        store.put_if_absent(key, b"")
    assert store.list("a") == ["a/b/c", "a/b/d", "a/c"]


def test_a_folder_is_not_an_object(store: Objects) -> None:
    store.put_if_absent("a/b", b"1")
    assert store.get("a") is None
    assert not store.exists("a")


def test_a_storage_that_keeps_its_promise_passes_the_check(store: Objects) -> None:
    check_put_if_absent(store)
    assert store.list("") == []


def test_a_server_that_overlooks_the_condition_cannot_hold_a_log() -> None:
    server = S3Server(before=lambda environ: environ.pop("HTTP_IF_NONE_MATCH", None))
    try:
        server.make_bucket()
        store = ObjectStore("s3://bucket/runs/one", cloud(server.endpoint))
        with pytest.raises(UserError, match=r"s3://bucket/runs/one overwrites objects .* If-None-Match"):
            WeightLog(store).add_link(ANCHOR)
        assert store.list("") == []
    finally:
        server.stop()


@pytest.mark.parametrize("key", ["../escape", "a//b", "a/../../b"])
def test_illegal_keys_are_refused(store: Objects, key: str) -> None:
    with pytest.raises(ValueError, match="path"):
        store.put_if_absent(key, b"")


def test_of_many_threads_one_creates_a_key(store: Objects) -> None:
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


def test_of_sixteen_racers_one_wins(store: Objects) -> None:
    barrier = Barrier(16)

    def race(racer: int) -> bool:
        barrier.wait(timeout=30)
        return store.put_if_absent("commits/00000001.json", b"%d" % racer)

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert won.count(True) == 1
    assert store.get("commits/00000001.json") == b"%d" % won.index(True)


def test_what_is_deleted_is_gone_and_can_be_created_again(store: Objects) -> None:
    for key in ("a/b", "a/c", "a/d", "a/e"):
        store.put_if_absent(key, b"1")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a/x", "a/c", "a/y", "a/d")
    store.delete()
    assert store.list("a") == ["a/e"]
    assert store.get("a/c") is None
    assert not store.exists("a/d")
    assert store.put_if_absent("a/c", b"2")
    assert store.get("a/c") == b"2"


def test_entries_tell_size_and_age(store: Objects) -> None:
    before_s = store.now()
    store.put_if_absent("a/b", b"123")
    store.put_if_absent("a/c", b"")
    after_s = store.now()
    entries = store.entries("a")
    assert [(entry.key, entry.size_bytes) for entry in entries] == [("a/b", 3), ("a/c", 0)]
    assert all(before_s - 1 <= entry.modified_s <= after_s + 1 for entry in entries)
    assert abs(after_s - time.time()) < 60
    assert store.list(CLOCK_FOLDER) == []


def test_a_renewed_object_is_young_again(store: Objects) -> None:
    store.put_if_absent("a/b", b"123")
    [old] = store.entries("a")
    pause_s = 1.0 if store.url.startswith("s3:") else 0.05  # that server tells whole seconds
    time.sleep(pause_s)
    store.renew("a/b", b"123")
    [young] = store.entries("a")
    assert young.modified_s > old.modified_s
    assert store.get("a/b") == b"123"


def test_a_long_list_is_complete(store: Objects) -> None:
    keys = [f"many/{number:04d}" for number in range(60)]
    for key in keys:
        store.put_if_absent(key, b"")
    assert store.list("many") == keys
    store.delete(*keys)
    assert store.list("many") == []


def test_a_reader_never_sees_part_of_an_object(store: Objects) -> None:
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
from etude.objects import ObjectStore
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


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_nothing_but_files_is_opened_in_a_folder(tmp_path: Path, made: Callable[[Path], object]) -> None:
    """Regression: a pipe in the place of an object held its reader up for ever."""
    store = ObjectStore(str(tmp_path))
    made(tmp_path / "k")
    looks: list[Callable[[], object]] = [
        lambda: store.get("k"),
        lambda: store.exists("k"),
    ]
    for look in looks:
        with pytest.raises(DamagedError, match=r"'k' .* is not a file but a pipe, socket or device"):
            look()


def test_a_folder_outlives_its_store(tmp_path: Path) -> None:
    ObjectStore(str(tmp_path)).put_if_absent("k", b"1")
    assert ObjectStore(tmp_path.as_uri()).get("k") == b"1"


def test_what_a_dead_writer_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path), syncs=True)
    assert store.put_if_absent("a/b", b"whole") and not store.put_if_absent("a/b", b"other")
    old, young, other = tmp_path / "a" / "c#1", tmp_path / "a" / "c#2", tmp_path / "a" / "notes#old"
    for file in (old, young, other):
        file.write_bytes(b"part")
    for file in (old, other, tmp_path / "a" / "b"):
        os.utime(file, (0, 0))
    assert store.remove_partial(3600.0) == 1
    assert [file.exists() for file in (old, young, other)] == [False, True, True]
    assert store.get("a/b") == b"whole"


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


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("k"),
    "put_if_absent": lambda store: store.put_if_absent("k", b"data"),
    "renew": lambda store: store.renew("k", b"data"),
    "exists": lambda store: store.exists("k"),
    "list": lambda store: store.list("k"),
    "delete": lambda store: store.delete("k"),
    "now": lambda store: store.now(),
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_server_that_never_answers_is_given_up_in_time(call: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        options = cloud(f"http://127.0.0.1:{silent.getsockname()[1]}", request_s=0.2, deadline_s=0.6)
        store = ObjectStore("s3://bucket/run", options)
        started_s = time.monotonic()
        with pytest.raises(InfrastructureError, match=r"cannot .* \(gave up after"):
            CALLS[call](store)
        assert 0.2 <= time.monotonic() - started_s < StoreOptions().request_s  # which is what it would wait otherwise


def test_a_server_that_is_not_there_is_an_infrastructure_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store = ObjectStore("s3://bucket/run", cloud(f"http://127.0.0.1:{port}", request_s=0.2, deadline_s=0.6))
    with pytest.raises(InfrastructureError, match="cannot read 'k'"):
        store.get("k")


def test_a_bucket_that_is_not_there_is_an_infrastructure_error(endpoint: str) -> None:
    store = ObjectStore("s3://no-such-bucket/run", cloud(endpoint))
    for call in ("put_if_absent", "list", "now"):
        with pytest.raises(InfrastructureError, match="no-such-bucket"):
            CALLS[call](store)


def test_the_environment_says_what_options_do_not(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket/environment")
    assert store.put_if_absent("k", b"1")
    assert ObjectStore("s3://bucket/environment", cloud(endpoint)).get("k") == b"1"


def test_two_prefixes_of_a_bucket_are_two_places(endpoint: str) -> None:
    one, two = (ObjectStore(f"s3://bucket/prefix-{name}", cloud(endpoint)) for name in "ab")
    assert one.put_if_absent("k", b"1")
    assert two.get("k") is None
    assert (one.list(""), two.list("")) == (["k"], [])


@pytest.mark.parametrize(("request_s", "deadline_s"), [(0.0, 90.0), (30.0, 59.0), (-1.0, 1.0)])
def test_times_without_room_for_a_second_try_are_refused(request_s: float, deadline_s: float) -> None:
    with pytest.raises(UserError, match="at least twice that"):
        StoreOptions(request_s=request_s, deadline_s=deadline_s)


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    for url in (str(tmp_path), "memory://"):
        with pytest.raises(UserError, match="have no effect here"):
            ObjectStore(url, StoreOptions())
    with pytest.raises(UserError, match="endpoint, region are for s3:// only"):
        ObjectStore("gs://bucket/run", StoreOptions(endpoint="http://host", region="here"))


def test_secrets_are_not_shown() -> None:
    assert "secret-key" not in repr(StoreOptions(secret_access_key="secret-key", session_token="secret-key"))
