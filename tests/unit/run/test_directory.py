"""The directory of a region: the newest start of each process counts, also among starts that meet."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etude.objects import ObjectStore
from etude.run.directory import Directory
from etude.run.process_name import ProcessName

ENGINE = ProcessName(command="serve", replica=1, region="eu")
KEY = "a key of the run"
GATEWAY = ProcessName(command="gateway", region="eu")


def test_the_newest_start_of_each_process_counts(tmp_path: Path) -> None:
    directory = Directory(ObjectStore(str(tmp_path)), KEY)
    assert directory.urls("serve") == {}
    for port in range(1, 13):
        directory.announce(ENGINE, f"http://10.0.0.1:{port}")
    directory.announce(GATEWAY, "https://10.0.0.2:1")
    assert directory.urls("serve") == {ENGINE: "http://10.0.0.1:12"}
    assert directory.urls("gateway") == {GATEWAY: "https://10.0.0.2:1"}
    assert len(directory.objects.list("")) == 2  # nothing piles up


def test_of_two_starts_at_a_time_one_is_the_newest(tmp_path: Path) -> None:
    urls = [f"http://10.0.0.1:{port}" for port in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda url: Directory(ObjectStore(str(tmp_path)), KEY).announce(ENGINE, url), urls))
    assert Directory(ObjectStore(str(tmp_path)), KEY).urls("serve")[ENGINE] in urls


def test_a_process_that_leaves_is_gone_until_it_is_started_again(tmp_path: Path) -> None:
    directory, reader = (Directory(ObjectStore(str(tmp_path)), KEY) for _ in range(2))
    directory.announce(ENGINE, "http://10.0.0.1:1")
    assert reader.urls("serve") == {ENGINE: "http://10.0.0.1:1"}
    directory.withdraw(ENGINE, "http://10.0.0.1:1")
    directory.announce(ENGINE, "http://10.0.0.2:1")  # before the reader looks again
    assert reader.urls("serve") == {ENGINE: "http://10.0.0.2:1"}
    directory.withdraw(ENGINE, "http://10.0.0.1:1")
    assert reader.urls("serve") == {ENGINE: "http://10.0.0.2:1"}, "it is an earlier start that leaves late"
    directory.withdraw(ENGINE, "http://10.0.0.2:1")
    assert reader.urls("serve") == {}
    assert len(directory.objects.list("")) == 1


def test_entries_without_a_signature_of_the_run_do_not_count(tmp_path: Path) -> None:
    objects = ObjectStore(str(tmp_path))
    directory = Directory(objects, KEY)
    directory.announce(ENGINE, "http://10.0.0.1:1")
    signed = objects.get(f"{ENGINE}/000000000001")
    assert signed is not None
    Directory(objects, "a key of another run").announce(GATEWAY, "http://10.6.6.6:1")
    objects.put_if_absent(f"{ENGINE}/000000000002", signed)  # an old entry, as the newest
    objects.put_if_absent(f"{ENGINE}/000000000003", b"http://10.6.6.6:2 " + signed.partition(b" ")[2])
    for key, data in ((f"{ENGINE}/000000000004", b"\xff"), ("no name/000000000001", b"x"), ("serve", b"x")):
        objects.put_if_absent(key, data)
    assert directory.urls("serve") == {ENGINE: "http://10.0.0.1:1"}
    assert directory.urls("gateway") == {}
    directory.announce(ENGINE, "http://10.0.0.1:2")
    assert directory.urls("serve") == {ENGINE: "http://10.0.0.1:2"}
